/* y = x w^T + bias. Weights lie in panels of PANEL rows, [lanes][PANEL]: one stream through memory for each panel. Rows
 * of x are packed in groups, [lanes][rows of the group], so that a whole group is multiplied with a panel in registers. The
 * panel is taken in slices of k that stay in the first cache until the last group has passed, while the next slice is fetched.
 *
 * A sum runs over k in order in one register, put aside in float32 between slices: a row of y is the same bits however
 * many rows there are, whichever thread takes them. */

enum {
    GROUP = W == 16 ? 12 : W == 8 ? 3 : 2, /* rows, times PANEL / W vectors, that registers hold as sums */
    MOST_ROWS = HAS_TILES ? 2 * TILE_ROWS : GROUP, /* of a group */
    SLICE = 320,                           /* lanes at most: 40 KiB of a panel */
    TILE_SLICE = 288,                      /* the same on tiles, where rows are read past the first cache, */
    SHORT_SLICE = 96,                      /* and beside few groups, which wait for the panel */
    FEW_GROUPS = 2,
    BLOCK_GROUPS = 16,                     /* groups whose sums are kept on the stack, */
    BLOCK_PANELS = HAS_TILES ? 8 : 1,      /* for so many panels */
    BLOCK_SUMS = BLOCK_GROUPS * MOST_ROWS * PANEL,
    KEPT_BYTES = 3 << 18,                  /* of packed rows that stay in the second cache while panels pass */
    LINES_AHEAD = 8,                       /* cache lines to fetch during 4 lanes: as many as these are */
    TILE_LANES = 16,                       /* of a tile of x or of a panel */
    NEAR = 4096,                           /* bytes ahead that a group alone fetches */
};

INLINE enum kind kind_of_weight(const struct gemm_args *a) {
    return kind_of(a->w.format == WEIGHT_F32 ? DT_F32 : DT_BF16);
}

/* Whether tiles multiply pairs of bfloat16: those of a panel, or what its codes are unpacked to. */
INLINE int has_pairs(const struct linear *w) { return HAS_TILES && w->format != WEIGHT_F32 && w->format != WEIGHT_INT8; }
INLINE int goes_by_tiles(const struct gemm_args *a) { return has_pairs(&a->w) || is_wide(&a->w); }

/* Bytes of a lane of x: pairs that the machine cannot multiply directly become two float32. */
INLINE size_t row_lane_bytes(enum kind kind) { return kind == KIND_BF16 ? 8 : 4; }

/* The rows of a group at most. */
INLINE int64_t most_rows(const struct gemm_args *a) {
    if (is_wide(&a->w)) return MOST_ROWS / WIDE_PARTS;
    if (goes_by_tiles(a)) return MOST_ROWS;
    return is_quantised(a->w.format) ? QROWS : GROUP;
}

int64_t gemm_num_groups(const struct gemm_args *a) {
    int64_t most = most_rows(a);
    return (a->m + most - 1) / most;
}

/* Groups have about as many rows as each other. On tiles many are full, but for the last one: shapes of tiles stay as they are. */
int64_t gemm_group_start(const struct gemm_args *a, int64_t group) {
    const int64_t most = most_rows(a);
    if (!goes_by_tiles(a) || a->m <= FEW_GROUPS * most) return group * a->m / gemm_num_groups(a);
    return group * most < a->m ? group * most : a->m;
}

/* Bytes of a packed row. In tiles zeros follow the last lane. */
INLINE size_t gemm_row_bytes(const struct gemm_args *a) {
    if (is_wide(&a->w)) return wide_row_bytes(a->w.k);
    if (has_pairs(&a->w)) return (size_t)quant_num_blocks(a->w.k) * TILE_BYTES;
    if (is_quantised(a->w.format)) return quant_row_bytes(a->w.format, a->w.k);
    enum kind kind = kind_of_weight(a);
    return (size_t)a->w.k / pair_of(kind) * row_lane_bytes(kind);
}

int64_t gemm_block_panels(void) { return BLOCK_PANELS; }

int32_t gemm_goes_by_rows(const struct gemm_args *a) { return goes_by_tiles(a); }

