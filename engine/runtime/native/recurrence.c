/* Passes over the tokens of a step with recurrent state (recurrence.h). */
#include "recurrence.h"
#include "layer.h"

enum { PASS = 128 }; /* tokens of a pass, or up to MOST_TOKENS if it ends with a slice's drafts, which end with a block */

size_t lay_out_pass(struct pass *p, int32_t dtype, int64_t rows, char *room) {
    size_t used = 0;
    p->stride = (p->sizes->channels + 2 * p->sizes->num_heads + 15) / 16 * 16;
    p->rows = carve(room, &used, rows * p->width, size_of(dtype));
    p->tokens = carve(room, &used, MOST_TOKENS * p->stride, sizeof(float));
    p->firsts = carve(room, &used, rows + 1, sizeof(int64_t));
    return used;
}

/* Let a pass go from its begin as far as it may. */
static void extend(struct pass *p) {
    const struct step_states *states = p->convolution.states;
    int64_t last = states->num_slices, slice;
    while (p->firsts[p->slice + 1] <= p->begin) p->slice++;
    p->end = p->firsts[last] < p->begin + PASS ? p->firsts[last] : p->begin + PASS;
    for (slice = p->slice; p->firsts[slice + 1] < p->end; slice++) continue;
    int64_t kept = p->firsts[slice] + kept_of(states, slice);
    if (p->end < p->firsts[slice + 1] && p->end > kept) p->end = kept > p->begin ? kept : p->firsts[slice + 1];
    p->num_slices = slice + (p->firsts[slice] < p->end) - p->slice;
}

int32_t run_passes(const struct turn *t, struct pass *p, range_work *prepare, range_work *advance,
                   int32_t (*finish)(const struct turn *turn, const struct pass *pass)) {
    const struct recurrence *sizes = p->sizes;
    const struct step_states *states = t->layer->states;
    int32_t dtype = t->decoder->dtype;
    int64_t pieces = sizes->v_dim / sizes->columns * sizes->num_heads, size = (int64_t)size_of(dtype);
    p->out = t->out, p->eps = t->decoder->eps;
    p->convolution = (struct convolution){
        .states = states, .places = t->layer->places, .drafts = t->layer->drafts, .taps = sizes->taps, .bias = sizes->bias,
        .rows = p->rows, .row_bytes = p->width * size, .first_byte = p->inputs * size, .channels = sizes->channels,
        .kernel = sizes->kernel, .first_piece = pieces, .segment = sizes->segment, .dtype = dtype,
    };
    p->firsts[0] = 0;
    for (int64_t i = 0; i < states->num_slices; i++) p->firsts[i + 1] = p->firsts[i] + tokens_of(states, i);
    for (; p->begin < p->firsts[states->num_slices]; p->begin = p->end) {
        extend(p);
        int64_t tokens = p->end - p->begin, work = tokens * sizes->k_dim * sizes->columns / p->num_slices;
        run_ranges(prepare, p, tokens, sizes->kernel * sizes->channels);
        run_ranges(advance, p, p->num_slices * pieces, work);
        int32_t status = finish(t, p);
        if (status) return status;
    }
    keep_inputs(&p->convolution);
    return QUIRE_OK;
}
