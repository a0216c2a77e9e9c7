/* The two products of attention, scores = rows . K and sums = sums * fade + weights . V, for a strip of rows and the keys
 * of a chunk. A row's sums are the same bits whatever other rows are in its strip. */

enum {
    /* Rows, times tiles of keys or vectors of dimensions, that registers hold as sums. */
    STRIP_ROWS = REGISTER_BYTES == 64 ? 6 : REGISTER_BYTES == 32 ? 4 : 2,
    STRIP_TILES = REGISTER_BYTES == 64 ? 4 : 1,
    STRIP_DIMS = REGISTER_BYTES == 64 ? 4 : TILE / W,
};

/* Floats of a lane of queries. */
INLINE size_t width_of(enum kind kind) { return kind == KIND_F32 || kind >= KIND_BF16_DOT ? 1 : 2; }

/* scores[r][t * TILE + i] = row r . (tile t, column i): R rows times T tiles, kept in registers throughout. The tiles
 * `ahead`, if any, are fetched meanwhile, a line for a line. */
INLINE void score(enum kind kind, int R, int T, const float *rows, const uint32_t *const *tiles,
                  const uint32_t *const *ahead, size_t stride, size_t num_lanes, float *scores) {
    size_t width = width_of(kind);
    const uint32_t *tile[STRIP_TILES];
    vf acc[STRIP_ROWS][STRIP_TILES][NV];
    UNROLL for (int t = 0; t < T; t++) tile[t] = tiles[t];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) acc[r][t][v] = splat(0);
    for (size_t l = 0; l < num_lanes; l++, rows += (size_t)R * width) {
        if (ahead)
            UNROLL for (int t = 0; t < T; t++) __builtin_prefetch(ahead[t] + l * TILE, 0, 2);
        vu lane[STRIP_TILES][NV];
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) lane[t][v] = load_u(tile[t] + l * stride + v * W);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < T; t++)
                UNROLL for (int v = 0; v < NV; v++)
                    acc[r][t][v] = lane_fma(acc[r][t][v], lane[t][v], rows, (size_t)r, kind);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < NV; v++) store_f(scores + r * CHUNK + t * TILE + v * W, acc[r][t][v]);
}

/* The same for all tiles of a chunk. */
INLINE void score_chunk(enum kind kind, int R, const float *rows, const struct chunk *c, size_t dim, float *scores) {
    size_t lanes = dim / pair_of(kind), t = 0;
    size_t alike = c->lane_stride == TILE || c->num_tiles < c->num_direct ? c->num_tiles : c->num_direct;
    for (; t + STRIP_TILES <= alike; t += STRIP_TILES)
        score(kind, R, STRIP_TILES, rows, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, lanes,
              scores + t * TILE);
    if (STRIP_TILES > 2 && t + 2 <= alike) {
        score(kind, R, 2, rows, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, lanes, scores + t * TILE);
        t += 2;
    }
    for (; t < c->num_tiles; t++)
        score(kind, R, 1, rows, c->k + t, NULL, t < c->num_direct ? c->lane_stride : TILE, lanes, scores + t * TILE);
}

/* sums[r][d ..] = sums * fade + weights . V, for R rows and C vectors of dimensions, kept in registers throughout. */
INLINE void weigh(enum kind kind, int R, int C, const float *weights, const float *fade, float *sums,
                  const struct chunk *c, size_t dim, size_t d) {
    size_t tile_lanes = TILE / pair_of(kind);
    vf acc[STRIP_ROWS][STRIP_DIMS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++) acc[r][v] = load_f(sums + (size_t)r * dim + d + (size_t)v * W) * fade[r];
    for (size_t t = 0; t < c->num_tiles; t++) {
        const uint32_t *tile = c->v[t] + d;
        const char *ahead = d == 0 ? c->next_k[t] : NULL;
        for (size_t j = 0; j < tile_lanes; j++, tile += dim) {
            for (size_t i = 0; ahead && i < dim / TILE; i++, ahead += c->lane_stride * 4)
                __builtin_prefetch(ahead, 0, 2);
            vu lane[STRIP_DIMS];
            UNROLL for (int v = 0; v < C; v++) lane[v] = load_u(tile + v * W);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < C; v++)
                    acc[r][v] = lane_fma(acc[r][v], lane[v], weights + r * CHUNK, t * tile_lanes + j, kind);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++) store_f(sums + (size_t)r * dim + d + (size_t)v * W, acc[r][v]);
}

/* The last dimensions, where head_dim is no multiple of a vector: the same through a copy of those few. */
static void weigh_tail(enum kind kind, const float *weights, float fade, float *sums, const struct chunk *c, size_t dim,
                       size_t d) {
    size_t tile_lanes = TILE / pair_of(kind), rest = dim - d;
    float padded[TILE] = {0};
    memcpy(padded, sums + d, rest * 4);
    vf acc = load_f(padded) * fade;
    for (size_t t = 0; t < c->num_tiles; t++)
        for (size_t j = 0; j < tile_lanes; j++) {
            memcpy(padded, c->v[t] + j * dim + d, rest * 4);
            acc = lane_fma(acc, load_u(padded), weights, t * tile_lanes + j, kind);
        }
    store_f(padded, acc);
    memcpy(sums + d, padded, rest * 4);
}

INLINE void weigh_chunk(enum kind kind, int R, const float *weights, const float *fade, float *sums,
                        const struct chunk *c, size_t dim) {
    size_t d = 0;
    for (; d + STRIP_DIMS * W <= dim; d += STRIP_DIMS * W) weigh(kind, R, STRIP_DIMS, weights, fade, sums, c, dim, d);
    for (; d + W <= dim; d += W) weigh(kind, R, 1, weights, fade, sums, c, dim, d);
    for (size_t r = 0; d < dim && r < (size_t)R; r++)
        weigh_tail(kind, weights + r * CHUNK, fade[r], sums + r * dim, c, dim, d);
}

#define EACH_STRIP_SIZE(do) do(1) do(2) do(3) do(4) do(5) do(6)

/* The products of a strip, whatever its size. Not inlined, so that registers are theirs. */
__attribute__((noinline)) static void score_strip(enum kind kind, size_t num, const float *rows, const struct chunk *c,
                                                  size_t dim, float *scores) {
#define SCORE(R)                                                                         \
    case R:                                                                              \
        if (R > STRIP_ROWS) break;                                                       \
        if (kind == KIND_F32) score_chunk(KIND_F32, R, rows, c, dim, scores);            \
        else if (kind == KIND_F16) score_chunk(KIND_F16, R, rows, c, dim, scores);       \
        else if (!HAS_TILES) score_chunk(KIND_OF_PAIRS, R, rows, c, dim, scores);        \
        break;
    switch (num) { EACH_STRIP_SIZE(SCORE) }
#undef SCORE
}

__attribute__((noinline)) static void weigh_strip(enum kind kind, size_t num, const float *weights, const float *fade,
                                                  float *sums, const struct chunk *c, size_t dim) {
#define WEIGH(R)                                                                               \
    case R:                                                                                    \
        if (R > STRIP_ROWS) break;                                                             \
        if (kind == KIND_F32) weigh_chunk(KIND_F32, R, weights, fade, sums, c, dim);           \
        else if (kind == KIND_F16) weigh_chunk(KIND_F16, R, weights, fade, sums, c, dim);      \
        else if (!HAS_TILES) weigh_chunk(KIND_OF_PAIRS, R, weights, fade, sums, c, dim);       \
        break;
    switch (num) { EACH_STRIP_SIZE(WEIGH) }
#undef WEIGH
}
