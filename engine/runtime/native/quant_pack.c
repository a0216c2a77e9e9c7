/* Packing of quantised weights, once at load: rows of a GGUF file, or a float matrix, into the panels of
 * quant_format.h; and dequantising of such rows.
 *
 * Plain C for every machine. A GGUF block is first spelled out as codes with scales and minimums, the same way for all
 * of the file's types, and then written where the panel has it. */
#include <math.h>
#include <string.h>

#include "quant_format.h"
#include "stored_rows.h"

/* The file's numbers for its quantised types. */
enum gguf_kind {
    GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8, GGUF_Q2_K = 10, GGUF_Q3_K = 11, GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14,
    GGUF_IQ3_XXS = 18, GGUF_IQ4_NL = 20, GGUF_IQ3_S = 21, GGUF_IQ4_XS = 23, GGUF_MXFP4 = 39,
};

/* The compiler may neither merge the product with the difference behind it, nor take these loops for unimportant. */
#if defined(__GNUC__) && !defined(__clang__)
#define ROUNDED __attribute__((optimize("O3", "fp-contract=off")))
#else
#define ROUNDED
#endif

/* QBLOCK weights: scale[i / 16] * (code[i] - zero) - min[i / 16]; with a table, scale[i / 16] * (table[code[i]] - 128).
 * Four codes are a quad, the first one lowest. */
struct block {
    uint32_t quads[QBLOCK / 4];
    float scale[2], min[2];
    int zero;
    const uint8_t *table;
    uint8_t exponent; /* MXFP4: the scale as it is stored */
    uint8_t scale_code, min_code; /* Q4_K, Q5_K: likewise, ... */
    const uint8_t *supers;        /* ... and the two float16 that they are multiplied by */
};

enum { STRIP = SUPER }; /* blocks of a row that are packed in turn: what several rows write then stays in the cache */
#define EACH_QUAD(i) _Pragma("GCC unroll 8") for (int i = 0; i < QBLOCK / 4; i++)
#define CONSTANT static inline __attribute__((always_inline)) /* compiled for each type and format */

/* The nearest float16. */
CONSTANT uint16_t f32_to_f16(float value) {
    uint32_t bits, sign, small;
    memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    float shifted;
    memcpy(&shifted, &bits, sizeof shifted);
    shifted += 0.5f; /* the remaining mantissa is that of a subnormal, rounded */
    memcpy(&small, &shifted, sizeof small);
    uint32_t normal = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13, large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = bits >= 0x38800000 ? normal : small - 0x3f000000;
    return (uint16_t)(sign | (bits >= 0x477ff000 ? large : half));
}

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
    to->scale_code = (uint8_t)scale, to->min_code = (uint8_t)min;
    to->supers = p;
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

/* Four signed levels: index 8 and on of a table for the positive ones, 7 and down for the negative. */
static inline uint32_t signed_levels(const uint8_t *levels, uint32_t signs) {
    return (read_u32(levels) + 0x08080808u) ^ spread_bits(signs) * 15;
}

/* 98 bytes: a scale, 64 entries of the grid, and a word for each part: four times seven signs, and four bits of scale.
 * The eighth sign of each group makes the number of them even. */
CONSTANT void read_iq3_xxs(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    uint32_t word = read_u32(p + 66 + part * 4);
    for (int i = 0; i < 8; i++) {
        uint32_t signs = word >> (i / 2 * 7) & 127, folded = signs ^ signs >> 4;
        signs |= (0x6996u >> (folded & 15) & 1) << 7;
        to->quads[i] = signed_levels(grid + 4 * p[2 + part * 8 + i], signs >> (i % 2 * 4));
    }
    set_scales(to, f16_to_f32(p) * (0.5f + (float)(word >> 28)) * 0.5f, 0, 0);
    to->table = quant_table_of(WEIGHT_IQ3_XXS);
}

/* 110 bytes: a scale, 64 entries of the grid and their ninth bits, 32 of signs, 4 of scales. */
CONSTANT void read_iq3_s(struct block *to, const uint8_t *p, int part, const uint8_t *grid) {
    for (int i = 0; i < 8; i++) {
        int entry = p[2 + part * 8 + i] | (p[66 + part] >> i & 1) << 8;
        to->quads[i] = signed_levels(grid + 4 * entry, (uint32_t)(p[74 + part * 4 + i / 2] >> (i % 2 * 4)));
    }
    set_scales(to, f16_to_f32(p) * (float)(1 + 2 * (p[106 + part / 2] >> (part % 2 * 4) & 15)), 0, 0);
    to->table = quant_table_of(WEIGHT_IQ3_S);
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
    default: read_mxfp4(to, row + b * 17); break;
    }
}

