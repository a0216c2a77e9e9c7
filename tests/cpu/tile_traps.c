/* Runs instructions of AMX where a machine refuses them: each is a trap, whose handler has the model compute it. So tests run the
 * code that a machine with tiles runs. */
#define _GNU_SOURCE
#define TILE_MODEL
#include "tiles.h"

#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>

static const int registers[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
static struct sigaction others; /* what is done about traps of other instructions */
static atomic_int num_configured;

/* Threads whose tiles have shapes. */
EXPORT int num_threads_with_tiles(void) { return num_configured; }

/* The operand in memory behind three bytes of a prefix and an opcode: where it is, how far apart rows of a tile are, and the next
 * instruction. */
static const uint8_t *operand(const greg_t *values, const uint8_t *prefix, uintptr_t *at, size_t *stride) {
    const uint8_t *next = prefix + 4;
    int mode = *next >> 6, base = *next++ & 7, is_indexed = base == 4, index = 4, shift = 0;
    if (is_indexed) index = (*next >> 3 & 7) | (~prefix[1] >> 3 & 8), shift = *next >> 6, base = *next++ & 7;
    int has_base = mode || base != 5;
    int32_t offset = 0;
    if (mode == 1) offset = (int8_t)*next++;
    if (mode == 2 || !has_base) memcpy(&offset, next, sizeof offset), next += sizeof offset;
    *at = has_base ? (uintptr_t)values[registers[base | (~prefix[1] >> 2 & 8)]] : is_indexed ? 0 : (uintptr_t)next;
    *at += (uintptr_t)(intptr_t)offset;
    *stride = index == 4 ? 0 : (size_t)values[registers[index]] << shift;
    return next;
}

static void on_trap(int signal, siginfo_t *info, void *context) {
    enum { NO_PREFIX, PREFIX_66, PREFIX_F3, PREFIX_F2 };
    (void)info;
    greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *prefix = (const uint8_t *)values[REG_RIP], *next = prefix + 5;
    const int is_ours = prefix[0] == 0xc4 && (prefix[1] & 0x1f) == 2 && !(prefix[2] & 0x84);
    const int in_memory = prefix[4] < 0xc0, to = prefix[4] >> 3 & 7, a = prefix[4] & 7, b = ~prefix[2] >> 3 & 15;
    const int before = tile_now.palette;
    uintptr_t at = 0;
    size_t stride = 0;
    if (is_ours && in_memory) next = operand(values, prefix, &at, &stride);
    switch (is_ours ? prefix[3] << 8 | in_memory << 4 | (prefix[2] & 3) : 0) {
    case 0x4910 | NO_PREFIX: tile_configure((const struct tile_shapes *)(at + stride)); break;
    case 0x4900 | NO_PREFIX: tile_release(); break;
    case 0x4900 | PREFIX_F2: tile_zero(to); break;
    case 0x4b10 | PREFIX_F2: tile_load(to, (const void *)at, stride); break;
    case 0x4b10 | PREFIX_66: tile_load_once(to, (const void *)at, stride); break;
    case 0x4b10 | PREFIX_F3: tile_store(to, (void *)at, stride); break;
    case 0x5c00 | PREFIX_F3: tile_dot_bf16(to, a, b); break;
    case 0x5e00 | PREFIX_F3: tile_dot_codes(to, a, b); break;
    default: sigaction(signal, &others, NULL); return; /* which has it, as it traps again */
    }
    num_configured += tile_now.palette - before;
    values[REG_RIP] = (greg_t)next;
}

EXPORT int trap_tiles(void) {
    struct sigaction ours = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    return sigaction(SIGILL, &ours, &others);
}
