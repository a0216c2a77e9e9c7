/* Blocks of GGUF's quantised types, spelled out: codes with scales and minimums, the same way for all types.
 *
 * Plain C for every machine. The layouts are those of the `gguf` package, or of ggml where it has none. */
#ifndef QUIRE_QUANT_BLOCKS_H
#define QUIRE_QUANT_BLOCKS_H

#include <string.h>

#include "quant_format.h"
#include "stored_rows.h"

/* The file's numbers for its quantised types. */
enum gguf_kind {
    GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8, GGUF_Q2_K = 10, GGUF_Q3_K = 11, GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14,
    GGUF_IQ2_XXS = 16, GGUF_IQ2_XS = 17, GGUF_IQ3_XXS = 18, GGUF_IQ1_S = 19, GGUF_IQ4_NL = 20, GGUF_IQ3_S = 21,
    GGUF_IQ2_S = 22, GGUF_IQ4_XS = 23, GGUF_IQ1_M = 29, GGUF_TQ1_0 = 34, GGUF_TQ2_0 = 35,
    GGUF_MXFP4 = 39, GGUF_NVFP4 = 40, GGUF_Q1_0 = 41, GGUF_Q2_0 = 42,
};

/* QBLOCK weights: scale[i / 16] * (code[i] - zero) - min[i / 16]; with a table, scale[i / 16] * (table[code[i]] - 128).
 * Four codes are a quad, the first one lowest. */
struct block {
    uint32_t quads[QBLOCK / 4];
    float scale[2], min[2];
    int zero;
    const uint8_t *table;
    uint8_t exponent; /* MXFP4: the scale as it is stored */
    uint8_t scale_code[2], min_code; /* of formats with SCALE_CODE: likewise, ... */
    uint16_t supers[2];              /* ... and the float16 that they are multiplied by */
};

#define EACH_QUAD(i) _Pragma("GCC unroll 8") for (int i = 0; i < QBLOCK / 4; i++)
#define CONSTANT static inline __attribute__((always_inline)) /* compiled for each type and format */

CONSTANT void set_scales(struct block *to, float scale, float min, int zero) {
    to->scale[0] = to->scale[1] = scale;
    to->min[0] = to->min[1] = min;
    to->zero = zero;
}

static inline uint32_t read_u32(const uint8_t *p) {
    uint32_t word; /* machines are little-endian, as files are */
    memcpy(&word, p, sizeof word);
    return word;
}

/* Four bits as the lowest ones of four bytes. */
static inline uint32_t spread_bits(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

/* Halves of 16 bytes: the first 16 codes are the low ones. */
CONSTANT void read_nibbles(struct block *to, const uint8_t *p) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        uint32_t word = read_u32(p + 4 * i);
        to->quads[i] = word & 0x0f0f0f0fu;
        to->quads[4 + i] = word >> 4 & 0x0f0f0f0fu;
    }
}

/* The fifth bit of each of 32 codes. */
CONSTANT void read_fifth_bits(struct block *to, const uint8_t *p) {
    uint32_t bits = read_u32(p);
    EACH_QUAD(i) to->quads[i] |= spread_bits(bits >> (4 * i)) << 4;
}

/* Scale and minimum, six bits each, of the 32 weights `part` of a superblock of 256. */
CONSTANT void read_k_scales(struct block *to, const uint8_t *p, int part) {
    const uint8_t *packed = p + 4;
    int scale = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
    int min = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | packed[part] >> 6 << 4;
    set_scales(to, f16_to_f32(p) * (float)scale, f16_to_f32(p + 2) * (float)min, 0);
    to->scale_code[0] = (uint8_t)scale, to->min_code = (uint8_t)min;
    memcpy(to->supers, p, sizeof to->supers);
}

/* Low four bits: two parts of 32 share 32 bytes. */
CONSTANT void read_k_nibbles(struct block *to, const uint8_t *p, int part) {
    EACH_QUAD(i) to->quads[i] = read_u32(p + part / 2 * 32 + 4 * i) >> (part % 2 * 4) & 0x0f0f0f0fu;
}

