/* Vectors of the instruction set being compiled, in GCC/Clang vector extensions: W float32 lanes, NV vectors a tile.
 * The instruction set is what the compiler's options (build.py) let it use; without any, the compiler maps vectors of four to
 * SSE2, NEON or plain scalars.
 *
 * With PORTABLE_BITS every set computes the same bits: vectors whose lanes are summed have sixteen of them, without a set's own
 * instructions, which the compiler makes of as many as it takes; pairs of bfloat16 are multiplied one by one; and no product is
 * fused with a sum, by build.py's options. Products with weights keep their vectors, as their lanes are rows. */
#ifndef QUIRE_VEC_H
#define QUIRE_VEC_H

#include <math.h>
#include <string.h>

#include "quire_cpu.h"

#if defined(PORTABLE_BITS) && !defined(LANES_ARE_ROWS)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define X86_INTRINSICS
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define ARM_INTRINSICS
#define ARM_DOT
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define ARM_MATRIX
#endif
#if !defined(PORTABLE_BITS) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define BF16_DOT /* products of pairs of bfloat16 */
#endif
#if !defined(PORTABLE_BITS) && (defined(__AMX_TILE__) || defined(__AMXTILE__) || defined(TILE_MODEL))
#define TILES /* registers of sixteen rows (tiles.h); the second name is Clang 14's */
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define VNNI_DOT /* products of bytes */
#endif
#if defined(X86_INTRINSICS) && !defined(TILES)
#define INT16_DOT /* products of pairs of 16-bit integers, one of which is widened from bytes */
enum { HAS_INT16 = 1 };
#else
enum { HAS_INT16 = 0 };
#endif
#if defined(REGISTER_BYTES) /* less than the machine has */
#elif defined(__AVX512F__)
#define REGISTER_BYTES 64
#elif defined(__AVX2__)
#define REGISTER_BYTES 32
#else
#define REGISTER_BYTES 16
#endif
#ifndef VECTOR_BYTES
#define VECTOR_BYTES REGISTER_BYTES
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { W = VECTOR_BYTES / 4, NV = TILE / W };

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));

/* How lanes are multiplied. The last two need BF16_DOT and TILES: both factors are pairs of bfloat16. Beside tiles, pairs are
 * widened: such machines are Intel's, whose products of pairs take more time than two of float32, what adapters add for eight
 * rows 1.5 times as much. */
enum kind {
    KIND_F32, KIND_BF16, KIND_F16, KIND_BF16_DOT, KIND_TILES, KIND_INT16,
#if defined(BF16_DOT) && !defined(TILES)
    KIND_OF_PAIRS = KIND_BF16_DOT,
#else
    KIND_OF_PAIRS = KIND_BF16,
#endif
};

INLINE size_t pair_of(enum kind kind) { return kind == KIND_F32 ? 1 : 2; }

/* Bytes of a lane in memory. */
INLINE size_t lane_of(enum kind kind) { return kind == KIND_INT16 ? 2 : 4; }

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vu splat_u(uint32_t x) { return x - (vu){0}; }
INLINE vu load_u(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf load_f(const void *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f(void *p, vf v) { memcpy(p, &v, sizeof v); }

/* a OP b for each lane: all bits of it, or none. Of vectors wider than its registers GCC compares one lane after the other,
 * three times the code: there they go by registers. */
#if VECTOR_BYTES > REGISTER_BYTES && !defined(__clang__)
#define COMPARE(a, op, b)                                                                                              \
    __extension__({                                                                                                    \
        typedef __typeof__((a)[0]) part __attribute__((vector_size(REGISTER_BYTES)));                                  \
        enum { NUM_PARTS = VECTOR_BYTES / REGISTER_BYTES };                                                            \
        union { __typeof__(a) all; part parts[NUM_PARTS]; } x_ = {a}, y_ = {(b) - (__typeof__(a)){0}};                 \
        union { vi all; part parts[NUM_PARTS]; } found;                                                                \
        UNROLL for (int i = 0; i < NUM_PARTS; i++) found.parts[i] = (part)(x_.parts[i] op y_.parts[i]);                \
        found.all;                                                                                                     \
    })
#else
#define COMPARE(a, op, b) ((vi)((a) op (b)))
#endif

/* (a & mask) | b. */
INLINE vu merge(vu a, uint32_t mask, vu b) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vu)_mm512_ternarylogic_epi32((__m512i)a, _mm512_set1_epi32((int)mask), (__m512i)b, 0xea);
#else
    return (a & mask) | b;
#endif
}

