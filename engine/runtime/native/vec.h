/* Vectors of the instruction set being compiled, in GCC/Clang vector extensions: W float32 lanes, NV vectors a tile.
 * isa_*.c defines VECTOR_BYTES (and BF16_DOT where the machine multiplies pairs of bfloat16) before including this. */
#ifndef QUIRE_VEC_H
#define QUIRE_VEC_H

#include <math.h>
#include <string.h>

#include "quire_cpu.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { W = VECTOR_BYTES / 4, NV = TILE / W };

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));

/* How lanes are multiplied. The last needs BF16_DOT: both factors are pairs of bfloat16. */
enum kind { KIND_F32, KIND_BF16, KIND_F16, KIND_BF16_DOT };

INLINE size_t pair_of(enum kind kind) { return kind == KIND_F32 ? 1 : 2; }

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vu splat_u(uint32_t x) { return x - (vu){0}; }
INLINE vu load_u(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf load_f(const void *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f(void *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu select_u(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }
INLINE vf select_f(vi mask, vf yes, vf no) { return (vf)select_u(mask, (vu)yes, (vu)no); }
INLINE vf max_f(vf a, vf b) { return select_f(a > b, a, b); }

INLINE float sum_f(vf v) {
    float total = 0;
    UNROLL for (int i = 0; i < W; i++) total += v[i];
    return total;
}

INLINE float peak_f(vf v) {
    float best = v[0];
    UNROLL for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
    return best;
}

/* float16 bits in the low half of each lane -> float32. */
INLINE vf widen_f16(vu h) {
    vu magnitude = (h & 0x7fff) << 13;
    vu scaled = (vu)((vf)magnitude * splat(0x1p112f)); /* exponents rebiased; subnormals come out right as well */
    vu special = (vu)(magnitude >= splat_u(0x0f800000)) & 0x7f800000;
    return (vf)(scaled | special | ((h & 0x8000) << 16));
}

INLINE vu narrow_bf16(vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return select_u((vi)(x != x), (bits >> 16) | 0x40, rounded);
}

INLINE vu narrow_f16(vf x) {
    vu bits = (vu)x, magnitude = bits & 0x7fffffff;
    vu normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    vu subnormal = (vu)((vf)magnitude + splat(0.5f)) - 0x3f000000;
    vu huge = select_u((vi)(magnitude > splat_u(0x7f800000)), splat_u(0x7e00), splat_u(0x7c00));
    vu result = select_u((vi)(magnitude < splat_u(0x38800000)), subnormal, normal);
    return select_u((vi)(magnitude >= splat_u(0x47800000)), huge, result) | ((bits >> 16) & 0x8000);
}

/* Values of a tensor from element `at` on. */
struct view {
    void *base;
    size_t at;
    enum dtype dtype;
};

/* Values i .. i + W - 1 of a view as float32, zeros from `end` on. */
INLINE vf get(struct view view, int64_t i, int64_t end) {
    size_t from = view.at + (size_t)i, count = end - i < W ? (size_t)(end - i) : W;
    if (view.dtype == DT_F32) {
        vf x = {0};
        memcpy(&x, (const float *)view.base + from, count == W ? sizeof x : count * sizeof(float));
        return x;
    }
    vh halves = {0};
    memcpy(&halves, (const uint16_t *)view.base + from, count == W ? sizeof halves : count * sizeof(uint16_t));
    vu wide = __builtin_convertvector(halves, vu);
    return view.dtype == DT_BF16 ? (vf)(wide << 16) : widen_f16(wide);
}

/* Round x into values i .. of a view, none from `end` on. */
INLINE void put(struct view view, int64_t i, int64_t end, vf x) {
    size_t to = view.at + (size_t)i, count = end - i < W ? (size_t)(end - i) : W;
    if (view.dtype == DT_F32) {
        memcpy((float *)view.base + to, &x, count == W ? sizeof x : count * sizeof(float));
        return;
    }
    vh halves = __builtin_convertvector(view.dtype == DT_BF16 ? narrow_bf16(x) : narrow_f16(x), vh);
    memcpy((uint16_t *)view.base + to, &halves, count == W ? sizeof halves : count * sizeof(uint16_t));
}

/* e^x to about one unit in the last place; 0 below -87, infinity above 88, NaN for NaN. */
INLINE vf exp_f(vf x) {
    vf bounded = select_f(x < splat(-87.f), splat(-87.f), select_f(x > splat(88.f), splat(88.f), x));
    vf n = (bounded * 1.44269504f + 12582912.f) - 12582912.f; /* the nearest integer */
    vf f = (bounded - n * 0.693145752f) - n * 1.42860677e-6f; /* ln 2 in two parts */
    vf p = 1.f / 5040 + f * (1.f / 40320);
    p = 1.f / 720 + f * p;
    p = 1.f / 120 + f * p;
    p = 1.f / 24 + f * p;
    p = 1.f / 6 + f * p;
    p = 0.5f + f * p;
    p = 1.f + f * p;
    p = 1.f + f * p;
    vf power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    vf y = select_f(x < splat(-87.f), splat(0.f), p * power);
    return select_f(x > splat(88.f), splat(INFINITY), select_f((vi)(x != x), x, y));
}

INLINE vf tanh_f(vf x) {
    return 1.f - 2.f / (exp_f(x + x) + 1.f);
}

/* acc + lane . row[l], one product of lanes; `row` holds float32, or for KIND_BF16_DOT pairs of bfloat16. */
INLINE vf lane_fma(vf acc, vu lane, const float *row, size_t l, enum kind kind) {
    switch (kind) {
    case KIND_F32: return acc + (vf)lane * row[l];
    case KIND_BF16: return (acc + (vf)(lane << 16) * row[2 * l]) + (vf)(lane & 0xffff0000) * row[2 * l + 1];
    case KIND_F16: return (acc + widen_f16(lane & 0xffff) * row[2 * l]) + widen_f16(lane >> 16) * row[2 * l + 1];
    default: break;
    }
#ifdef BF16_DOT
    uint32_t both;
    memcpy(&both, row + l, sizeof both);
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)lane, (__m512bh)splat_u(both));
#else
    return acc;
#endif
}

/* How this instruction set multiplies a tensor's type. */
INLINE enum kind kind_of(enum dtype dtype) {
#ifdef BF16_DOT
    if (dtype == DT_BF16) return KIND_BF16_DOT;
#endif
    return dtype == DT_F32 ? KIND_F32 : dtype == DT_BF16 ? KIND_BF16 : KIND_F16;
}

/* out[r][t * TILE + i] = row r . (tile t, column i): R rows times T tiles, kept in registers throughout. */
INLINE void tile_dot(enum kind kind, int R, int T, const float *rows, size_t row_stride, const uint32_t *const *tiles,
                     size_t lane_stride, size_t num_lanes, float *out, size_t out_stride) {
    vf acc[4][4][NV];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) acc[r][t][v] = splat(0);
    for (size_t l = 0; l < num_lanes; l++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) {
                vu lane = load_u(tiles[t] + l * lane_stride + v * W);
                UNROLL for (int r = 0; r < R; r++)
                    acc[r][t][v] = lane_fma(acc[r][t][v], lane, rows + r * row_stride, l, kind);
            }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) store_f(out + r * out_stride + t * TILE + v * W, acc[r][t][v]);
}

/* W-many registers fit: rows and tiles that tile_dot takes at once. */
enum { STEP_ROWS = W == 4 ? 2 : 4, STEP_TILES = W == 16 ? 4 : 1 };

INLINE void tile_dot_rows(enum kind kind, int T, size_t num_rows, const float *rows, size_t row_stride,
                          const uint32_t *const *tiles, size_t lane_stride, size_t num_lanes, float *out,
                          size_t out_stride) {
    for (size_t r = 0; r < num_rows; r += STEP_ROWS) {
        const float *from = rows + r * row_stride;
        float *to = out + r * out_stride;
        switch (num_rows - r < STEP_ROWS ? num_rows - r : STEP_ROWS) {
        case 1: tile_dot(kind, 1, T, from, row_stride, tiles, lane_stride, num_lanes, to, out_stride); break;
        case 2: tile_dot(kind, 2, T, from, row_stride, tiles, lane_stride, num_lanes, to, out_stride); break;
        case 3: tile_dot(kind, 3, T, from, row_stride, tiles, lane_stride, num_lanes, to, out_stride); break;
        default: tile_dot(kind, 4, T, from, row_stride, tiles, lane_stride, num_lanes, to, out_stride); break;
        }
    }
}

#endif
