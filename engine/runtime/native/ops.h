/* The small operations between matrix products. Sums and products in float32, one rounding at each result. */

/* A tensor that goes with others of `dtype` and is of that type too, or float32. */
INLINE struct view view_of(const void *base, int32_t own, enum dtype dtype, size_t at) {
    return (struct view){(void *)base, at, own == DT_F32 ? DT_F32 : dtype};
}

INLINE struct view floats(const float *base, int64_t at) { return (struct view){(void *)base, (size_t)at, DT_F32}; }

INLINE float sum_squares(struct view x, int64_t width) {
    vf squares = splat(0);
    for (int64_t i = 0; i < width; i += W) {
        vf value = get(x, i, width);
        squares += value * value;
    }
    return sum_f(squares);
}

INLINE float mean_square(struct view x, int64_t width) { return sum_squares(x, width) / (float)width; }

INLINE void norm_row(struct view in, struct view out, struct view weight, int64_t width, float eps) {
    float factor = 1.f / sqrtf(mean_square(in, width) + eps);
    for (int64_t i = 0; i < width; i += W) put(out, i, width, get(in, i, width) * factor * get(weight, i, width));
}

/* A LayerNorm of a row, into `out` and, if the stream is to be its result, over the row. */
INLINE void layer_norm_row(const struct norm_args *a, struct view in, struct view out) {
    struct view weight = view_of(a->weight, a->weight_dtype, out.dtype, 0), bias = weight;
    bias.base = (void *)a->bias;
    vf sum = splat(0), squares = splat(0);
    for (int64_t i = 0; i < a->width; i += W) sum += get(in, i, a->width);
    vf mean = splat(sum_f(sum) / (float)a->width);
    for (int64_t i = 0; i < a->width; i += W) {
        vf off = get(in, i, a->width) - mean, kept = {0};
        copy_values(&kept, &off, a->width - i, sizeof(float)); /* zeros behind the row */
        squares += kept * kept;
    }
    vf factor = splat(1.f / sqrtf(sum_f(squares) / (float)a->width + a->eps));
    for (int64_t i = 0; i < a->width; i += W) {
        vf x = (get(in, i, a->width) - mean) * factor * get(weight, i, a->width);
        if (a->bias) x += get(bias, i, a->width);
        if (a->kind == NORM_LAYER_OF_STREAM) put(in, i, a->width, x);
        put(out, i, a->width, x);
    }
}

INLINE void add_norm_row(const struct norm_args *a, int64_t row, struct view out) {
    enum dtype stream = a->stream_dtype == DT_F32 ? DT_F32 : out.dtype;
    struct view residual = {a->residual, (size_t)(row * a->residual_stride), stream};
    struct view delta = {(void *)a->delta, (size_t)(row * a->delta_stride), stream};
    vf scale = splat(a->scale != 0 ? a->scale : 1);
    for (int64_t i = 0; a->delta && i < a->width; i += W)
        put(residual, i, a->width, scale * (get(residual, i, a->width) + a->alpha * get(delta, i, a->width)));
    if (a->weight && a->kind != NORM_RMS)
        layer_norm_row(a, residual, out);
    else if (a->weight && out.dtype == DT_F32 && a->weight_dtype != DT_F32) /* the outputs of parts are normed in float32 */
        norm_row(residual, out, (struct view){(void *)a->weight, 0, (enum dtype)a->weight_dtype}, a->width, a->eps);
    else if (a->weight)
        norm_row(residual, out, view_of(a->weight, a->weight_dtype, out.dtype, 0), a->width, a->eps);
    else
        for (int64_t i = 0; i < a->width; i += W) put(out, i, a->width, get(residual, i, a->width));
}

/* Rows [begin, end), or where they are packed, groups of rows. */
INLINE void add_rms_norm_as(const struct norm_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; !a->packs && row < end; row++)
        add_norm_row(a, row, (struct view){a->out, (size_t)(row * a->out_stride), dtype});
    for (int64_t group = begin; a->packs && group < end; group++) {
        int64_t first = gemm_group_start(a->packs, group), num = gemm_group_start(a->packs, group + 1) - first;
        uint32_t rows[num * a->width / (dtype == DT_F32 ? 1 : 2)];
        for (int64_t r = 0; r < num; r++)
            add_norm_row(a, first + r, (struct view){rows, (size_t)(r * a->width), dtype});
        gemm_pack_group(a->packs, group, rows, a->width);
    }
}

/* One row of a packed matrix, as it was: lane by lane from its panel. */
INLINE void unpack_row(const struct embed_args *a, int64_t id, uint32_t *to, int64_t lanes) {
    const uint32_t *panel = (const uint32_t *)a->table + id / PANEL * lanes * PANEL + id % PANEL;
    for (int64_t l = 0; l < lanes; l++) to[l] = panel[l * PANEL];
}

