/* The operations on rows of a mixture of experts, around its products (moe.c). */

INLINE void widen_as(const struct widen_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    struct view x = {(void *)a->x, 0, dtype}, y = {a->y, 0, DT_F32};
    int64_t last = end * a->width;
    for (int64_t i = begin * a->width; i < last; i += W) put(y, i, last, get(x, i, last));
}

INLINE void clamp_as(const struct clamp_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    vf limit = splat(a->limit);
    for (int64_t row = begin; row < end; row++) {
        struct view gates = floats(a->gate_up, 2 * row * a->width), ups = floats(a->gate_up, (2 * row + 1) * a->width);
        struct view out = {a->inner, (size_t)(row * a->width), dtype};
        for (int64_t i = 0; i < a->width; i += W) {
            vf gate = get(gates, i, a->width), up = get(ups, i, a->width);
            gate = select_f(COMPARE(gate, >, limit), limit, gate); /* NaN stays */
            up = clamp_f(up, -limit, limit);
            put(out, i, a->width, (up + 1.f) * (gate / (1.f + exp_f(-a->alpha * gate))));
        }
    }
}

void add_ranks(const void *args, int64_t begin, int64_t end) {
    const struct ranks_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        const float *weights = a->weights + row * a->num_ranks;
        const int32_t *places = a->places + row * a->num_ranks;
        struct view y = {a->y, (size_t)(row * a->width), DT_F32};
        for (int64_t i = 0; i < a->width; i += W) {
            vf sum = splat(0);
            for (int64_t rank = 0; rank < a->num_ranks; rank++)
                sum += weights[rank] * get(floats(a->results, places[rank] * a->width), i, a->width);
            put(y, i, a->width, sum);
        }
    }
}

FOR_EACH_TYPE(widen, widen_args)
FOR_EACH_TYPE(clamp, clamp_args)
