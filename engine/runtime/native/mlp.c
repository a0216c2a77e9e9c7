/* The dense feed-forward: layers/mlp.py in C. */
#include "layer.h"

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed;
    return (size_t)(rows * num_columns_of(&part->first)) * size_of(d->dtype);
}

static int32_t run(const struct turn *t) {
    int32_t status = part_multiply(t, PLACE_GATE_UP, &t->part->first, t->x, t->room, t->decoder->dtype);
    return status ? status : part_multiply(t, PLACE_DOWN, &t->part->last, t->room, t->out, DT_F32);
}

EXPORT const struct kind kind_mlp = {measure, run};
