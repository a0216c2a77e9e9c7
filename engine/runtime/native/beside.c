/* A dense MLP and a mixture of experts, each with norms before and after it: layers/mixture.py in C. */
#include "moe.h"

SHARED struct beside {
    struct part mlp, experts;
    struct norm before_mlp, after_mlp, before_router, before_experts, after_experts;
};

/* The intermediate results: normed rows for either part, and for the router; the experts' sum; then a part's own. */
struct room {
    char *normed, *routed, *own;
    float *sum;
};

static size_t lay_out(const struct decoder *d, int64_t rows, char *base, struct room *r) {
    size_t used = 0, size = size_of(d->dtype);
    r->normed = carve(base, &used, rows * d->hidden, size);
    r->routed = carve(base, &used, rows * d->hidden, size);
    r->sum = carve(base, &used, rows * d->hidden, sizeof(float));
    r->own = base ? base + used : NULL;
    return used;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct beside *b = part->args;
    struct room room;
    size_t dense = measure_part(&b->mlp, d, rows, packed), experts = measure_part(&b->experts, d, rows, packed);
    return lay_out(d, rows, NULL, &room) + (dense > experts ? dense : experts);
}

static int32_t run(const struct turn *t) {
    const struct beside *b = t->part->args;
    struct room r;
    lay_out(t->decoder, t->rows, t->room, &r);
    int32_t dtype = t->decoder->dtype;
    int64_t hidden = t->decoder->hidden;
    norm_rows(t, b->before_mlp, t->x, r.normed, hidden, hidden, dtype);
    struct turn own = *t;
    own.part = &b->mlp, own.x = r.normed, own.room = r.own;
    int32_t status = b->mlp.kind->run(&own);
    if (status) return status;
    norm_rows(t, b->after_mlp, t->out, t->out, hidden, hidden, DT_F32);
    norm_rows(t, b->before_experts, t->x, r.normed, hidden, hidden, dtype);
    norm_rows(t, b->before_router, t->x, r.routed, hidden, hidden, dtype);
    struct moe_args experts = {b->experts.args, r.normed, r.sum, NULL, NULL, t->rows, r.routed};
    if ((status = moe_forward(&experts, r.own))) return status;
    norm_rows(t, b->after_experts, r.sum, r.sum, hidden, hidden, DT_F32);
    add_delta(t->out, r.sum, hidden, t->rows, hidden, 1, 1);
    return QUIRE_OK;
}

EXPORT const struct kind kind_beside = {measure, run};