/* On tiles, as many as stay in the second cache while panels pass, and at least half of the most: each block reads all weights. */
int64_t gemm_block_groups(const struct gemm_args *a) {
    if (!gemm_goes_by_rows(a)) return BLOCK_GROUPS;
    int64_t kept = (int64_t)(KEPT_BYTES / ((size_t)most_rows(a) * gemm_row_bytes(a)));
    return kept > BLOCK_GROUPS ? BLOCK_GROUPS : kept > BLOCK_GROUPS / 2 ? kept : BLOCK_GROUPS / 2;
}

size_t gemm_rows_bytes(const struct gemm_args *a) { return (size_t)a->m * gemm_row_bytes(a); }

/* Lay the lanes of packed rows side by side: [lanes][num][lane bytes]. */
INLINE void interleave(char *to, const char *const *from, int64_t num, size_t bytes, size_t lane) {
    for (int64_t r = 0; r < num; r++)
        for (size_t i = 0; i < bytes; i += lane) memcpy(to + i * (size_t)num + (size_t)r * lane, from[r] + i, lane);
}

/* Pack some lanes of row `r` of a group of `num`. */
INLINE void pack_lanes(enum kind kind, const uint32_t *x, size_t lanes, uint32_t *to, size_t r, size_t num) {
    if (kind == KIND_BF16) {
        to += 2 * r;
        for (size_t l = 0; l < lanes; l++, to += 2 * num) to[0] = x[l] << 16, to[1] = x[l] & 0xffff0000;
    } else {
        for (size_t l = 0; l < lanes; l++) to[l * num + r] = x[l];
    }
}

/* Pack rows for tiles of bfloat16: [k / QBLOCK][num][TILE_BYTES]. */
INLINE void pack_pairs(const struct gemm_args *a, const void *x_rows, int64_t stride, void *group, int64_t num) {
    struct view to = {group, 0, DT_BF16};
    for (int64_t begin = 0; begin < a->w.k; begin += QBLOCK)
        for (int64_t r = 0; r < num; r++, to.at += QBLOCK) {
            struct view x = {(void *)x_rows, (size_t)(r * stride), (enum dtype)a->w.dtype};
            vf values[QBLOCK / W];
            load_block(x, begin, a->w.k, values);
            UNROLL for (int i = 0; i < QBLOCK / W; i++) put(to, i * W, QBLOCK, values[i]);
        }
}

/* Pack one group, its rows `stride` values apart from `x` on. */
void gemm_pack_group(const struct gemm_args *a, int64_t group, const void *x_rows, int64_t stride) {
    enum { AT_ONCE = 16 }; /* lanes of each row */
    enum kind kind = kind_of_weight(a);
    size_t lanes = (size_t)a->w.k / pair_of(kind);
    int64_t first = gemm_group_start(a, group), num = gemm_group_start(a, group + 1) - first;
    void *to = (char *)a->rows + (size_t)first * gemm_row_bytes(a);
    if (is_wide(&a->w)) wide_pack_rows(a, x_rows, stride, to, num);
    else if (has_pairs(&a->w)) pack_pairs(a, x_rows, stride, to, num);
    else if (is_quantised(a->w.format)) quant_pack_rows(a, x_rows, stride, quant_group_at(a->w.format, a->w.k, a->rows, first, num), num);
    else for (size_t l = 0; l < lanes; l += AT_ONCE)
        for (int64_t r = 0; r < num; r++) {
            const uint32_t *x = (const uint32_t *)x_rows + (size_t)(r * stride) / pair_of(kind) + l;
            uint32_t *at = (uint32_t *)to + l * (size_t)num * row_lane_bytes(kind) / 4;
            pack_lanes(kind, x, lanes - l < AT_ONCE ? lanes - l : AT_ONCE, at, (size_t)r, (size_t)num);
        }
}

/* Pack one group from rows that were each packed alone. `rows[i]` is where the product's row i is among those. */
void gemm_gather(const struct gemm_args *a, int64_t group, const char *alone, const int32_t *rows) {
    size_t bytes = gemm_row_bytes(a), lane = is_quantised(a->w.format) ? 4 : row_lane_bytes(kind_of_weight(a));
    int64_t first = gemm_group_start(a, group), num = gemm_group_start(a, group + 1) - first;
    char *to = (char *)a->rows + (size_t)first * bytes;
    const char *from[num];
    for (int64_t r = 0; r < num; r++) from[r] = alone + (size_t)rows[first + r] * bytes;
    if (is_wide(&a->w)) {
        size_t codes = wide_tiles_bytes(a->w.k);
        interleave(to, from, num, codes, WIDE_PARTS * TILE_BYTES);
        for (int64_t r = 0; r < num; r++) from[r] += codes;
        to += (size_t)num * codes, bytes -= codes;
    }
    if (has_pairs(&a->w)) interleave(to, from, num, bytes, TILE_BYTES);
    else if (lane == 8) interleave(to, from, num, bytes, 8);
    else interleave(to, from, num, bytes, 4);
}

