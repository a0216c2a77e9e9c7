/* Products of many rows with quantised weights, on tiles: the codes of a part of a panel are unpacked once, to signed bytes, and
 * multiplied with tiles of rows. The integers are those of quant.h, and scales are multiplied in the same order. */

/* SUPER blocks of a panel. */
struct unpacked {
    int8_t codes[SUPER * QBLOCK * PANEL]; /* [inputs / 4][PANEL][4], less their zero */
    float scales[SUPER * 2 * PANEL], mins[SUPER * 2 * PANEL]; /* [groups][PANEL] */
    int64_t num_blocks;
    int group, has_min;
};

typedef uint8_t vub __attribute__((vector_size(VECTOR_BYTES)));

/* One block behind `panel`; `supers` is of its SUPER blocks. */
INLINE void unpack_block(struct quant_format f, const char *panel, vu table, const vf supers[2][PANEL / W], int8_t *codes,
                         float *scales, float *mins) {
    const vub zero = (vub)splat_u(0x01010101u * (uint32_t)f.zero);
    UNROLL for (int v = 0; v < PANEL / W; v++) {
        for (int quad = 0; quad < QBLOCK / 4; quad++) {
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

/* Blocks from `first` on, a multiple of SUPER. */
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
        unpack_block(f, panel, table, supers, to->codes + b * QBLOCK * PANEL, to->scales + groups, to->mins + groups);
    }
}

/* Blocks of panel `p`. */
static void unpack(const struct linear *w, int64_t p, int64_t first, struct unpacked *to) {
    const char *panel = (const char *)w->packed + (size_t)p * quant_panel_bytes(quant_format_of(w->format), w->k);
#define UNPACK(format)                              \
    case format:                                    \
        unpack_as(format, w, panel, first, to);     \
        break;
    switch (w->format) {
        UNPACK(WEIGHT_Q2_HALF_MIN) UNPACK(WEIGHT_Q3_HALF) UNPACK(WEIGHT_Q4) UNPACK(WEIGHT_Q4_MIN) UNPACK(WEIGHT_Q5)
        UNPACK(WEIGHT_Q5_MIN) UNPACK(WEIGHT_Q6_HALF) UNPACK(WEIGHT_Q6_HALF_MIN) UNPACK(WEIGHT_Q8) UNPACK(WEIGHT_Q8_HALF)
        UNPACK(WEIGHT_Q8_HALF_MIN) UNPACK(WEIGHT_IQ4) UNPACK(WEIGHT_MXFP4) UNPACK(WEIGHT_NVFP4) UNPACK(WEIGHT_IQ2)
        UNPACK(WEIGHT_Q1) UNPACK(WEIGHT_IQ1_S) UNPACK(WEIGHT_Q2) UNPACK(WEIGHT_Q4_SUPER) UNPACK(WEIGHT_Q5_SUPER)
        UNPACK(WEIGHT_INT8)
    case WEIGHT_IQ3_XXS:
    case WEIGHT_IQ3_S: unpack_as(WEIGHT_IQ4, w, panel, first, to); break;
    default: unpack_as(WEIGHT_IQ2, w, panel, first, to);
    }
#undef UNPACK
}

/* sums [num][PANEL] += rows . the blocks of a panel from `first` on. */
static void quant_dot_tiles(const struct unpacked *w, int64_t first, size_t num, struct quant_group x, float *sums,
                            struct tile_shapes *shapes) {
    const int groups = QBLOCK / w->group;
    struct tile_shapes wanted = {0};
    for (int column = 0; column < 2; column++) {
        tile_shape(&wanted, column, num, TILE_BYTES);
        tile_shape(&wanted, 6 + column, (size_t)w->group / 4, TILE_BYTES);
    }
    tile_shape(&wanted, 4, num, (size_t)w->group);
    tile_reshape(shapes, &wanted);
    const char *rows = (const char *)x.bytes + (size_t)first * num * QBLOCK;
    const float *row_scales = x.scales + (size_t)first * num, *row_sums = x.sums + (size_t)(first * groups) * num;
    for (int64_t i = 0; i < w->num_blocks * groups; i++, row_sums += num) {
        int32_t dots[TILE_ROWS * PANEL];
        const int8_t *codes = w->codes + i * w->group * PANEL;
        const float *scales = w->scales + i * PANEL, *mins = w->mins + i * PANEL;
        tile_zero(0), tile_zero(1);
        tile_load(4, rows + (size_t)(i % groups * w->group), QBLOCK);
        tile_load(6, codes, PANEL * 4);
        tile_load(7, codes + TILE_BYTES, PANEL * 4);
        tile_dot_int8(0, 4, 6);
        tile_dot_int8(1, 4, 7);
        tile_store(0, dots, PANEL * 4);
        tile_store(1, dots + PANEL / 2, PANEL * 4);
        for (size_t r = 0; r < num; r++)
            UNROLL for (int v = 0; v < PANEL / W; v++) {
                float *to = sums + r * PANEL + (size_t)v * W;
                vf dot = __builtin_convertvector((vi)load_u(dots + r * PANEL + (size_t)v * W), vf);
                vf sum = load_f(to) + dot * (load_f(scales + v * W) * row_scales[r]);
                if (w->has_min) sum -= load_f(mins + v * W) * row_sums[r];
                store_f(to, sum);
            }
        if (i % groups == groups - 1) rows += num * QBLOCK, row_scales += num;
    }
}

/* A whole row's scale, in formats that have no others. */
static void scale_rows(const struct linear *w, int64_t first_row, int64_t num, float *sums) {
    if (quant_format_of(w->format).scale != SCALE_OF_ROW) return;
    for (int64_t i = 0; i < num * PANEL; i += W)
        store_f(sums + i, load_f(sums + i) * load_f((const float *)w->scales + first_row + i % PANEL));
}
