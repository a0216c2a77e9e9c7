/* An MLP most of whose gates are 0: SparseMLP of layers/altup.py in C. */
#include "altup.h"
#include "layer.h"

SHARED struct sparse_mlp {
    float deviations; /* above the mean of a row's gates, up to which they are 0 */
    int32_t activation;
};

static size_t gate_up_bytes(const struct part *part, int32_t dtype, int64_t rows) {
    return (size_t)(rows * part->first.n) * size_of(dtype);
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed;
    return gate_up_bytes(part, d->dtype, rows) * 3 / 2;
}

static int32_t run(const struct turn *t) {
    const struct sparse_mlp *s = t->part->args;
    int32_t dtype = t->decoder->dtype;
    char *inner = t->room + gate_up_bytes(t->part, dtype, t->rows);
    int32_t status = part_multiply(t, PLACE_GATE_UP, &t->part->first, t->x, t->room, dtype);
    if (status) return status;
    int64_t width = t->part->last.k;
    struct sparse_args act = {t->room, inner, width, s->deviations, dtype, s->activation};
    run_ranges(sparse_act_rows, &act, t->rows, width);
    return part_multiply(t, PLACE_DOWN, &t->part->last, inner, t->out, DT_F32);
}

EXPORT const struct kind kind_sparse_mlp = {measure, run};
