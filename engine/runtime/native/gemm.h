/* y = x w^T with weights packed in tiles, bound by reading w where rows are few.
 * The tile is the same as attention's K: TILE weight rows side by side, so a product is tile_dot with rows of x, and
 * each sum runs over k in order: a row of y is the same bits however many rows there are. */

enum { GEMM_ROWS = 16, GEMM_COLUMNS = STEP_TILES * TILE };

/* Whether x has to be float32 first: bfloat16, where the machine cannot multiply it itself. */
static int gemm_widens(const struct gemm_args *g) { return kind_of(g->dtype) == KIND_BF16; }

static void gemm_widen(const struct gemm_args *g, float *wide) {
    for (int64_t m = 0; m < g->m; m++) {
        struct view x = {(void *)g->x, (size_t)(m * g->x_stride), g->dtype};
        struct view to = {wide, (size_t)(m * g->k), DT_F32};
        for (int64_t k = 0; k < g->k; k += W) put(to, k, g->k, get(x, k, g->k));
    }
}

INLINE void gemm_columns(const struct gemm_args *g, enum dtype dtype, int T, const float *rows, size_t row_stride,
                         int64_t tile) {
    enum kind kind = kind_of(dtype);
    size_t lanes = (size_t)g->k / pair_of(kind);
    const uint32_t *tiles[STEP_TILES];
    for (int t = 0; t < T; t++) tiles[t] = (const uint32_t *)g->packed + (size_t)(tile + t) * lanes * TILE;
    float out[GEMM_ROWS * GEMM_COLUMNS];
    for (int64_t m = 0; m < g->m; m += GEMM_ROWS) {
        int64_t num_rows = g->m - m < GEMM_ROWS ? g->m - m : GEMM_ROWS;
        tile_dot_rows(kind, T, (size_t)num_rows, rows + (size_t)m * row_stride, row_stride, tiles, TILE, lanes, out,
                      GEMM_COLUMNS);
        for (int64_t r = 0; r < num_rows; r++) {
            int64_t n = tile * TILE, num_columns = g->n - n < T * TILE ? g->n - n : T * TILE;
            struct view sums = {out, (size_t)(r * GEMM_COLUMNS), DT_F32};
            struct view bias = {(void *)g->bias, (size_t)n, dtype};
            struct view y = {g->y, (size_t)((m + r) * g->y_stride + n), g->y_dtype == DT_F32 ? DT_F32 : dtype};
            for (int64_t i = 0; i < num_columns; i += W) {
                vf sum = get(sums, i, num_columns);
                put(y, i, num_columns, g->bias ? sum + get(bias, i, num_columns) : sum);
            }
        }
    }
}

INLINE void gemm_as(const struct gemm_args *g, enum dtype dtype, const float *wide, int64_t begin, int64_t end) {
    const float *rows = wide ? wide : g->x;
    size_t row_stride = (size_t)(wide ? g->k : dtype == DT_F32 ? g->x_stride : g->x_stride / 2);
    int64_t tile = begin;
    for (; tile + STEP_TILES <= end; tile += STEP_TILES) gemm_columns(g, dtype, STEP_TILES, rows, row_stride, tile);
    for (; tile < end; tile++) gemm_columns(g, dtype, 1, rows, row_stride, tile);
}

static void gemm(const struct gemm_args *g, const float *wide, int64_t begin, int64_t end) {
    if (g->dtype == DT_F32)
        gemm_as(g, DT_F32, wide, begin, end);
    else
        gemm_as(g, DT_BF16, wide, begin, end);
}