void gemm_pack_rows(const void *args, int64_t begin, int64_t end) {
    const struct gemm_args *a = args;
    size_t size = size_of(a->w.dtype);
    for (int64_t g = begin; g < end; g++)
        gemm_pack_group(a, g, (const char *)a->x + (size_t)(gemm_group_start(a, g) * a->x_stride) * size, a->x_stride);
}

/* sums[R][PANEL] += rows . panel over some lanes; memory is fetched every four lanes. */
INLINE void panel_dot(enum kind kind, int R, const uint32_t *panel, const char *rows, size_t lanes, float *sums,
                      int is_first, struct ahead *ahead) {
    vf acc[GROUP][PANEL / W];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < PANEL / W; v++)
            acc[r][v] = is_first ? splat(0) : load_f(sums + r * PANEL + v * W);
    for (size_t l = 0; l < lanes; l++, rows += (size_t)R * row_lane_bytes(kind)) {
        if (l % 4 == 0) fetch_ahead(ahead, 0);
        vu lane[PANEL / W];
        UNROLL for (int v = 0; v < PANEL / W; v++) lane[v] = load_u(panel + l * PANEL + v * W);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < PANEL / W; v++)
                acc[r][v] = lane_fma(acc[r][v], lane[v], (const float *)rows, (size_t)r, kind);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < PANEL / W; v++) store_f(sums + r * PANEL + v * W, acc[r][v]);
}

/* Two products on tiles have the same rows in each group, so the first can write its results where the second reads them. */
int32_t gemm_packs_for(const struct linear *w, const struct linear *next) {
    return has_pairs(w) && has_pairs(next) && w->dtype == DT_BF16 && next->k == num_columns_of(w) && next->k % QBLOCK == 0;
}

/* The address of the results of a panel of row `r` of a group of `num` that begins with row `first`. */
INLINE char *gemm_target(const struct gemm_args *a, int64_t first, int64_t num, int64_t r, int64_t panel) {
    int64_t column = panel * panel_columns_of(&a->w);
    if (HAS_TILES && a->next) {
        int64_t tile = column / (2 * TILE_LANES), rest = column % (2 * TILE_LANES);
        return (char *)a->y + (size_t)(first * a->next->k + (tile * num + r) * 2 * TILE_LANES + rest) * 2;
    }
    return (char *)a->y + (size_t)((first + r) * a->y_stride + column) * size_of(a->y_dtype);
}

/* Prefetch the lines that the results are written to: rows are pages apart. */
INLINE void gemm_prepare(const struct gemm_args *a, int64_t first, int64_t num, int64_t panel) {
    for (int64_t r = 0; r < num; r++) {
        char *y = gemm_target(a, first, num, r, panel);
        __builtin_prefetch(y, 1);
        __builtin_prefetch(y + (is_gated(a->w.activation) ? 31 : 64), 1);
    }
}

/* Rows of one panel whose sums are complete. */
struct complete {
    const float *sums;
    int64_t panel, first, num, num_done;
};

/* Up to `most_rows` more of them: sums, plus bias, perhaps activated, rounded into y. */
INLINE void finish_as(const struct gemm_args *a, struct complete *c, int64_t most_rows, enum dtype y_dtype) {
    int64_t most = panel_columns_of(&a->w), first = c->panel * most, rest = num_columns_of(&a->w) - first;
    int64_t end = c->num_done + most_rows < c->num ? c->num_done + most_rows : c->num;
    int64_t num_columns = rest < most ? rest : most;
    struct view bias = {(void *)a->w.bias, (size_t)first, (enum dtype)a->w.dtype}, up_bias = bias;
    up_bias.at += (size_t)(a->w.n / 2);
    for (int64_t r = c->num_done; r < end; r++) {
        const float *from = c->sums + r * PANEL;
        struct view y = {gemm_target(a, c->first, c->num, r, c->panel), 0, y_dtype};
        for (int64_t i = 0; i < num_columns; i += W) {
            vf sum = load_f(from + i);
            if (a->w.bias) sum += get(bias, i, num_columns);
            if (a->w.activation == ACT_RELU2) {
                sum = max_f(sum, splat(0));
                sum *= sum;
            } else if (a->w.activation == ACT_GELU_ALONE) {
                sum = gelu(sum);
            } else if (a->w.activation == ACT_GELU_TANH_ALONE) {
                sum = activate(sum, ACT_GELU_TANH);
            } else if (a->w.activation) {
                vf up = load_f(from + PANEL / 2 + i);
                if (a->w.bias) up += get(up_bias, i, num_columns);
                sum = activate(sum, (enum activation)a->w.activation) * up;
            }
            put(y, i, num_columns, sum);
        }
    }
    c->num_done = end;
}

