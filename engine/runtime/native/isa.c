/* Which instruction sets the machine and its system can run: a library of its own, which is asked before one of kernels is
 * chosen. A set that the compiler does not know is not there. */
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include "quire_cpu.h"

enum isa { PORTABLE, AVX2, AVXVNNI, AVX512, AVX512BF16, NEON_DOT, NEON_BF16 }; /* class Isa in build.py */

#if defined(__clang__)
enum { KNOWS_AVXVNNI = __clang_major__ >= 12 };
#else
enum { KNOWS_AVXVNNI = __GNUC__ >= 11 };
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
#endif

EXPORT int32_t quire_has_isa(int32_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int dots = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (isa == AVX512BF16) return avx512 && dots;
    if (isa == AVX512) return avx512;
    if (isa == AVXVNNI) return avx2 && has_avxvnni() && KNOWS_AVXVNNI;
    if (isa == AVX2) return avx2;
#elif defined(__aarch64__) && defined(__linux__)
    enum { HAS_DOT = 1 << 20, HAS_I8MM = 1 << 13, HAS_BF16 = 1 << 14 }; /* of the words 1 and 2 */
    int dot = (getauxval(AT_HWCAP) & HAS_DOT) != 0;
    if (isa == NEON_BF16) return dot && (~getauxval(AT_HWCAP2) & (HAS_I8MM | HAS_BF16)) == 0;
    if (isa == NEON_DOT) return dot;
#endif
    return isa == PORTABLE;
}