/* Weights 32 * b and on of a row of the file. */
CONSTANT void read_block(int32_t kind, const uint8_t *grid, const uint8_t *row, int64_t b, struct block *to) {
    int part = (int)(b % 8);
    to->table = NULL;
    to->supers = NULL;
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
    case GGUF_IQ3_XXS: read_iq3_xxs(to, row + b / 8 * 98, part, grid); break;
    case GGUF_IQ3_S: read_iq3_s(to, row + b / 8 * 110, part, grid); break;
    case GGUF_IQ4_XS: read_iq4_xs(to, row + b / 8 * 136, part); break;
    default: read_short_block(kind, row, b, to); break;
    }
}

/* Scales, and behind them minimums, of one row's blocks of a strip: for each block [QBLOCK / group]. */
struct heads {
    float values[4 * STRIP];
    uint16_t halves[4 * STRIP];
};

/* How much is added to codes, for a format with zero points. */
CONSTANT int code_shift(struct quant_format f, const struct block *from) {
    return from->table || (f.has_min && f.bits < 8) ? 0 : f.zero - from->zero;
}

/* Note the scales and minimums of block `b` of a strip. */
CONSTANT void note_head(struct quant_format f, const struct block *from, struct heads *heads, int64_t b) {
    int zero = from->table ? f.zero : from->zero + code_shift(f, from);
    const int num = QBLOCK / f.group;
    for (int g = 0; g < num; g++) {
        int at = g * f.group / 16;
        heads->values[b * num + g] = from->scale[at];
        heads->values[(STRIP + b) * num + g] = from->min[at] + from->scale[at] * (float)(zero - f.zero);
    }
}

/* Write scales and minimums where weight row `r` of a panel has them. */
CONSTANT void write_head(struct quant_format f, const struct block *from, const struct heads *heads, int64_t b,
                         uint8_t *block, int64_t r) {
    const int num = QBLOCK / f.group;
    for (int g = 0; g < num; g++) {
        uint8_t *head = block + g * quant_scale_bytes(f) * (1 + f.has_min) * PANEL;
        if (f.scale == SCALE_E8M0) head[r] = from->exponent;
        if (f.scale == SCALE_F16) memcpy(head + r * 2, heads->halves + b * num + g, 2);
        if (f.scale == SCALE_F16 && f.has_min) memcpy(head + (PANEL + r) * 2, heads->halves + (STRIP + b) * num + g, 2);
        if (f.scale == SCALE_CODE) head[r] = from->scale_code, head[PANEL + r] = from->min_code;
    }
}

/* Write a plane of `plane` bits, from bit `low` of the codes on: quads of codes are moved as one. */
static inline __attribute__((always_inline)) uint8_t *write_plane(const uint32_t quads[QBLOCK / 4], int plane,
                                                                  int low, uint8_t *to) {
    const uint32_t mask = 0x01010101u * ((1u << plane) - 1);
    const int num = 8 / plane;
    for (int i = 0; i < QBLOCK / 4; i += num, to += PANEL * 4) {
        uint32_t packed = 0;
        _Pragma("GCC unroll 8") for (int j = 0; j < num; j++) packed |= (quads[i + j] >> low & mask) << (j * plane);
        memcpy(to, &packed, sizeof packed);
    }
    return to;
}

/* Write what the blocks of a strip have in common where weight row `r` of a panel has it. */
CONSTANT void write_supers(struct quant_format f, const struct block *from, uint8_t *super, int64_t r) {
    for (int i = 0; i < 2 && f.scale == SCALE_CODE && from->supers; i++)
        memcpy(super + (i * PANEL + r) * 2, from->supers + 2 * i, 2);
}

