/* The steps of Gated DeltaNet (delta.h). Tokens are computed in order, one by one, and no sum goes across tokens: a token's
 * bits do not depend on the slice or the pass that it is in. */
#include "delta.h"

INLINE float sum_squares(const float *x, int64_t num) {
    struct view view = {(void *)x, 0, DT_F32};
    vf squares = splat(0);
    for (int64_t i = 0; i < num; i += W) {
        vf value = get(view, i, num);
        squares += value * value;
    }
    return sum_f(squares);
}

INLINE void scale_floats(float *x, int64_t num, float factor) {
    struct view view = {x, 0, DT_F32};
    for (int64_t i = 0; i < num; i += W) put(view, i, num, get(view, i, num) * factor);
}

/* Unit length for queries and keys; decays and betas from the row as projected. */
INLINE void finish_token(const struct delta *d, float *token, const char *row, enum dtype dtype) {
    int64_t channels = delta_channels(d), heads = d->num_v_heads;
    for (int64_t head = 0; head < 2 * d->num_k_heads; head++) {
        float *x = token + head * d->k_dim, length = sqrtf(sum_squares(x, d->k_dim) + 1e-6f);
        scale_floats(x, d->k_dim, 1.f / (head < d->num_k_heads ? length * sqrtf((float)d->k_dim) : length));
    }
    struct view b = {(void *)row, (size_t)(channels + heads * d->v_dim), dtype}, a = b;
    struct view rates = {(void *)d->rates, 0, DT_F32}, biases = {(void *)d->biases, 0, DT_F32};
    struct view decays = {token, (size_t)channels, DT_F32}, betas = {token, (size_t)(channels + heads), DT_F32};
    a.at += (size_t)heads;
    for (int64_t i = 0; i < heads; i += W) {
        vf x = get(a, i, heads) + get(biases, i, heads);
        UNROLL for (int lane = 0; lane < W; lane++) x[lane] = x[lane] > 20.f ? x[lane] : log1pf(expf(x[lane]));
        put(decays, i, heads, exp_f(get(rates, i, heads) * x));
        put(betas, i, heads, 1.f / (1.f + exp_f(-get(b, i, heads))));
    }
}

/* Tokens [begin, end) of a pass: everything that needs no state. */
INLINE void delta_prepare_as(const struct delta_pass *p, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t slice = p->slice, num;
    for (int64_t at = p->begin + begin; at < p->begin + end; at += num) {
        while (p->firsts[slice + 1] <= at) slice++;
        int64_t first = at - p->firsts[slice], after = p->firsts[slice + 1];
        float *tokens = p->tokens + (at - p->begin) * p->stride;
        num = (after < p->begin + end ? after : p->begin + end) - at;
        if (num > MAX_RUN) num = MAX_RUN;
        convolve(&p->convolution, slice, first, num, tokens, p->stride, 1, dtype);
        for (int64_t i = 0; i < num; i++)
            finish_token(p->delta, tokens + i * p->stride, inputs_at(&p->convolution, slice, first + i, 0), dtype);
    }
}

/* A token's numbers for one head, and columns of its v, which become the result. */
struct delta_token {
    const float *q, *k;
    float *v;
    float decay, beta;
};

/* One token, for `num` vectors of columns: from rows of one matrix, `columns` apart, into those of another or the same. Where
 * the sum of a column is latency, it is one of several sums of rows. `next` is read soon. */
INLINE void delta_token_as(const struct delta_token *t, struct view from, struct view to, int64_t first, int64_t k_dim,
                           int64_t columns, int64_t num, const char *next) {
    enum { MAX = 32 / W };
    int64_t ways = 8 / num, rows = k_dim / ways * ways, row_bytes = columns * (int64_t)size_of(to.dtype);
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
        deltas[j] = (get(v, j * W, end) - decay * sums[0][j]) * t->beta;
        results[j] = splat(0);
    }
    for (int64_t i = 0; i < k_dim; i++) {
        vf k = splat(t->k[i]), q = splat(t->q[i]);
        for (int64_t line = 0; next && line < row_bytes; line += 64) __builtin_prefetch(next + i * row_bytes + line);
        UNROLL for (int64_t j = 0; j < num; j++) {
            vf x = decay * get(from, i * columns + j * W, i * columns + end) + k * deltas[j];
            results[j] += q * x;
            put(to, i * columns + j * W, i * columns + end, x);
        }
    }
    UNROLL for (int64_t j = 0; j < num; j++) put(v, j * W, end, results[j]);
}

/* A piece in the slot of a slice that a pass begins with; NULL: it is zero. */
INLINE char *piece_before(const struct delta_pass *p, int64_t slice, int64_t piece) {
    const struct step_states *states = p->convolution.states;
    int is_written = p->begin > p->firsts[slice] + states->replays[slice];
    const int32_t *blocks = (is_written ? states->written : states->read) + slice * states->width;
    return blocks[0] < 0 ? NULL : piece_at(&p->convolution, blocks, piece);
}

