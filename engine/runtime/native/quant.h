/* Products with quantised weights: integer dots over a group of inputs, then one multiplication by both scales.
 *
 * x is quantised row by row to bytes in [-127, 127], with a scale for every QBLOCK inputs: with one for the whole row,
 * int8 would cost a small model 4 % of perplexity. Codes are unsigned, as the machine's byte products want them; what
 * `zero` and `min` take away is the sum of x's bytes times a constant, known once x is packed. The integers are exact,
 * and float32 sums run over k in order, in one register, each product and its sum rounded together: a row of y is the same bits
 * however many rows there are, whichever thread takes them, on whichever machine that can multiply and add at once. Only
 * the portable kernels on x86 round between the two. Where there are tiles, formats with scales of groups take these (quant_tiles.h). */
#include "quant_dot.h"
#include "quant_format.h"
#include "tiles.h"

enum {
    QVECTORS = 2, /* vectors of a panel that registers hold sums of at once */
    QALONE = W == 8 ? 4 : 2, /* likewise of a single row, whose panels are read from memory: in order, in one pass */
    QNEAR = 6144, /* bytes ahead that a group alone fetches, or four times as many of codes in planes */
    QROWS = IS_DOT_IN_PLACE && W == 16 ? 6 : IS_DOT_IN_PLACE || W >= 8 ? 4 : 2, /* rows, times QVECTORS, that registers hold sums of */
};

/* One group of packed rows: bytes [k / 4][rows][4], then for each block a scale [rows], and for each group of inputs
 * -zero times the sum of the bytes, int32 [rows], and that sum times the scale, float32 [rows]. All are of four bytes,
 * so that rows that were packed alone can be laid side by side (moe.c). */
struct quant_group {
    uint32_t *bytes;
    float *scales;
    int32_t *starts;
    float *sums;
};

INLINE size_t quant_row_bytes(int32_t format, int64_t k) {
    size_t blocks = (size_t)quant_num_blocks(k), groups = QBLOCK / (size_t)quant_format_of(format).group;
    return blocks * (QBLOCK + (1 + 2 * groups) * sizeof(float));
}

INLINE struct quant_group quant_group_at(int32_t format, int64_t k, void *rows, int64_t first, int64_t num) {
    size_t num_scales = (size_t)(quant_num_blocks(k) * num), groups = QBLOCK / (size_t)quant_format_of(format).group;
    char *base = (char *)rows + (size_t)first * quant_row_bytes(format, k);
    float *scales = (float *)(base + num_scales * QBLOCK), *starts = scales + num_scales;
    return (struct quant_group){(uint32_t *)base, scales, (int32_t *)starts, starts + num_scales * groups};
}

INLINE int32_t sum_of(vi v) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    UNROLL for (int i = 0; i < W; i++) sum += v[i];
    return sum;
#endif
}

/* The block of a row of k values that begins at `begin`; zeros behind the row. */
INLINE void load_block(struct view x, int64_t begin, int64_t k, vf values[QBLOCK / W]) {
    UNROLL for (int i = 0; i < QBLOCK / W; i++) {
        int64_t at = begin + i * W;
        values[i] = begin + QBLOCK <= k ? get(x, at, at + W) : at < k ? get(x, at, k) : splat(0);
    }
}

/* The integers nearest to products, from the mantissa. */
INLINE vi nearest(vf x, vf factor) { return (vi)(x * factor + 12582912.f) - 0x4b400000; }

/* The largest magnitude of a block, infinity or NaN if one of its values is, so that y will not be finite. */
INLINE float peak_of(const vf values[QBLOCK / W]) {
    vf most = splat(0);
    UNROLL for (int i = 0; i < QBLOCK / W; i++) most = larger(magnitude_of(values[i]), most);
    return largest_of(most);
}

static void quant_pack_row(struct quant_format f, struct view x, int64_t k, struct quant_group to, size_t r, size_t num) {
    size_t group_of_row = r;
    for (int64_t begin = 0; begin < k; begin += QBLOCK) {
        vf values[QBLOCK / W];
        load_block(x, begin, k, values);
        float peak = peak_of(values), scale = peak / 127;
        vf inverse = splat(peak > 0 ? 127 / peak : 0);
        vi sums[2] = {{0}}; /* of each half */
        int8_t bytes[QBLOCK];
        UNROLL for (int i = 0; i < QBLOCK / W; i++) {
            vi rounded = nearest(values[i], inverse);
            vb narrow = __builtin_convertvector(rounded, vb);
            memcpy(bytes + i * W, &narrow, sizeof narrow);
            sums[i * W / 16] += rounded;
        }
        UNROLL for (size_t i = 0; i < QBLOCK / 4; i++, to.bytes += num) memcpy(to.bytes + r, bytes + 4 * i, 4);
        to.scales[r] = scale;
        to.scales += num;
        for (int g = 0; g < QBLOCK / f.group; g++, group_of_row += num) {
            int32_t sum = sum_of(f.group == QBLOCK ? sums[0] + sums[1] : sums[g]);
            to.starts[group_of_row] = -f.zero * sum;
            to.sums[group_of_row] = (float)sum * scale;
        }
    }
}

