/* Dot products of four unsigned codes with four signed bytes, in every 32-bit lane: the one thing of quantised products
 * that instruction sets differ in. All give the same integers.
 *
 * Without an instruction that adds four products to a lane, pairs of products are summed in 16 bits, and these sums in 32
 * as often as the size of the codes wants it. Codes of eight bits less 128 are multiplied as magnitudes and signs. */
#if defined(VNNI_DOT) || defined(ARM_DOT)

enum { IS_DOT_IN_PLACE = 1 };

struct dot {
    vu sum;
};

#ifdef ARM_DOT

/* Both factors are signed here: codes of eight bits lose their zero first. */
INLINE struct dot dot_begin(vu start, int bits) { return (struct dot){bits == 8 ? splat_u(0) : start}; }

INLINE struct dot dot_add(struct dot dot, vu codes, uint32_t bytes, int bits, int quad) {
    (void)quad;
    if (bits == 8) codes ^= 0x80808080;
    return (struct dot){(vu)vdotq_s32((int32x4_t)dot.sum, (int8x16_t)codes, (int8x16_t)splat_u(bytes))};
}

#ifdef ARM_MATRIX
enum { QUADS = 2 };

/* Two rows of x, two quads of each, against those of a vector of weight rows: low has the sums of the first two weight
 * rows, [weight row][row of x], and high those of the others. `step` is from a quad of x to the next. */
INLINE void pair_add(struct dot *low, struct dot *high, const vu codes[2], const uint32_t *x, int step, int bits) {
    uint32x4_t flip = vdupq_n_u32(bits == 8 ? 0x80808080 : 0);
    uint32x4_t first = (uint32x4_t)codes[0] ^ flip, second = (uint32x4_t)codes[1] ^ flip;
    uint32x2_t quad = vld1_u32(x), next = vld1_u32(x + step);
    int8x16_t rows = (int8x16_t)vcombine_u32(vzip1_u32(quad, next), vzip2_u32(quad, next));
    low->sum = (vu)vmmlaq_s32((int32x4_t)low->sum, (int8x16_t)vzip1q_u32(first, second), rows);
    high->sum = (vu)vmmlaq_s32((int32x4_t)high->sum, (int8x16_t)vzip2q_u32(first, second), rows);
}

/* From sums of two rows by themselves to those that pair_add adds to, and back. */
INLINE void pair_begin(struct dot *low, struct dot *high) {
    vu starts = (vu)vzip1q_u32((uint32x4_t)low->sum, (uint32x4_t)high->sum);
    low->sum = high->sum = starts;
}

INLINE void pair_end(struct dot *low, struct dot *high) {
    uint32x4_t one = vuzp1q_u32((uint32x4_t)low->sum, (uint32x4_t)high->sum);
    high->sum = (vu)vuzp2q_u32((uint32x4_t)low->sum, (uint32x4_t)high->sum);
    low->sum = (vu)one;
}
#endif

#else

INLINE struct dot dot_begin(vu start, int bits) {
    (void)bits;
    return (struct dot){start};
}

INLINE struct dot dot_add(struct dot dot, vu codes, uint32_t bytes, int bits, int quad) {
    (void)bits, (void)quad;
#if VECTOR_BYTES == 64
    return (struct dot){(vu)_mm512_dpbusd_epi32((__m512i)dot.sum, (__m512i)codes, _mm512_set1_epi32((int)bytes))};
#else
    return (struct dot){(vu)_mm256_dpbusd_epi32((__m256i)dot.sum, (__m256i)codes, _mm256_set1_epi32((int)bytes))};
#endif
}

#endif

INLINE vu dot_end(struct dot dot) { return dot.sum; }

#else

enum { IS_DOT_IN_PLACE = 0 };

typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES)));

struct dot {
    vu sum;
    vs pairs;
};

/* The start takes away what the zero of codes adds, which those of eight bits have lost. */
INLINE struct dot dot_begin(vu start, int bits) { return (struct dot){bits == 8 ? splat_u(0) : start, (vs){0}}; }

