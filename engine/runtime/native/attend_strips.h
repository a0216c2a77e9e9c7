/* The two products of attention, scores = rows . K and sums = sums * fade + weights . V, for a strip of rows and the keys
 * of a chunk. A row's sums are the same bits whatever other rows are in its strip. */

enum {
    /* Rows, times tiles of keys or vectors of dimensions, that registers hold as sums. */
    STRIP_ROWS = REGISTER_BYTES == 64 ? 6 : REGISTER_BYTES == 32 ? 4 : 2,
    STRIP_TILES = REGISTER_BYTES == 64 ? 4 : 1,
    STRIP_DIMS = REGISTER_BYTES == 64 ? 4 : TILE / W,
};

/* Four bytes each that a lane of queries has. */
INLINE size_t width_of(enum kind kind) { return kind == KIND_F32 || kind >= KIND_BF16_DOT ? 1 : 2; }

/* Sums of lanes: floats, or integers for KIND_INT16. */
struct lanes {
    vf floats;
    vi whole;
};

/* A vector of lanes, of which pairs of int8 become pairs of int16. */
INLINE vu load_lanes(const char *p, enum kind kind) {
#ifdef INT16_DOT
#if VECTOR_BYTES == 64
    if (kind == KIND_INT16) return (vu)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
#else
    if (kind == KIND_INT16) return (vu)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#endif
#endif
    (void)kind;
    return load_u(p);
}

/* acc + lane . row[l], where `row` holds pairs of 16-bit integers. */
INLINE vi pair_dot(vi acc, vu lane, const float *row, size_t l) {
#ifdef INT16_DOT
    int32_t both;
    memcpy(&both, row + l, sizeof both);
#if VECTOR_BYTES == 64 && defined(VNNI_DOT)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)lane, _mm512_set1_epi32(both));
#elif VECTOR_BYTES == 64
    return acc + (vi)_mm512_madd_epi16((__m512i)lane, _mm512_set1_epi32(both));
#elif defined(VNNI_DOT)
    return (vi)_mm256_dpwssd_epi32((__m256i)acc, (__m256i)lane, _mm256_set1_epi32(both));
#else
    return acc + (vi)_mm256_madd_epi16((__m256i)lane, _mm256_set1_epi32(both));
#endif
#else
    (void)lane, (void)row, (void)l;
    return acc;
#endif
}

INLINE struct lanes add_lane(struct lanes acc, vu lane, const float *row, size_t l, enum kind kind) {
    if (kind == KIND_INT16) acc.whole = pair_dot(acc.whole, lane, row, l);
    else acc.floats = lane_fma(acc.floats, lane, row, l, kind);
    return acc;
}

/* A sum as float32: of integers, times their unit. */
INLINE vf sum_of(struct lanes acc, enum kind kind, const float *unit) {
    return kind == KIND_INT16 ? __builtin_convertvector(acc.whole, vf) * *unit : acc.floats;
}

/* scores[r][t * TILE + i] = row r . (tile t, column i): R rows times T tiles, kept in registers throughout. The tiles
 * `ahead`, if any, are fetched meanwhile, a line for a line. */
INLINE void score(enum kind kind, int R, int T, const float *rows, const float *units, const char *const *tiles,
                  const char *const *ahead, size_t stride, size_t num_lanes, float *scores) {
    size_t width = width_of(kind), size = lane_of(kind);
    const char *tile[STRIP_TILES];
    struct lanes acc[STRIP_ROWS][STRIP_TILES][NV];
    UNROLL for (int t = 0; t < T; t++) tile[t] = tiles[t];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) acc[r][t][v] = (struct lanes){splat(0), (vi){0}};
    for (size_t l = 0; l < num_lanes; l++, rows += (size_t)R * width) {
        if (ahead && l * TILE * size % 64 == 0)
            UNROLL for (int t = 0; t < T; t++) __builtin_prefetch(ahead[t] + l * TILE * size, 0, 2);
        vu lane[STRIP_TILES][NV];
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) lane[t][v] = load_lanes(tile[t] + (l * stride + (size_t)(v * W)) * size, kind);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < T; t++)
                UNROLL for (int v = 0; v < NV; v++)
                    acc[r][t][v] = add_lane(acc[r][t][v], lane[t][v], rows, (size_t)r, kind);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++)
                store_f(scores + r * CHUNK + t * TILE + v * W, sum_of(acc[r][t][v], kind, units + r));
}

/* The same for all tiles of a chunk. */
INLINE void score_chunk(enum kind kind, int R, const float *rows, const float *units, const struct chunk *c, size_t dim,
                        float *scores) {
    size_t lanes = dim / pair_of(kind), t = 0;
    size_t alike = c->lane_stride == TILE || c->num_tiles < c->num_direct ? c->num_tiles : c->num_direct;
    for (; t + STRIP_TILES <= alike; t += STRIP_TILES)
        score(kind, R, STRIP_TILES, rows, units, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, lanes,
              scores + t * TILE);
    if (STRIP_TILES > 2 && kind != KIND_INT16 && t + 2 <= alike) { /* less to compile */
        score(kind, R, 2, rows, units, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, lanes, scores + t * TILE);
        t += 2;
    }
    for (; t < c->num_tiles; t++)
        score(kind, R, 1, rows, units, c->k + t, NULL, t < c->num_direct ? c->lane_stride : TILE, lanes, scores + t * TILE);
}

/* What sums begin with, and what they are at the end. Sums of integers begin at zero. There only the product with `fade` is
 * rounded, as units are powers of two, and it is kept from being fused with the sum. */