/* The high halves of each lane, of `low` in the low half and of `high` in the high one. */
INLINE vu pair_high(vu low, vu high) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vu)_mm512_mask_alignr_epi8((__m512i)high, 0x3333333333333333, (__m512i)low, (__m512i)low, 2);
#else
    return merge(high, 0xffff0000, low >> 16);
#endif
}

INLINE vu select_u(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }
INLINE vf select_f(vi mask, vf yes, vf no) { return (vf)select_u(mask, (vu)yes, (vu)no); }

/* a > b ? a : b, so b where either is NaN. The one instruction for it is not found by compilers. */
INLINE vf max_f(vf a, vf b) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(X86_INTRINSICS) && VECTOR_BYTES == 32
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_f(COMPARE(a, >, b), a, b);
#endif
}

/* x within [low, high]; NaN stays. */
INLINE vf clamp_f(vf x, vf low, vf high) {
    x = select_f(COMPARE(x, <, low), low, x);
    return select_f(COMPARE(x, >, high), high, x);
}

/* Whether the processor is Intel's. These prefetch some twenty lines behind one that is read, in up to 32 pages at once. A product with
 * one row reads weights 1.4 times as fast there if it prefetches them (30 GB/s for 21, two cores of Emerald Rapids). Other processors
 * prefetch that stream by themselves, and lose a quarter if the product does, too (Zen 4). */
INLINE int fetches_by_page(void) {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

/* Memory that is fetched beside arithmetic, `num` lines at a time: each `step` bytes behind the one before, and behind `end` from `from`
 * on, a line further. */
enum { PAGE = 4096 };

struct ahead {
    const char *from, *at, *end;
    size_t num, step;
};

/* `bytes` of memory, line after line. */
INLINE struct ahead lines_from(const char *from, size_t bytes, size_t num) {
    return (struct ahead){from, from, from + bytes, num, 64};
}

/* `bytes` of memory that are used later, behind the first `before` lines: on Intel's processors a line of every page in turn. */
INLINE struct ahead next_part(const char *from, size_t bytes, size_t num, size_t before) {
    const size_t num_pages = (bytes - 1) / PAGE + 1;
    if (!fetches_by_page()) return lines_from(from + before * 64, bytes, num);
    const char *line = from + before / num_pages * 64;
    return (struct ahead){line, line + before % num_pages * PAGE, from + bytes, num, PAGE};
}

INLINE void fetch_ahead(struct ahead *ahead, int is_near) {
    for (size_t i = 0; i < ahead->num; i++) {
        if (is_near) __builtin_prefetch(ahead->at, 0, 3);
        else __builtin_prefetch(ahead->at, 0, 2);
        ahead->at += ahead->step;
        if (ahead->at >= ahead->end) ahead->at = ahead->from += 64;
    }
}

typedef float v4 __attribute__((vector_size(16)));

/* The sum of quarters, then of what they hold: always in this order. */
INLINE float sum_f(vf v) {
    v4 parts[W / 4], total;
    memcpy(parts, &v, sizeof v);
    total = parts[0];
    UNROLL for (int i = 1; i < W / 4; i++) total += parts[i];
    return (total[0] + total[2]) + (total[1] + total[3]);
}

INLINE float peak_f(vf v) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    UNROLL for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

/* The larger of magnitudes, lane by lane: of their bits, by which a NaN is larger than any number. */
INLINE vf larger(vf a, vf b) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(X86_INTRINSICS)
    return (vf)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    return select_f(COMPARE((vi)a, >, (vi)b), a, b);
#endif
}

/* The largest of them all. */
INLINE float largest_of(vf magnitudes) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    uint32_t largest = _mm512_reduce_max_epu32((__m512i)magnitudes);
#else
    vu bits = (vu)magnitudes;
    uint32_t largest = bits[0];
    UNROLL for (int i = 1; i < W; i++) largest = bits[i] > largest ? bits[i] : largest;
#endif
    float value;
    memcpy(&value, &largest, sizeof value);
    return value;
}

