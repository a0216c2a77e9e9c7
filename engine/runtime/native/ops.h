/* The small operations between matrix products. Sums and products in float32, one rounding at each result. */

/* A weight may be of the tensor's type or float32. */
INLINE struct view weight_view(const void *weight, int32_t weight_dtype, enum dtype dtype) {
    return (struct view){(void *)weight, 0, weight_dtype == DT_F32 ? DT_F32 : dtype};
}

INLINE void norm_row(struct view in, struct view out, struct view weight, int64_t width, float eps) {
    vf squares = splat(0);
    for (int64_t i = 0; i < width; i += W) {
        vf x = get(in, i, width);
        squares += x * x;
    }
    float factor = 1.f / sqrtf(sum_f(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += W) put(out, i, width, get(in, i, width) * factor * get(weight, i, width));
}

INLINE void add_rms_norm_as(const struct norm_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    struct view weight = weight_view(a->weight, a->weight_dtype, dtype);
    for (int64_t row = begin; row < end; row++) {
        struct view residual = {a->residual, (size_t)(row * a->residual_stride), dtype};
        struct view delta = {(void *)a->delta, (size_t)(row * a->delta_stride), dtype};
        struct view out = {a->out, (size_t)(row * a->out_stride), dtype};
        for (int64_t i = 0; a->delta && i < a->width; i += W)
            put(residual, i, a->width, get(residual, i, a->width) + a->alpha * get(delta, i, a->width));
        norm_row(residual, out, weight, a->width, a->eps);
    }
}

INLINE void rope_as(const struct rope_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t half = a->rope_dim / 2;
    for (int64_t token = begin; token < end; token++) {
        size_t angle = (size_t)(token * a->rope_dim);
        struct view cos_low = {(void *)a->cos, angle, dtype}, cos_high = {(void *)a->cos, angle + (size_t)half, dtype};
        struct view sin_low = {(void *)a->signed_sin, angle, dtype};
        struct view sin_high = {(void *)a->signed_sin, angle + (size_t)half, dtype};
        for (int64_t head = 0; head < a->num_heads + a->num_kv_heads; head++) {
            struct view low = {a->qk, (size_t)(token * a->stride + head * a->head_dim), dtype};
            struct view high = {a->qk, low.at + (size_t)half, dtype};
            const void *weight = head < a->num_heads ? a->q_weight : a->k_weight;
            if (weight) norm_row(low, low, weight_view(weight, a->weight_dtype, dtype), a->head_dim, a->eps);
            for (int64_t i = 0; i < half; i += W) {
                vf x = get(low, i, half), y = get(high, i, half);
                put(low, i, half, x * get(cos_low, i, half) + y * get(sin_low, i, half));
                put(high, i, half, y * get(cos_high, i, half) + x * get(sin_high, i, half));
            }
        }
    }
}

INLINE void silu_mul_as(const struct silu_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        struct view gate = {(void *)a->gate_up, (size_t)(row * a->in_stride), dtype};
        struct view up = {(void *)a->gate_up, gate.at + (size_t)a->width, dtype};
        struct view out = {a->out, (size_t)(row * a->out_stride), dtype};
        for (int64_t i = 0; i < a->width; i += W) {
            vf x = get(gate, i, a->width);
            put(out, i, a->width, x / (1.f + exp_f(-x)) * get(up, i, a->width));
        }
    }
}

/* One copy of each for every type, the type known to the compiler. */
#define FOR_EACH_TYPE(name, args)                                        \
    static void name(const struct args *a, int64_t begin, int64_t end) { \
        if (a->dtype == DT_F32)                                          \
            name##_as(a, begin, end, DT_F32);                            \
        else if (a->dtype == DT_BF16)                                    \
            name##_as(a, begin, end, DT_BF16);                           \
        else                                                             \
            name##_as(a, begin, end, DT_F16);                            \
    }

FOR_EACH_TYPE(add_rms_norm, norm_args)
FOR_EACH_TYPE(rope, rope_args)
FOR_EACH_TYPE(silu_mul, silu_args)