static void quant_pack_rows(const struct gemm_args *a, const void *x, int64_t stride, struct quant_group to, int64_t num) {
    const struct quant_format f = quant_format_of(a->w.format);
    size_t bytes = (size_t)num * quant_row_bytes(a->w.format, a->w.k);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((char *)to.bytes + at, 1); /* other threads have read them */
    for (int64_t r = 0; r < num; r++) {
        struct view row = {(void *)x, (size_t)(r * stride), (enum dtype)a->w.dtype};
        quant_pack_row(f, row, a->w.k, to, (size_t)r, (size_t)num);
    }
}

/* The quad of codes `quad` of a block, for vector `v` of a panel; `codes` is where the block's codes begin. */
INLINE vu load_quad(struct quant_format f, const char *codes, int quad, int v) {
    if (f.bits == 8) return load_u(codes + (size_t)(quad * PANEL + v * W) * 4);
    vu code = splat_u(0);
    int shift = 0, first = 0; /* of the plane: in the code, in the block */
    UNROLL for (int plane = 4; plane > 0; plane /= 2) {
        if (!(f.bits & plane)) continue;
        int quads = 8 / plane, left = shift - quad % quads * plane;
        vu bits = load_u(codes + (size_t)((first + quad / quads) * PANEL + v * W) * 4);
        bits = left < 0 ? bits >> -left : bits << left;
        code |= bits & (0x01010101u * (uint32_t)(((1 << plane) - 1) << shift));
        shift += plane, first += plane;
    }
    return code;
}

/* Scales and minimums of SUPER blocks, for vectors of a panel. */
struct supers {
    vf scale[QALONE], min[QALONE];
};

/* The scales of a group of inputs, for vector `v` of a panel; `head` is where the group has them. */
INLINE vf quant_scale(struct quant_format f, const char *head, int v, vf super) {
    head += v * W * quant_scale_bytes(f);
    if (f.scale == SCALE_F16) return load_f16(head);
    if (f.scale == SCALE_E8M0) return load_e8m0(head);
    return f.scale == SCALE_CODE ? load_u8(head) * super : splat(1);
}

/* The codes of a quad, as they are multiplied. */
INLINE vu load_factors(struct quant_format f, const char *codes, int quad, int v, vu table) {
    vu code = load_quad(f, codes, quad, v);
    return f.has_table ? look_up(table, code) : code;
}

/* How many vectors of a panel R rows are multiplied with at once. */
INLINE int vectors_of(int R) { return R == 1 ? QALONE : QVECTORS; }

/* One group of inputs: some vectors of a panel against R rows, summed into acc. */
INLINE void quant_dot_group(struct quant_format f, int R, const char *block, int g, int v0, vu table,
                            const struct supers *supers, struct quant_group x, vf acc[QROWS][QALONE]) {
    const char *codes = block + quant_head_bytes(f);
    const int bits = f.has_table ? 8 : f.bits;             /* of what is multiplied */
    const int num = vectors_of(R), num_paired = QUADS == 2 ? R / 2 * 2 : 0; /* rows that are multiplied in pairs */
    struct dot dot[QROWS][QALONE];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < num; v++)
            dot[r][v] = dot_begin(splat_u(f.zero ? (uint32_t)x.starts[r] : 0), bits);
    UNROLL for (int r = 0; r < num_paired; r += 2)
        UNROLL for (int v = 0; v < num; v++) pair_begin(&dot[r][v], &dot[r + 1][v]);
    UNROLL for (int i = 0; i < f.group / 4; i += QUADS)
        UNROLL for (int v = 0; v < num; v++) {
            vu code[QUADS];
            UNROLL for (int j = 0; j < QUADS; j++) code[j] = load_factors(f, codes, g * f.group / 4 + i + j, v0 + v, table);
            UNROLL for (int r = 0; r < num_paired; r += 2)
                pair_add(&dot[r][v], &dot[r + 1][v], code, x.bytes + i * R + r, R, bits);
            UNROLL for (int j = 0; j < QUADS; j++)
                UNROLL for (int r = num_paired; r < R; r++)
                    dot[r][v] = dot_add(dot[r][v], code[j], x.bytes[(i + j) * R + r], bits, i + j);
        }
    UNROLL for (int r = 0; r < num_paired; r += 2)
        UNROLL for (int v = 0; v < num; v++) pair_end(&dot[r][v], &dot[r + 1][v]);
    UNROLL for (int v = 0; v < num; v++) {
        const char *head = block + (size_t)(g * quant_scale_bytes(f) * (1 + f.has_min) * PANEL);
        vf scale = quant_scale(f, head, v0 + v, supers->scale[v]);
        vf min = f.has_min ? quant_scale(f, head + quant_scale_bytes(f) * PANEL, v0 + v, supers->min[v]) : splat(0);
        UNROLL for (int r = 0; r < R; r++) {
            vf sum = __builtin_convertvector((vi)dot_end(dot[r][v]), vf);
            acc[r][v] += sum * (f.scale == SCALE_OF_ROW ? splat(x.scales[r]) : scale * x.scales[r]);
            if (f.has_min) acc[r][v] -= min * x.sums[r];
        }
    }
}

