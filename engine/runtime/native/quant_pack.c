/* Packing of quantised weights, once at load: rows of a GGUF file, or a float matrix, into the panels of
 * quant_format.h.
 *
 * Plain C for every machine. A GGUF block is first spelled out as codes with scales and minimums, the same way for all
 * of the file's types, and then written where the panel has it. */
#include <math.h>
#include <string.h>

#include "quant_format.h"

/* The file's numbers for its types. */
enum gguf_kind {
    GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8, GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14,
};

/* QBLOCK weights: scale[i / 16] * (code[i] - zero) - min[i / 16]. */
struct block {
    uint8_t codes[QBLOCK];
    float scale[2], min[2];
    int zero;
};

static float f16_to_f32(const uint8_t *p) {
    uint32_t half = (uint32_t)p[0] | (uint32_t)p[1] << 8, magnitude = half & 0x7fff, bits;
    float value, two_112 = 0x1p112f;
    bits = magnitude << 13;
    memcpy(&value, &bits, sizeof value);
    value *= two_112; /* rebiases the exponent; subnormals come out right as well */
    memcpy(&bits, &value, sizeof bits);
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    bits |= (half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t f32_to_f16(float value) {
    uint32_t bits, sign;
    memcpy(&bits, &value, sizeof bits);
    sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits >= 0x38800000) return (uint16_t)(sign | ((bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13));
    float shifted;
    memcpy(&shifted, &bits, sizeof shifted);
    shifted += 0.5f; /* the remaining mantissa is that of a subnormal, rounded */
    memcpy(&bits, &shifted, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000));
}

static void set_scales(struct block *to, float scale, float min, int zero) {
    to->scale[0] = to->scale[1] = scale;
    to->min[0] = to->min[1] = min;
    to->zero = zero;
}

/* Halves of 16 bytes: the first 16 codes are the low ones. */
static void read_nibbles(struct block *to, const uint8_t *p) {
    for (int i = 0; i < 16; i++) {
        to->codes[i] = p[i] & 15;
        to->codes[16 + i] = p[i] >> 4;
    }
}

/* The fifth bit of each of 32 codes. */
static void read_fifth_bits(struct block *to, const uint8_t *p) {
    for (int i = 0; i < QBLOCK; i++) to->codes[i] |= (uint8_t)((p[i / 8] >> (i % 8) & 1) << 4);
}

/* Scale and minimum, six bits each, of the 32 weights `part` of a superblock of 256. */
static void read_k_scales(struct block *to, const uint8_t *p, int part) {
    const uint8_t *packed = p + 4;
    int scale = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
    int min = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | packed[part] >> 6 << 4;
    set_scales(to, f16_to_f32(p) * (float)scale, f16_to_f32(p + 2) * (float)min, 0);
}

/* Low four bits: two parts of 32 share 32 bytes. */
static void read_k_nibbles(struct block *to, const uint8_t *p, int part) {
    for (int i = 0; i < QBLOCK; i++) to->codes[i] = p[part / 2 * 32 + i] >> (part % 2 * 4) & 15;
}

/* 210 bytes: 128 of low four bits, 64 of high two, 16 scales, and their scale; each half of 256 weights in turn. */
static void read_q6_k(struct block *to, const uint8_t *p, int part) {
    int half = part / 4, quarter = part % 4;
    const uint8_t *low = p + half * 64 + quarter % 2 * 32, *high = p + 128 + half * 32;
    for (int i = 0; i < QBLOCK; i++)
        to->codes[i] = (uint8_t)((low[i] >> (quarter / 2 * 4) & 15) | (high[i] >> (quarter * 2) & 3) << 4);
    set_scales(to, 0, 0, 32);
    for (int i = 0; i < 2; i++) to->scale[i] = f16_to_f32(p + 208) * (float)(int8_t)p[192 + part * 2 + i];
}

/* Weights 32 * b and on of a row of the file. */
static void read_block(int32_t kind, const uint8_t *row, int64_t b, struct block *to) {
    int part = (int)(b % 8);
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
        for (int i = 0; i < QBLOCK; i++) to->codes[i] = row[2 + i] ^ 0x80;
        set_scales(to, f16_to_f32(row), 0, 128);
        break;
    case GGUF_Q4_K:
        row += b / 8 * 144;
        read_k_nibbles(to, row + 16, part);
        read_k_scales(to, row, part);
        break;
    case GGUF_Q5_K:
        row += b / 8 * 176;
        read_k_nibbles(to, row + 48, part);
        for (int i = 0; i < QBLOCK; i++) to->codes[i] |= (uint8_t)((row[16 + i] >> part & 1) << 4);
        read_k_scales(to, row, part);
        break;
    default: read_q6_k(to, row + b / 8 * 210, part); break;
    }
}