/* a * b + c, rounded once where tiles sum so. */
INLINE vf fused(vf a, vf b, vf c) {
#ifdef TILES
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE vf magnitude_of(vf x) { return (vf)((vu)x & 0x7fffffff); }

/* float16 bits in the low half of each lane -> float32. */
INLINE vf widen_f16(vu h) {
    vu magnitude = (h & 0x7fff) << 13;
    vu scaled = (vu)((vf)magnitude * splat(0x1p112f)); /* exponents rebiased; subnormals come out right as well */
    vu special = (vu)COMPARE(magnitude, >=, splat_u(0x0f800000)) & 0x7f800000;
    return (vf)(scaled | special | ((h & 0x8000) << 16));
}

INLINE vh narrow_bf16(vf x) {
#if defined(BF16_DOT) && defined(ARM_INTRINSICS)
    return (vh)vcvt_bf16_f32((float32x4_t)x);
#elif defined(BF16_DOT)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(select_u(COMPARE(x, !=, x), (bits >> 16) | 0x40, rounded), vh);
#endif
}

#ifdef BF16_DOT
/* Both vectors as bfloat16, the first one's ahead. */
INLINE vu narrow_both(vf first, vf second) {
#ifdef ARM_INTRINSICS
    return (vu)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
#else
    return (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
}
#endif

INLINE vh narrow_f16(vf x) {
    vu bits = (vu)x, magnitude = bits & 0x7fffffff;
    vu normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    vu subnormal = (vu)((vf)magnitude + splat(0.5f)) - 0x3f000000;
    vu huge = select_u(COMPARE(magnitude, >, splat_u(0x7f800000)), splat_u(0x7e00), splat_u(0x7c00));
    vu result = select_u(COMPARE(magnitude, <, splat_u(0x38800000)), subnormal, normal);
    result = select_u(COMPARE(magnitude, >=, splat_u(0x47800000)), huge, result) | ((bits >> 16) & 0x8000);
    return __builtin_convertvector(result, vh);
}

/* Values of a tensor from element `at` on. */
struct view {
    void *base;
    size_t at;
    enum dtype dtype;
};

/* 16 bits to the low half of each lane. Compilers do not find the one instruction for it. */
INLINE vu widen_halves(vh halves) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vu)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(X86_INTRINSICS)
    return (vu)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, vu);
#endif
}

/* Copy a vector, or the rest of one. A copy of constant size is one instruction, any other is a call. */
INLINE void copy_values(void *to, const void *from, int64_t count, size_t size) {
    if (__builtin_expect(count >= W, 1))
        memcpy(to, from, W * size);
    else
        memcpy(to, from, (size_t)count * size);
}

/* Values i .. i + W - 1 of a view as float32, zeros from `end` on. */
INLINE vf get(struct view view, int64_t i, int64_t end) {
    size_t from = view.at + (size_t)i;
    if (view.dtype == DT_F32) {
        vf x = {0};
        copy_values(&x, (const float *)view.base + from, end - i, sizeof(float));
        return x;
    }
    vh halves = {0};
    copy_values(&halves, (const uint16_t *)view.base + from, end - i, sizeof(uint16_t));
    vu wide = widen_halves(halves);
    return view.dtype == DT_BF16 ? (vf)(wide << 16) : widen_f16(wide);
}

/* Round x into values i .. of a view, none from `end` on. */
INLINE void put(struct view view, int64_t i, int64_t end, vf x) {
    size_t to = view.at + (size_t)i;
    if (view.dtype == DT_F32) {
        copy_values((float *)view.base + to, &x, end - i, sizeof(float));
        return;
    }
    vh halves = view.dtype == DT_BF16 ? narrow_bf16(x) : narrow_f16(x);
    copy_values((uint16_t *)view.base + to, &halves, end - i, sizeof(uint16_t));
}

/* The largest magnitude of a row, infinity or NaN if it has one. */
INLINE float peak_of_row(struct view row, int64_t width) {
    vf most = splat(0);
    for (int64_t i = 0; i < width; i += W) most = larger(magnitude_of(get(row, i, width)), most);
    return largest_of(most);
}

/* e^x to about one unit in the last place; exactly 0 below -87.7, infinity above 88.4, NaN for NaN. Both ends come
 * from the exponent field: at the bounds, 2^n is all zeros or the pattern of infinity. */