/* 210 bytes: 128 of low four bits, 64 of high two, 16 scales, and their scale; each half of 256 weights in turn. */
CONSTANT void read_q6_k(struct block *to, const uint8_t *p, int part) {
    int half = part / 4, quarter = part % 4;
    const uint8_t *low = p + half * 64 + quarter % 2 * 32, *high = p + 128 + half * 32;
    EACH_QUAD(i) to->quads[i] = (read_u32(low + 4 * i) >> (quarter / 2 * 4) & 0x0f0f0f0fu) |
                                (read_u32(high + 4 * i) >> (quarter * 2) & 0x03030303u) << 4;
    set_scales(to, 0, 0, 32);
    for (int i = 0; i < 2; i++) to->scale[i] = f16_to_f32(p + 208) * (float)(int8_t)p[192 + part * 2 + i];
}

/* The crumbs (two bits) of the 32 weights `part`: four parts share 32 bytes. */
CONSTANT void read_crumbs(struct block *to, const uint8_t *p, int part) {
    EACH_QUAD(i) to->quads[i] = read_u32(p + part / 4 * 32 + 4 * i) >> (part % 4 * 2) & 0x03030303u;
}

/* 84 bytes: 16 scales and minimums of four bits, 64 of codes, and the scales of both. */
CONSTANT void read_q2_k(struct block *to, const uint8_t *p, int part) {
    read_crumbs(to, p + 16, part);
    to->zero = 0;
    for (int i = 0; i < 2; i++) {
        uint8_t packed = p[part * 2 + i];
        to->scale[i] = f16_to_f32(p + 80) * (float)(packed & 15);
        to->min[i] = f16_to_f32(p + 82) * (float)(packed >> 4);
    }
}

/* 110 bytes: 32 of high bits, 64 of low two, 12 of 16 scales of six bits, and their scale. */
CONSTANT void read_q3_k(struct block *to, const uint8_t *p, int part) {
    read_crumbs(to, p + 32, part);
    EACH_QUAD(i) to->quads[i] |= (read_u32(p + 4 * i) >> part & 0x01010101u) << 2;
    set_scales(to, 0, 0, 4);
    for (int i = 0; i < 2; i++) {
        int j = part * 2 + i, low = p[96 + j % 8] >> (j / 8 * 4) & 15, high = p[104 + j % 4] >> (j / 4 * 2) & 3;
        to->scale[i] = f16_to_f32(p + 108) * (float)((low | high << 4) - 32);
    }
}

/* Four signed levels: index `half` and on of a table for the positive ones, those before, down, for the negative. */
static inline uint32_t signed_levels(const uint8_t *levels, uint32_t signs, uint32_t half) {
    return (read_u32(levels) + 0x01010101u * half) ^ spread_bits(signs) * (2 * half - 1);
}

/* Eight signs of seven: the last one makes the number of them even. */
static inline uint32_t even_signs(uint32_t signs) {
    signs &= 127;
    uint32_t folded = signs ^ signs >> 4;
    return signs | (0x6996u >> (folded & 15) & 1) << 7;
}

/* 98 bytes: a scale, 64 entries of the grid, and a word for each part: four times seven signs, and four bits of scale. */
CONSTANT void read_iq3_xxs(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    uint32_t word = read_u32(p + 66 + part * 4);
    for (int i = 0; i < 8; i++) {
        uint32_t signs = even_signs(word >> (i / 2 * 7)) >> (i % 2 * 4);
        to->quads[i] = signed_levels(grid + 4 * p[2 + part * 8 + i], signs, 8);
    }
    set_scales(to, f16_to_f32(p) * (0.5f + (float)(word >> 28)) * 0.5f, 0, 0);
    to->table = quant_table_of(WEIGHT_IQ3_XXS);
}

/* 110 bytes: a scale, 64 entries of the grid and their ninth bits, 32 of signs, 4 of scales. */
CONSTANT void read_iq3_s(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    for (int i = 0; i < 8; i++) {
        int entry = p[2 + part * 8 + i] | (p[66 + part] >> i & 1) << 8;
        to->quads[i] = signed_levels(grid + 4 * entry, (uint32_t)(p[74 + part * 4 + i / 2] >> (i % 2 * 4)), 8);
    }
    set_scales(to, f16_to_f32(p) * (float)(1 + 2 * (p[106 + part / 2] >> (part % 2 * 4) & 15)), 0, 0);
    to->table = quant_table_of(WEIGHT_IQ3_S);
}

