/* Packing of quantised weights, once at load: rows of a GGUF file, or a float matrix, into the panels of
 * quant_format.h; and dequantising of such rows.
 *
 * Plain C for every machine. A GGUF block is first spelled out (quant_blocks.h), and then written where the panel has
 * it. */
#include <math.h>
#include <string.h>

#include "quant_blocks.h"

enum { STRIP = SUPER }; /* blocks of a row that are packed in turn: what several rows write then stays in the cache */

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
        int at = g * f.group / 16;
        uint8_t *head = block + g * quant_scale_bytes(f) * (1 + f.has_min) * PANEL;
        if (f.scale == SCALE_E8M0) head[r] = from->exponent;
        if (f.scale == SCALE_F16) memcpy(head + r * 2, heads->halves + b * num + g, 2);
        if (f.scale == SCALE_F16 && f.has_min) memcpy(head + (PANEL + r) * 2, heads->halves + (STRIP + b) * num + g, 2);
        if (f.scale == SCALE_CODE) head[r] = from->scale_code[at];
        if (f.scale == SCALE_CODE && f.has_min) head[PANEL + r] = from->min_code;
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
    for (int i = 0; i <= f.has_min && f.scale == SCALE_CODE; i++)
        memcpy(super + (i * PANEL + r) * 2, from->supers + i, 2);
}

/* Write the codes of a block where weight row `r` of a panel has them. */
CONSTANT void write_codes(struct quant_format f, const struct block *from, uint8_t *block, int64_t r) {
    uint8_t *to = block + quant_head_bytes(f) + 4 * r;
    int shift = code_shift(f, from);
    uint32_t quads[QBLOCK / 4];
    if (from->table && f.bits == 8) {
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
    void (*narrow)(const float *, uint16_t *, int64_t) = narrow_halves;
    for (int64_t strip = 0; strip < num_blocks; strip += STRIP) {
        int64_t after = strip + STRIP < num_blocks ? strip + STRIP : num_blocks;
        for (int64_t i = begin; i < end; i++) {
            struct block blocks[STRIP];
            struct heads heads = {0};
            int64_t to = target_row(s, i);
            uint8_t *out = (uint8_t *)s->packed + (size_t)(to / PANEL) * panel_bytes + (size_t)strip * block_bytes;
            out += strip / SUPER * quant_super_bytes(f);
            for (int64_t b = 0; b < after - strip; b++) {
                read_block(kind, &s->stored, rows + (i - begin) * s->stored.row_bytes, strip + b, blocks + b);
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
    PACK_CASE(GGUF_NVFP4, WEIGHT_NVFP4)
    PACK_CASE(GGUF_IQ2_XXS, WEIGHT_IQ2)
    PACK_CASE(GGUF_IQ2_XS, WEIGHT_IQ2)
    PACK_CASE(GGUF_IQ2_S, WEIGHT_IQ2)
    PACK_CASE(GGUF_IQ1_S, WEIGHT_IQ1_S)
    PACK_CASE(GGUF_IQ1_M, WEIGHT_IQ1_M)
    PACK_CASE(GGUF_TQ1_0, WEIGHT_Q2)
    PACK_CASE(GGUF_TQ2_0, WEIGHT_Q2)
    PACK_CASE(GGUF_Q1_0, WEIGHT_Q1)
    PACK_CASE(GGUF_Q2_0, WEIGHT_Q2)
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

static void dequantise_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct dequant_args *a = context;
    const size_t size = size_of(a->dtype);
    for (int64_t row = begin; row < end; row++, rows += a->stored.row_bytes) {
        char *out = (char *)a->out + (size_t)(row * a->k) * size;
        for (int64_t b = 0; b < a->k / QBLOCK; b++, out += QBLOCK * size) {
            struct block block;
            float values[QBLOCK];
            uint16_t narrow[QBLOCK];
            read_block(a->stored.kind, &a->stored, rows, b, &block);
            block_values(&block, values);
            if (a->dtype == DT_BF16) narrow_bf16(values, narrow, QBLOCK);
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
    if (dtype == DT_BF16) narrow_bf16(values, half, QBLOCK);
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
                    block.scale[half] = f16_to_f32(supers + r * 2) * f.unit * (float)head[r];
                    if (f.has_min) block.min[half] = f16_to_f32(supers + (PANEL + r) * 2) * f.unit * (float)head[PANEL + r];
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
    read_floats(s->stored.kind, from, begin, num, values);
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

/* Rows of Q8_0 whose blocks all have the scale of the first. */
static void copy_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct quant_source *s = context;
    const struct quant_format f = quant_format_of(WEIGHT_INT8);
    int64_t num_blocks = quant_num_blocks(s->k);
    for (int64_t row = begin; row < end; row++, rows += s->stored.row_bytes) {
        int64_t to = target_row(s, row);
        uint8_t *codes = (uint8_t *)s->packed + (size_t)(to / PANEL * num_blocks) * quant_block_bytes(f) + to % PANEL * 4;
        for (int64_t b = 0; b < num_blocks; b++) {
            struct block block;
            read_block(GGUF_Q8_0, &s->stored, rows, b, &block);
            if (b == 0) s->scales[to] = block.scale[0];
            for (int i = 0; i < QBLOCK / 4; i++, codes += PANEL * 4) memcpy(codes, &block.quads[i], 4);
        }
    }
}

int32_t quant_pack_int8(const void *args, int64_t begin, int64_t end) {
    const struct quant_source *s = args;
    return for_each_tile(&s->stored, begin, end, s->stored.kind == GGUF_Q8_0 ? copy_tile : round_tile, s);
}
