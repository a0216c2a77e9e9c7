/* The eight tile registers of AMX, each of up to 16 rows of 64 bytes, and the instructions on them.
 *
 * With TILE_MODEL they are arrays, and the instructions C, by which tests prove the kernels on machines without tiles. Products
 * of bfloat16 have the order of the hardware, which was measured on a Xeon bit for bit: of the pairs that a tile holds, even
 * and odd values are summed apart by fused multiply-adds from zero, denormals as zero, and their sum is added to the
 * accumulator. So a row's sum depends on where tiles begin, not on how many rows there are. */
#ifndef QUIRE_TILES_H
#define QUIRE_TILES_H

#include "vec.h"

enum { TILE_ROWS = 16, TILE_BYTES = 64, NUM_TILES = 8 };
#ifdef TILES
enum { HAS_TILES = 1 };
#else
enum { HAS_TILES = 0 }; /* what uses tiles is compiled, and left out */
#endif

/* The shapes of the registers, as the machine loads them; zeros: none. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

INLINE void tile_shape(struct tile_shapes *shapes, int tile, size_t rows, size_t bytes) {
    shapes->palette = 1;
    shapes->rows[tile] = (uint8_t)rows;
    shapes->bytes[tile] = (uint16_t)(rows ? bytes : 0);
}

#ifndef TILES

#define tile_configure(shapes) ((void)(shapes))
#define tile_release() ((void)0)
#define tile_zero(tile) ((void)0)
#define tile_load(tile, from, stride) ((void)(from), (void)(stride))
#define tile_store(tile, to, stride) ((void)(to), (void)(stride))
#define tile_dot_bf16(c, a, b) ((void)0)
#define tile_dot_int8(c, a, b) ((void)0)

#elif defined(TILE_MODEL)

static _Thread_local struct tile_shapes tile_now;
static _Thread_local uint8_t tile_data[NUM_TILES][TILE_ROWS][TILE_BYTES];

static void tile_configure(const struct tile_shapes *shapes) {
    tile_now = *shapes;
    memset(tile_data, 0, sizeof tile_data);
}

static void tile_release(void) { memset(&tile_now, 0, sizeof tile_now); }

static void tile_zero(int tile) {
    if (!tile_now.rows[tile]) __builtin_trap(); /* as the machine does */
    memset(tile_data[tile], 0, sizeof tile_data[tile]);
}

static void tile_load(int tile, const void *from, size_t stride) {
    tile_zero(tile);
    for (size_t r = 0; r < tile_now.rows[tile]; r++)
        memcpy(tile_data[tile][r], (const char *)from + r * stride, tile_now.bytes[tile]);
}

static void tile_store(int tile, void *to, size_t stride) {
    if (!tile_now.rows[tile]) __builtin_trap();
    for (size_t r = 0; r < tile_now.rows[tile]; r++)
        memcpy((char *)to + r * stride, tile_data[tile][r], tile_now.bytes[tile]);
}

/* Whether c [rows][columns] += a [rows][inputs] . b [inputs][columns] is possible. */
static void tile_check(int c, int a, int b) {
    const struct tile_shapes *s = &tile_now;
    if (!s->rows[c] || s->rows[a] != s->rows[c] || s->rows[b] != s->bytes[a] / 4 || s->bytes[b] != s->bytes[c])
        __builtin_trap();
}

/* Never inlined: compilers move arithmetic across the change of what becomes of denormals. */
__attribute__((noinline)) static void tile_bf16_rows(int c, int a, int b) {
    for (int r = 0; r < tile_now.rows[c]; r++) {
        __m512 even = _mm512_setzero_ps(), odd = even, sum = _mm512_loadu_ps(tile_data[c][r]);
        for (int i = 0; i < tile_now.rows[b]; i++) {
            __m512i pairs = _mm512_loadu_si512(tile_data[b][i]), high = _mm512_set1_epi32((int)0xffff0000);
            uint32_t x;
            memcpy(&x, tile_data[a][r] + 4 * i, 4);
            __m512i both = _mm512_set1_epi32((int)x);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(both, 16), (__m512)_mm512_slli_epi32(pairs, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(both, high), (__m512)_mm512_and_si512(pairs, high), odd);
        }
        _mm512_storeu_ps(tile_data[c][r], _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
    }
}

static void tile_dot_bf16(int c, int a, int b) {
    enum { DENORMALS_ARE_ZERO = 0x8040 }; /* inputs and results */
    tile_check(c, a, b);
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZERO);
    tile_bf16_rows(c, a, b);
    _mm_setcsr(before);
}

/* c += a . b, of signed bytes. */
static void tile_dot_int8(int c, int a, int b) {
    tile_check(c, a, b);
    for (int r = 0; r < tile_now.rows[c]; r++)
        for (int i = 0; i < tile_now.bytes[c] / 4; i++) {
            int32_t sum;
            memcpy(&sum, tile_data[c][r] + 4 * i, 4);
            for (int k = 0; k < tile_now.bytes[a]; k++)
                sum += (int8_t)tile_data[a][r][k] * (int8_t)tile_data[b][k / 4][4 * i + k % 4];
            memcpy(tile_data[c][r] + 4 * i, &sum, 4);
        }
}

#else

/* Compilers know neither which memory nor which registers these use: each waits for what is written before it. */
#define TILE_ASM(text, ...) ({ __asm__ volatile(text : : __VA_ARGS__ : "memory"); })
#define tile_configure(shapes) TILE_ASM("ldtilecfg %0", "m"(*(shapes)))
#define tile_release() TILE_ASM("tilerelease", "i"(0))
#define tile_zero(tile) TILE_ASM("tilezero %%tmm" #tile, "i"(0))
#define tile_load(tile, from, stride) TILE_ASM("tileloadd (%0,%1,1), %%tmm" #tile, "r"(from), "r"((size_t)(stride)))
#define tile_store(tile, to, stride) TILE_ASM("tilestored %%tmm" #tile ", (%0,%1,1)", "r"(to), "r"((size_t)(stride)))
#define tile_dot_bf16(c, a, b) TILE_ASM("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c, "i"(0))
#define tile_dot_int8(c, a, b) TILE_ASM("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c, "i"(0))

#endif

/* Give the registers these shapes, unless they have them. */
INLINE void tile_reshape(struct tile_shapes *now, const struct tile_shapes *wanted) {
    if (!memcmp(now, wanted, sizeof *now)) return;
    *now = *wanted;
    tile_configure(now);
}

#endif
