/* The layout of quantised weights in memory, for packing (quant_pack.c) and the kernels (quant.h).
 *
 * A panel is a row of blocks, each QBLOCK inputs of PANEL weight rows: for every `group` of inputs a float16 scale
 * (and, with `has_min`, a float16 minimum) of each row, then the codes. Four codes of one row are neighbours, as the
 * dot product of bytes wants them: [inputs / 4][PANEL][4] bytes, or for codes of four bits [inputs / 8][PANEL][4],
 * where the low halves of the bytes are the first four inputs and the high halves the next four.
 *
 *     weight = scale * (code - zero) - min,  codes unsigned
 *
 * WEIGHT_INT8 has one float32 scale for a whole row, in struct linear, and nothing but codes in its blocks. */
#ifndef QUIRE_QUANT_FORMAT_H
#define QUIRE_QUANT_FORMAT_H

#include "quire_cpu.h"

enum { QBLOCK = 32 }; /* inputs of a block, and of x that share a scale */

struct quant_format {
    int bits, group, has_scale, has_min, zero;
};

static inline __attribute__((always_inline)) struct quant_format quant_format_of(int32_t format) {
    switch (format) {
    case WEIGHT_Q4: return (struct quant_format){4, 32, 1, 0, 8};
    case WEIGHT_Q4_MIN: return (struct quant_format){4, 32, 1, 1, 0};
    case WEIGHT_Q8: return (struct quant_format){8, 32, 1, 0, 128};
    case WEIGHT_Q8_HALF: return (struct quant_format){8, 16, 1, 0, 128};
    case WEIGHT_Q8_HALF_MIN: return (struct quant_format){8, 16, 1, 1, 128};
    default: return (struct quant_format){8, 32, 0, 0, 128}; /* WEIGHT_INT8 */
    }
}

static inline int is_quantised(int32_t format) { return format >= WEIGHT_INT8; }

/* Bytes of a block ahead of its codes. */
static inline __attribute__((always_inline)) size_t quant_head_bytes(struct quant_format f) {
    return (size_t)(QBLOCK / f.group * (f.has_scale + f.has_min) * PANEL) * sizeof(uint16_t);
}

static inline __attribute__((always_inline)) size_t quant_block_bytes(struct quant_format f) {
    return quant_head_bytes(f) + (size_t)(QBLOCK * PANEL * f.bits / 8);
}

static inline int64_t quant_num_blocks(int64_t k) { return (k + QBLOCK - 1) / QBLOCK; }

#endif
