/* Gated DeltaNet (delta.h): two products, and the pieces of their rows in place. */
#include "delta.h"
#include "layer.h"

#include <string.h>

static struct pass pass_of(const struct part *part) {
    const struct delta *d = part->args;
    int64_t keys = d->sizes.num_k_heads * d->sizes.k_dim;
    return (struct pass){.sizes = &d->sizes, .rule = d, .width = d->rows.n + d->gates.n, .k = keys, .v = 2 * keys};
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct delta *delta = part->args;
    struct pass pass = pass_of(part);
    widen_packed(packed, &delta->rows, rows);
    widen_packed(packed, &delta->gates, rows);
    return lay_out_pass(&pass, d->dtype, rows, NULL);
}

/* Rows as projected, whose pieces are moved to their places. */
struct mixed {
    const struct delta *delta;
    char *rows;
    size_t bytes, size; /* of a row; of a value */
};

static void run_move(const void *context, int64_t begin, int64_t end) {
    const struct mixed *m = context;
    char mixed[m->bytes];
    for (int64_t row = begin; row < end; row++) {
        char *to = m->rows + (size_t)row * m->bytes;
        memcpy(mixed, to, m->bytes);
        for (const int32_t *move = m->delta->moves; move < m->delta->moves + 3 * m->delta->num_moves; move += 3)
            memcpy(to + (size_t)move[1] * m->size, mixed + (size_t)move[0] * m->size, (size_t)move[2] * m->size);
    }
}

static int32_t finish(const struct turn *t, const struct pass *p) {
    (void)t; /* no head needs another rank's */
    run_ranges(delta_finish, p, p->end - p->begin, 4 * p->sizes->num_heads * p->sizes->v_dim);
    return QUIRE_OK;
}

static int32_t run(const struct turn *t) {
    const struct delta *d = t->part->args;
    int32_t dtype = t->decoder->dtype;
    struct pass pass = pass_of(t->part);
    lay_out_pass(&pass, dtype, t->rows, t->room);
    int32_t status = part_multiply_into(t, PLACE_QKV, &d->rows, t->x, pass.rows, pass.width, dtype);
    char *gates = pass.rows + (size_t)d->rows.n * size_of(dtype);
    if (!status) status = part_multiply_into(t, PLACE_Q_B, &d->gates, t->x, gates, pass.width, dtype);
    if (status) return status;
    if (d->moves) {
        struct mixed mixed = {d, pass.rows, (size_t)pass.width * size_of(dtype), size_of(dtype)};
        run_ranges(run_move, &mixed, t->rows, pass.width);
    }
    return run_passes(t, &pass, delta_prepare, delta_advance, finish);
}

EXPORT const struct kind kind_delta = {measure, run};
