/* Mamba-2: layers/mamba.py in C. */
#ifndef QUIRE_MAMBA_H
#define QUIRE_MAMBA_H

#include "recurrence.h"

/* A projected row is the gate z, then x of all heads, B and C of all groups, then dt. A token is x, B and C, then the decay and
 * the step of each head: B are the keys, C the queries, and groups the heads of both. */
SHARED struct mamba {
    struct recurrence sizes;
    const float *rates, *biases, *skips; /* [num_heads]: -exp(A_log); added to dt; D */
    const float *norm;                   /* [num_heads * v_dim]; NULL: none */
    float min_step, max_step;
    float gate_scale, step_scale; /* of z and dt as projected */
    int64_t num_sharing; /* ranks that have heads of the one group */
};

#endif