static void finish_rows(const struct gemm_args *a, struct complete *c, int64_t most_rows) {
    BY_TYPE(a->y_dtype, finish_as, a, c, most_rows);
}

static void gemm_finish(const struct gemm_args *a, const float *sums, int64_t first, int64_t num, int64_t panel) {
    finish_rows(a, &(struct complete){sums, panel, first, num, 0}, num);
}

#define EACH_GROUP_SIZE(do) do(1) do(2) do(3) do(4) do(5) do(6) do(7) do(8) do(9) do(10) do(11) do(12)

static void panel_dot_group(enum kind kind, int64_t num_rows, const uint32_t *panel, const char *rows, size_t lanes,
                            float *sums, int is_first, struct ahead *ahead) {
#define DOT_CASE(R)                                                                                               \
    case R:                                                                                                       \
        if (R > GROUP) break;                                                                                     \
        if (kind == KIND_F32) panel_dot(KIND_F32, R, panel, rows, lanes, sums, is_first, ahead);                  \
        else if (!HAS_TILES) panel_dot(KIND_OF_PAIRS, R, panel, rows, lanes, sums, is_first, ahead);              \
        break;
    switch (num_rows) { EACH_GROUP_SIZE(DOT_CASE) }
#undef DOT_CASE
}

/* sums[R][PANEL] += R rows, `stride` bytes apart, . panel: as panel_dot, of few lanes, whose rows are not packed. The next
 * panel, which comes a while later, is fetched meanwhile: eight sequences of four adapters of rank 16 make a step of SmolLM2
 * in bfloat16 1.42 times as long, and without that 1.52 times. */
INLINE void low_dot(enum kind kind, int R, const uint32_t *panel, const char *rows, size_t stride, size_t lanes,
                    float *sums) {
    vf acc[GROUP][PANEL / W];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < PANEL / W; v++) acc[r][v] = load_f(sums + r * PANEL + v * W);
    for (size_t l = 0; l < lanes; l++) {
        __builtin_prefetch(panel + (lanes + l) * PANEL, 0, 2);
        __builtin_prefetch(panel + (lanes + l) * PANEL + PANEL / 2, 0, 2);
        vu lane[PANEL / W];
        UNROLL for (int v = 0; v < PANEL / W; v++) lane[v] = load_u(panel + l * PANEL + v * W);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < PANEL / W; v++)
                acc[r][v] = lane_fma(acc[r][v], lane[v], (const float *)(rows + (size_t)r * stride), l, kind);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < PANEL / W; v++) store_f(sums + r * PANEL + v * W, acc[r][v]);
}

static void low_dot_rows(const struct linear *up, int64_t num, int64_t panel, const char *rows, float *sums) {
    enum kind kind = up->format == WEIGHT_F32 ? KIND_F32 : KIND_OF_PAIRS;
    size_t lanes = (size_t)up->k / pair_of(kind), stride = lanes * row_lane_bytes(kind);
    const uint32_t *from = (const uint32_t *)up->packed + (size_t)panel * lanes * PANEL;
#define LOW_CASE(R)                                                                                \
    case R:                                                                                        \
        if (R > GROUP) break;                                                                      \
        if (kind == KIND_F32) low_dot(KIND_F32, R, from, rows, stride, lanes, sums);               \
        else low_dot(KIND_OF_PAIRS, R, from, rows, stride, lanes, sums);                           \
        break;
    switch (num) { EACH_GROUP_SIZE(LOW_CASE) }
#undef LOW_CASE
}

