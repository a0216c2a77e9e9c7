/* Products of many rows with quantised weights, on tiles: the codes of a part of a panel are unpacked once, to signed bytes, and
 * multiplied with tiles of rows. The integers are those of quant.h, and scales are multiplied in the same order. */

/* SUPER blocks of a panel. */
struct unpacked {
    ALIGNED int8_t codes[SUPER * QBLOCK * PANEL]; /* [inputs / 4][PANEL][4], less their zero */
    ALIGNED float scales[SUPER * 2 * PANEL], mins[SUPER * 2 * PANEL]; /* [groups][PANEL] */
    int64_t num_blocks;
    int group, has_min;
};

typedef uint8_t vub __attribute__((vector_size(VECTOR_BYTES)));

/* One block behind `panel`; `supers` is of its SUPER blocks. */
INLINE void unpack_block(struct quant_format f, const char *panel, vu table, const vf supers[2][PANEL / W], int8_t *codes,
                         float *scales, float *mins) {
    const vub zero = (vub)splat_u(0x01010101u * (uint32_t)f.zero);
    UNROLL for (int v = 0; v < PANEL / W; v++) {
        UNROLL for (int quad = 0; quad < QBLOCK / 4; quad++) { /* shifts are constants then */
            vub code = (vub)load_factors(f, panel + quant_head_bytes(f), quad, v, table) - zero;
            memcpy(codes + (quad * PANEL + v * W) * 4, &code, sizeof code);
        }
        for (int g = 0; g < QBLOCK / f.group; g++) {
            const char *head = panel + (size_t)(g * quant_scale_bytes(f) * (1 + f.has_min) * PANEL);
            store_f(scales + g * PANEL + v * W, quant_scale(f, head, v, supers[0][v]));
            if (f.has_min)
                store_f(mins + g * PANEL + v * W, quant_scale(f, head + quant_scale_bytes(f) * PANEL, v, supers[1][v]));
        }
    }
}

/* Blocks from `first` on, a multiple of SUPER. Those behind them are fetched meanwhile. */
INLINE void unpack_as(int32_t format, const struct linear *w, const char *panel, int64_t first, struct unpacked *to) {
    const struct quant_format f = quant_format_of(format);
    const vu table = f.has_table ? load_table(quant_table_of(w->format)) : splat_u(0);
    vf supers[2][PANEL / W] = {0};
    int64_t rest = quant_num_blocks(w->k) - first;
    panel += (size_t)first * quant_block_bytes(f) + (size_t)(first / SUPER * quant_super_bytes(f));
    to->num_blocks = rest < SUPER ? rest : SUPER;
    to->group = f.group, to->has_min = f.has_min;
    for (int v = 0; f.scale == SCALE_CODE && v < PANEL / W; v++) {
        supers[0][v] = load_f16(panel + v * W * 2) * f.unit;
        if (f.has_min) supers[1][v] = load_f16(panel + (PANEL + v * W) * 2) * f.unit;
    }
    panel += quant_super_bytes(f);
    for (int64_t b = 0; b < to->num_blocks; b++, panel += quant_block_bytes(f)) {
        int64_t groups = b * (QBLOCK / f.group) * PANEL;
        const char *ahead = panel + SUPER * quant_block_bytes(f) + quant_super_bytes(f);
        for (size_t at = 0; at < quant_block_bytes(f); at += 64) __builtin_prefetch(ahead + at, 0, 2);
        unpack_block(f, panel, table, supers, to->codes + b * QBLOCK * PANEL, to->scales + groups, to->mins + groups);
    }
}

/* Blocks of panel `p`. */
static void unpack(const struct linear *w, int64_t p, int64_t first, struct unpacked *to) {
    const char *panel = (const char *)w->packed + (size_t)p * quant_panel_bytes(quant_format_of(w->format), w->k);
#define UNPACK(F) case F: unpack_as(F, w, panel, first, to); break;
    switch (kernel_of(w->format)) { EACH_KERNEL(UNPACK) }
#undef UNPACK
}

/* Groups of inputs whose products are scaled in one pass over the sums, while those of the next ones are multiplied. */
enum { SCALED = 2 };

