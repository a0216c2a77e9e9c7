/* The steps of a convolution between two gates (short_conv.h). Each channel of each token alone: a token's bits do not depend on
 * the step that it is in. */
#include "short_conv.h"

/* Rows [begin, end): what enters the convolution. */
INLINE void first_gate_as(const struct gated_rows *r, int64_t begin, int64_t end, enum dtype dtype) {
    int64_t channels = r->convolution.channels;
    for (int64_t row = begin; row < end; row++) {
        struct view b = {(void *)r->projected, (size_t)(row * 3 * channels), dtype}, x = b;
        struct view inputs = {r->inputs, (size_t)(row * channels), dtype};
        x.at += (size_t)(2 * channels);
        for (int64_t i = 0; i < channels; i += W) put(inputs, i, channels, get(b, i, channels) * get(x, i, channels));
    }
}

/* Tokens [first, first + num) of a slice, of which the first is row `row`: their convolution times their gates c. */
INLINE void convolve_run(const struct gated_rows *r, int64_t slice, int64_t first, int64_t num, int64_t row,
                         enum dtype dtype) {
    const struct convolution *c = &r->convolution;
    int64_t width = c->segment;
    for (int64_t at = 0; at < c->channels; at += width) {
        float sums[MAX_RUN * MAX_SEGMENT];
        convolve_segment(c, slice, first, num, at / width, sums, MAX_SEGMENT, 0);
        for (int64_t token = 0; token < num; token++) {
            struct view sum = {sums, (size_t)(token * MAX_SEGMENT), DT_F32};
            struct view gate = {(void *)r->projected, (size_t)((3 * (row + token) + 1) * c->channels + at), dtype};
            struct view out = {r->out, (size_t)((row + token) * c->channels + at), dtype};
            for (int64_t i = 0; i < width; i += W) put(out, i, width, get(gate, i, width) * get(sum, i, width));
        }
    }
}

/* Rows [begin, end). */
INLINE void convolve_gated_as(const struct gated_rows *r, int64_t begin, int64_t end, enum dtype dtype) {
    const struct step_states *states = r->convolution.states;
    for (int64_t slice = 0, row = begin, num; row < end; row += num) {
        while (states->starts[slice + 1] <= row) slice++;
        int64_t after = states->starts[slice + 1] < end ? states->starts[slice + 1] : end;
        num = after - row < MAX_RUN ? after - row : MAX_RUN;
        convolve_run(r, slice, states->replays[slice] + row - states->starts[slice], num, row, dtype);
    }
}

FOR_EACH_TYPE(first_gate, gated_rows)
FOR_EACH_TYPE(convolve_gated, gated_rows)