/* All tokens of a slice in a pass, for one piece of its matrices. `next` is read soon. */
INLINE void advance_piece(const struct delta_pass *p, int64_t slice, int64_t piece, const char *next, enum dtype dtype) {
    const struct delta *d = p->delta;
    const struct step_states *states = p->convolution.states;
    int64_t columns = d->columns, head = piece / (d->v_dim / columns), channels = delta_channels(d);
    int64_t size = d->k_dim * columns, first = p->firsts[slice], after = p->firsts[slice + 1];
    int64_t replayed = first + states->replays[slice], kept = first + kept_of(states, slice);
    int64_t begin = first > p->begin ? first : p->begin, end = after < p->end ? after : p->end;
    char *written = piece_at(&p->convolution, states->written + slice * states->width, piece);
    uint32_t drafted[end > kept ? size : 1]; /* the state after drafts */
    struct view from = {piece_before(p, slice, piece), 0, dtype};
    if (!from.base) from.base = memset(written, 0, (size_t)size * size_of(dtype));
    for (int64_t at = begin; at < end; at++) {
        float *token = p->tokens + (at - p->begin) * p->stride, *gates = token + channels + head;
        const float *q = token + head / d->shared % d->num_k_heads * d->k_dim;
        float *v = token + 2 * d->num_k_heads * d->k_dim + piece * columns;
        struct delta_token t = {q, q + d->num_k_heads * d->k_dim, v, gates[0], gates[d->num_v_heads]};
        struct view to = {at < replayed ? from.base : at < kept ? written : (char *)drafted, 0, dtype};
        const char *soon = at + 1 < end ? NULL : next;
        if (columns == 32)
            delta_token_as(&t, from, to, 0, d->k_dim, 32, 32 / W, soon);
        else
            for (int64_t j = 0; j < columns; j += W) delta_token_as(&t, from, to, j, d->k_dim, columns, 1, soon);
        from = to;
    }
}

/* Pieces [begin, end) of the pass's slices, a head of all slices after the other: so threads have equal shares of each. */
INLINE void delta_advance_as(const struct delta_pass *p, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t blocks = p->delta->v_dim / p->delta->columns;
    for (int64_t item = begin; item < end; item++) {
        int64_t ends = item + 1 < end ? item + 1 : item, pieces[2], slices[2], items[2] = {item, ends};
        for (int i = 0; i < 2; i++) {
            slices[i] = p->slice + items[i] / blocks % p->num_slices;
            pieces[i] = items[i] / blocks / p->num_slices * blocks + items[i] % blocks;
        }
        advance_piece(p, slices[0], pieces[0], piece_before(p, slices[1], pieces[1]), dtype);
    }
}

/* Tokens [begin, end) of a pass: the norm of each head's result, times the gate, into the part's rows. */
INLINE void delta_gate_as(const struct delta_pass *p, int64_t begin, int64_t end, enum dtype dtype) {
    const struct delta *d = p->delta;
    const struct step_states *states = p->convolution.states;
    int64_t slice = p->slice, channels = delta_channels(d), width = d->num_v_heads * d->v_dim;
    struct view norm = {(void *)d->norm, 0, DT_F32};
    for (int64_t at = p->begin + begin; at < p->begin + end; at++) {
        while (p->firsts[slice + 1] <= at) slice++;
        int64_t token = at - p->firsts[slice], row = states->starts[slice] + token - states->replays[slice];
        if (token < states->replays[slice]) continue;
        const float *results = p->tokens + (at - p->begin) * p->stride + channels - width;
        for (int64_t head = 0; head < d->num_v_heads; head++, results += d->v_dim) {
            struct view x = {(void *)results, 0, DT_F32};
            struct view out = {p->out, (size_t)(row * width + head * d->v_dim), dtype};
            struct view z = {(void *)inputs_at(&p->convolution, slice, token, 0), (size_t)(channels + head * d->v_dim), dtype};
            float factor = 1.f / sqrtf(sum_squares(results, d->v_dim) / (float)d->v_dim + p->eps);
            for (int64_t i = 0; i < d->v_dim; i += W) {
                vf gate = get(z, i, d->v_dim);
                gate /= 1.f + exp_f(-gate);
                put(out, i, d->v_dim, get(x, i, d->v_dim) * factor * get(norm, i, d->v_dim) * gate);
            }
        }
    }
}

static void delta_prepare(const struct delta_pass *p, int64_t begin, int64_t end) {
    enum dtype dtype = (enum dtype)p->convolution.dtype;
    if (dtype == DT_F32)
        delta_prepare_as(p, begin, end, DT_F32);
    else if (dtype == DT_BF16)
        delta_prepare_as(p, begin, end, DT_BF16);
    else
        delta_prepare_as(p, begin, end, DT_F16);
}

static void delta_advance(const struct delta_pass *p, int64_t begin, int64_t end) {
    if (p->delta->state_dtype == DT_F32)
        delta_advance_as(p, begin, end, DT_F32);
    else
        delta_advance_as(p, begin, end, DT_BF16);
}

static void delta_gate(const struct delta_pass *p, int64_t begin, int64_t end) {
    delta_gate_as(p, begin, end, (enum dtype)p->convolution.dtype);
}