INLINE void embed_as(const struct embed_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t lanes = a->width / (dtype == DT_F32 ? 1 : 2), is_packed = a->format >= 0;
    for (int64_t row = begin; row < end; row++) {
        uint32_t plain[is_packed ? lanes : 1];
        if (is_packed) unpack_row(a, a->ids[row], plain, lanes);
        struct view from = {(void *)a->table, (size_t)(a->ids[row] * a->width), dtype};
        if (is_packed) from = (struct view){plain, 0, dtype};
        struct view out = {a->out, (size_t)(row * a->width), DT_F32};
        for (int64_t i = 0; i < a->width; i += W) {
            vf x = get(from, i, a->width) * a->scale;
            put(out, i, a->width, a->adds ? get(out, i, a->width) + x : x);
        }
    }
}

/* Rows [begin, end); NaN stays. */
INLINE void clip_as(const struct clip_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    struct view x = {a->x, 0, dtype};
    vf limit = splat(a->limit);
    for (int64_t i = begin * a->width; i < end * a->width; i += W) {
        vf value = get(x, i, end * a->width);
        put(x, i, end * a->width, clamp_f(value, -limit, limit));
    }
}

/* Rows [begin, end). */
INLINE void gate_as(const struct gate_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    struct view x = {a->x, 0, dtype}, gate = {(void *)a->gate, 0, dtype};
    for (int64_t i = begin * a->width; i < end * a->width; i += W)
        put(x, i, end * a->width, get(x, i, end * a->width) / (1.f + exp_f(-get(gate, i, end * a->width))));
}

/* Rows [begin, end). */
INLINE void act_as(const struct act_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        struct view x = {a->x, (size_t)(row * a->width), dtype};
        struct view input = {(void *)a->input, (size_t)(row * a->input_stride), DT_F32};
        for (int64_t i = 0; i < a->width; i += W) {
            vf value = activate(get(x, i, a->width), (enum activation)a->activation);
            put(x, i, a->width, value * get(input, i, a->width));
        }
    }
}

INLINE void rope_as(const struct rope_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t half = a->rope_dim / 2, rotated = a->num_heads + a->num_kv_heads;
    int64_t heads = rotated + (a->v_weight ? a->num_kv_heads : 0);
    for (int64_t token = begin; token < end; token++) {
        size_t angle = (size_t)(token * a->rope_dim);
        struct view cos_low = view_of(a->cos, a->angle_dtype, dtype, angle), cos_high = cos_low;
        struct view sin_low = view_of(a->signed_sin, a->angle_dtype, dtype, angle), sin_high = sin_low;
        cos_high.at += (size_t)half, sin_high.at += (size_t)half;
        for (int64_t head = 0; head < heads; head++) {
            struct view low = {a->qk, (size_t)(token * a->stride + head * a->head_dim), dtype};
            struct view high = {a->qk, low.at + (size_t)half, dtype};
            const void *weight = head < a->num_heads ? a->q_weight : head < rotated ? a->k_weight : a->v_weight;
            if (weight) norm_row(low, low, view_of(weight, a->weight_dtype, dtype, 0), a->head_dim, a->eps);
            for (int64_t i = 0; i < half && head < rotated; i += W) {
                vf x = get(low, i, half), y = get(high, i, half);
                put(low, i, half, x * get(cos_low, i, half) + y * get(sin_low, i, half));
                put(high, i, half, y * get(cos_high, i, half) + x * get(sin_high, i, half));
            }
        }
    }
}

/* One copy of each for every type. */
#define FOR_EACH_TYPE(name, of)                                      \
    void name##_rows(const void *args, int64_t begin, int64_t end) { \
        const struct of *a = args;                                   \
        BY_TYPE(a->dtype, name##_as, a, begin, end);                 \
    }

FOR_EACH_TYPE(add_rms_norm, norm_args)
FOR_EACH_TYPE(clip, clip_args)
FOR_EACH_TYPE(gate, gate_args)
FOR_EACH_TYPE(act, act_args)
FOR_EACH_TYPE(rope, rope_args)
FOR_EACH_TYPE(embed, embed_args)

void scale_logits_rows(const void *args, int64_t begin, int64_t end) {
    const struct scaled_logits *a = args;
    struct view x = {a->logits, 0, DT_F32};
    for (int64_t i = begin * a->width; i < end * a->width; i += W) {
        vf value = get(x, i, end * a->width) * a->multiplier;
        put(x, i, end * a->width, a->cap != 0 ? a->cap * tanh_f(value / a->cap) : value);
    }
}

void narrow_halves(const float *from, uint16_t *to, int64_t num) {
    struct view in = {(void *)from, 0, DT_F32}, out = {to, 0, DT_F16};
    for (int64_t i = 0; i < num; i += W) put(out, i, num, get(in, i, num));
}