/* Blocks of a panel, from a multiple of SUPER on. */
struct part {
    int64_t first, num;
};

/* Some vectors of a part of a panel, from vector `v0` on, against R rows: out[R][PANEL], which has the sums of the parts before.
 * Meanwhile memory is fetched beside each block. */
INLINE void quant_dot(int32_t format, int R, const struct linear *w, const char *panel, int64_t first_row, int v0,
                      struct quant_group x, struct part part, float *out, struct ahead ahead) {
    const struct quant_format f = quant_format_of(format);
    const int num = vectors_of(R);
    const vu table = f.has_table ? load_table(quant_table_of(w->format)) : splat_u(0);
    vf acc[QROWS][QALONE];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < num; v++) acc[r][v] = part.first ? load_f(out + r * PANEL + (v0 + v) * W) : splat(0);
    const int64_t groups = part.first * (QBLOCK / f.group), end = part.first + part.num;
    x.bytes += part.first * (QBLOCK / 4) * R, x.scales += part.first * R, x.starts += groups * R, x.sums += groups * R;
    panel += (size_t)part.first * quant_block_bytes(f) + (size_t)(part.first / SUPER * quant_super_bytes(f));
    struct supers supers = {0};
    for (int64_t b = part.first; b < end; b++, panel += quant_block_bytes(f)) {
        if (f.scale == SCALE_CODE && b % SUPER == 0) {
            UNROLL for (int v = 0; v < num; v++) {
                supers.scale[v] = load_f16(panel + (v0 + v) * W * 2) * f.unit;
                if (f.has_min) supers.min[v] = load_f16(panel + (PANEL + (v0 + v) * W) * 2) * f.unit;
            }
            panel += quant_super_bytes(f);
        }
        fetch_ahead(&ahead, R == 1 && !fetches_by_page());
        UNROLL for (int g = 0; g < QBLOCK / f.group; g++) {
            quant_dot_group(f, R, panel, g, v0, table, &supers, x, acc);
            x.bytes += f.group / 4 * R;
            x.starts += R, x.sums += R;
        }
        x.scales += R;
    }
    UNROLL for (int v = 0; v < num; v++) {
        int is_of_row = f.scale == SCALE_OF_ROW && end == quant_num_blocks(w->k);
        vf scale = is_of_row ? load_f((const float *)w->scales + first_row + (v0 + v) * W) : splat(1);
        UNROLL for (int r = 0; r < R; r++)
            store_f(out + r * PANEL + (v0 + v) * W, is_of_row ? acc[r][v] * scale : acc[r][v]);
    }
}

#define QUANT_CASE(F, R)                                                                   \
    case R:                                                                                \
        if (R > QROWS) break;                                                              \
        for (int v = 0; v < PANEL / W; v += vectors_of(R), ahead.num = 0)                  \
            quant_dot(F, R, w, panel, first_row, v, x, part, out, ahead);                  \
        break;
#define DEFINE_QUANT_DOT(F)                                                                                       \
    static void quant_dot_##F(const struct linear *w, const char *panel, int64_t first_row, struct quant_group x, \
                              int64_t num, struct part part, float *out, struct ahead ahead) {                    \
        switch (num) {                                                                                            \
            QUANT_CASE(F, 1) QUANT_CASE(F, 2) QUANT_CASE(F, 3) QUANT_CASE(F, 4) QUANT_CASE(F, 5) QUANT_CASE(F, 6) \
        }                                                                                                         \
    }