/* Write the codes of a block where weight row `r` of a panel has them. */
CONSTANT void write_codes(struct quant_format f, const struct block *from, uint8_t *block, int64_t r) {
    uint8_t *to = block + quant_head_bytes(f) + 4 * r;
    int shift = code_shift(f, from);
    uint32_t quads[QBLOCK / 4];
    if (from->table && !f.has_table) {
        uint8_t codes[QBLOCK];
        memcpy(codes, from->quads, sizeof codes);
        for (int i = 0; i < QBLOCK; i++) codes[i] = from->table[codes[i]];
        memcpy(quads, codes, sizeof quads);
    } else {
        EACH_QUAD(i) quads[i] = from->quads[i] + 0x01010101u * (uint32_t)shift; /* no byte overflows */
    }
    int low = f.bits & 4;
    if (f.bits == 8) {
        EACH_QUAD(i) memcpy(to + i * PANEL * 4, quads + i, sizeof *quads);
    }
    if (f.bits & 4) to = write_plane(quads, 4, 0, to);
    if (f.bits & 2) to = write_plane(quads, 2, low, to), low += 2;
    if (f.bits & 1) write_plane(quads, 1, low, to);
}

/* Rows [begin, end) of a part, at most PANEL, which `rows` has. */
CONSTANT void pack_rows_as(const struct quant_source *s, const uint8_t *rows, int64_t begin, int64_t end, int32_t kind,
                           int32_t format) {
    const struct quant_format f = quant_format_of(format);
    const int64_t num_blocks = quant_num_blocks(s->k);
    const size_t block_bytes = quant_block_bytes(f), panel_bytes = quant_panel_bytes(f, s->k);
    void (*narrow)(const float *, uint16_t *, int64_t) = active_kernels()->narrow_f16;
    for (int64_t strip = 0; strip < num_blocks; strip += STRIP) {
        int64_t after = strip + STRIP < num_blocks ? strip + STRIP : num_blocks;
        for (int64_t i = begin; i < end; i++) {
            struct block blocks[STRIP];
            struct heads heads = {0};
            int64_t to = target_row(s, i);
            uint8_t *out = (uint8_t *)s->packed + (size_t)(to / PANEL) * panel_bytes + (size_t)strip * block_bytes;
            out += strip / SUPER * quant_super_bytes(f);
            for (int64_t b = 0; b < after - strip; b++) {
                read_block(kind, s->stored.grid, rows + (i - begin) * s->stored.row_bytes, strip + b, blocks + b);
                note_head(f, blocks + b, &heads, b);
            }
            if (f.scale == SCALE_F16)
                narrow(heads.values, heads.halves, (1 + f.has_min) * STRIP * QBLOCK / f.group);
            write_supers(f, blocks, out, to % PANEL);
            out += quant_super_bytes(f);
            for (int64_t b = 0; b < after - strip; b++, out += block_bytes) {
                write_head(f, blocks + b, &heads, b, out, to % PANEL);
                write_codes(f, blocks + b, out, to % PANEL);
            }
        }
    }
}

/* One function for each type in the format that holds only it, and one for all others. */
static void pack_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct quant_source *s = context;
#define PACK_CASE(kind_, format_)                                     \
    if (s->stored.kind == kind_ && s->format == format_) {                   \
        pack_rows_as(s, rows, begin, end, kind_, format_);            \
        return;                                                       \
    }
    PACK_CASE(GGUF_Q4_0, WEIGHT_Q4)
    PACK_CASE(GGUF_Q4_1, WEIGHT_Q4_MIN)
    PACK_CASE(GGUF_Q5_0, WEIGHT_Q5)
    PACK_CASE(GGUF_Q5_1, WEIGHT_Q5_MIN)
    PACK_CASE(GGUF_Q8_0, WEIGHT_Q8)
    PACK_CASE(GGUF_Q2_K, WEIGHT_Q2_HALF_MIN)
    PACK_CASE(GGUF_Q3_K, WEIGHT_Q3_HALF)
    PACK_CASE(GGUF_Q4_K, WEIGHT_Q4_SUPER)
    PACK_CASE(GGUF_Q5_K, WEIGHT_Q5_SUPER)
    PACK_CASE(GGUF_Q6_K, WEIGHT_Q6_HALF)
    PACK_CASE(GGUF_IQ3_XXS, WEIGHT_IQ3_XXS)
    PACK_CASE(GGUF_IQ3_S, WEIGHT_IQ3_S)
    PACK_CASE(GGUF_IQ4_NL, WEIGHT_IQ4)
    PACK_CASE(GGUF_IQ4_XS, WEIGHT_IQ4)
    PACK_CASE(GGUF_MXFP4, WEIGHT_MXFP4)
#undef PACK_CASE
    pack_rows_as(s, rows, begin, end, s->stored.kind, s->format);
}

int32_t quant_pack_gguf(const void *args, int64_t begin, int64_t end) {
    const struct quant_source *s = args;
    return for_each_tile(&s->stored, begin, end, pack_tile, s);
}

