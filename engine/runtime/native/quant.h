/* Products with quantised weights: integer dots over a group of inputs, then one multiplication by both scales.
 *
 * x is quantised row by row to bytes in [-127, 127], a scale for every QBLOCK inputs (WEIGHT_INT8: for the row). Codes
 * are unsigned, as the machine's byte products want them; what `zero` and `min` take away is the sum of x's bytes times
 * a constant, known once x is packed. The integers are exact, and float32 sums run over k in order, in one register: a
 * row of y is the same bits however many rows there are, whichever thread takes them. */
#include "quant_dot.h"
#include "quant_format.h"

typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));

enum {
    QVECTORS = 2, /* vectors of a panel that registers hold sums of at once */
    QROWS = W < 16 ? 2 : IS_DOT_IN_PLACE ? 6 : 4,
    INT8_ROWS = W < 16 ? 2 : IS_DOT_IN_PLACE ? 12 : 4,
};

INLINE int64_t quant_rows(int32_t format) { return format == WEIGHT_INT8 ? INT8_ROWS : QROWS; }

/* One group of packed rows: bytes [k / 4][rows][4], then for each block a scale [rows], and for each group of inputs
 * -zero times the sum of the bytes, int32 [rows], and that sum times the scale, float32 [rows]. */
struct quant_group {
    uint32_t *bytes;
    float *scales;
    int32_t *starts;
    float *sums;
};

INLINE size_t quant_row_bytes(int32_t format, int64_t k) {
    size_t blocks = (size_t)quant_num_blocks(k), groups = quant_num_groups(quant_format_of(format));
    return blocks * QBLOCK + (format == WEIGHT_INT8 ? 3 : blocks * (1 + 2 * groups)) * sizeof(float);
}

INLINE struct quant_group quant_group_at(int32_t format, int64_t k, void *rows, int64_t first, int64_t num) {
    size_t blocks = (size_t)quant_num_blocks(k), groups = quant_num_groups(quant_format_of(format));
    size_t num_scales = (size_t)num * (format == WEIGHT_INT8 ? 1 : blocks);
    size_t num_sums = (size_t)num * (format == WEIGHT_INT8 ? 1 : blocks * groups);
    char *base = (char *)rows + (size_t)first * quant_row_bytes(format, k);
    float *scales = (float *)(base + blocks * QBLOCK * (size_t)num), *starts = scales + num_scales;
    return (struct quant_group){(uint32_t *)base, scales, (int32_t *)starts, starts + num_sums};
}

