/* The layout of quantised weights in memory, for packing (quant_pack.c) and the kernels (quant.h).
 *
 * A panel is a row of blocks, each QBLOCK inputs of PANEL weight rows: for every `group` of inputs a scale (and, with
 * `has_min`, a float16 minimum) of each row, then the codes. Four codes of one row, a *quad*, are neighbours, as the dot
 * product of bytes wants them. Codes of eight bits are [inputs / 4][PANEL][4] bytes. Codes of fewer bits are cut into
 * planes, of four, two and one bits, the lowest bits first; `bits` is the sum of the planes. In a plane of p bits a byte
 * holds the same element of 8 / p quads, the first one lowest: [inputs * p / 32][PANEL][4] bytes.
 *
 *     weight = scale * (code - zero) - min,  codes unsigned
 *     weight = scale * table[code]           for a format with a table, which is stored plus `zero`
 *
 * A scale is float16, or with E8M0 a byte, the exponent of a power of two; the table has doubled values there. With
 * SCALE_CODE a scale and a minimum are bytes, times `unit` and float16 of SUPER blocks, which lie ahead of these: of each
 * row first that of the scales, then that of the minimums. These are the types' own numbers, so nothing is rounded.
 * WEIGHT_INT8 has one float32 scale for a whole row, in struct linear, and nothing but codes in its blocks. */
#ifndef QUIRE_QUANT_FORMAT_H
#define QUIRE_QUANT_FORMAT_H

#include "quire_cpu.h"

enum {
    QBLOCK = 32, /* inputs of a block, and of x that share a scale */
    SUPER = 8,   /* blocks */
};

enum scale_kind { SCALE_OF_ROW, SCALE_E8M0, SCALE_CODE, SCALE_F16 };

struct quant_format {
    int bits, group, scale, has_min, zero, has_table;
    float unit;
};

static inline __attribute__((always_inline)) struct quant_format quant_format_of(int32_t format) {
    switch (format) {
    case WEIGHT_Q2_HALF_MIN: return (struct quant_format){2, 16, SCALE_F16, 1, 0, 0, 1};
    case WEIGHT_Q3_HALF: return (struct quant_format){3, 16, SCALE_F16, 0, 4, 0, 1};
    case WEIGHT_Q4: return (struct quant_format){4, 32, SCALE_F16, 0, 8, 0, 1};
    case WEIGHT_Q4_MIN: return (struct quant_format){4, 32, SCALE_F16, 1, 0, 0, 1};
    case WEIGHT_Q5: return (struct quant_format){5, 32, SCALE_F16, 0, 16, 0, 1};
    case WEIGHT_Q5_MIN: return (struct quant_format){5, 32, SCALE_F16, 1, 0, 0, 1};
    case WEIGHT_Q6_HALF: return (struct quant_format){6, 16, SCALE_F16, 0, 32, 0, 1};
    case WEIGHT_Q6_HALF_MIN: return (struct quant_format){6, 16, SCALE_F16, 1, 0, 0, 1};
    case WEIGHT_Q8: return (struct quant_format){8, 32, SCALE_F16, 0, 128, 0, 1};
    case WEIGHT_Q8_HALF: return (struct quant_format){8, 16, SCALE_F16, 0, 128, 0, 1};
    case WEIGHT_Q8_HALF_MIN: return (struct quant_format){8, 16, SCALE_F16, 1, 128, 0, 1};
    case WEIGHT_IQ4:
    case WEIGHT_IQ3_XXS:
    case WEIGHT_IQ3_S: return (struct quant_format){4, 32, SCALE_F16, 0, 128, 1, 1};
    case WEIGHT_MXFP4: return (struct quant_format){4, 32, SCALE_E8M0, 0, 128, 1, 1};
    case WEIGHT_NVFP4: return (struct quant_format){4, 16, SCALE_F16, 0, 128, 1, 1};
    case WEIGHT_IQ2:
    case WEIGHT_IQ1_M: return (struct quant_format){3, 16, SCALE_CODE, 0, 128, 1, 0.125f};
    case WEIGHT_Q1: return (struct quant_format){1, 32, SCALE_F16, 0, 128, 1, 1};
    case WEIGHT_IQ1_S: return (struct quant_format){2, 32, SCALE_CODE, 1, 0, 0, 0.125f};
    case WEIGHT_Q2: return (struct quant_format){2, 32, SCALE_F16, 0, 1, 0, 1};
    case WEIGHT_Q4_SUPER: return (struct quant_format){4, 32, SCALE_CODE, 1, 0, 0, 1};
    case WEIGHT_Q5_SUPER: return (struct quant_format){5, 32, SCALE_CODE, 1, 0, 0, 1};
    default: return (struct quant_format){8, 32, SCALE_OF_ROW, 0, 128, 0, 1}; /* WEIGHT_INT8 */
    }
}

/* The table of a format that has one, each value plus 128. */
static inline const uint8_t *quant_table_of(int32_t format) {
    static const uint8_t tables[][16] = {
        {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},            /* WEIGHT_IQ4 */
        {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190},         /* WEIGHT_IQ3_XXS */
        {113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143},     /* WEIGHT_IQ3_S */
        {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},     /* WEIGHT_MXFP4 */
        {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},     /* WEIGHT_NVFP4 */
        {0, 85, 103, 120, 136, 153, 171, 0},    /* WEIGHT_IQ2 */
        {121, 129, 137, 0, 119, 127, 135, 0},   /* WEIGHT_IQ1_M: -1, 0 and 1, with an eighth more or less, times 8 */
        {127, 129},                             /* WEIGHT_Q1 */
    };
    return tables[format - WEIGHT_IQ4];
}

static inline int is_quantised(int32_t format) { return format >= WEIGHT_INT8; }

/* Bytes of a scale, and of a minimum if there are any. */
static inline __attribute__((always_inline)) int quant_scale_bytes(struct quant_format f) {
    return f.scale == SCALE_OF_ROW ? 0 : f.scale == SCALE_F16 ? 2 : 1;
}

/* Bytes of the scales, or minimums, of SUPER blocks. */
static inline __attribute__((always_inline)) int quant_super_bytes(struct quant_format f) {
    return f.scale == SCALE_CODE ? 2 * (1 + f.has_min) * PANEL : 0;
}

/* Bytes of a block ahead of its codes. */
static inline __attribute__((always_inline)) size_t quant_head_bytes(struct quant_format f) {
    return (size_t)(QBLOCK / f.group * quant_scale_bytes(f) * (1 + f.has_min) * PANEL);
}

static inline __attribute__((always_inline)) size_t quant_block_bytes(struct quant_format f) {
    return quant_head_bytes(f) + (size_t)(QBLOCK * PANEL * f.bits / 8);
}

static inline int64_t quant_num_blocks(int64_t k) { return (k + QBLOCK - 1) / QBLOCK; }

static inline size_t quant_panel_bytes(struct quant_format f, int64_t k) {
    int64_t num = quant_num_blocks(k), num_supers = (num + SUPER - 1) / SUPER;
    return (size_t)num * quant_block_bytes(f) + (size_t)(num_supers * quant_super_bytes(f));
}

#endif