/* The weights of a block, rounded after the product and again after the minimum goes off it. */
ROUNDED static void block_values(const struct block *from, float values[QBLOCK]) {
    int8_t signs[QBLOCK];
    uint8_t codes[QBLOCK];
    memcpy(codes, from->quads, sizeof codes);
    for (int i = 0; i < QBLOCK && from->table; i++) signs[i] = (int8_t)(from->table[codes[i]] - 128);
    for (int i = 0; i < QBLOCK && !from->table; i++) signs[i] = (int8_t)(codes[i] - from->zero);
    for (int half = 0; half < 2; half++) {
        const float scale = from->scale[half], min = from->min[half];
        for (int i = 16 * half; i < 16 * half + 16; i++) values[i] = scale * (float)signs[i] - min;
    }
}

/* The nearest bfloat16. */
ROUNDED static void narrow_bf16(const float values[QBLOCK], uint16_t out[QBLOCK]) {
    for (int i = 0; i < QBLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, is_nan = (bits & 0x7fffffff) > 0x7f800000;
        out[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : nearest);
    }
}

static void dequantise_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct dequant_args *a = context;
    const size_t size = a->dtype == DT_F32 ? 4 : 2;
    for (int64_t row = begin; row < end; row++, rows += a->stored.row_bytes) {
        char *out = (char *)a->out + (size_t)(row * a->k) * size;
        for (int64_t b = 0; b < a->k / QBLOCK; b++, out += QBLOCK * size) {
            struct block block;
            float values[QBLOCK];
            uint16_t narrow[QBLOCK];
            read_block(a->stored.kind, a->stored.grid, rows, b, &block);
            block_values(&block, values);
            if (a->dtype == DT_BF16) narrow_bf16(values, narrow);
            for (int i = 0; i < QBLOCK && a->dtype == DT_F16; i++) narrow[i] = f32_to_f16(values[i]);
            memcpy(out, a->dtype == DT_F32 ? (const void *)values : narrow, QBLOCK * size);
        }
    }
}

int32_t quant_dequantise(const void *args, int64_t begin, int64_t end) {
    const struct dequant_args *a = args;
    return for_each_tile(&a->stored, begin, end, dequantise_tile, a);
}

/* The codes of a block where weight row `r` of a panel has it. */
CONSTANT void read_codes(struct quant_format f, const uint8_t *from, uint32_t quads[QBLOCK / 4]) {
    int low = 0;
    EACH_QUAD(i) quads[i] = 0;
    for (int plane = f.bits == 8 ? 8 : 4; plane; plane = plane == 8 ? 0 : plane / 2) {
        if (!(f.bits & plane)) continue;
        for (int i = 0; i < QBLOCK / 4; i++) {
            int num = 8 / plane;
            uint32_t stored = read_u32(from + i / num * PANEL * 4), mask = 0x01010101u * ((1u << plane) - 1);
            quads[i] |= (stored >> (i % num * plane) & mask) << low;
        }
        from += QBLOCK * plane / 32 * PANEL * 4;
        low += plane;
    }
}

/* Round values to a type. */
static void round_to(int32_t dtype, float values[QBLOCK]) {
    uint16_t half[QBLOCK];
    if (dtype == DT_BF16) narrow_bf16(values, half);
    for (int i = 0; i < QBLOCK && dtype == DT_F16; i++) {
        half[0] = f32_to_f16(values[i]);
        values[i] = f16_to_f32((const uint8_t *)half);
    }
    for (int i = 0; i < QBLOCK && dtype == DT_BF16; i++) {
        uint32_t bits = (uint32_t)half[i] << 16;
        memcpy(values + i, &bits, sizeof bits);
    }
}