INLINE int32_t largest_of(vi v) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t largest = v[0];
    UNROLL for (int i = 1; i < W; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
#endif
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

/* The largest magnitude of values [begin, end), infinity or NaN if one of them is, so that y will not be finite. As
 * integers, magnitudes are in the same order, and NaN is above all. */
INLINE float peak_of(struct view x, int64_t begin, int64_t end) {
    vi peak = {0};
    for (int64_t i = begin; i < end; i += W) {
        vi magnitude = (vi)get(x, i, end) & 0x7fffffff;
        peak = (vi)select_u(magnitude > peak, (vu)magnitude, (vu)peak);
    }
    int32_t bits = largest_of(peak);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round x * inverse for the inputs of one block to bytes; sums[2] of each half. */
INLINE void quantise_block(struct view x, int64_t begin, int64_t end, float inverse, int8_t bytes[QBLOCK],
                           int32_t sums[2]) {
    UNROLL for (int half = 0; half < 2; half++) {
        vi sum = {0};
        UNROLL for (int i = half * 16; i < half * 16 + 16; i += W) {
            vf value = begin + i < end ? get(x, begin + i, end) : splat(0);
            vi rounded = (vi)(value * inverse + 12582912.f) - 0x4b400000; /* the nearest integer, from the mantissa */
            vb narrow = __builtin_convertvector(rounded, vb);
            memcpy(bytes + i, &narrow, sizeof narrow);
            sum += rounded;
        }
        sums[half] = sum_of(sum);
    }
}

/* One row for weights with scales of their own for every few inputs. */
INLINE void quant_pack_row(const struct quant_format f, struct view x, int64_t k, struct quant_group to, size_t r,
                           size_t num) {
    size_t group_of_row = r;
    for (int64_t begin = 0; begin < k; begin += QBLOCK) {
        int64_t end = begin + QBLOCK < k ? begin + QBLOCK : k;
        float peak = peak_of(x, begin, end), scale = peak / 127;
        int8_t bytes[QBLOCK];
        int32_t sums[2];
        quantise_block(x, begin, end, peak > 0 ? 127 / peak : 0, bytes, sums);
        UNROLL for (size_t i = 0; i < QBLOCK / 4; i++, to.bytes += num) memcpy(to.bytes + r, bytes + 4 * i, 4);
        to.scales[r] = scale;
        to.scales += num;
        for (int g = 0; g < QBLOCK / f.group; g++, group_of_row += num) {
            int32_t sum = f.group == QBLOCK ? sums[0] + sums[1] : sums[g];
            to.starts[group_of_row] = -f.zero * sum;
            to.sums[group_of_row] = (float)sum * scale;
        }
    }
}

/* One row for WEIGHT_INT8. */
INLINE void quant_pack_whole_row(const struct quant_format f, struct view x, int64_t k, struct quant_group to, size_t r,
                                 size_t num) {
    float peak = peak_of(x, 0, k), inverse = peak > 0 ? 127 / peak : 0;
    int32_t sum = 0;
    for (int64_t begin = 0; begin < k; begin += QBLOCK) {
        int8_t bytes[QBLOCK];
        int32_t sums[2];
        quantise_block(x, begin, k, inverse, bytes, sums);
        UNROLL for (size_t i = 0; i < QBLOCK / 4; i++, to.bytes += num) memcpy(to.bytes + r, bytes + 4 * i, 4);
        sum += sums[0] + sums[1];
    }
    to.scales[r] = peak / 127;
    to.starts[r] = -f.zero * sum;
}

static void quant_pack_rows(const struct gemm_args *a, void *rows, int64_t first, int64_t num) {
    struct quant_group to = quant_group_at(a->w.format, a->w.k, rows, first, num);
    const struct quant_format f = quant_format_of(a->w.format);
    for (int64_t r = 0; r < num; r++) {
        struct view x = {(void *)a->x, (size_t)((first + r) * a->x_stride), (enum dtype)a->w.dtype};
        if (a->w.format == WEIGHT_INT8)
            quant_pack_whole_row(f, x, a->w.k, to, (size_t)r, (size_t)num);
        else
            quant_pack_row(f, x, a->w.k, to, (size_t)r, (size_t)num);
    }
}

/* QVECTORS vectors of a panel, from vector `v0` on, against R rows: out[R][PANEL]. */
INLINE void quant_dot(int32_t format, int R, const struct linear *w, const char *panel, int64_t first_row, int v0,
                      struct quant_group x, float *out) {
    const struct quant_format f = quant_format_of(format);
    const int is_whole = format == WEIGHT_INT8, group = is_whole ? QBLOCK : f.group;
    const int num_loads = group * f.bits / 32;
    vf acc[INT8_ROWS][QVECTORS];
    vu ints[INT8_ROWS][QVECTORS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < QVECTORS; v++) {
            acc[r][v] = splat(0);
            ints[r][v] = splat_u(is_whole ? (uint32_t)x.starts[r] : 0);
        }
    for (int64_t b = 0; b < quant_num_blocks(w->k); b++, panel += quant_block_bytes(f)) {
        UNROLL for (int g = 0; g < QBLOCK / group; g++) {
            const char *codes = panel + quant_head_bytes(f) + (size_t)(g * group * PANEL * f.bits / 8);
            struct dot dot[INT8_ROWS][QVECTORS];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < QVECTORS; v++)
                    dot[r][v] = dot_begin(is_whole ? ints[r][v] : splat_u((uint32_t)x.starts[r]));
            UNROLL for (int i = 0; i < num_loads; i++)
                UNROLL for (int v = 0; v < QVECTORS; v++) {
                    vu code = load_u(codes + (size_t)(i * PANEL + (v0 + v) * W) * 4);
                    UNROLL for (int r = 0; r < R; r++)
                        if (f.bits == 8) {
                            dot[r][v] = dot_add8(dot[r][v], code, x.bytes[i * R + r]);
                        } else {
                            dot[r][v] = dot_add4(dot[r][v], code & 0x0f0f0f0f, x.bytes[2 * i * R + r]);
                            dot[r][v] = dot_add4(dot[r][v], (code >> 4) & 0x0f0f0f0f, x.bytes[(2 * i + 1) * R + r]);
                        }
                }
            x.bytes += group / 4 * R;
            UNROLL for (int v = 0; v < QVECTORS; v++) {
                const char *head = panel + (size_t)(g * (1 + f.has_min) * PANEL + (v0 + v) * W) * sizeof(uint16_t);
                vf scale = is_whole ? splat(0) : load_f16(head);
                vf min = f.has_min ? load_f16(head + PANEL * sizeof(uint16_t)) : splat(0);
                UNROLL for (int r = 0; r < R; r++) {
                    ints[r][v] = dot_end(dot[r][v]);
                    if (!is_whole) acc[r][v] += __builtin_convertvector((vi)ints[r][v], vf) * (scale * x.scales[r]);
                    if (f.has_min) acc[r][v] -= min * x.sums[r];
                }
            }
            if (!is_whole) x.starts += R, x.sums += R;
        }
        if (!is_whole) x.scales += R;
    }
    UNROLL for (int v = 0; v < QVECTORS; v++) {
        vf scale = is_whole ? load_f((const float *)w->scales + first_row + (v0 + v) * W) : splat(0);
        UNROLL for (int r = 0; r < R; r++) {
            if (is_whole) acc[r][v] = __builtin_convertvector((vi)ints[r][v], vf) * (scale * x.scales[r]);
            store_f(out + r * PANEL + (v0 + v) * W, acc[r][v]);
        }
    }
}

#define EACH_QROWS(do, F) do(F, 1) do(F, 2) do(F, 3) do(F, 4) do(F, 5) do(F, 6)
#define EACH_INT8_ROWS(do, F) EACH_QROWS(do, F) do(F, 7) do(F, 8) do(F, 9) do(F, 10) do(F, 11) do(F, 12)
#define QUANT_CASE(F, R)                                                                                \
    case R:                                                                                             \
        if (R > (F == WEIGHT_INT8 ? INT8_ROWS : QROWS)) break;                                          \
        for (int v = 0; v < PANEL / W; v += QVECTORS) quant_dot(F, R, w, panel, first_row, v, x, out);  \
        break;
#define DEFINE_QUANT_DOT(name, F, EACH)                                                                 \
    static void name(const struct linear *w, const char *panel, int64_t first_row, struct quant_group x, \
                     int64_t num, float *out) {                                                         \
        switch (num) { EACH(QUANT_CASE, F) }                                                            \
    }

DEFINE_QUANT_DOT(quant_dot_int8, WEIGHT_INT8, EACH_INT8_ROWS)
DEFINE_QUANT_DOT(quant_dot_q4, WEIGHT_Q4, EACH_QROWS)
DEFINE_QUANT_DOT(quant_dot_q4_min, WEIGHT_Q4_MIN, EACH_QROWS)
DEFINE_QUANT_DOT(quant_dot_q8, WEIGHT_Q8, EACH_QROWS)
DEFINE_QUANT_DOT(quant_dot_q8_half, WEIGHT_Q8_HALF, EACH_QROWS)
DEFINE_QUANT_DOT(quant_dot_q8_half_min, WEIGHT_Q8_HALF_MIN, EACH_QROWS)

/* out[num][PANEL] = one group of packed rows . one panel. */
static void quant_panel(const struct linear *w, void *rows, int64_t first, int64_t num, int64_t p, float *out) {
    static void (*const dots[])(const struct linear *, const char *, int64_t, struct quant_group, int64_t, float *) = {
        [WEIGHT_INT8] = quant_dot_int8,       [WEIGHT_Q4] = quant_dot_q4,
        [WEIGHT_Q4_MIN] = quant_dot_q4_min,   [WEIGHT_Q8] = quant_dot_q8,
        [WEIGHT_Q8_HALF] = quant_dot_q8_half, [WEIGHT_Q8_HALF_MIN] = quant_dot_q8_half_min,
    };
    size_t panel_bytes = (size_t)quant_num_blocks(w->k) * quant_block_bytes(quant_format_of(w->format));
    const char *panel = (const char *)w->packed + (size_t)p * panel_bytes;
    dots[w->format](w, panel, p * PANEL, quant_group_at(w->format, w->k, rows, first, num), num, out);
}
