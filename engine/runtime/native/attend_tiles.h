/* The two products of attention on tiles, for up to TILE_ROWS rows of bfloat16: a tile of keys, and a tile of values, are read as
 * they lie in the pool. Each row's sums are the same bits whatever other rows there are. */

/* The heads that tiles hold: keys whose numbers fill tiles, and values whose columns do. */
INLINE int has_tiled_heads(const struct attend_args *a) {
    return HAS_TILES && a->pool.dtype == DT_BF16 && a->pool.head_dim % (2 * TILE) == 0 && value_dim_of(&a->pool) % TILE == 0;
}

/* Registers 0 to 3 hold sums, 4 queries, 5 weights, 6 keys, 7 values. */
INLINE void shape_attention(size_t num, struct tile_shapes *shapes) {
    struct tile_shapes wanted = {0};
    for (int i = 0; i < 5; i++) tile_shape(&wanted, i, num, TILE_BYTES);
    tile_shape(&wanted, 5, num, TILE * 2);
    tile_shape(&wanted, 6, TILE_ROWS, TILE_BYTES);
    tile_shape(&wanted, 7, TILE / 2, TILE_BYTES);
    tile_reshape(shapes, &wanted);
}

/* scores [num][t * TILE + i] = row . (tile t, column i), for some tiles. Those `ahead`, if any, are fetched meanwhile. */
INLINE void score_tiles(int T, const char *rows, const uint32_t *const *keys, const uint32_t *const *ahead, size_t stride,
                        size_t dim, float *scores) {
    tile_zero(0);
    if (T > 1) tile_zero(1), tile_zero(2), tile_zero(3);
    for (size_t l = 0; l < dim / 2; l += TILE_ROWS) {
        for (size_t i = 0; ahead && i < (size_t)T * TILE_ROWS; i++)
            __builtin_prefetch(ahead[i / TILE_ROWS] + (l + i % TILE_ROWS) * TILE, 0, 2);
        tile_load(4, rows + l * 4, dim * 2);
        tile_load(6, keys[0] + l * stride, stride * 4);
        tile_dot_bf16(0, 4, 6);
        if (T == 1) continue;
        tile_load(6, keys[1] + l * stride, stride * 4);
        tile_dot_bf16(1, 4, 6);
        tile_load(6, keys[2] + l * stride, stride * 4);
        tile_dot_bf16(2, 4, 6);
        tile_load(6, keys[3] + l * stride, stride * 4);
        tile_dot_bf16(3, 4, 6);
    }
    tile_store(0, scores, CHUNK * 4);
    if (T == 1) return;
    tile_store(1, scores + TILE, CHUNK * 4);
    tile_store(2, scores + 2 * TILE, CHUNK * 4);
    tile_store(3, scores + 3 * TILE, CHUNK * 4);
}

/* The scores of a strip. */
static void score_strip_tiles(size_t num, const float *rows, const struct chunk *c, size_t dim, float *scores,
                              struct tile_shapes *shapes) {
    size_t t = 0, alike = c->lane_stride == TILE || c->num_tiles < c->num_direct ? c->num_tiles : c->num_direct;
    shape_attention(num, shapes);
    for (; t + 4 <= alike; t += 4)
        score_tiles(4, (const char *)rows, c->k + t, c->is_cold ? c->v + t : NULL, c->lane_stride, dim, scores + t * TILE);
    for (; t < c->num_tiles; t++)
        score_tiles(1, (const char *)rows, c->k + t, NULL, t < c->num_direct ? c->lane_stride : TILE, dim, scores + t * TILE);
}

/* sums [num][d ..] += weights . V, for one or four tiles of dimensions. */
INLINE void weigh_tiles(int D, const float *weights, float *sums, const struct chunk *c, size_t dim, size_t d) {
    tile_load(0, sums + d, dim * 4);
    if (D > 1) {
        tile_load(1, sums + d + TILE, dim * 4);
        tile_load(2, sums + d + 2 * TILE, dim * 4);
        tile_load(3, sums + d + 3 * TILE, dim * 4);
    }
    for (size_t t = 0; t < c->num_tiles; t++) {
        const uint32_t *values = c->v[t] + d;
        const char *ahead = d == 0 ? c->next_k[t] : NULL;
        for (size_t i = 0; ahead && i < dim / 2; i++, ahead += c->lane_stride * 4) __builtin_prefetch(ahead, 0, 2);
        tile_load(5, (const char *)weights + t * TILE * 2, CHUNK * 4);
        tile_load(7, values, dim * 4);
        tile_dot_bf16(0, 5, 7);
        if (D == 1) continue;
        tile_load(7, values + TILE, dim * 4);
        tile_dot_bf16(1, 5, 7);
        tile_load(7, values + 2 * TILE, dim * 4);
        tile_dot_bf16(2, 5, 7);
        tile_load(7, values + 3 * TILE, dim * 4);
        tile_dot_bf16(3, 5, 7);
    }
    tile_store(0, sums + d, dim * 4);
    if (D == 1) return;
    tile_store(1, sums + d + TILE, dim * 4);
    tile_store(2, sums + d + 2 * TILE, dim * 4);
    tile_store(3, sums + d + 3 * TILE, dim * 4);
}

/* sums = sums * fade + weights . V, for a strip; `dim` is that of values. */
static void weigh_strip_tiles(size_t num, const float *weights, const float *fade, float *sums, const struct chunk *c, size_t dim,
                              struct tile_shapes *shapes) {
    size_t d = 0;
    shape_attention(num, shapes);
    for (size_t r = 0; r < num; r++)
        for (size_t i = 0; i < dim; i += W) store_f(sums + r * dim + i, load_f(sums + r * dim + i) * fade[r]);
    for (; d + 4 * TILE <= dim; d += 4 * TILE) weigh_tiles(4, weights, sums, c, dim, d);
    for (; d < dim; d += TILE) weigh_tiles(1, weights, sums, c, dim, d);
}
