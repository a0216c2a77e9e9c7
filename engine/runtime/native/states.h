/* A layer's recurrent state in the slots of a step, and the inputs of its convolution.
 *
 * A slice's tokens are its replays, drafts of the step before of which the rows were kept, and then its rows. The state after
 * the kept rows is written, and before it, of some slices, the state midway: after the replays into the slot that was read, or
 * at a boundary of a prompt into a snapshot. */
#ifndef QUIRE_STATES_H
#define QUIRE_STATES_H

#include "quire_cpu.h"

/* The slots of recurrent state in a step of S slices, the same for all layers; StepStates in kv_layout.py. */
SHARED struct step_states {
    char *base;                    /* of block 0 */
    const int32_t *read, *written; /* [S][width], blocks; read[0] of a slice below 0: the state is zero */
    const int32_t *starts;         /* [S + 1]: rows of each slice */
    const int32_t *kept;           /* [S]: of its rows, after how many the state is written; the others are drafts */
    const int32_t *replays;        /* [S]: drafts of the step before that come before its rows */
    const int32_t *midway;         /* [S][width], blocks */
    const int32_t *midway_after;   /* [S]: tokens after which the state is written there; 0: never */
    const int32_t *rows;           /* [S]: runner rows */
    int64_t block_bytes, width;    /* blocks of a slot */
    int64_t num_slices, max_drafts;
};

enum { MAX_SEGMENT = 64 };

/* A convolution along the tokens of a slice, each channel alone. */
struct convolution {
    const struct step_states *states;
    const int32_t *places; /* as in struct layer */
    char *drafts;
    const float *taps; /* [kernel][channels], of the oldest token first */
    const float *bias; /* [channels]; NULL: none */
    const char *rows;  /* of the step, in `dtype`; the inputs begin `first_byte` bytes behind the start of each */
    int64_t row_bytes, first_byte, channels, kernel;
    int64_t first_piece, segment; /* of its last inputs, and their channels: [kernel - 1][segment] each */
    int32_t dtype;
};

/* The address of a piece in a slot. */
static inline char *piece_at(const struct convolution *c, const int32_t *blocks, int64_t piece) {
    const int32_t *place = c->places + 2 * piece;
    return c->states->base + blocks[place[0]] * c->states->block_bytes + place[1];
}

/* The tokens of a slice after which its state is written. */
static inline int64_t kept_of(const struct step_states *states, int64_t slice) {
    return states->replays[slice] + states->kept[slice];
}

/* All tokens of a slice. */
static inline int64_t tokens_of(const struct step_states *states, int64_t slice) {
    return states->replays[slice] + states->starts[slice + 1] - states->starts[slice];
}

/* The row of a token of a slice. */
static inline const char *row_at(const struct convolution *c, int64_t slice, int64_t token) {
    const struct step_states *states = c->states;
    int64_t replays = states->replays[slice];
    return token < replays ? c->drafts + (states->rows[slice] * states->max_drafts + token) * c->row_bytes
                           : c->rows + (states->starts[slice] + token - replays) * c->row_bytes;
}

/* The inputs of a segment at token `token` of a slice; those before its first token are in the slot. */
static inline const char *inputs_at(const struct convolution *c, int64_t slice, int64_t token, int64_t segment) {
    static const char zeros[MAX_SEGMENT * sizeof(float)];
    int64_t bytes = c->segment * (int64_t)size_of(c->dtype);
    if (token >= 0) return row_at(c, slice, token) + c->first_byte + segment * bytes;
    const int32_t *blocks = c->states->read + slice * c->states->width;
    return blocks[0] < 0 ? zeros : piece_at(c, blocks, c->first_piece + segment) + (token + c->kernel - 1) * bytes;
}

/* Write each slice's last inputs into its slots, and copy its drafts' rows. */
void keep_inputs(const struct convolution *c);

#endif
