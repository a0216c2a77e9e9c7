/* A mixture of experts between two products, to a narrower space and back, and perhaps an MLP beside it (Nemotron 3). MoE of
 * layers/mixture.py in C. */
#include "moe.h"

SHARED struct latent_experts {
    struct part experts; /* of the narrow rows; its router reads x */
    struct part shared;  /* of x; kind NULL: none */
    struct linear narrow, widen;
};

/* The rows that the experts read, and then their rounded sum; the sum, or what the shared expert says; then a part's own. */
struct room {
    char *rows, *own;
    float *sum;
};

static size_t lay_out(const struct latent_experts *l, const struct decoder *d, int64_t rows, char *base, struct room *r) {
    int64_t latent = l->narrow.n;
    size_t used = 0;
    r->rows = carve(base, &used, rows * latent, size_of(d->dtype));
    r->sum = carve(base, &used, rows * (latent > d->hidden ? latent : d->hidden), sizeof(float));
    r->own = base ? base + used : NULL;
    return used;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct latent_experts *l = part->args;
    struct room room;
    widen_packed(packed, &l->narrow, rows);
    widen_packed(packed, &l->widen, rows);
    size_t experts = measure_part(&l->experts, d, rows, packed), shared = measure_part(&l->shared, d, rows, packed);
    return lay_out(l, d, rows, NULL, &room) + (experts > shared ? experts : shared);
}

static int32_t run(const struct turn *t) {
    const struct latent_experts *l = t->part->args;
    const struct decoder *d = t->decoder;
    int64_t latent = l->narrow.n;
    struct room r;
    lay_out(l, d, t->rows, t->room, &r);
    struct turn own = *t;
    own.adapters = NULL, own.part = &l->shared, own.room = r.own, own.out = r.sum; /* adapters never change experts */
    int32_t status = part_multiply(&own, 0, &l->narrow, t->x, r.rows, d->dtype);
    if (status) return status;
    struct moe_args experts = {l->experts.args, r.rows, r.sum, NULL, NULL, t->rows, t->x};
    if ((status = moe_forward(&experts, r.own))) return status;
    struct norm_args round = {
        .residual = r.sum, .out = r.rows, .rows = t->rows, .width = latent, .residual_stride = latent, .out_stride = latent,
        .dtype = d->dtype, .stream_dtype = DT_F32,
    };
    quire_add_rms_norm(&round);
    if ((status = part_multiply(&own, 0, &l->widen, r.rows, t->out, DT_F32)) || !l->shared.kind) return status;
    if ((status = l->shared.kind->run(&own))) return status;
    add_delta(t->out, r.sum, d->hidden, t->rows, d->hidden, 1, 1);
    return QUIRE_OK;
}

EXPORT const struct kind kind_latent_experts = {measure, run};
