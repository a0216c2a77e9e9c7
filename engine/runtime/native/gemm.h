/* y = x w^T with bfloat16 weights packed in tiles, for few rows: a decode step's linears, bound by reading w.
 * The tile is the same as attention's K: TILE weight rows side by side, so a product is tile_dot with rows of x. */

enum { GEMM_ROWS = 16, GEMM_COLUMNS = STEP_TILES * TILE };

#ifdef BF16_DOT
#define gemm_widen NULL
#else
/* x in float32, where the machine cannot multiply bfloat16 itself. */
static void gemm_widen(const struct gemm_args *g, float *wide) {
    for (int64_t m = 0; m < g->m; m++) {
        struct view x = {(void *)g->x, (size_t)(m * g->x_stride), DT_BF16};
        struct view to = {wide, (size_t)(m * g->k), DT_F32};
        for (int64_t k = 0; k < g->k; k += W) put(to, k, g->k, get(x, k, g->k));
    }
}
#endif

INLINE void gemm_columns(const struct gemm_args *g, int T, const float *rows, size_t row_stride, int64_t tile) {
    enum kind kind = kind_of(DT_BF16);
    size_t lanes = (size_t)g->k / 2;
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
            struct view bias = {(void *)g->bias, (size_t)n, DT_BF16};
            struct view y = {g->y, (size_t)((m + r) * g->y_stride + n), DT_BF16};
            for (int64_t i = 0; i < num_columns; i += W) {
                vf sum = get(sums, i, num_columns);
                put(y, i, num_columns, g->bias ? sum + get(bias, i, num_columns) : sum);
            }
        }
    }
}

static void gemm(const struct gemm_args *g, const float *wide, int64_t begin, int64_t end) {
    const float *rows = wide ? wide : g->x;
    size_t row_stride = (size_t)(wide ? g->k : g->x_stride / 2);
    int64_t tile = begin;
    for (; tile + STEP_TILES <= end; tile += STEP_TILES) gemm_columns(g, STEP_TILES, rows, row_stride, tile);
    for (; tile < end; tile++) gemm_columns(g, 1, rows, row_stride, tile);
}