/* Scales of halves, 2 * step + 1 eighths of the float16 at `super`. */
CONSTANT void set_eighths(struct block *to, const uint8_t *super, int first, int second) {
    for (int i = 0; i < 2; i++) {
        int steps = 2 * (i ? second : first) + 1;
        to->scale[i] = f16_to_f32(super) * 0.125f * (float)steps;
        to->scale_code[i] = (uint8_t)steps;
    }
    memcpy(to->supers, super, sizeof *to->supers);
}

/* Eight codes of IQ2, by an entry of its grid. */
CONSTANT void set_iq2(struct block *to, int eight, const uint8_t *levels, uint32_t signs) {
    for (int i = 0; i < 2; i++) to->quads[2 * eight + i] = signed_levels(levels + 4 * i, signs >> (4 * i), 4);
    to->table = quant_table_of(WEIGHT_IQ2);
}

/* 66 bytes: a scale, and for each part four entries and a word: four times seven signs, and four bits of scale. */
CONSTANT void read_iq2_xxs(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    const uint8_t *entries = p + 2 + part * 8;
    uint32_t word = read_u32(entries + 4);
    for (int i = 0; i < 4; i++) set_iq2(to, i, grid + 8 * entries[i], even_signs(word >> (7 * i)));
    set_eighths(to, p, (int)(word >> 28), (int)(word >> 28));
}

/* 74 bytes: a scale, 32 times nine bits of an entry and seven signs, and two scales a byte. */
CONSTANT void read_iq2_xs(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    for (int i = 0; i < 4; i++) {
        uint32_t two = read_u32(p + 2 + part * 8 + i / 2 * 4) >> (i % 2 * 16) & 0xffff;
        set_iq2(to, i, grid + 8 * (two & 511), even_signs(two >> 9));
    }
    set_eighths(to, p, p[66 + part] & 15, p[66 + part] >> 4);
}

/* 82 bytes: a scale, 32 entries, 32 of signs, 8 with bits nine and ten of the entries, and two scales a byte. */
CONSTANT void read_iq2_s(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    for (int i = 0; i < 4; i++) {
        int at = part * 4 + i, entry = p[2 + at] | (p[66 + part] >> (2 * i) & 3) << 8;
        set_iq2(to, i, grid + 8 * entry, p[34 + at]);
    }
    set_eighths(to, p, p[74 + part] & 15, p[74 + part] >> 4);
}

/* 50 bytes: a scale, 32 entries, and two bytes for each part: three more bits of each entry, three of scale, and whether an
 * eighth goes off all levels or is added. As codes with a minimum these are level * 8 * steps - (8 -+ 1) * steps. */
CONSTANT void read_iq1_s(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    int high = p[34 + 2 * part] | p[35 + 2 * part] << 8, is_less = high >> 15;
    EACH_QUAD(i) {
        int entry = p[2 + part * 4 + i / 2] | (high >> (i / 2 * 3) & 7) << 8;
        to->quads[i] = read_u32(grid + 8 * entry + i % 2 * 4);
    }
    set_eighths(to, p, high >> 12 & 7, high >> 12 & 7);
    to->table = quant_table_of(WEIGHT_IQ1_M) + 4 * is_less;
    to->min_code = (uint8_t)(to->scale_code[0] * (7 + 2 * is_less));
    to->scale_code[0] = (uint8_t)(to->scale_code[0] * 8);
    to->supers[1] = to->supers[0];
}

/* 56 bytes: 32 entries, half a byte for each: three more bits, and the eighth's sign; and four words of four times three
 * bits of scale, above which lie four bits of the float16. */
