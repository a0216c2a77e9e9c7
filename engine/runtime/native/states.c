/* The end of a step of recurrent state (states.h). */
#include "states.h"

#include <string.h>

/* Write a segment's last inputs before token `end` of a slice into a slot. */
static void write_inputs(const struct convolution *c, int64_t slice, int64_t end, int64_t segment, const int32_t *blocks) {
    size_t bytes = (size_t)c->segment * size_of(c->dtype);
    char *to = piece_at(c, blocks, c->first_piece + segment);
    for (int64_t i = 0; i < c->kernel - 1; i++, to += bytes) /* in the slot that is read, what is still needed lies behind */
        memcpy(to, inputs_at(c, slice, end + i - (c->kernel - 1), segment), bytes);
}

static void run_keep(const void *context, int64_t begin, int64_t end) {
    const struct convolution *c = context;
    const struct step_states *states = c->states;
    for (int64_t slice = begin; slice < end; slice++) {
        const int32_t *read = states->read + slice * states->width, *written = states->written + slice * states->width;
        const int32_t *midway = states->midway + slice * states->width;
        int64_t drafts = states->starts[slice] + states->kept[slice], after = states->midway_after[slice];
        int is_left = after && midway[0] != written[0], is_last = is_left && midway[0] == read[0];
        for (int64_t segment = 0; segment * c->segment < c->channels; segment++) { /* what is read is written last */
            if (is_left && !is_last) write_inputs(c, slice, after, segment, midway);
            write_inputs(c, slice, kept_of(states, slice), segment, written);
            if (is_last) write_inputs(c, slice, after, segment, midway);
        }
        if (drafts < states->starts[slice + 1])
            memcpy(c->drafts + states->rows[slice] * states->max_drafts * c->row_bytes, c->rows + drafts * c->row_bytes,
                   (size_t)((states->starts[slice + 1] - drafts) * c->row_bytes));
    }
}

void keep_inputs(const struct convolution *c) {
    run_ranges(run_keep, c, c->states->num_slices, c->kernel * c->channels);
}
