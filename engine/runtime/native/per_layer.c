/* The part behind a feed-forward that takes in the layer's input: PerLayerGate of layers/altup.py in C. */
#include "layer.h"

SHARED struct per_layer {
    int64_t first; /* of the layer's input among those of all layers */
    int32_t activation;
};

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed;
    return (size_t)(rows * part->first.n) * size_of(d->dtype);
}

static int32_t run(const struct turn *t) {
    const struct per_layer *p = t->part->args;
    struct turn own = *t;
    own.adapters = NULL;
    int32_t dtype = t->decoder->dtype, status = part_multiply(&own, 0, &t->part->first, t->x, t->room, dtype);
    if (status) return status;
    int64_t width = t->part->first.n;
    struct act_args act = {t->room, t->inputs + p->first, width, t->input_stride, dtype, p->activation};
    run_ranges(act_rows, &act, t->rows, width);
    return part_multiply(&own, 0, &t->part->last, t->room, t->out, DT_F32);
}

EXPORT const struct kind kind_per_layer = {measure, run};
