/* Products on tiles (gemm.h): of panels as they lie, pairs of bfloat16 or codes of rows with one scale (wide_rows.h), and of pairs that
 * codes are unpacked to (quant_tiles.h). */

/* A product on tiles. While tiles of one group wait for its rows, vectors finish the rows of the group before. */
struct tiling {
    const struct gemm_args *a;
    struct complete before;
    uint64_t shapes; /* see shape_products */
    struct unpacking *unpacks; /* NULL: weights are multiplied as they lie */
};

/* c += rows in a . weights in b. */
#define TILE_DOT(is_codes, c, a, b)              \
    do {                                         \
        if (is_codes) tile_dot_codes(c, a, b);   \
        else tile_dot_bf16(c, a, b);             \
    } while (0)

/* sums[num][PANEL] += rows . panel over some lanes, of up to two tiles of rows: lanes fill whole tiles, or one in part. */
INLINE void panel_dot_tiles(int is_codes, int is_high, size_t num, const uint32_t *panel, const char *rows, size_t lanes, float *sums,
                            int is_first, struct ahead *ahead, struct tiling *tiling) {
    const size_t width = PANEL * 4, num_tiles = (lanes - 1) / TILE_LANES + 1;
    struct complete *before = &tiling->before;
    const int64_t at_once = (before->num - before->num_done + (int64_t)num_tiles - 1) / (int64_t)num_tiles;
    float *last = sums + TILE_ROWS * PANEL;
    if (is_first) {
        tile_zero(0), tile_zero(1);
        if (is_high) tile_zero(2), tile_zero(3);
    } else {
        tile_load(0, sums, width), tile_load(1, sums + TILE_ROWS, width);
        if (is_high) tile_load(2, last, width), tile_load(3, last + TILE_ROWS, width);
    }
    struct unpacking *unpacks = tiling->unpacks;
    const size_t mask = unpacks ? unpacks->kept * TILE_LANES - 1 : SIZE_MAX; /* of a lane's place among those that are kept */
    if (unpacks && !unpacks->at) unpack_next(unpacks);
    for (size_t l = 0; l < lanes; l += TILE_LANES, rows += num * TILE_BYTES) {
        const uint32_t *at = panel + (l & mask) * PANEL;
        fetch_ahead(ahead, 0);
        if (at_once) finish_rows(tiling->a, before, at_once);
        if (unpacks) unpack_next(unpacks);
        tile_load_once(4, rows, TILE_BYTES);
        tile_load(6, at, width);
        tile_load(7, at + PANEL / 2, width);
        TILE_DOT(is_codes, 0, 4, 6);
        TILE_DOT(is_codes, 1, 4, 7);
        if (!is_high) continue;
        tile_load_once(5, rows + TILE_ROWS * TILE_BYTES, TILE_BYTES);
        TILE_DOT(is_codes, 2, 5, 6);
        TILE_DOT(is_codes, 3, 5, 7);
    }
    tile_store(0, sums, width), tile_store(1, sums + TILE_ROWS, width);
    if (is_high) tile_store(2, last, width), tile_store(3, last + TILE_ROWS, width);
}

static void panel_dot_group_tiles(int is_codes, size_t num, const uint32_t *panel, const char *rows, size_t lanes, float *sums, int is_first,
                                  struct ahead *ahead, struct tiling *tiling) {
    shape_products(&tiling->shapes, num, lanes < TILE_LANES ? lanes : TILE_LANES);
#define TILES_CASE(is_codes)                                                                                            \
    if (num > TILE_ROWS) panel_dot_tiles(is_codes, 1, num, panel, rows, lanes, sums, is_first, ahead, tiling); \
    else panel_dot_tiles(is_codes, 0, num, panel, rows, lanes, sums, is_first, ahead, tiling)
    if (is_codes) {
        TILES_CASE(1);
    } else {
        TILES_CASE(0);
    }
#undef TILES_CASE
}

/* The same for one row, by vectors in the order of tiles: a stream of vectors is read faster. Never inlined: compilers move
 * arithmetic across the change of what becomes of denormals. */
