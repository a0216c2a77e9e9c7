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
    widen_packed(packed, &b->mlp.first, rows);
    widen_packed(packed, &b->mlp.last, rows);
    size_t dense = b->mlp.kind->measure(&b->mlp, d, rows, packed);
    size_t experts = b->experts.kind->measure(&b->experts, d, rows, packed);
    return lay_out(d, rows, NULL, &room) + (dense > experts ? dense : experts);
}

/* out = norm(x), of `dtype`. */
static void norm_rows(const struct turn *t, struct norm norm, const void *x, void *out, int32_t dtype) {
    int64_t width = t->decoder->hidden;
    struct norm_args args = {
        .residual = (void *)x, .weight = norm.weight, .out = out, .rows = t->rows, .width = width,
        .residual_stride = width, .out_stride = width,
        .dtype = dtype, .weight_dtype = norm.dtype, .stream_dtype = dtype, .eps = t->decoder->eps,
    };
    quire_add_rms_norm(&args);
}

static int32_t run(const struct turn *t) {
    const struct beside *b = t->part->args;
    struct room r;
    lay_out(t->decoder, t->rows, t->room, &r);
    int32_t dtype = t->decoder->dtype;
    norm_rows(t, b->before_mlp, t->x, r.normed, dtype);
    struct turn own = *t;
    own.part = &b->mlp, own.x = r.normed, own.room = r.own;
    int32_t status = b->mlp.kind->run(&own);
    if (status) return status;
    norm_rows(t, b->after_mlp, t->out, t->out, DT_F32);
    norm_rows(t, b->before_experts, t->x, r.normed, dtype);
    norm_rows(t, b->before_router, t->x, r.routed, dtype);
    struct moe_args experts = {b->experts.args, r.normed, r.sum, NULL, NULL, t->rows, r.routed};
    if ((status = moe_forward(&experts, r.own))) return status;
    norm_rows(t, b->after_experts, r.sum, r.sum, DT_F32);
    add_delta(t->out, r.sum, t->decoder->hidden, t->rows, t->decoder->hidden, 1, 1);
    return QUIRE_OK;
}

EXPORT const struct kind kind_beside = {measure, run};
