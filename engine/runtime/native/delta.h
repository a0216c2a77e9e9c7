/* Gated DeltaNet: layers/delta.py in C. */
#ifndef QUIRE_DELTA_H
#define QUIRE_DELTA_H

#include "states.h"

/* A value head's state is a matrix [k_dim, v_dim], in pieces of `columns` columns; the pieces of all heads come before
 * those of the convolution. A projected row is q, k, v of all heads, the gate z, then b and a. */
SHARED struct delta {
    struct linear rows;          /* to q, k, v and z; the part reads rows, for two matrices */
    struct linear gates;         /* to b and a, which checkpoints often leave as floats */
    const float *taps;           /* [kernel][channels of q, k and v] */
    const float *rates, *biases; /* [num_v_heads]: -exp(A_log); added to a */
    const float *norm;           /* [v_dim] */
    int64_t num_k_heads, num_v_heads, k_dim, v_dim, kernel, columns, segment;
    int64_t shared;      /* value head h goes with key head h / shared % num_k_heads */
    const int32_t *moves; /* [num_moves][3]: first of a piece as projected, where it belongs, and its length; NULL: all do */
    int64_t num_moves;
    int32_t state_dtype; /* of the matrices: float32, or bfloat16, into which each token's result is rounded */
};

/* Some tokens of a step, which are numbered slice by slice, replays included. Passes bound the memory that tokens take;
 * none begins between two drafts, whose state is nowhere in between. */
struct delta_pass {
    const struct delta *delta;
    void *out; /* [rows, num_v_heads * v_dim] in the model's type */
    float eps; /* of the norm */
    struct convolution convolution;
    const int64_t *firsts; /* [slices + 1]: the first token of each slice */
    int64_t begin, end;
    int64_t slice, num_slices; /* those with tokens in the pass */
    float *tokens;             /* [end - begin][stride]: q, k and v of all heads, then a decay and a beta for each value
                                  head; v is replaced by the result */
    int64_t stride;
};

static inline int64_t delta_channels(const struct delta *d) {
    return 2 * d->num_k_heads * d->k_dim + d->num_v_heads * d->v_dim;
}

/* The width of a projected row. */
static inline int64_t delta_row(const struct delta *d) { return d->rows.n + d->gates.n; }

#endif