/* Products of bytes, neighbours added. */
INLINE vs pair_products(vu codes, uint32_t bytes, int bits) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    __m512i x = _mm512_set1_epi32((int)bytes), w = (__m512i)(codes ^ 0x80808080);
    if (bits < 8) return (vs)_mm512_maddubs_epi16((__m512i)codes, x);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return (vs)_mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
#elif defined(X86_INTRINSICS)
    __m256i x = _mm256_set1_epi32((int)bytes), w = (__m256i)(codes ^ 0x80808080);
    if (bits < 8) return (vs)_mm256_maddubs_epi16((__m256i)codes, x);
    return (vs)_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
#else
    vs both = (vs)codes, x = (vs)splat_u(bytes);
    vs zero = (vs){0} + (int16_t)(bits < 8 ? 0 : 128);
    return ((both & 0xff) - zero) * ((x << 8) >> 8) + (((vs)((vu)both >> 8) & 0xff) - zero) * (x >> 8);
#endif
}

INLINE vu sum_pairs(vs pairs) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vu)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#elif defined(X86_INTRINSICS)
    return (vu)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#else
    return (vu)(((vi)((vu)pairs << 16) >> 16) + ((vi)pairs >> 16));
#endif
}

/* Add the quad `quad` of a group. 16 bits hold 8 sums of two products of codes of four bits, 4 of five, 2 of six. */
INLINE struct dot dot_add(struct dot dot, vu codes, uint32_t bytes, int bits, int quad) {
    dot.pairs += pair_products(codes, bytes, bits);
#ifdef X86_INTRINSICS
    if (bits < 8) __asm__("" : "+x"(dot.pairs)); /* or compilers put all products into memory, and sum them at last */
#endif
    int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    if ((quad + 1) % most) return dot;
    return (struct dot){dot.sum + sum_pairs(dot.pairs), (vs){0}};
}

INLINE vu dot_end(struct dot dot) { return dot.sum + sum_pairs(dot.pairs); }

#endif

#ifndef ARM_MATRIX
enum { QUADS = 1 }; /* of codes that are multiplied at a time */
#define pair_begin(low, high)
#define pair_add(low, high, codes, x, step, bits)
#define pair_end(low, high)
#endif

/* W float16 as float32. */
INLINE vf load_f16(const void *p) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(X86_INTRINSICS)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#elif defined(ARM_INTRINSICS)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vh halves;
    memcpy(&halves, p, sizeof halves);
    return widen_f16(__builtin_convertvector(halves, vu));
#endif
}

/* W exponents E8M0, halved for a table of doubled values. 0 stands for 2^-127 as well, 255 for infinity. */
INLINE vf load_e8m0(const void *p) {
    typedef uint8_t vub __attribute__((vector_size(W)));
    vub bytes;
    memcpy(&bytes, p, sizeof bytes);
    vu bits = __builtin_convertvector(bytes, vu) << 23, least = splat_u(0x00400000);
    return (vf)select_u((vi)bits == 0, least, bits) * 0.5f;
}

/* W bytes, unsigned, as float32. */
INLINE vf load_u8(const void *p) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)));
#elif defined(X86_INTRINSICS)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)));
#else
    typedef uint8_t vub __attribute__((vector_size(W)));
    vub bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector((vi)__builtin_convertvector(bytes, vu), vf);
#endif
}

/* A table of 16 bytes, repeated as `look_up` wants it. */
INLINE vu load_table(const uint8_t *table) {
    vu repeated;
    for (int i = 0; i < VECTOR_BYTES; i += 16) memcpy((char *)&repeated + i, table, 16);
    return repeated;
}

/* table[code] for every byte; codes are less than 16. */
INLINE vu look_up(vu table, vu codes) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vu)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(X86_INTRINSICS)
    return (vu)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(ARM_INTRINSICS)
    return (vu)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t from[VECTOR_BYTES], at[VECTOR_BYTES];
    memcpy(from, &table, sizeof from);
    memcpy(at, &codes, sizeof at);
    for (int i = 0; i < VECTOR_BYTES; i++) at[i] = from[at[i]];
    return load_u(at);
#endif
}