CONSTANT void read_iq1_m(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    EACH_QUAD(i) {
        int at = part * 4 + i / 2, high = p[32 + at / 2] >> (at % 2 * 4), entry = p[at] | (high & 7) << 8;
        to->quads[i] = read_u32(grid + 8 * entry + i % 2 * 4) + 0x01010101u * (uint32_t)(high >> 1 & 4);
    }
    uint8_t super[2] = {(uint8_t)(p[49] >> 4 | (p[51] & 0xf0)), (uint8_t)(p[53] >> 4 | (p[55] & 0xf0))};
    int word = p[48 + part / 2 * 2] | p[49 + part / 2 * 2] << 8, scales = word >> (part % 2 * 6);
    set_eighths(to, super, scales & 7, scales >> 3 & 7);
    to->table = quant_table_of(WEIGHT_IQ1_M);
}

/* 54 bytes: 32 with five weights each, 16 with five, 4 with four, and a scale. Weights are the digits, to base 3, of a
 * fraction of 256. */
CONSTANT void read_tq1_0(struct block *to, const uint8_t *p, int part) {
    static const uint8_t powers[] = {1, 3, 9, 27, 81};
    uint8_t codes[QBLOCK];
    for (int i = 0; i < QBLOCK; i++) {
        int at = part * QBLOCK + i, digit = at / 32, byte = at % 32;
        if (at >= 160) digit = (at - 160) / 16, byte = 32 + at % 16;
        if (at >= 240) digit = (at - 240) / 4, byte = 48 + at % 4;
        codes[i] = (uint8_t)((uint8_t)(p[byte] * powers[digit]) * 3 >> 8);
    }
    memcpy(to->quads, codes, sizeof codes);
    set_scales(to, f16_to_f32(p + 52), 0, 1);
}

/* 36 bytes: 4 scales, float8_e4m3fn without a sign, for a table of doubled values; and nibbles, in halves of 8 bytes. */
CONSTANT void read_nvfp4(struct block *to, const uint8_t *p, int part) {
    set_scales(to, 0, 0, 0);
    for (int i = 0; i < 2; i++) {
        uint8_t stored = p[part * 2 + i];
        uint32_t bits = stored == 0x7f ? 0 : (stored & 0x7fu) << 20;
        memcpy(to->scale + i, &bits, sizeof bits);
        to->scale[i] *= 0x1p119f; /* rebiases the exponent, as f16_to_f32 does, and halves */
        for (int j = 0; j < 2; j++) {
            uint32_t word = read_u32(p + 4 + part * 16 + i * 8 + j * 4);
            to->quads[4 * i + j] = word & 0x0f0f0f0fu;
            to->quads[4 * i + 2 + j] = word >> 4 & 0x0f0f0f0fu;
        }
    }
    to->table = quant_table_of(WEIGHT_NVFP4);
}

/* 136 bytes: a scale, 8 scales of six bits, and nibbles. */
CONSTANT void read_iq4_xs(struct block *to, const uint8_t *p, int part) {
    int low = p[4 + part / 2] >> (part % 2 * 4) & 15, high = (p[2] | p[3] << 8) >> (part * 2) & 3;
    read_nibbles(to, p + 8 + part * 16);
    set_scales(to, f16_to_f32(p) * (float)((low | high << 4) - 32), 0, 0);
    to->table = quant_table_of(WEIGHT_IQ4);
}

