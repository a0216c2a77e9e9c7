/* Dot products of four unsigned codes with four signed bytes, in every 32-bit lane: the one thing of quantised products
 * that instruction sets differ in. All give the same integers.
 *
 * Without an instruction that adds four products to a lane, pairs of products are summed in 16 bits. Codes of four bits
 * cannot overflow them within a block of 32 (15 * 127 * 2 * 8 < 2^15); those of eight bits are taken as two of four. */
#ifdef VNNI_DOT

enum { IS_DOT_IN_PLACE = 1 };

struct dot {
    vu sum;
};

INLINE struct dot dot_begin(vu start) { return (struct dot){start}; }
INLINE vu dot_end(struct dot dot) { return dot.sum; }

INLINE struct dot dot_add8(struct dot dot, vu codes, uint32_t bytes) {
    return (struct dot){(vu)_mm512_dpbusd_epi32((__m512i)dot.sum, (__m512i)codes, _mm512_set1_epi32((int)bytes))};
}

INLINE struct dot dot_add4(struct dot dot, vu codes, uint32_t bytes) { return dot_add8(dot, codes, bytes); }

#else

enum { IS_DOT_IN_PLACE = 0 };

typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES)));

struct dot {
    vu start;
    vs low, high;
};

INLINE struct dot dot_begin(vu start) { return (struct dot){start, (vs){0}, (vs){0}}; }

/* Products of bytes, neighbours added. */
INLINE vs pair_products(vu codes, uint32_t bytes) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32((int)bytes));
#elif defined(X86_INTRINSICS)
    return (vs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32((int)bytes));
#else
    vs both = (vs)codes, x = (vs)splat_u(bytes);
    return (both & 0xff) * ((x << 8) >> 8) + ((vs)((vu)both >> 8) & 0xff) * (x >> 8);
#endif
}

INLINE struct dot dot_add4(struct dot dot, vu codes, uint32_t bytes) {
    dot.low += pair_products(codes, bytes);
    return dot;
}

INLINE struct dot dot_add8(struct dot dot, vu codes, uint32_t bytes) {
    dot.low += pair_products(codes & 0x0f0f0f0f, bytes);
    dot.high += pair_products((codes >> 4) & 0x0f0f0f0f, bytes);
    return dot;
}

INLINE vu sum_pairs(vs pairs) { return (vu)(((vi)((vu)pairs << 16) >> 16) + ((vi)pairs >> 16)); }

INLINE vu dot_end(struct dot dot) { return dot.start + sum_pairs(dot.low) + (sum_pairs(dot.high) << 4); }

#endif

/* W float16 as float32. */
INLINE vf load_f16(const void *p) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(X86_INTRINSICS)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
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
#else
    uint8_t from[VECTOR_BYTES], at[VECTOR_BYTES];
    memcpy(from, &table, sizeof from);
    memcpy(at, &codes, sizeof at);
    for (int i = 0; i < VECTOR_BYTES; i++) at[i] = from[at[i]];
    return load_u(at);
#endif
}
