/* Products with WEIGHT_INT8 on tiles. A row of weights has one scale there. If a row of x has one, too, sums of integers are
 * scaled once, at their end, where other formats scale them after every 32 inputs. Bytes are too coarse for that, so x is rounded
 * to 16 bits, high * 256 + low: two rows of signed bytes. Tiles multiply both with the codes as they lie in the panels. All sums are
 * exact until they are joined, so a row of y is the same bits by tiles and by vectors. */

enum {
    WIDE_PARTS = 2,             /* rows of bytes that a row is */
    MOST_WIDE_INPUTS = 1 << 16, /* whose sums 32 bits hold */
    WIDE_MOST = 127 << 8,       /* magnitude that the largest value becomes */
};

INLINE int is_wide(const struct linear *w) { return HAS_TILES && w->format == WEIGHT_INT8 && w->k <= MOST_WIDE_INPUTS; }

/* Lanes of four inputs, and bytes of a packed row, which begins with its tiles of both parts. */
INLINE size_t wide_lanes(int64_t k) { return (size_t)quant_num_blocks(k) * QBLOCK / 4; }
INLINE size_t wide_tiles_bytes(int64_t k) { return (wide_lanes(k) * 4 + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES * WIDE_PARTS; }
INLINE size_t wide_row_bytes(int64_t k) { return wide_tiles_bytes(k) + TILE_BYTES; }

/* One group of packed rows: bytes [tiles][rows][WIDE_PARTS][TILE_BYTES], then of each row the scale, and for each part what the
 * codes' zero adds to a sum. */
struct wide_group {
    char *bytes;
    float *scales;
    int32_t *starts[WIDE_PARTS];
};

INLINE struct wide_group wide_group_at(int64_t k, void *group, int64_t num) {
    float *scales = (float *)((char *)group + (size_t)num * wide_tiles_bytes(k));
    int32_t *starts = (int32_t *)(scales + num);
    return (struct wide_group){group, scales, {starts, starts + num}};
}

static void wide_pack_row(struct view x, int64_t k, struct wide_group to, size_t r, size_t num) {
    enum { ZERO = 128 }; /* of codes */
    float peak = peak_of_row(x, k);
    vf values[QBLOCK / W], inverse = splat(peak > 0 ? WIDE_MOST / peak : 0);
    vi sums[WIDE_PARTS] = {{0}};
    for (int64_t begin = 0; begin < k; begin += QBLOCK) {
        char *tile = to.bytes + ((size_t)(begin / TILE_BYTES) * num + r) * WIDE_PARTS * TILE_BYTES + begin % TILE_BYTES;
        load_block(x, begin, k, values);
        UNROLL for (int i = 0; i < QBLOCK / W; i++) {
            vi rounded = nearest(values[i], inverse);
            vi high = (rounded + 128) >> 8, low = rounded - (high << 8);
            vb narrow[] = {__builtin_convertvector(high, vb), __builtin_convertvector(low, vb)};
            UNROLL for (int p = 0; p < WIDE_PARTS; p++) memcpy(tile + p * TILE_BYTES + i * W, &narrow[p], sizeof narrow[p]);
            sums[0] += high, sums[1] += low;
        }
    }
    to.scales[r] = peak / WIDE_MOST;
    UNROLL for (int p = 0; p < WIDE_PARTS; p++) to.starts[p][r] = -ZERO * sum_of(sums[p]);
}

static void wide_pack_rows(const struct gemm_args *a, const void *x, int64_t stride, void *group, int64_t num) {
    for (int64_t r = 0; r < num; r++) {
        struct view row = {(void *)x, (size_t)(r * stride), (enum dtype)a->w.dtype};
        wide_pack_row(row, a->w.k, wide_group_at(a->w.k, group, num), (size_t)r, (size_t)num);
    }
}

/* sums [WIDE_PARTS][PANEL], integers, += one row . some lanes of a panel, by vectors: a stream of vectors is read faster. */
static void wide_row_dot(const uint32_t *panel, const uint32_t *row, size_t lanes, float *sums, int is_first) {
    enum { NEAR_BYTES = 4096, LANES = TILE_BYTES / 4 };
    struct dot dot[WIDE_PARTS][PANEL / W];
    UNROLL for (int p = 0; p < WIDE_PARTS; p++)
        UNROLL for (int v = 0; v < PANEL / W; v++) dot[p][v] = dot_begin(is_first ? splat_u(0) : load_u(sums + p * PANEL + v * W), 8);
    for (size_t l = 0; l < lanes; l++, panel += PANEL) {
        const uint32_t *quads = row + l / LANES * LANES * WIDE_PARTS + l % LANES;
        __builtin_prefetch((const char *)panel + NEAR_BYTES, 0, 2);
        __builtin_prefetch((const char *)panel + NEAR_BYTES + 64, 0, 2);
        UNROLL for (int v = 0; v < PANEL / W; v++) {
            const vu codes = load_u(panel + v * W);
            UNROLL for (int p = 0; p < WIDE_PARTS; p++) dot[p][v] = dot_add(dot[p][v], codes, quads[p * LANES], 8, 0);
        }
    }
    UNROLL for (int p = 0; p < WIDE_PARTS; p++)
        UNROLL for (int v = 0; v < PANEL / W; v++) store_f(sums + p * PANEL + v * W, (vf)dot_end(dot[p][v]));
}

/* Join the parts of a group's complete sums, [num][WIDE_PARTS][PANEL] integers, to [num][PANEL] floats in place. */
static void wide_join(const struct linear *w, void *group, int64_t num, int64_t first_column, float *sums) {
    const struct wide_group x = wide_group_at(w->k, group, num);
    for (int64_t r = 0; r < num; r++)
        UNROLL for (int v = 0; v < PANEL / W; v++) {
            const float *parts = sums + r * WIDE_PARTS * PANEL + v * W;
            vi high = (vi)load_u(parts) + x.starts[0][r], low = (vi)load_u(parts + PANEL) + x.starts[1][r];
            vf sum = fused(splat(256), __builtin_convertvector(high, vf), __builtin_convertvector(low, vf));
            store_f(sums + r * PANEL + v * W, sum * x.scales[r] * load_f((const float *)w->scales + first_column + v * W));
        }
}
