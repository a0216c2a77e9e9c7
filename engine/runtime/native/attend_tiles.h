/* The two products of attention on tiles, for up to TILE_ROWS rows of bfloat16: a tile of keys, and a tile of values, are read as
 * they lie in the pool. Each row's sums are the same bits whatever other rows there are. */

enum products { SCORES, VALUES };

/* Registers 0 to 3 hold sums, 4 queries, 5 weights, 6 keys, 7 values. What a head's size leaves behind the last whole tile has
 * smaller ones: `rest` lanes of scores take 5 for queries and 7 for keys, and `rest` columns of values 4 for sums and 6 for values. */
INLINE void shape_attention(enum products products, size_t num, size_t rest, uint64_t *now) {
    const uint64_t name = (rest ? (uint64_t)(products + 1) << 16 : 0) | num << 8 | rest; /* without a rest both have the same */
    if (*now == name) return;
    *now = name;
    struct tile_shapes wanted = {0};
    for (int i = 0; i < 5; i++) tile_shape(&wanted, i, num, TILE_BYTES);
    tile_shape(&wanted, 5, num, TILE * 2);
    tile_shape(&wanted, 6, TILE_ROWS, TILE_BYTES);
    tile_shape(&wanted, 7, TILE / 2, TILE_BYTES);
    if (rest && products == SCORES) tile_shape(&wanted, 5, num, rest * 4), tile_shape(&wanted, 7, rest, TILE_BYTES);
    if (rest && products == VALUES) tile_shape(&wanted, 4, num, rest * 4), tile_shape(&wanted, 6, TILE / 2, rest * 4);
    tile_configure(&wanted);
}

/* scores [num][t * TILE + i] = row . (tile t, column i), for one or four tiles. Those `ahead`, if any, are fetched meanwhile. */
INLINE void score_tiles(int T, const char *rows, const char *const *keys, const char *const *ahead, size_t stride,
                        size_t dim, float *scores) {
#define EACH_SUM(do, ...) { do(0, __VA_ARGS__); if (T > 1) { do(1, __VA_ARGS__); do(2, __VA_ARGS__); do(3, __VA_ARGS__); } }
#define ZERO(t, _) tile_zero(t)
#define SCORE(t, query, key) tile_load(key, keys[t] + l * stride * 4, stride * 4), tile_dot_bf16(t, query, key)
#define STORE(t, _) tile_store(t, scores + t * TILE, CHUNK * 4)
    EACH_SUM(ZERO, )
    for (size_t l = 0; l < dim / 2; l += TILE_ROWS) {
        const size_t lanes = dim / 2 - l < TILE_ROWS ? dim / 2 - l : TILE_ROWS;
        for (size_t i = l; ahead && i < l + lanes; i++)
            for (int t = 0; t < T; t++) __builtin_prefetch(ahead[t] + i * TILE_BYTES, 0, 2);
        if (lanes == TILE_ROWS) {
            tile_load(4, rows + l * 4, dim * 2);
            EACH_SUM(SCORE, 4, 6)
        } else {
            tile_load(5, rows + l * 4, dim * 2);
            EACH_SUM(SCORE, 5, 7)
        }
    }
    EACH_SUM(STORE, )
#undef EACH_SUM
#undef ZERO
#undef SCORE
#undef STORE
}

/* The scores of a strip. */
static void score_strip_tiles(size_t num, const float *rows, const struct chunk *c, size_t dim, float *scores,
                              uint64_t *shapes) {
    size_t t = 0, alike = c->lane_stride == TILE || c->num_tiles < c->num_direct ? c->num_tiles : c->num_direct;
    shape_attention(SCORES, num, dim / 2 % TILE_ROWS, shapes);
    for (; t + 4 <= alike; t += 4)
        score_tiles(4, (const char *)rows, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, dim, scores + t * TILE);
    for (; t < c->num_tiles; t++)
        score_tiles(1, (const char *)rows, c->k + t, NULL, t < c->num_direct ? c->lane_stride : TILE, dim, scores + t * TILE);
}

/* sums [num][d ..] += weights . V, for one or four tiles of dimensions, or those behind the last whole one. */
INLINE void weigh_tiles(int D, const float *weights, float *sums, const struct chunk *c, size_t dim, size_t d) {
#define EACH_SUM(do)                                                    \
    if (d + TILE > dim) { do(4, 6, 0); }                                \
    else { do(0, 7, 0); if (D > 1) { do(1, 7, 1); do(2, 7, 2); do(3, 7, 3); } }
#define LOAD(sum, value, i) tile_load(sum, sums + d + i * TILE, dim * 4)
#define WEIGH(sum, value, i) tile_load(value, values + i * TILE_BYTES, dim * 4), tile_dot_bf16(sum, 5, value)
#define STORE(sum, value, i) tile_store(sum, sums + d + i * TILE, dim * 4)
    const int fetches = d == 0 && c->is_cold;
    EACH_SUM(LOAD)
    for (size_t t = 0; t < c->num_tiles; t++) {
        const char *values = c->v[t] + d * 4;
        for (size_t i = t * dim / 2 / c->num_tiles; fetches && i < (t + 1) * dim / 2 / c->num_tiles; i++)
            for (size_t j = 0; j < CHUNK / TILE; j++)
                if (c->next_k[j]) __builtin_prefetch(c->next_k[j] + i * c->lane_stride * 4, 0, 2);
        tile_load(5, (const char *)weights + t * TILE * 2, CHUNK * 4);
        EACH_SUM(WEIGH)
    }
    EACH_SUM(STORE)
#undef EACH_SUM
#undef LOAD
#undef WEIGH
#undef STORE
}

/* sums = sums * fade + weights . V, for a strip; `dim` is that of values. */
static void weigh_strip_tiles(size_t num, const float *weights, const float *fade, float *sums, const struct chunk *c, size_t dim,
                              uint64_t *shapes) {
    shape_attention(VALUES, num, dim % TILE, shapes);
    for (size_t r = 0, i; r < num; r++) {
        float *row = sums + r * dim;
        for (i = 0; i + W <= dim; i += W) store_f(row + i, load_f(row + i) * fade[r]);
        for (; i < dim; i++) row[i] *= fade[r];
    }
    size_t d = 0;
    for (; d + 4 * TILE <= dim; d += 4 * TILE) weigh_tiles(4, weights, sums, c, dim, d);
    for (; d < dim; d += TILE) weigh_tiles(1, weights, sums, c, dim, d);
}
