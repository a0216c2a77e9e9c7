/* The rule of Gated DeltaNet (delta.h). */
#include "delta.h"

/* Unit length for queries and keys; decays and betas from the row as projected. */
INLINE void complete_delta(const struct pass *p, float *token, const char *row, enum dtype dtype) {
    const struct delta *d = p->rule;
    const struct recurrence *r = p->sizes;
    int64_t channels = r->channels, heads = r->num_heads;
    for (int64_t head = 0; head < 2 * r->num_k_heads; head++) {
        struct view x = floats(token, head * r->k_dim);
        float length = sqrtf(sum_squares(x, r->k_dim) + 1e-6f);
        scale_floats(x, r->k_dim, 1.f / (head < r->num_k_heads ? length * sqrtf((float)r->k_dim) : length));
    }
    struct view b = {(void *)row, (size_t)(channels + heads * r->v_dim), dtype}, a = b;
    struct view rates = floats(d->rates, 0), biases = floats(d->biases, 0);
    struct view decays = floats(token, channels), betas = floats(token, channels + heads);
    a.at += (size_t)heads;
    for (int64_t i = 0; i < heads; i += W) {
        vf x = softplus_f(get(a, i, heads) + get(biases, i, heads));
        put(decays, i, heads, exp_f(get(rates, i, heads) * x));
        put(betas, i, heads, 1.f / (1.f + exp_f(-get(b, i, heads))));
    }
}

/* Where the sum of a column is latency, it is one of several sums of rows. */
INLINE void change_by_delta(const struct pass *p, const struct head_token *t, struct view from, struct view to, int64_t first,
                            int64_t columns, int64_t num, const char *next) {
    enum { MAX = 32 / W };
    int64_t k_dim = p->sizes->k_dim, ways = 8 / num, rows = k_dim / ways * ways;
    vf sums[8][MAX], deltas[MAX], results[MAX], decay = splat(t->decay);
    struct view v = {t->v, (size_t)first, DT_F32};
    UNROLL for (int64_t way = 0; way < ways; way++)
        UNROLL for (int64_t j = 0; j < num; j++) sums[way][j] = splat(0);
    from.at += (size_t)first, to.at += (size_t)first;
    int64_t end = columns - first;
    for (int64_t i = 0; i < rows; i += ways)
        UNROLL for (int64_t way = 0; way < ways; way++)
            UNROLL for (int64_t j = 0; j < num; j++)
                sums[way][j] += t->k[i + way] * get(from, (i + way) * columns + j * W, (i + way) * columns + end);
    for (int64_t i = rows; i < k_dim; i++)
        UNROLL for (int64_t j = 0; j < num; j++) sums[0][j] += t->k[i] * get(from, i * columns + j * W, i * columns + end);
    UNROLL for (int64_t j = 0; j < num; j++) {
        UNROLL for (int64_t way = 1; way < ways; way++) sums[0][j] += sums[way][j];
        deltas[j] = (get(v, j * W, end) - decay * sums[0][j]) * t->step;
        results[j] = splat(0);
    }
    for (int64_t i = 0; i < k_dim; i++) {
        vf k = splat(t->k[i]), q = splat(t->q[i]);
        fetch_rows(next, i, 1, columns * (int64_t)size_of(to.dtype));
        UNROLL for (int64_t j = 0; j < num; j++) {
            vf x = decay * get(from, i * columns + j * W, i * columns + end) + k * deltas[j];
            results[j] += q * x;
            put(to, i * columns + j * W, i * columns + end, x);
        }
    }
    UNROLL for (int64_t j = 0; j < num; j++) put(v, j * W, end, results[j]);
}

/* The norm of each head's result, times the gate. */
INLINE void finish_delta(const struct pass *p, float *token, const char *row, int64_t out_row) {
    const struct recurrence *r = p->sizes;
    enum dtype dtype = (enum dtype)p->convolution.dtype;
    struct view norm = floats(((const struct delta *)p->rule)->norm, 0);
    for (int64_t head = 0; head < r->num_heads; head++) {
        struct view x = floats(token, p->v + head * r->v_dim);
        struct view z = {(void *)row, (size_t)(r->channels + head * r->v_dim), dtype};
        struct view out = {p->out, (size_t)((out_row * r->num_heads + head) * r->v_dim), dtype};
        float factor = 1.f / sqrtf(mean_square(x, r->v_dim) + p->eps);
        for (int64_t i = 0; i < r->v_dim; i += W)
            put(out, i, r->v_dim, get(x, i, r->v_dim) * factor * get(norm, i, r->v_dim) * silu_f(get(z, i, r->v_dim)));
    }
}

void delta_prepare(const void *p, int64_t begin, int64_t end) { prepare_pass(p, begin, end, complete_delta); }
void delta_advance(const void *p, int64_t begin, int64_t end) { advance_pass(p, begin, end, change_by_delta); }
void delta_finish(const void *p, int64_t begin, int64_t end) { finish_pass(p, begin, end, finish_delta); }
