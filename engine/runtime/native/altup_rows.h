/* The operations on rows of several residual streams, and of the parts beside them (altup.h). Each row alone: its bits do not
 * depend on the step that it is in. */
#include "altup.h"

/* A number of a row for each stream: tanh(router . norm(x)). */
INLINE void modalities(const struct altup_args *a, struct view x, int64_t num, float *out) {
    float factor = 1.f / sqrtf(mean_square(x, a->width) + a->eps);
    for (int64_t s = 0; s < num; s++) {
        struct view weights = floats(a->mixing->router, s * a->width);
        vf sum = splat(0);
        for (int64_t i = 0; i < a->width; i += W) sum += get(x, i, a->width) * get(weights, i, a->width);
        out[s] = tanhf(sum_f(sum) * factor);
    }
}

/* out [rows] = matrix [rows, num] x. */
INLINE void small_product(const float *matrix, const float *x, int64_t rows, int64_t num, float *out) {
    for (int64_t r = 0; r < rows; r++) {
        out[r] = 0;
        for (int64_t i = 0; i < num; i++) out[r] += matrix[r * num + i] * x[i];
    }
}

/* streams = streams + coefficients x streams, the coefficients by the first one. */
INLINE void predict_row(const struct altup_args *a, int64_t row, int64_t num) {
    float modes[num], coefficients[num * num];
    struct view first = floats(a->stream, row * a->width);
    modalities(a, first, num, modes);
    small_product(a->mixing->predict, modes, num * num, num, coefficients);
    for (int64_t i = 0; i < a->width; i += W) {
        vf x[num];
        for (int64_t s = 0; s < num; s++) x[s] = get(floats(a->streams, (row * num + s) * a->width), i, a->width);
        for (int64_t s = 0; s < num; s++) {
            vf sum = x[s];
            for (int64_t other = 0; other < num; other++) sum += coefficients[s * num + other] * x[other];
            put(floats(a->streams, (row * num + s) * a->width), i, a->width, sum);
            if (s == 0) put(first, i, a->width, sum);
        }
    }
}

/* Each stream += its share of what the layer found beyond the prediction of the first. */
INLINE void correct_row(const struct altup_args *a, int64_t row, int64_t num, enum dtype dtype) {
    float modes[num], shares[num];
    struct view found = floats(a->stream, row * a->width), x = {a->x, (size_t)(row * a->width), dtype};
    modalities(a, found, num, modes);
    small_product(a->mixing->correct, modes, num, num, shares);
    for (int64_t i = 0; i < a->width; i += W) {
        vf beyond = get(found, i, a->width) - get(floats(a->streams, row * num * a->width), i, a->width);
        for (int64_t s = 0; s < num; s++) {
            struct view stream = floats(a->streams, (row * num + s) * a->width);
            vf sum = get(stream, i, a->width) + (1.f + shares[s]) * beyond;
            put(stream, i, a->width, sum);
            if (s) continue;
            put(found, i, a->width, sum);
            put(x, i, a->width, sum * get(floats(a->mixing->scale, 0), i, a->width));
        }
    }
}

/* All streams but the first += norm(delta). */
INLINE void share_row(const struct altup_args *a, int64_t row, int64_t num) {
    struct view delta = floats(a->delta, row * a->width);
    float factor = 1.f / sqrtf(mean_square(delta, a->width) + a->eps);
    for (int64_t i = 0; i < a->width; i += W) {
        vf term = get(delta, i, a->width) * factor * get(floats(a->mixing->after_gate, 0), i, a->width);
        for (int64_t s = 1; s < num; s++) {
            struct view stream = floats(a->streams, (row * num + s) * a->width);
            put(stream, i, a->width, get(stream, i, a->width) + term);
        }
    }
}

/* Rows [begin, end). 4 is Gemma 3n's number of streams, for which the compiler unrolls. */
void altup_predict(const void *args, int64_t begin, int64_t end) {
    const struct altup_args *a = args;
    for (int64_t row = begin; row < end; row++)
        if (a->num == 4) predict_row(a, row, 4);
        else predict_row(a, row, a->num);
}

void altup_share(const void *args, int64_t begin, int64_t end) {
    const struct altup_args *a = args;
    for (int64_t row = begin; row < end; row++) share_row(a, row, a->num);
}

INLINE void altup_correct_as(const struct altup_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++)
        if (a->num == 4) correct_row(a, row, 4, dtype);
        else correct_row(a, row, a->num, dtype);
}

void lengthen(const void *args, int64_t begin, int64_t end) {
    const struct lengthen_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        struct view from = floats(a->from, row * a->from_stride), to = floats(a->to, row * a->to_stride);
        float wanted = mean_square(floats(a->like, row * a->like_stride), a->width), own = mean_square(from, a->width);
        float factor = sqrtf(wanted) / sqrtf(own > LEAST_SQUARE ? own : LEAST_SQUARE);
        for (int64_t i = 0; i < a->width; i += W) put(to, i, a->width, get(from, i, a->width) * factor);
    }
}

INLINE void add_laurel_as(const struct laurel_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        struct view stream = floats(a->stream, row * a->width), delta = floats(a->delta, row * a->width);
        struct view x = {(void *)a->x, (size_t)(row * a->width), dtype};
        float factor = 1.f / sqrtf(mean_square(delta, a->width) + a->eps);
        for (int64_t i = 0; i < a->width; i += W) {
            vf term = get(x, i, a->width) + get(delta, i, a->width) * factor * get(floats(a->weight, 0), i, a->width);
            put(stream, i, a->width, (get(stream, i, a->width) + term) * 0.707106781f);
        }
    }
}

/* Values i .. of a row less its mean, zeros from `end` on. */
INLINE vf less_mean(struct view x, float mean, int64_t i, int64_t end) {
    vf all = get(x, i, end) - mean, kept = {0};
    copy_values(&kept, &all, end - i, sizeof(float));
    return kept;
}

INLINE void sparse_act_as(const struct sparse_args *a, int64_t begin, int64_t end, enum dtype dtype) {
    for (int64_t row = begin; row < end; row++) {
        struct view gates = {(void *)a->gate_up, (size_t)(2 * row * a->width), dtype}, ups = gates;
        struct view inner = {a->inner, (size_t)(row * a->width), dtype};
        ups.at += (size_t)a->width;
        vf sum = splat(0), squares = splat(0);
        for (int64_t i = 0; i < a->width; i += W) sum += get(gates, i, a->width);
        float mean = sum_f(sum) / (float)a->width;
        for (int64_t i = 0; i < a->width; i += W) {
            vf rest = less_mean(gates, mean, i, a->width);
            squares += rest * rest;
        }
        float cut = a->deviations * sqrtf(sum_f(squares) / (float)a->width);
        for (int64_t i = 0; i < a->width; i += W) {
            vf gate = max_f(splat(0), less_mean(gates, mean, i, a->width) - cut); /* NaN stays */
            put(inner, i, a->width, activate(gate, (enum activation)a->activation) * get(ups, i, a->width));
        }
    }
}

FOR_EACH_TYPE(altup_correct, altup_args)
FOR_EACH_TYPE(add_laurel, laurel_args)
FOR_EACH_TYPE(sparse_act, sparse_args)
