/* Gated DeltaNet (delta.h): convolution and norms of all tokens; the recurrence, piece by piece of the heads' matrices, each
 * with the tokens of its slice in order; the gated norm. */
#include "delta.h"
#include "layer.h"

#include <string.h>

enum {
    PASS = 128,  /* tokens of a pass, */
    MOST = 1024, /* or more if it ends with a slice's drafts, which end with a block */
};

struct room {
    char *rows;      /* [T, first.n] as projected */
    float *tokens;   /* of a pass */
    int64_t *firsts; /* of slices */
};

static int64_t stride_of(const struct delta *d) { return (delta_channels(d) + 2 * d->num_v_heads + 15) / 16 * 16; }

static size_t lay_out(const struct part *part, int32_t dtype, int64_t rows, char *base, struct room *room) {
    size_t used = 0;
    room->rows = carve(base, &used, rows * delta_row(part->args), size_of(dtype));
    room->tokens = carve(base, &used, MOST * stride_of(part->args), sizeof(float));
    room->firsts = carve(base, &used, rows + 1, sizeof(int64_t));
    return used;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct delta *delta = part->args;
    struct room room;
    widen_packed(packed, &delta->rows, rows);
    widen_packed(packed, &delta->gates, rows);
    return lay_out(part, d->dtype, rows, NULL, &room);
}

/* Rows as projected, whose pieces are moved to their places. */
struct mixed {
    const struct delta *delta;
    char *rows;
    size_t size; /* of a value */
};

static void run_move(const void *context, int64_t begin, int64_t end) {
    const struct mixed *m = context;
    size_t bytes = (size_t)delta_row(m->delta) * m->size;
    char mixed[bytes];
    for (int64_t row = begin; row < end; row++) {
        char *to = m->rows + (size_t)row * bytes;
        memcpy(mixed, to, bytes);
        for (const int32_t *move = m->delta->moves; move < m->delta->moves + 3 * m->delta->num_moves; move += 3)
            memcpy(to + (size_t)move[1] * m->size, mixed + (size_t)move[0] * m->size, (size_t)move[2] * m->size);
    }
}

/* Let a pass go from its begin as far as it may. */
static void extend(struct delta_pass *p) {
    const struct step_states *states = p->convolution.states;
    int64_t last = states->num_slices, slice;
    while (p->firsts[p->slice + 1] <= p->begin) p->slice++;
    p->end = p->firsts[last] < p->begin + PASS ? p->firsts[last] : p->begin + PASS;
    for (slice = p->slice; p->firsts[slice + 1] < p->end; slice++) continue;
    int64_t kept = p->firsts[slice] + kept_of(states, slice);
    if (p->end < p->firsts[slice + 1] && p->end > kept) p->end = kept > p->begin ? kept : p->firsts[slice + 1];
    p->num_slices = slice + (p->firsts[slice] < p->end) - p->slice;
}

static void run_prepare(const void *p, int64_t begin, int64_t end) { active_kernels()->delta_prepare(p, begin, end); }
static void run_advance(const void *p, int64_t begin, int64_t end) { active_kernels()->delta_advance(p, begin, end); }
static void run_gate(const void *p, int64_t begin, int64_t end) { active_kernels()->delta_gate(p, begin, end); }

static int32_t run(const struct turn *t) {
    const struct delta *d = t->part->args;
    const struct step_states *states = t->layer->states;
    int32_t dtype = t->decoder->dtype;
    int64_t channels = delta_channels(d), pieces = d->v_dim / d->columns * d->num_v_heads;
    struct room room;
    lay_out(t->part, dtype, t->rows, t->room, &room);
    int64_t width = delta_row(d);
    int32_t status = part_multiply_into(t, PLACE_QKV, &d->rows, t->x, room.rows, width, dtype);
    char *gates = room.rows + (size_t)d->rows.n * size_of(dtype);
    if (!status) status = part_multiply_into(t, PLACE_Q_B, &d->gates, t->x, gates, width, dtype);
    if (status) return status;
    if (d->moves) {
        struct mixed mixed = {d, room.rows, size_of(dtype)};
        run_ranges(run_move, &mixed, t->rows, width, WORTH_SHARING);
    }
    room.firsts[0] = 0;
    for (int64_t i = 0; i < states->num_slices; i++) room.firsts[i + 1] = room.firsts[i] + tokens_of(states, i);
    struct delta_pass pass = {
        .delta = d, .out = t->out, .eps = t->decoder->eps,
        .firsts = room.firsts, .tokens = room.tokens, .stride = stride_of(d),
        .convolution = {
            states, t->layer->places, t->layer->drafts, d->taps, room.rows,
            width * (int64_t)size_of(dtype), channels, d->kernel, pieces, d->segment, dtype,
        },
    };
    for (; pass.begin < room.firsts[states->num_slices]; pass.begin = pass.end) {
        extend(&pass);
        int64_t tokens = pass.end - pass.begin, work = tokens * d->k_dim * d->columns / pass.num_slices;
        run_ranges(run_prepare, &pass, tokens, d->kernel * channels, WORTH_SHARING);
        run_ranges(run_advance, &pass, pass.num_slices * pieces, work, WORTH_SHARING);
        run_ranges(run_gate, &pass, tokens, 4 * d->num_v_heads * d->v_dim, WORTH_SHARING);
    }
    keep_inputs(&pass.convolution);
    return QUIRE_OK;
}

EXPORT const struct kind kind_delta = {measure, run};
