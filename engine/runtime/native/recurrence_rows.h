/* The steps of layers with a matrix for each head (recurrence.h), for any rule. Tokens are computed in order, one by one, and
 * no sum goes across tokens: a token's bits do not depend on the slice or the pass that it is in. */
#include "recurrence.h"

INLINE void scale_floats(struct view x, int64_t num, float factor) {
    for (int64_t i = 0; i < num; i += W) put(x, i, num, get(x, i, num) * factor);
}

INLINE vf softplus_f(vf x) {
    UNROLL for (int lane = 0; lane < W; lane++) x[lane] = x[lane] > 20.f ? x[lane] : log1pf(expf(x[lane]));
    return x;
}

INLINE vf silu_f(vf x) { return x / (1.f + exp_f(-x)); }

/* Complete a token behind the convolution, of a row as projected. */
typedef void complete_token(const struct pass *p, float *token, const char *row, enum dtype dtype);

INLINE void prepare_tokens(const struct pass *p, int64_t begin, int64_t end, complete_token *complete, enum dtype dtype) {
    int64_t slice = p->slice, num;
    for (int64_t at = p->begin + begin; at < p->begin + end; at += num) {
        while (p->firsts[slice + 1] <= at) slice++;
        int64_t first = at - p->firsts[slice], after = p->firsts[slice + 1];
        float *tokens = p->tokens + (at - p->begin) * p->stride;
        num = (after < p->begin + end ? after : p->begin + end) - at;
        if (num > MAX_RUN) num = MAX_RUN;
        convolve(&p->convolution, slice, first, num, tokens, p->stride, 1);
        for (int64_t i = 0; i < num; i++)
            complete(p, tokens + i * p->stride, row_at(&p->convolution, slice, first + i), dtype);
    }
}

/* Tokens [begin, end) of a pass: everything that needs no state. */
INLINE void prepare_pass(const struct pass *p, int64_t begin, int64_t end, complete_token *complete) {
    BY_TYPE(p->convolution.dtype, prepare_tokens, p, begin, end, complete);
}

/* A token's numbers for one head, and columns of its v, which become the result. */
struct head_token {
    const float *q, *k;
    float *v;
    float decay, step;
    int64_t head;
};

/* One token, for `num` vectors of columns from `first` on: from rows of one matrix, `columns` apart, into those of another or
 * the same. `next` is read soon. */
typedef void change_matrix(const struct pass *p, const struct head_token *t, struct view from, struct view to, int64_t first,
                           int64_t columns, int64_t num, const char *next);

/* Fetch rows of the piece that is next, unless it is NULL: into the second cache, because the first has no room for two. */
INLINE void fetch_rows(const char *next, int64_t row, int64_t num, int64_t row_bytes) {
    for (int64_t at = row * row_bytes; next && at < (row + num) * row_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
}

/* A piece in the slot of a slice that a pass begins with; NULL: it is zero. */
INLINE char *piece_before(const struct pass *p, int64_t slice, int64_t piece) {
    const struct step_states *states = p->convolution.states;
    int64_t done = p->begin - p->firsts[slice];
    const int32_t *blocks = done <= 0 ? states->read : done <= states->midway_after[slice] ? states->midway : states->written;
    blocks += slice * states->width;
    return blocks[0] < 0 ? NULL : piece_at(&p->convolution, blocks, piece);
}

/* All tokens of a slice in a pass, for one piece of its matrices. `next` is read soon. */
INLINE void advance_piece(const struct pass *p, int64_t slice, int64_t piece, const char *next, enum dtype dtype,
                          change_matrix *change) {
    const struct recurrence *r = p->sizes;
    const struct step_states *states = p->convolution.states;
    int64_t columns = r->columns, head = piece / (r->v_dim / columns), key = head / r->shared % r->num_k_heads * r->k_dim;
    int64_t size = r->k_dim * columns, first = p->firsts[slice], after = p->firsts[slice + 1];
    int64_t midway_after = first + states->midway_after[slice], kept = first + kept_of(states, slice);
    int64_t begin = first > p->begin ? first : p->begin, end = after < p->end ? after : p->end;
    char *written = piece_at(&p->convolution, states->written + slice * states->width, piece);
    char *midway = states->midway_after[slice] ? piece_at(&p->convolution, states->midway + slice * states->width, piece) : NULL;
    uint32_t drafted[end > kept ? size : 1]; /* the state after drafts */
    struct view from = {piece_before(p, slice, piece), 0, dtype};
    if (!from.base) from.base = memset(written, 0, (size_t)size * size_of(dtype));
    for (int64_t at = begin; at < end; at++) {
        float *token = p->tokens + (at - p->begin) * p->stride, *gates = token + r->channels + head;
        struct head_token t = {
            token + p->q + key, token + p->k + key, token + p->v + piece * columns, gates[0], gates[r->num_heads], head,
        };
        struct view to = {at < midway_after ? midway : at < kept ? written : (char *)drafted, 0, dtype};
        const char *soon = at + 1 < end ? NULL : next;
        if (columns == 32)
            change(p, &t, from, to, 0, 32, 32 / W, soon);
        else if (columns == 16)
            change(p, &t, from, to, 0, 16, 16 / W, soon);
        else
            for (int64_t j = 0; j < columns; j += W) change(p, &t, from, to, j, columns, 1, soon);
        from = to;
    }
}

INLINE void advance_pieces(const struct pass *p, int64_t begin, int64_t end, enum dtype dtype, change_matrix *change) {
    int64_t blocks = p->sizes->v_dim / p->sizes->columns;
    for (int64_t item = begin; item < end; item++) {
        int64_t ends = item + 1 < end ? item + 1 : item, pieces[2], slices[2], items[2] = {item, ends};
        for (int i = 0; i < 2; i++) {
            slices[i] = p->slice + items[i] / blocks % p->num_slices;
            pieces[i] = items[i] / blocks / p->num_slices * blocks + items[i] % blocks;
        }
        advance_piece(p, slices[0], pieces[0], piece_before(p, slices[1], pieces[1]), dtype, change);
    }
}

/* Pieces [begin, end) of the pass's slices, a head of all slices after the other: so threads have equal shares of each. */
INLINE void advance_pass(const struct pass *p, int64_t begin, int64_t end, change_matrix *change) {
    if (p->sizes->state_dtype == DT_F32)
        advance_pieces(p, begin, end, DT_F32, change);
    else
        advance_pieces(p, begin, end, DT_BF16, change);
}

/* Norm and gate a token's results into a row of the part's. */
typedef void finish_token(const struct pass *p, float *token, const char *row, int64_t out_row);

/* Tokens [begin, end) of a pass but replays, which have no rows. */
INLINE void finish_pass(const struct pass *p, int64_t begin, int64_t end, finish_token *finish) {
    const struct step_states *states = p->convolution.states;
    int64_t slice = p->slice;
    for (int64_t at = p->begin + begin; at < p->begin + end; at++) {
        while (p->firsts[slice + 1] <= at) slice++;
        int64_t token = at - p->firsts[slice], row = token - states->replays[slice];
        if (row >= 0)
            finish(p, p->tokens + (at - p->begin) * p->stride, row_at(&p->convolution, slice, token), states->starts[slice] + row);
    }
}