void quant_unpack_rows(const void *args, int64_t begin, int64_t end) {
    const struct embed_args *a = args;
    const struct quant_format f = quant_format_of(a->format);
    const size_t block_bytes = quant_block_bytes(f);
    const int64_t num_blocks = quant_num_blocks(a->width);
    for (int64_t i = begin; i < end; i++) {
        int64_t r = a->ids[i] % PANEL;
        const uint8_t *panel = (const uint8_t *)a->table + (size_t)(a->ids[i] / PANEL) * quant_panel_bytes(f, a->width);
        const uint8_t *supers = panel;
        for (int64_t b = 0; b < num_blocks; b++, panel += block_bytes) {
            if (b % SUPER == 0) supers = panel, panel += quant_super_bytes(f);
            struct block block = {.zero = f.zero, .table = f.has_table ? quant_table_of(a->format) : NULL};
            float values[QBLOCK], *out = a->out + i * a->width + b * QBLOCK;
            for (int half = 0; half < 2; half++) {
                const uint8_t *head = panel + half * 16 / f.group * quant_scale_bytes(f) * (1 + f.has_min) * PANEL;
                uint32_t bits = head[r] < 2 ? (uint32_t)0x00200000 << head[r] : (uint32_t)(head[r] - 1) << 23;
                if (f.scale == SCALE_E8M0) memcpy(&block.scale[half], &bits, sizeof bits);
                if (f.scale == SCALE_F16) block.scale[half] = f16_to_f32(head + r * 2);
                if (f.scale == SCALE_F16 && f.has_min) block.min[half] = f16_to_f32(head + (PANEL + r) * 2);
                if (f.scale == SCALE_CODE) {
                    block.scale[half] = f16_to_f32(supers + r * 2) * (float)head[r];
                    block.min[half] = f16_to_f32(supers + (PANEL + r) * 2) * (float)head[PANEL + r];
                }
            }
            read_codes(f, panel + quant_head_bytes(f) + 4 * r, block.quads);
            block_values(&block, values);
            round_to(a->dtype, values);
            for (int j = 0; j < QBLOCK && b * QBLOCK + j < a->width; j++) out[j] = values[j] * a->scale;
        }
    }
}

/* QBLOCK values of a row as float32, zeros behind its end. */
static void read_values(const struct quant_source *s, const uint8_t *from, int64_t begin, float values[QBLOCK]) {
    int64_t num = s->k - begin < QBLOCK ? s->k - begin : QBLOCK;
    for (int64_t i = num; i < QBLOCK; i++) values[i] = 0;
    if (s->stored.kind == DT_F32) memcpy(values, from + begin * 4, (size_t)num * sizeof(float));
    if (s->stored.kind == DT_F16)
        for (int64_t i = 0; i < num; i++) values[i] = f16_to_f32(from + 2 * (begin + i));
    if (s->stored.kind == DT_BF16)
        for (int64_t i = 0; i < num; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[begin + i] << 16;
            memcpy(values + i, &bits, sizeof bits);
        }
}

/* The largest magnitude of a row, infinity or NaN if that is in it: as integers they are in the same order. */
static float row_peak(const struct quant_source *s, const uint8_t *row) {
    int32_t largest = 0, bits[QBLOCK];
    for (int64_t begin = 0; begin < s->k; begin += QBLOCK) {
        float values[QBLOCK];
        read_values(s, row, begin, values);
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < QBLOCK; i++) largest = (bits[i] & 0x7fffffff) > largest ? bits[i] & 0x7fffffff : largest;
    }
    float peak;
    memcpy(&peak, &largest, sizeof peak);
    return peak;
}

static void round_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct quant_source *s = context;
    const struct quant_format f = quant_format_of(WEIGHT_INT8);
    int64_t num_blocks = quant_num_blocks(s->k);
    for (int64_t row = begin; row < end; row++, rows += s->stored.row_bytes) {
        float peak = row_peak(s, rows), inverse = peak > 0 && isfinite(peak) ? 127 / peak : 0;
        int64_t to = target_row(s, row);
        uint8_t *codes = (uint8_t *)s->packed + (size_t)(to / PANEL * num_blocks) * quant_block_bytes(f);
        codes += to % PANEL * 4;
        s->scales[to] = peak / 127; /* if that is not finite, the row's results will not be either */
        for (int64_t b = 0; b < num_blocks && inverse > 0; b++) {
            float values[QBLOCK];
            uint8_t four[4];
            read_values(s, rows, b * QBLOCK, values);
            for (int i = 0; i < QBLOCK; i += 4, codes += PANEL * 4) {
                for (int j = 0; j < 4; j++) /* adding and taking away 1.5 * 2^23 rounds to an integer */
                    four[j] = (uint8_t)((int)((values[i + j] * inverse + 12582912.f) - 12582912.f) + f.zero);
                memcpy(codes, four, 4);
            }
        }
    }
}

int32_t quant_pack_int8(const void *args, int64_t begin, int64_t end) {
    const struct quant_source *s = args;
    return for_each_tile(&s->stored, begin, end, round_tile, s);
}