INLINE vf exp_f(vf x) {
    x = clamp_f(x, splat(-88.f), splat(89.f));
    vf n = (x * 1.44269504f + 12582912.f) - 12582912.f; /* the nearest integer */
    vf f = (x - n * 0.693145752f) - n * 1.42860677e-6f; /* ln 2 in two parts */
    vf p = 1.f / 720 + f * (1.f / 5040);
    p = 1.f / 120 + f * p;
    p = 1.f / 24 + f * p;
    p = 1.f / 6 + f * p;
    p = 0.5f + f * p;
    p = 1.f + f * p;
    p = 1.f + f * p;
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

/* 2^x for x <= 0 (or a rounding above), exactly 1 at 0 and 0 below -126.5, NaN for NaN: to a unit in the last place if
 * `is_exact`, else to 3e-6, far below the resolution of bfloat16 and float16. */
INLINE vf exp2_f(vf x, int is_exact) {
    x = max_f(splat(-127.f), x);
    vf t = x + (12582912.f + 127.f); /* the nearest integer, in the low bits of a float; an exponent, with its bias */
    vf f = x - (t - (12582912.f + 127.f)), p;
    if (is_exact) {
        p = 1.339887e-3f + f * 1.535336e-4f;
        p = 9.618437e-3f + f * p;
        p = 5.550332e-2f + f * p;
        p = 0.24022648f + f * p;
        p = 0.6931472f + f * p;
    } else {
        p = 5.5906426e-2f + f * 9.582852e-3f;
        p = 0.24024099f + f * p;
        p = 0.6931242f + f * p;
    }
    return (1.f + f * p) * (vf)((vu)t << 23);
}

INLINE vf tanh_f(vf x) {
    return 1.f - 2.f / (exp_f(x + x) + 1.f);
}

/* max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2), which is x / 2 * (1 + erf(x / sqrt 2)), to 4e-7 and one rounding. Half of erfc is a
 * polynomial up to |x| = 5.25, fitted so that its error times |x| is least: a third of the time of one with a division and a
 * power of e. Behind 5.25, where the term is 4e-7, it is 0. NaN stays NaN. */
INLINE vf gelu(vf x) {
    static const float terms[] = {
        6.72713562e-4f,  -4.62474860e-3f, 3.66849708e-3f,  1.97618790e-2f,  -3.48615460e-2f, -1.96207687e-2f,
        9.68885347e-2f,  -6.13656007e-2f, -9.51344073e-2f, 1.96085602e-1f,  -9.77585837e-2f, -1.20885335e-1f,
        2.57117420e-1f,  -2.25950569e-1f, 1.15075618e-1f,  -3.34010981e-2f, 4.33245627e-3f,
    };
    vf most = max_f(x, -x), u = most * (2 / 5.25f) - 1.f;
    vf half = splat(terms[0]);
    UNROLL for (size_t i = 1; i < sizeof terms / sizeof *terms; i++) half = half * u + terms[i];
    return max_f(x, splat(0)) - select_f(COMPARE(most, >, splat(5.25f)), splat(0), most * half);
}

INLINE vf activate(vf x, enum activation activation) {
    if (activation == ACT_SILU) return x / (1.f + exp_f(-x));
    if (activation == ACT_GELU_TANH) return 0.5f * x * (1.f + tanh_f(0.797884561f * (x + 0.044715f * x * x * x)));
    return gelu(x);
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
#ifdef ARM_INTRINSICS
    acc = (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)lane, (bfloat16x8_t)splat_u(both));
#else
    acc = (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)lane, (__m512bh)splat_u(both));
#endif
#endif
    return acc;
}

/* Call work(.., type) with the type known to the compiler. */
#define BY_TYPE(type, work, ...)                                   \
    ((type) == DT_F32    ? work(__VA_ARGS__, DT_F32)               \
     : (type) == DT_BF16 ? work(__VA_ARGS__, DT_BF16)              \
                         : work(__VA_ARGS__, DT_F16))

/* How this instruction set multiplies a tensor's type. */
INLINE enum kind kind_of(enum dtype dtype) {
#ifdef TILES
    if (dtype == DT_BF16) return KIND_TILES;
#endif
    return dtype == DT_F32 ? KIND_F32 : dtype == DT_BF16 ? KIND_OF_PAIRS : KIND_F16;
}

#endif