/* Add addends to the sums of some rows and one panel, neighbours of one adapter together. */
static void add_low_rank(const struct gemm_args *a, int64_t first, int64_t num_rows, int64_t panel, float *sums) {
    for (int64_t r = 0, num; r < num_rows; r += num) {
        const struct addend *at = a->addends + first + r;
        for (num = 1; num < GROUP && r + num < num_rows && at[num].up == at->up; num++) continue;
        if (at->up) low_dot_rows(at->up, num, panel, at->low, sums + r * PANEL);
    }
}

static void gemm_quantised(const struct gemm_args *a, const struct gemm_share *share) {
    float sums[BLOCK_GROUPS * QROWS * PANEL];
    int64_t num_blocks = quant_num_blocks(a->w.k), block_start = gemm_group_start(a, share->group_begin);
    int64_t most = quant_part_blocks(&a->w, share->group_end - share->group_begin);
    for (int64_t p = share->panel_begin; p < share->panel_end; p++)
        for (struct part part = {0, most}; part.first < num_blocks; part.first += most) {
            int is_last = part.first + most >= num_blocks;
            if (is_last) part.num = num_blocks - part.first;
            for (int64_t g = share->group_begin; g < share->group_end; g++) {
                int64_t first = gemm_group_start(a, g), num_rows = gemm_group_start(a, g + 1) - first;
                float *done = sums + (first - block_start) * PANEL;
                if (is_last) gemm_prepare(a, first, num_rows, p);
                quant_panel(&a->w, a->rows, first, num_rows, p, part, done, g - share->group_begin,
                            share->group_end - share->group_begin);
                if (!is_last) continue;
                if (a->addends) add_low_rank(a, first, num_rows, p, done);
                gemm_finish(a, done, first, num_rows, p);
            }
        }
}

#include "gemm_tiles.h"

/* Cache lines to fetch every four lanes. Groups that share a slice fetch the next one together. A group alone meets memory as it
 * comes, and fetches just ahead of where it is; for a single row what some machines fetch by themselves is enough. */
INLINE size_t lines_ahead(const struct gemm_args *a, int64_t num_groups) {
    return a->m == 1 && !fetches_by_page() ? 0 : (LINES_AHEAD - 1) / (size_t)num_groups + 1;
}

void gemm(const struct gemm_args *a, const struct gemm_share *share) {
    if (goes_by_tiles(a)) {
        gemm_tiles(a, share);
        return;
    }
    if (is_quantised(a->w.format)) {
        gemm_quantised(a, share);
        return;
    }
    enum kind kind = kind_of_weight(a);
    size_t lanes = (size_t)a->w.k / pair_of(kind);
    int64_t num_groups = share->group_end - share->group_begin;
    size_t slice_lanes = ((lanes - 1) / ((lanes - 1) / SLICE + 1) / 4 + 1) * 4; /* slices of about one size */
    size_t lines = lines_ahead(a, num_groups);
    float sums[BLOCK_SUMS];
    int64_t block_start = gemm_group_start(a, share->group_begin);
    for (int64_t p = share->panel_begin; p < share->panel_end; p++) {
        const uint32_t *panel = (const uint32_t *)a->w.packed + (size_t)p * lanes * PANEL;
        for (size_t at = 0, num; at < lanes; at += num) {
            num = lanes - at < slice_lanes ? lanes - at : slice_lanes;
            const uint32_t *slice = panel + at * PANEL;
            const char *next = (const char *)(slice + num * PANEL);
            struct ahead ahead = num_groups == 1 ? lines_from((const char *)slice + NEAR, num * PANEL * 4, lines)
                                                 : next_part(next, num * PANEL * 4, lines, 0);
            for (int64_t g = share->group_begin; g < share->group_end; g++) {
                int64_t first = gemm_group_start(a, g), num_rows = gemm_group_start(a, g + 1) - first;
                int is_last = at + num == lanes;
                if (is_last && !a->next) gemm_prepare(a, first, num_rows, p);
                const char *rows = (const char *)a->rows + (size_t)first * gemm_row_bytes(a);
                rows += at * (size_t)num_rows * row_lane_bytes(kind);
                float *done = sums + (first - block_start) * PANEL;
                ahead.num = (g - share->group_begin) * (int64_t)lines < LINES_AHEAD ? lines : 0;
                panel_dot_group(kind, num_rows, slice, rows, num, done, at == 0, &ahead);
                if (!is_last) continue;
                if (a->addends) add_low_rank(a, first, num_rows, p, done);
                gemm_finish(a, done, first, num_rows, p);
            }
        }
    }
}