__attribute__((noinline)) static void row_dot(const uint32_t *panel, const uint32_t *row, size_t lanes, float *sums) {
    vf acc[PANEL / W];
    UNROLL for (int v = 0; v < PANEL / W; v++) acc[v] = load_f(sums + v * W);
    for (size_t l = 0; l < lanes; l += TILE_LANES) {
        vf even[PANEL / W] = {0}, odd[PANEL / W] = {0};
        const size_t end = lanes - l < TILE_LANES ? lanes : l + TILE_LANES;
        for (size_t i = l; i < end; i++, panel += PANEL) {
            __builtin_prefetch((const char *)panel + NEAR, 0, 2);
            __builtin_prefetch((const char *)panel + NEAR + 64, 0, 2);
            const vu both = splat_u(row[i]);
            UNROLL for (int v = 0; v < PANEL / W; v++) {
                const vu lane = load_u(panel + v * W);
                even[v] = fused((vf)(both << 16), (vf)(lane << 16), even[v]);
                odd[v] = fused((vf)(both & 0xffff0000), (vf)(lane & 0xffff0000), odd[v]);
            }
        }
        UNROLL for (int v = 0; v < PANEL / W; v++) acc[v] += even[v] + odd[v];
    }
    UNROLL for (int v = 0; v < PANEL / W; v++) store_f(sums + v * W, acc[v]);
}

static void row_dot_tiles(const uint32_t *panel, const char *row, size_t lanes, float *sums, int is_first) {
    if (is_first) memset(sums, 0, PANEL * sizeof *sums);
    const unsigned before = flush_denormals();
    row_dot(panel, (const uint32_t *)row, lanes, sums);
    restore_denormals(before);
}

/* Panels whose slices follow each other, so that rows that do not stay in the second cache are read once for all of them. Others
 * are read to their ends: each is one stream. */
INLINE int64_t block_panels(const struct gemm_args *a, const struct gemm_share *share) {
    int64_t rows = gemm_group_start(a, share->group_end) - gemm_group_start(a, share->group_begin);
    return (size_t)rows * gemm_row_bytes(a) > KEPT_BYTES ? BLOCK_PANELS : 1;
}

/* A slice of a panel: `num` lanes from `at` on, and what is fetched meanwhile. */
struct slice {
    const uint32_t *from;
    struct ahead ahead;
    size_t at, num;
};

INLINE int is_unpacked(const struct linear *w) { return is_quantised(w->format) && has_pairs(w); }

/* Lanes of a panel that tiles multiply: pairs of bfloat16, or four codes. */
INLINE size_t tile_lanes(const struct linear *w) {
    if (is_wide(w)) return wide_lanes(w->k);
    return is_unpacked(w) ? (size_t)quant_num_blocks(w->k) * TILE_LANES : (size_t)w->k / 2;
}

/* Where lane `at` of panel `p` lies, of a block of codes the first one. */
INLINE const char *tile_lane(const struct linear *w, int64_t p, size_t at) {
    if (is_unpacked(w)) return quant_block(w, p, (int64_t)(at / TILE_LANES));
    return (const char *)w->packed + ((size_t)p * tile_lanes(w) + at) * PANEL * 4;
}

static void multiply_slice(struct tiling *tiling, const struct gemm_share *share, int64_t p, struct slice s, float *sums) {
    const struct gemm_args *a = tiling->a;
    int64_t block_start = gemm_group_start(a, share->group_begin);
    const int is_last = s.at + s.num == tile_lanes(&a->w), is_codes = is_wide(&a->w), parts = is_codes ? WIDE_PARTS : 1;
    /* Beside a full block, rows would wait for the lines of results that are fetched. */
    const int prepares = is_last && !a->next && share->group_end - share->group_begin < BLOCK_GROUPS / 2;
    for (int64_t g = share->group_begin; g < share->group_end; g++) {
        int64_t first = gemm_group_start(a, g), num_rows = gemm_group_start(a, g + 1) - first;
        if (prepares) gemm_prepare(a, first, num_rows, p);
        char *group = (char *)a->rows + (size_t)first * gemm_row_bytes(a);
        const char *rows = group + s.at * (size_t)(num_rows * parts) * 4;
        float *done = sums + (first - block_start) * parts * PANEL;
        if (num_rows == 1 && !tiling->unpacks) {
            finish_rows(a, &tiling->before, MOST_ROWS); /* their sums may be where these come */
            if (is_codes) wide_row_dot(s.from, (const uint32_t *)rows, s.num, done, s.at == 0);
            else row_dot_tiles(s.from, rows, s.num, done, s.at == 0);
        } else {
            panel_dot_group_tiles(is_codes, (size_t)(num_rows * parts), s.from, rows, s.num, done, s.at == 0, &s.ahead, tiling);
        }
        if (!is_last) continue;
        if (is_codes) wide_join(&a->w, group, num_rows, p * PANEL, done);
        if (a->addends) add_low_rank(a, first, num_rows, p, done);
        tiling->before = (struct complete){done, p, first, num_rows, 0};
    }
}