INLINE struct lanes begin_sum(const float *sums, float fade, enum kind kind) {
    return (struct lanes){kind == KIND_INT16 ? splat(0) : load_f(sums) * fade, (vi){0}};
}

INLINE vf end_sum(const float *sums, float fade, const float *unit, struct lanes acc, enum kind kind) {
    if (kind != KIND_INT16) return acc.floats;
    vf before = load_f(sums) * fade;
#ifdef INT16_DOT
    __asm__("" : "+v"(before));
#endif
    return before + sum_of(acc, kind, unit);
}

/* sums[r][d ..] = sums * fade + weights . V, for R rows and C vectors of dimensions, kept in registers throughout. */
INLINE void weigh(enum kind kind, int R, int C, const float *weights, const float *fade, const float *units, float *sums,
                  const struct chunk *c, size_t dim, size_t d) {
    size_t tile_lanes = TILE / pair_of(kind), size = lane_of(kind);
    struct lanes acc[STRIP_ROWS][STRIP_DIMS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++) acc[r][v] = begin_sum(sums + (size_t)r * dim + d + (size_t)v * W, fade[r], kind);
    for (size_t t = 0; t < c->num_tiles; t++) {
        const char *tile = c->v[t] + d * size, *ahead = d == 0 ? c->next_k[t] : NULL;
        for (size_t j = 0; j < tile_lanes; j++, tile += dim * size) {
            for (size_t i = 0; ahead && i < c->num_lines; i++, ahead += c->line_stride) __builtin_prefetch(ahead, 0, 2);
            vu lane[STRIP_DIMS];
            UNROLL for (int v = 0; v < C; v++) lane[v] = load_lanes(tile + (size_t)(v * W) * size, kind);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < C; v++)
                    acc[r][v] = add_lane(acc[r][v], lane[v], weights + r * CHUNK, t * tile_lanes + j, kind);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++) {
            float *to = sums + (size_t)r * dim + d + (size_t)v * W;
            store_f(to, end_sum(to, fade[r], units + r, acc[r][v], kind));
        }
}

/* The last dimensions, where head_dim is no multiple of a vector: the same through a copy of those few. */
static void weigh_tail(enum kind kind, const float *weights, float fade, const float *unit, float *sums, const struct chunk *c,
                       size_t dim, size_t d) {
    size_t tile_lanes = TILE / pair_of(kind), size = lane_of(kind), rest = dim - d;
    float padded[TILE] = {0};
    char lanes[TILE * 4] = {0};
    memcpy(padded, sums + d, rest * 4);
    struct lanes acc = begin_sum(padded, fade, kind);
    for (size_t t = 0; t < c->num_tiles; t++)
        for (size_t j = 0; j < tile_lanes; j++) {
            memcpy(lanes, c->v[t] + (j * dim + d) * size, rest * size);
            acc = add_lane(acc, load_lanes(lanes, kind), weights, t * tile_lanes + j, kind);
        }
    store_f(padded, end_sum(padded, fade, unit, acc, kind));
    memcpy(sums + d, padded, rest * 4);
}

INLINE void weigh_chunk(enum kind kind, int R, const float *weights, const float *fade, const float *units, float *sums,
                        const struct chunk *c, size_t dim) {
    size_t d = 0;
    for (; d + STRIP_DIMS * W <= dim; d += STRIP_DIMS * W) weigh(kind, R, STRIP_DIMS, weights, fade, units, sums, c, dim, d);
    for (; d + W <= dim; d += W) weigh(kind, R, 1, weights, fade, units, sums, c, dim, d);
    for (size_t r = 0; d < dim && r < (size_t)R; r++)
        weigh_tail(kind, weights + r * CHUNK, fade[r], units + r, sums + r * dim, c, dim, d);
}

/* Call work(kind, R, ..) for a strip of R rows, kind and R known to the compiler. */
#define STRIP_CASE(R, work, ...)                                                            \
    case R:                                                                                 \
        if (R > STRIP_ROWS) break;                                                          \
        if (kind == KIND_F32) work(KIND_F32, R, __VA_ARGS__);                               \
        else if (kind == KIND_F16) work(KIND_F16, R, __VA_ARGS__);                          \
        else if (kind == KIND_INT16 && HAS_INT16) work(KIND_INT16, R, __VA_ARGS__);         \
        else if (!HAS_TILES) work(KIND_OF_PAIRS, R, __VA_ARGS__);                           \
        break;
#define BY_STRIP(num, ...)                                                                  \
    switch (num) {                                                                          \
        STRIP_CASE(1, __VA_ARGS__) STRIP_CASE(2, __VA_ARGS__) STRIP_CASE(3, __VA_ARGS__)    \
        STRIP_CASE(4, __VA_ARGS__) STRIP_CASE(5, __VA_ARGS__) STRIP_CASE(6, __VA_ARGS__)    \
    }

/* The products of a strip, whatever its size. Not inlined, so that registers are theirs. */
__attribute__((noinline)) static void score_strip(enum kind kind, size_t num, const float *rows, const float *units,
                                                  const struct chunk *c, size_t dim, float *scores) {
    BY_STRIP(num, score_chunk, rows, units, c, dim, scores)
}

__attribute__((noinline)) static void weigh_strip(enum kind kind, size_t num, const float *weights, const float *fade,
                                                  const float *units, float *sums, const struct chunk *c, size_t dim) {
    BY_STRIP(num, weigh_chunk, weights, fade, units, sums, c, dim)
}
