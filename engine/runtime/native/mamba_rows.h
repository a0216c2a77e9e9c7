/* The rule of Mamba-2 (mamba.h). */
#include "mamba.h"

/* Decays and steps from the row as projected. */
INLINE void complete_mamba(const struct pass *p, float *token, const char *row, enum dtype dtype) {
    const struct mamba *m = p->rule;
    int64_t channels = p->sizes->channels, heads = p->sizes->num_heads;
    struct view dt = {(void *)row, (size_t)(p->inputs + channels), dtype};
    struct view rates = floats(m->rates, 0), biases = floats(m->biases, 0);
    struct view decays = floats(token, channels), steps = floats(token, channels + heads);
    for (int64_t i = 0; i < heads; i += W) {
        vf step = softplus_f(get(dt, i, heads) * splat(m->step_scale) + get(biases, i, heads));
        step = clamp_f(step, splat(m->min_step), splat(m->max_step));
        put(decays, i, heads, exp_f(get(rates, i, heads) * step));
        put(steps, i, heads, step);
    }
}

/* One row of a matrix, for `num` vectors of columns. */
INLINE void change_row(const struct head_token *t, struct view from, struct view to, int64_t row, int64_t columns, int64_t end,
                       int64_t num, vf decay, const vf *added, vf *results) {
    vf k = splat(t->k[row]), q = splat(t->q[row]);
    UNROLL for (int64_t j = 0; j < num; j++) {
        vf x = decay * get(from, row * columns + j * W, row * columns + end) + k * added[j];
        results[j] += q * x;
        put(to, row * columns + j * W, row * columns + end, x);
    }
}

/* Where the sum of a column is latency, it is one of two sums of rows. */
INLINE void change_by_mamba(const struct pass *p, const struct head_token *t, struct view from, struct view to, int64_t first,
                            int64_t columns, int64_t num, const char *next) {
    enum { MAX = 32 / W };
    int64_t k_dim = p->sizes->k_dim, ways = num == 1 ? 2 : 1, rows = k_dim / ways * ways, end = columns - first;
    vf added[MAX], results[2][MAX], decay = splat(t->decay), skip = splat(((const struct mamba *)p->rule)->skips[t->head]);
    struct view v = {t->v, (size_t)first, DT_F32};
    from.at += (size_t)first, to.at += (size_t)first;
    UNROLL for (int64_t j = 0; j < num; j++) {
        vf x = get(v, j * W, end);
        added[j] = x * t->step, results[0][j] = x * skip, results[1][j] = splat(0);
    }
    for (int64_t i = 0; i < rows; i += ways) {
        fetch_rows(next, i, ways, columns * (int64_t)size_of(to.dtype));
        UNROLL for (int64_t way = 0; way < ways; way++)
            change_row(t, from, to, i + way, columns, end, num, decay, added, results[way]);
    }
    if (rows < k_dim) change_row(t, from, to, rows, columns, end, num, decay, added, results[0]);
    UNROLL for (int64_t j = 0; j < num; j++) put(v, j * W, end, ways == 1 ? results[0][j] : results[0][j] + results[1][j]);
}

/* Gate a token's results, in place; the sums of their squares by groups are left where its decays were. */
INLINE void gate_mamba(const struct pass *p, float *token, const char *row, int64_t out_row) {
    (void)out_row;
    const struct recurrence *r = p->sizes;
    vf scale = splat(((const struct mamba *)p->rule)->gate_scale);
    int64_t width = r->shared * r->v_dim;
    for (int64_t group = 0; group < r->num_k_heads; group++) {
        struct view x = {token + p->v, (size_t)(group * width), DT_F32};
        struct view z = {(void *)row, (size_t)(group * width), (enum dtype)p->convolution.dtype};
        vf squares = splat(0);
        for (int64_t i = 0; i < width; i += W) {
            vf gated = get(x, i, width) * silu_f(get(z, i, width) * scale);
            squares += gated * gated;
            put(x, i, width, gated);
        }
        token[r->channels + group] = sum_f(squares);
    }
}

/* The norm of gated results by groups, or the results as they are. */
INLINE void norm_mamba(const struct pass *p, float *token, const char *row, int64_t out_row) {
    (void)row;
    const struct recurrence *r = p->sizes;
    const struct mamba *m = p->rule;
    int64_t width = r->shared * r->v_dim;
    for (int64_t group = 0; group < r->num_k_heads; group++) {
        struct view x = {token + p->v, (size_t)(group * width), DT_F32};
        struct view norm = {(void *)m->norm, (size_t)(group * width), DT_F32};
        struct view out = {p->out, (size_t)((out_row * r->num_k_heads + group) * width), (enum dtype)p->convolution.dtype};
        float factor = 1.f / sqrtf(token[r->channels + group] / (float)(width * m->num_sharing) + p->eps);
        for (int64_t i = 0; i < width; i += W)
            put(out, i, width, m->norm ? get(x, i, width) * factor * get(norm, i, width) : get(x, i, width));
    }
}

void mamba_prepare(const void *p, int64_t begin, int64_t end) { prepare_pass(p, begin, end, complete_mamba); }
void mamba_advance(const void *p, int64_t begin, int64_t end) { advance_pass(p, begin, end, change_by_mamba); }
void mamba_gate(const void *p, int64_t begin, int64_t end) { finish_pass(p, begin, end, gate_mamba); }
void mamba_norm(const void *p, int64_t begin, int64_t end) { finish_pass(p, begin, end, norm_mamba); }
