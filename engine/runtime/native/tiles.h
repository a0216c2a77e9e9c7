/* The eight tile registers of AMX, each of up to 16 rows of 64 bytes, and the instructions on them.
 *
 * Products of bfloat16 have an order, which was measured on a Xeon bit for bit: of the pairs that a tile holds, even and odd
 * values are summed apart by fused multiply-adds from zero, denormals as zero, and their sum is added to the accumulator. So a
 * row's sum depends on where tiles begin, not on how many rows there are. With TILE_MODEL the instructions are C. */
#ifndef QUIRE_TILES_H
#define QUIRE_TILES_H

#include "vec.h"

enum { TILE_ROWS = 16, TILE_BYTES = 64, NUM_TILES = 8 };
#define ALIGNED _Alignas(TILE_BYTES) /* a tile's row behind a line's end takes two loads */
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
#define tile_load_once(tile, from, stride) ((void)(from), (void)(stride))
#define tile_store(tile, to, stride) ((void)(to), (void)(stride))
#define tile_dot_bf16(c, a, b) ((void)0)
#define tile_dot_codes(c, a, b) ((void)0)

#elif defined(TILE_MODEL)

#include "tile_model.h" /* of tests/cpu */

#else

/* Compilers know neither which memory nor which registers these use: each waits for what is written before it. */
#define TILE_ASM(text, ...) ({ __asm__ volatile(text : : __VA_ARGS__ : "memory"); })
#define tile_configure(shapes) TILE_ASM("ldtilecfg %0", "m"(*(shapes)))
#define tile_release() TILE_ASM("tilerelease", "i"(0))
#define tile_zero(tile) TILE_ASM("tilezero %%tmm" #tile, "i"(0))
#define tile_load(tile, from, stride) TILE_ASM("tileloadd (%0,%1,1), %%tmm" #tile, "r"(from), "r"((size_t)(stride)))
/* The same, past the first cache, which keeps what it has. */
#define tile_load_once(tile, from, stride) TILE_ASM("tileloaddt1 (%0,%1,1), %%tmm" #tile, "r"(from), "r"((size_t)(stride)))
#define tile_store(tile, to, stride) TILE_ASM("tilestored %%tmm" #tile ", (%0,%1,1)", "r"(to), "r"((size_t)(stride)))
#define tile_dot_bf16(c, a, b) TILE_ASM("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c, "i"(0))
/* c += a . b, of signed bytes of a and unsigned ones of b. */
#define tile_dot_codes(c, a, b) TILE_ASM("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c, "i"(0))

#endif

/* Vectors that sum as tiles do take denormals as zero, and make none. Returns what restore_denormals needs. */
INLINE unsigned flush_denormals(void) {
#ifdef TILES
    enum { DENORMALS_ARE_ZERO = 0x8040 }; /* inputs and results */
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZERO);
    return before;
#else
    return 0;
#endif
}

INLINE void restore_denormals(unsigned before) {
    (void)before;
#ifdef TILES
    _mm_setcsr(before);
#endif
}

/* Shapes for products of up to two tiles of rows with a panel's two, of `lanes` of four bytes: registers 0 to 3 hold sums, 4 and 5
 * rows, 6 and 7 weights. `now` names the shapes that registers have; 0: none. */
INLINE void shape_products(uint64_t *now, size_t num_rows, size_t lanes) {
    const uint64_t name = num_rows << 8 | lanes;
    if (*now == name) return;
    *now = name;
    const size_t low = num_rows < TILE_ROWS ? num_rows : TILE_ROWS, high = num_rows - low;
    struct tile_shapes wanted = {0};
    for (int column = 0; column < 2; column++) {
        tile_shape(&wanted, column, low, TILE_BYTES);
        tile_shape(&wanted, 2 + column, high, TILE_BYTES);
        tile_shape(&wanted, 6 + column, lanes, TILE_BYTES);
    }
    tile_shape(&wanted, 4, low, lanes * 4);
    tile_shape(&wanted, 5, high, lanes * 4);
    tile_configure(&wanted);
}

#endif