/* The formats with scales of groups that have kernels. The others have the layout of one of these, and a table of their own. */
#define EACH_GROUPED(do)                                                                                         \
    do(WEIGHT_Q4) do(WEIGHT_Q4_MIN) do(WEIGHT_Q8) do(WEIGHT_Q8_HALF) do(WEIGHT_Q8_HALF_MIN)                      \
    do(WEIGHT_Q2_HALF_MIN) do(WEIGHT_Q3_HALF) do(WEIGHT_Q5) do(WEIGHT_Q5_MIN) do(WEIGHT_Q6_HALF)                 \
    do(WEIGHT_Q6_HALF_MIN) do(WEIGHT_IQ4) do(WEIGHT_MXFP4) do(WEIGHT_NVFP4) do(WEIGHT_IQ2) do(WEIGHT_Q1)         \
    do(WEIGHT_IQ1_S) do(WEIGHT_Q2) do(WEIGHT_Q4_SUPER) do(WEIGHT_Q5_SUPER)

#ifdef TILES /* which multiply what these are unpacked to (quant_tiles.h) */
#define EACH_KERNEL(do) do(WEIGHT_INT8)
#else
#define EACH_KERNEL(do) do(WEIGHT_INT8) EACH_GROUPED(do)
#endif

INLINE int32_t kernel_of(int32_t format) {
    if (format == WEIGHT_IQ3_XXS || format == WEIGHT_IQ3_S) return WEIGHT_IQ4;
    return format == WEIGHT_IQ1_M ? WEIGHT_IQ2 : format;
}

EACH_KERNEL(DEFINE_QUANT_DOT)

typedef void quant_dot_rows(const struct linear *, const char *, int64_t, struct quant_group, int64_t, struct part,
                            float *, struct ahead);

/* Blocks of a part of a panel that stays in the first cache while `num_groups` groups of rows pass; parts are of about one size. One
 * group reads a panel once, and many are bound by their products. */
static int64_t quant_part_blocks(const struct linear *w, int64_t num_groups) {
    enum { PART_BYTES = 32 << 10, MANY_GROUPS = 8 };
    int64_t num_blocks = quant_num_blocks(w->k);
    if (num_groups == 1 || num_groups > MANY_GROUPS || !fetches_by_page()) return num_blocks;
    int64_t num_parts = (int64_t)quant_panel_bytes(quant_format_of(w->format), w->k) / PART_BYTES + 1;
    return ((num_blocks - 1) / num_parts / SUPER + 1) * SUPER;
}

/* out[num][PANEL] += one group of packed rows . a part of a panel. If it is the group `turn` of several, `turns`, it fetches its
 * share of what comes next meanwhile: only the first of them would wait for memory, with nothing else to do. A group alone
 * fetches just ahead of where it is. For a single row this is slower on some machines than what they fetch by themselves, which
 * wants lines in order: codes in several planes are not read so, and a block of them is fetched as it begins. */
static void quant_panel(const struct linear *w, void *rows, int64_t first, int64_t num, int64_t p, struct part part, float *out,
                        int64_t turn, int64_t turns) {
#define ENTRY(F) [F] = quant_dot_##F,
    static quant_dot_rows *const dots[] = {EACH_KERNEL(ENTRY)};
#undef ENTRY
    const struct quant_format f = quant_format_of(w->format);
    int64_t num_blocks = quant_num_blocks(w->k);
    size_t panel_bytes = quant_panel_bytes(f, w->k), block_lines = (panel_bytes / (size_t)num_blocks + 63) / 64;
    const char *panel = (const char *)w->packed + (size_t)p * panel_bytes;
    size_t lines = (block_lines - 1) / (size_t)turns + 1, before = (size_t)(turn * part.num) * lines;
    const char *next = panel + (size_t)(part.first + part.num) * panel_bytes / (size_t)num_blocks; /* part or panel */
    int bits = f.bits, has_planes = bits & (bits - 1);
    struct ahead ahead = next_part(next, (size_t)part.num * block_lines * 64, lines, before);
    if (turns == 1) ahead = lines_from(panel + (has_planes ? 4 : 1) * QNEAR, panel_bytes, lines);
    if (num == 1 && !fetches_by_page()) ahead = lines_from(panel, panel_bytes, has_planes ? lines : 0);
    dots[kernel_of(w->format)](w, panel, p * PANEL, quant_group_at(w->format, w->k, rows, first, num), num, part, out, ahead);
}