/* dots [num][PANEL] = rows . codes of a group of inputs. */
INLINE void multiply_group(size_t num, const char *rows, const int8_t *codes, int32_t *dots) {
    const size_t width = PANEL * 4, is_high = num > TILE_ROWS;
    int32_t *last = dots + TILE_ROWS * PANEL;
    tile_zero(0), tile_zero(1);
    tile_load(4, rows, QBLOCK);
    tile_load(6, codes, width);
    tile_load(7, codes + TILE_BYTES, width);
    tile_dot_int8(0, 4, 6);
    tile_dot_int8(1, 4, 7);
    if (is_high) {
        tile_zero(2), tile_zero(3);
        tile_load(5, rows + TILE_ROWS * QBLOCK, QBLOCK);
        tile_dot_int8(2, 5, 6);
        tile_dot_int8(3, 5, 7);
    }
    tile_store(0, dots, width), tile_store(1, dots + PANEL / 2, width);
    if (is_high) tile_store(2, last, width), tile_store(3, last + PANEL / 2, width);
}

/* sums [num][PANEL] += dots of `count` groups of inputs from `i` on, times their scales, which registers hold. */
INLINE void add_scaled(int count, int has_min, const struct unpacked *w, int64_t i, size_t num, const float *const *row_scales,
                       const float *row_sums, int32_t *const *dots, float *sums) {
    vf scale[SCALED][PANEL / W], min[SCALED][PANEL / W];
    UNROLL for (int j = 0; j < count; j++)
        UNROLL for (int v = 0; v < PANEL / W; v++) {
            scale[j][v] = load_f(w->scales + (i + j) * PANEL + v * W);
            if (has_min) min[j][v] = load_f(w->mins + (i + j) * PANEL + v * W);
        }
    for (size_t r = 0; r < num; r++) {
        vf row_scale[SCALED], row_sum[SCALED];
        UNROLL for (int j = 0; j < count; j++) {
            row_scale[j] = splat(row_scales[j][r]);
            if (has_min) row_sum[j] = splat(row_sums[(size_t)j * num + r]);
        }
        UNROLL for (int v = 0; v < PANEL / W; v++) {
            const size_t at = r * PANEL + (size_t)v * W;
            vf sum = load_f(sums + at);
            UNROLL for (int j = 0; j < count; j++) {
                vf dot = __builtin_convertvector((vi)load_u(dots[j] + at), vf);
                sum += dot * (scale[j][v] * row_scale[j]);
                if (has_min) sum -= min[j][v] * row_sum[j];
            }
            store_f(sums + at, sum);
        }
    }
}

/* sums [num][PANEL] += rows . the blocks of a panel from `first` on, for up to two tiles of rows. */
static void quant_dot_tiles(const struct unpacked *w, int64_t first, size_t num, struct quant_group x, float *sums,
                            uint64_t *shapes) {
    const int groups = QBLOCK / w->group;
    shape_products(shapes, num, (size_t)w->group / 4);
    ALIGNED int32_t dots[2 * SCALED][2 * TILE_ROWS * PANEL];
    const int64_t count = w->num_blocks * groups;
    for (int64_t i = -SCALED; i < count; i += SCALED) {
        for (int64_t j = i + SCALED; j < i + 2 * SCALED && j < count; j++) {
            const char *block = (const char *)x.bytes + (size_t)(first + j / groups) * num * QBLOCK;
            multiply_group(num, block + j % groups * w->group, w->codes + j * w->group * PANEL, dots[j % (2 * SCALED)]);
        }
        if (i < 0) continue;
        const float *row_scales[SCALED], *row_sums = x.sums + (size_t)(first * groups + i) * num;
        int32_t *its_dots[SCALED];
        for (int j = 0; j < SCALED; j++) {
            row_scales[j] = x.scales + (size_t)(first + (i + j) / groups) * num;
            its_dots[j] = dots[(i + j) % (2 * SCALED)];
        }
#define ADD(has_min)                                                                               \
    if (i + SCALED > count) add_scaled(1, has_min, w, i, num, row_scales, row_sums, its_dots, sums); \
    else add_scaled(SCALED, has_min, w, i, num, row_scales, row_sums, its_dots, sums)
        if (w->has_min) {
            ADD(1);
        } else {
            ADD(0);
        }
#undef ADD
    }
}

