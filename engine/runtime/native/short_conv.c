/* A convolution over the last tokens between two gates (short_conv.h). */
#include "short_conv.h"
#include "layer.h"

struct room {
    char *projected, *inputs;
};

static size_t lay_out(const struct part *part, int32_t dtype, int64_t rows, char *base, struct room *room) {
    size_t used = 0;
    room->projected = carve(base, &used, rows * part->first.n, size_of(dtype));
    room->inputs = carve(base, &used, rows * part->last.k, size_of(dtype));
    return used;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    struct room room;
    (void)packed; /* it has no matrix beside the first and the last */
    return lay_out(part, d->dtype, rows, NULL, &room);
}

static int32_t run(const struct turn *t) {
    const struct short_conv *s = t->part->args;
    int32_t dtype = t->decoder->dtype;
    int64_t channels = t->part->last.k;
    struct room room;
    lay_out(t->part, dtype, t->rows, t->room, &room);
    int32_t status = part_multiply(t, PLACE_QKV, &t->part->first, t->x, room.projected, dtype);
    if (status) return status;
    struct gated_rows rows = {
        .projected = room.projected, .inputs = room.inputs, .out = t->out, .dtype = dtype,
        .convolution = {
            .states = t->layer->states, .places = t->layer->places, .drafts = t->layer->drafts, .taps = s->taps,
            .bias = s->bias, .rows = room.inputs, .row_bytes = channels * (int64_t)size_of(dtype), .channels = channels,
            .kernel = s->kernel, .segment = s->segment, .dtype = dtype,
        },
    };
    run_ranges(first_gate_rows, &rows, t->rows, channels);
    run_ranges(convolve_gated_rows, &rows, t->rows, s->kernel * channels);
    keep_inputs(&rows.convolution);
    return QUIRE_OK;
}

EXPORT const struct kind kind_short_conv = {measure, run};