/* 17 bytes: an exponent, for a table of doubled values, and nibbles. */
CONSTANT void read_mxfp4(struct block *to, const uint8_t *p) {
    uint32_t bits = p[0] < 2 ? (uint32_t)0x00200000 << p[0] : (uint32_t)(p[0] - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    read_nibbles(to, p + 1);
    set_scales(to, scale, 0, 0);
    to->table = quant_table_of(WEIGHT_MXFP4);
    to->exponent = p[0];
}

/* Weights 32 * b and on of a row of the file, of a type with blocks of 32. */
CONSTANT void read_short_block(int32_t kind, const uint8_t *row, int64_t b, struct block *to) {
    switch (kind) {
    case GGUF_Q4_0:
        row += b * 18;
        read_nibbles(to, row + 2);
        set_scales(to, f16_to_f32(row), 0, 8);
        break;
    case GGUF_Q4_1:
        row += b * 20;
        read_nibbles(to, row + 4);
        set_scales(to, f16_to_f32(row), -f16_to_f32(row + 2), 0);
        break;
    case GGUF_Q5_0:
        row += b * 22;
        read_nibbles(to, row + 6);
        read_fifth_bits(to, row + 2);
        set_scales(to, f16_to_f32(row), 0, 16);
        break;
    case GGUF_Q5_1:
        row += b * 24;
        read_nibbles(to, row + 8);
        read_fifth_bits(to, row + 4);
        set_scales(to, f16_to_f32(row), -f16_to_f32(row + 2), 0);
        break;
    case GGUF_Q8_0:
        row += b * 34;
        EACH_QUAD(i) to->quads[i] = read_u32(row + 2 + 4 * i) ^ 0x80808080u;
        set_scales(to, f16_to_f32(row), 0, 128);
        break;
    case GGUF_IQ4_NL:
        row += b * 18;
        read_nibbles(to, row + 2);
        set_scales(to, f16_to_f32(row), 0, 0);
        to->table = quant_table_of(WEIGHT_IQ4);
        break;
    case GGUF_NVFP4: read_nvfp4(to, row + b / 2 * 36, (int)(b % 2)); break;
    case GGUF_Q1_0:
        row += b / 4 * 18;
        EACH_QUAD(i) to->quads[i] = spread_bits(read_u32(row + 2 + b % 4 * 4) >> (4 * i));
        set_scales(to, f16_to_f32(row), 0, 0);
        to->table = quant_table_of(WEIGHT_Q1);
        break;
    case GGUF_Q2_0:
        row += b / 2 * 18;
        EACH_QUAD(i) {
            uint32_t four = row[2 + b % 2 * 8 + i];
            to->quads[i] = (four | four << 6 | four << 12 | four << 18) & 0x03030303u;
        }
        set_scales(to, f16_to_f32(row), 0, 1);
        break;
    default: read_mxfp4(to, row + b * 17); break;
    }
}

/* Weights 32 * b and on of a row of the file. */
CONSTANT void read_block(int32_t kind, const struct stored_rows *from, const uint8_t *row, int64_t b, struct block *to) {
    const uint8_t *grid = from->grid;
    int part = (int)(b % 8);
    to->table = NULL;
    to->min[0] = to->min[1] = 0;
    switch (kind) {
    case GGUF_Q2_K: read_q2_k(to, row + b / 8 * 84, part); break;
    case GGUF_Q3_K: read_q3_k(to, row + b / 8 * 110, part); break;
    case GGUF_Q4_K:
        row += b / 8 * 144;
        read_k_nibbles(to, row + 16, part);
        read_k_scales(to, row, part);
        break;
    case GGUF_Q5_K:
        row += b / 8 * 176;
        read_k_nibbles(to, row + 48, part);
        EACH_QUAD(i) to->quads[i] |= (read_u32(row + 16 + 4 * i) >> part & 0x01010101u) << 4;
        read_k_scales(to, row, part);
        break;
    case GGUF_Q6_K: read_q6_k(to, row + b / 8 * 210, part); break;
    case GGUF_IQ2_XXS: read_iq2_xxs(to, row + b / 8 * 66, part, grid); break;
    case GGUF_IQ2_XS: read_iq2_xs(to, row + b / 8 * 74, part, grid); break;
    case GGUF_IQ2_S: read_iq2_s(to, row + b / 8 * 82, part, grid); break;
    case GGUF_IQ1_S: read_iq1_s(to, row + b / 8 * 50, part, grid); break;
    case GGUF_IQ1_M: read_iq1_m(to, row + b / 8 * 56, part, grid); break;
    case GGUF_TQ1_0: read_tq1_0(to, row + b / 8 * 54, part); break;
    case GGUF_TQ2_0:
        row += b / 8 * 66;
        read_crumbs(to, row, part);
        set_scales(to, f16_to_f32(row + 64), 0, 1);
        break;
    case GGUF_IQ3_XXS: read_iq3_xxs(to, row + b / 8 * 98, part, grid); break;
    case GGUF_IQ3_S: read_iq3_s(to, row + b / 8 * 110, part, grid); break;
    case GGUF_IQ4_XS: read_iq4_xs(to, row + b / 8 * 136, part); break;
    default: read_short_block(kind, row, b, to); break;
    }
    for (int i = 0; i < 2; i++) to->scale[i] *= from->factor;
}

#endif
