/* The small operations between matrix products. Sums and products in float32, one rounding at each result. */

INLINE float weight_at(const void *weight, int64_t i, int32_t dtype) { return load_one(weight, (size_t)i, (enum dtype)dtype); }

/* out = rms norm of `in`, each at an index of its tensor. */
INLINE void norm_row(const void *in, size_t from, void *out, size_t to, const void *weight, int64_t width, float eps,
                     enum dtype dtype, enum dtype weight_dtype) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        vf x = load_as_f(in, from + (size_t)i, dtype);
        squares += x * x;
    }
    float total = sum_f(squares);
    for (int64_t j = i; j < width; j++) {
        float x = load_one(in, from + (size_t)j, dtype);
        total += x * x;
    }
    float factor = 1.f / sqrtf(total / (float)width + eps);
    for (i = 0; i + W <= width; i += W)
        store_from_f(out, to + (size_t)i, load_as_f(in, from + (size_t)i, dtype) * factor * load_as_f(weight, (size_t)i, weight_dtype), dtype);
    for (; i < width; i++)
        store_one(out, to + (size_t)i, load_one(in, from + (size_t)i, dtype) * factor * weight_at(weight, i, weight_dtype), dtype);
}

INLINE void add_rms_norm_as(const struct norm_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        size_t at = (size_t)(row * a->residual_stride), delta = (size_t)(row * a->delta_stride);
        int64_t i = 0;
        if (a->delta) {
            for (; i + W <= a->width; i += W)
                store_from_f(a->residual, at + (size_t)i,
                             load_as_f(a->residual, at + (size_t)i, dtype) + a->alpha * load_as_f(a->delta, delta + (size_t)i, dtype), dtype);
            for (; i < a->width; i++)
                store_one(a->residual, at + (size_t)i,
                          load_one(a->residual, at + (size_t)i, dtype) + a->alpha * load_one(a->delta, delta + (size_t)i, dtype), dtype);
        }
        norm_row(a->residual, at, a->out, (size_t)(row * a->out_stride), a->weight, a->width, a->eps, dtype,
                 a->weight_dtype == DT_F32 ? DT_F32 : dtype);
    }
}

INLINE void rope_as(const struct rope_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t half = a->rope_dim / 2;
    for (int64_t token = begin; token < end; token++)
        for (int64_t head = 0; head < a->num_heads + a->num_kv_heads; head++) {
            size_t at = (size_t)(token * a->stride + head * a->head_dim), angle = (size_t)(token * a->rope_dim);
            const void *weight = head < a->num_heads ? a->q_weight : a->k_weight;
            if (weight)
                norm_row(a->qk, at, a->qk, at, weight, a->head_dim, a->eps, dtype, a->weight_dtype == DT_F32 ? DT_F32 : dtype);
            int64_t i = 0;
            for (; i + W <= half; i += W) {
                size_t low = (size_t)i, high = (size_t)(i + half);
                vf x = load_as_f(a->qk, at + low, dtype), y = load_as_f(a->qk, at + high, dtype);
                store_from_f(a->qk, at + low, x * load_as_f(a->cos, angle + low, dtype) + y * load_as_f(a->signed_sin, angle + low, dtype), dtype);
                store_from_f(a->qk, at + high, y * load_as_f(a->cos, angle + high, dtype) + x * load_as_f(a->signed_sin, angle + high, dtype), dtype);
            }
            for (; i < half; i++) {
                size_t low = (size_t)i, high = (size_t)(i + half);
                float x = load_one(a->qk, at + low, dtype), y = load_one(a->qk, at + high, dtype);
                store_one(a->qk, at + low, x * load_one(a->cos, angle + low, dtype) + y * load_one(a->signed_sin, angle + low, dtype), dtype);
                store_one(a->qk, at + high, y * load_one(a->cos, angle + high, dtype) + x * load_one(a->signed_sin, angle + high, dtype), dtype);
            }
        }
}

INLINE vf silu_f(vf x) { return x / (1.f + exp_f(-x)); }

INLINE void silu_mul_as(const struct silu_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        size_t gate = (size_t)(row * a->in_stride), up = gate + (size_t)a->width, to = (size_t)(row * a->out_stride);
        int64_t i = 0;
        for (; i + W <= a->width; i += W)
            store_from_f(a->out, to + (size_t)i,
                         silu_f(load_as_f(a->gate_up, gate + (size_t)i, dtype)) * load_as_f(a->gate_up, up + (size_t)i, dtype), dtype);
        for (; i < a->width; i++)
            store_one(a->out, to + (size_t)i,
                      silu_f(splat(load_one(a->gate_up, gate + (size_t)i, dtype)))[0] * load_one(a->gate_up, up + (size_t)i, dtype), dtype);
    }
}

/* One copy of each for every type, the type known to the compiler. */
#define FOR_EACH_TYPE(name, args)                                                                            \
    static void name(const struct args *a, int64_t begin, int64_t end) {                                    \
        if (a->dtype == DT_F32) name##_as(a, begin, end, DT_F32);                                            \
        else if (a->dtype == DT_BF16) name##_as(a, begin, end, DT_BF16);                                     \
        else name##_as(a, begin, end, DT_F16);                                                               \
    }

FOR_EACH_TYPE(add_rms_norm, norm_args)
FOR_EACH_TYPE(rope, rope_args)
FOR_EACH_TYPE(silu_mul, silu_args)