/* What is fetched during a slice of `num` lanes: all of the next one, each group a part. A group alone that multiplies weights as they
 * lie meets memory as it comes, and fetches what is just ahead. */
INLINE struct ahead ahead_of(const char *slice, size_t bytes, const char *next, size_t num, int64_t num_groups, int is_unpacked) {
    const size_t num_tiles = (num - 1) / TILE_LANES + 1;
    if (num_groups == 1 && !is_unpacked) return lines_from(slice + NEAR, bytes, (bytes / 64 - 1) / num_tiles + 1);
    const size_t before = (uintptr_t)next % PAGE, num_lines = ((before + bytes - 1) / PAGE + 1) * (PAGE / 64);
    return next_part(next - before, before + bytes, (num_lines - 1) / (num_tiles * (size_t)num_groups) + 1, 0);
}

/* Lanes of a slice at most, beside `num_groups` groups of rows. */
INLINE size_t longest_slice(const struct linear *w, int64_t num_groups) {
    if (!is_unpacked(w)) return num_groups == 1 ? tile_lanes(w) : num_groups > FEW_GROUPS ? TILE_SLICE : SHORT_SLICE;
    const size_t alone = WINDOW / quant_block_bytes(quant_format_of(w->format)) / SUPER * SUPER;
    return (num_groups == 1 ? alone : UNPACKED_BLOCKS) * TILE_LANES;
}

/* Panels on tiles, slice after slice. */
static void gemm_tiles(const struct gemm_args *a, const struct gemm_share *share) {
    const struct linear *w = &a->w;
    const int unpacks = is_unpacked(w);
    const int64_t num_groups = share->group_end - share->group_begin, most = block_panels(a, share);
    const size_t lanes = tile_lanes(w), rest = lanes > TILE_LANES ? lanes % TILE_LANES : 0; /* a slice of its own */
    const size_t num_slices = (lanes - 1) / longest_slice(w, num_groups) + 1, unit = unpacks ? SUPER * TILE_LANES : TILE_LANES;
    const size_t slice_lanes = ((lanes - rest - 1) / num_slices / unit + 1) * unit; /* of about one size */
    ALIGNED float sums[most * BLOCK_SUMS];
    struct unpacking unpacking;
    unpacking.w = w, unpacking.kept = num_groups == 1 ? UNPACKED_ALONE : UNPACKED_BLOCKS;
    struct tiling tiling = {.a = a, .unpacks = unpacks ? &unpacking : NULL};
    for (int64_t p = share->panel_begin, end; p < share->panel_end; p = end) {
        end = p + most < share->panel_end ? p + most : share->panel_end;
        for (size_t at = 0, num; at < lanes; at += num) {
            const size_t left = at < lanes - rest ? lanes - rest - at : rest;
            num = left > slice_lanes ? slice_lanes : left;
            const char *last_next = at + num < lanes ? tile_lane(w, p, at + num) : tile_lane(w, end, 0);
            for (int64_t i = p; i < end; i++) {
                const char *from = tile_lane(w, i, at), *next = i + 1 < end ? tile_lane(w, i + 1, at) : last_next;
                const size_t bytes = (size_t)(tile_lane(w, i, at + num) - from);
                struct slice slice = {(const uint32_t *)from, ahead_of(from, bytes, next, num, num_groups, unpacks), at, num};
                if (unpacks) slice.from = unpack_from(&unpacking, from, num / TILE_LANES);
                multiply_slice(&tiling, share, i, slice, sums + (i - p) * BLOCK_SUMS);
            }
        }
    }
    finish_rows(a, &tiling.before, MOST_ROWS);
    tile_release();
}
