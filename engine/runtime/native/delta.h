/* Gated DeltaNet: layers/delta.py in C. */
#ifndef QUIRE_DELTA_H
#define QUIRE_DELTA_H

#include "recurrence.h"

/* A projected row is q, k, v of all heads, the gate z, then b and a. A token is q, k and v, then the decay and the beta of each
 * head. */
SHARED struct delta {
    struct recurrence sizes;
    struct linear rows;          /* to q, k, v and z; the part reads rows, for two matrices */
    struct linear gates;         /* to b and a, which checkpoints often leave as floats */
    const float *rates, *biases; /* [num_heads]: -exp(A_log); added to a */
    const float *norm;           /* [v_dim] */
    const int32_t *moves; /* [num_moves][3]: first of a piece as projected, where it belongs, and its length; NULL: all do */
    int64_t num_moves;
};

#endif
