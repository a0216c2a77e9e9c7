/* Mamba-2 (mamba.h): a product, and norms over groups that ranks may share. */
#include "group.h"
#include "layer.h"
#include "mamba.h"

static struct pass pass_of(const struct part *part) {
    const struct mamba *m = part->args;
    int64_t width = m->sizes.num_heads * m->sizes.v_dim, groups = m->sizes.num_k_heads * m->sizes.k_dim;
    return (struct pass){
        .sizes = &m->sizes, .rule = m, .width = part->first.n, .inputs = width, .k = width, .q = width + groups,
    };
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed; /* it has no matrix beside the first and the last */
    struct pass pass = pass_of(part);
    return lay_out_pass(&pass, d->dtype, rows, NULL);
}

static void run_both(const void *p, int64_t begin, int64_t end) {
    mamba_gate(p, begin, end);
    mamba_norm(p, begin, end);
}

/* Add the squares of the one group over the ranks. */
static int32_t sum_ranks(const struct turn *t, const struct pass *p) {
    float squares[MOST_TOKENS] = {0}, *at = p->tokens + p->sizes->channels;
    int64_t tokens = p->end - p->begin;
    for (int64_t i = 0; i < tokens; i++) squares[i] = at[i * p->stride];
    int32_t status = quire_group_sum(t->decoder->group, squares, tokens);
    for (int64_t i = 0; i < tokens; i++) at[i * p->stride] = squares[i];
    return status;
}

static int32_t finish(const struct turn *t, const struct pass *p) {
    const struct mamba *m = p->rule;
    int64_t tokens = p->end - p->begin, unit = 4 * m->sizes.num_heads * m->sizes.v_dim;
    if (m->num_sharing == 1) {
        run_ranges(run_both, p, tokens, unit);
        return QUIRE_OK;
    }
    run_ranges(mamba_gate, p, tokens, unit);
    int32_t status = sum_ranks(t, p);
    if (!status) run_ranges(mamba_norm, p, tokens, unit);
    return status;
}

static int32_t run(const struct turn *t) {
    struct pass pass = pass_of(t->part);
    lay_out_pass(&pass, t->decoder->dtype, t->rows, t->room);
    int32_t status = part_multiply_into(t, PLACE_QKV, &t->part->first, t->x, pass.rows, pass.width, t->decoder->dtype);
    return status ? status : run_passes(t, &pass, mamba_prepare, mamba_advance, finish);
}

EXPORT const struct kind kind_mamba = {measure, run};
