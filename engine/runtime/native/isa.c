/* Says which instruction sets the machine and its system can run, and ranks them. It is a library of its own: a start asks it before
 * it chooses kernels. A set that the compiler does not know is left out. */
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include "quire_cpu.h"

enum isa { PORTABLE, AVX2, AVXVNNI, AVX512, AVX512VNNI, AVX512BF16, AMX, NEON_DOT, NEON_BF16 }; /* class Isa in build.py */

#if defined(__clang__)
enum { IS_OF_2021 = __clang_major__ >= 12 }; /* the compiler knows AVX-VNNI and AMX */
#else
enum { IS_OF_2021 = __GNUC__ >= 11 };
#endif

#if defined(__x86_64__)
/* Bits of cpuid, for which not every compiler has names. */
static int has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

static int has_avxvnni(void) {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

/* Whether the processor has tiles of bytes and of bfloat16, the system keeps their registers for threads, and lets this process
 * use them, for which it is asked once: they add 8 KB to what it keeps for a thread that uses them. */
static int may_use_tiles(void) {
    enum { TILE_CONFIG = 1 << 17, TILE_DATA = 1 << 18, REQUEST = 0x1023, DATA_FEATURE = 18 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* the system saves more than SSE's registers */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (1u << 22 | 1u << 24 | 1u << 25))) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (~low & (TILE_CONFIG | TILE_DATA)) return 0;
#if defined(__linux__)
    return syscall(SYS_arch_prctl, REQUEST, DATA_FEATURE) == 0;
#else
    return 0;
#endif
}
#endif

static int has_isa(int32_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int vnni = avx512 && __builtin_cpu_supports("avx512vnni"), bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (isa == AMX) return bf16 && IS_OF_2021 && may_use_tiles();
    if (isa == AVX512BF16) return bf16;
    if (isa == AVX512VNNI) return vnni;
    if (isa == AVX512) return avx512;
    if (isa == AVXVNNI) return avx2 && has_avxvnni() && IS_OF_2021;
    if (isa == AVX2) return avx2;
#elif defined(__aarch64__) && defined(__linux__)
    enum { HAS_DOT = 1 << 20, HAS_I8MM = 1 << 13, HAS_BF16 = 1 << 14 }; /* of the words 1 and 2 */
    int dot = (getauxval(AT_HWCAP) & HAS_DOT) != 0;
    if (isa == NEON_BF16) return dot && (~getauxval(AT_HWCAP2) & (HAS_I8MM | HAS_BF16)) == 0;
    if (isa == NEON_DOT) return dot;
#endif
    return isa == PORTABLE;
}

/* What an instruction set is worth here, more for a faster one; 0 of one that the machine cannot run. Intel's processors multiply
 * pairs of bfloat16 at half the rate at which they multiply them widened to float32: 44 and 89 billion products a second on a core
 * of Emerald Rapids. So there the set without pairs is worth more. */
EXPORT int32_t quire_isa_rank(int32_t isa) {
    if (!has_isa(isa)) return 0;
#if defined(__x86_64__)
    if (isa == AVX512BF16 && __builtin_cpu_is("intel")) return 2 * AVX512VNNI + 1;
#endif
    return 2 * isa + 2;
}