/* Write a block where weight row `r` of a panel has it. */
static void write_block(struct quant_format f, const struct block *from, uint8_t *panel, int64_t b, int64_t r) {
    uint8_t *block = panel + (size_t)b * quant_block_bytes(f), *codes = block + quant_head_bytes(f) + 4 * r;
    int shift = f.bits == 8 ? f.zero - from->zero : 0, extra = from->zero + shift - f.zero;
    for (int g = 0; g < QBLOCK / f.group; g++) {
        uint16_t *head = (uint16_t *)block + g * (1 + f.has_min) * PANEL + r;
        int at = g * f.group / 16;
        head[0] = f32_to_f16(from->scale[at]);
        if (f.has_min) head[PANEL] = f32_to_f16(from->min[at] + from->scale[at] * (float)extra);
    }
    for (int i = 0; i < QBLOCK; i += 32 / f.bits) {
        uint8_t four[4];
        for (int j = 0; j < 4; j++) four[j] = (uint8_t)(from->codes[i + j] + shift);
        if (f.bits == 4)
            for (int j = 0; j < 4; j++) four[j] |= (uint8_t)(from->codes[i + 4 + j] << 4);
        memcpy(codes + (size_t)(i * f.bits / 32) * PANEL * 4, four, 4);
    }
}

void quant_pack_gguf(const struct quant_source *s, int64_t begin, int64_t end) {
    const struct quant_format f = quant_format_of(s->format);
    int64_t num_blocks = quant_num_blocks(s->k);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = packed_row(s->first_row + i, s->n, s->activation);
        uint8_t *panel = (uint8_t *)s->packed + (size_t)(row / PANEL * num_blocks) * quant_block_bytes(f);
        for (int64_t b = 0; b < num_blocks; b++) {
            struct block block;
            read_block(s->kind, (const uint8_t *)s->rows + i * s->row_bytes, b, &block);
            write_block(f, &block, panel, b, row % PANEL);
        }
    }
}

/* QBLOCK values of a row as float32, zeros behind its end. */
static void read_values(const struct quant_source *s, int64_t row, int64_t begin, float values[QBLOCK]) {
    const uint8_t *from = (const uint8_t *)s->rows + row * s->row_bytes;
    int64_t num = s->k - begin < QBLOCK ? s->k - begin : QBLOCK;
    for (int64_t i = num; i < QBLOCK; i++) values[i] = 0;
    if (s->kind == DT_F32) memcpy(values, from + begin * 4, (size_t)num * sizeof(float));
    if (s->kind == DT_F16)
        for (int64_t i = 0; i < num; i++) values[i] = f16_to_f32(from + 2 * (begin + i));
    if (s->kind == DT_BF16)
        for (int64_t i = 0; i < num; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[begin + i] << 16;
            memcpy(values + i, &bits, sizeof bits);
        }
}

/* The largest magnitude of a row, infinity or NaN if that is in it: as integers they are in the same order. */
static float row_peak(const struct quant_source *s, int64_t row) {
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

void quant_pack_int8(const struct quant_source *s, int64_t begin, int64_t end) {
    const struct quant_format f = quant_format_of(WEIGHT_INT8);
    int64_t num_blocks = quant_num_blocks(s->k);
    for (int64_t row = begin; row < end; row++) {
        float peak = row_peak(s, row), inverse = peak > 0 && isfinite(peak) ? 127 / peak : 0;
        int64_t to = packed_row(row, s->n, s->activation);
        uint8_t *codes = (uint8_t *)s->packed + (size_t)(to / PANEL * num_blocks) * quant_block_bytes(f);
        codes += to % PANEL * 4;
        s->scales[to] = peak / 127; /* if that is not finite, the row's results will not be either */
        for (int64_t b = 0; b < num_blocks && inverse > 0; b++) {
            float values[QBLOCK];
            uint8_t four[4];
            read_values(s, row, b * QBLOCK, values);
            for (int i = 0; i < QBLOCK; i += 4, codes += PANEL * 4) {
                for (int j = 0; j < 4; j++) /* adding and taking away 1.5 * 2^23 rounds to an integer */
                    four[j] = (uint8_t)((int)((values[i + j] * inverse + 12582912.f) - 12582912.f) + f.zero);
                memcpy(codes, four, 4);
            }
        }
    }
}
