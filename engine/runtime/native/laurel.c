/* A mixer beside a product of low rank (LAuReL), which is added to the residual stream: AltUpLayer of layers/altup.py in C. */
#include "altup.h"
#include "layer.h"

SHARED struct laurel {
    struct part mixer;
    struct linear left, right;
    const float *after; /* [hidden], the weight of the norm behind both */
};

/* The product of both; then the rows between them, or what the mixer wants. */
static size_t sum_bytes(const struct decoder *d, int64_t rows) { return (size_t)(rows * d->hidden) * sizeof(float); }

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct laurel *l = part->args;
    size_t mixer = measure_part(&l->mixer, d, rows, packed), low = (size_t)(rows * l->left.n) * size_of(d->dtype);
    widen_packed(packed, &l->left, rows);
    widen_packed(packed, &l->right, rows);
    low += sum_bytes(d, rows);
    return mixer > low ? mixer : low;
}

static int32_t run(const struct turn *t) {
    const struct decoder *d = t->decoder;
    const struct laurel *l = t->part->args;
    struct turn own = *t;
    own.adapters = NULL;
    float *sum = (float *)t->room;
    char *low = t->room + sum_bytes(d, t->rows);
    int32_t status = part_multiply(&own, 0, &l->left, t->x, low, d->dtype);
    if (status || (status = part_multiply(&own, 0, &l->right, low, sum, DT_F32))) return status;
    struct laurel_args add = {t->stream, t->x, sum, l->after, d->hidden, d->eps, d->dtype};
    run_ranges(add_laurel_rows, &add, t->rows, d->hidden);
    own.part = &l->mixer, own.adapters = t->adapters;
    return l->mixer.kind->run(&own);
}

EXPORT const struct kind kind_laurel = {measure, run};
