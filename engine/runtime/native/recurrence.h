/* Layers with a matrix for each head and a convolution: layers/recurrence.py in C. A rule says how a token changes a matrix:
 * delta.h, mamba.h. */
#ifndef QUIRE_RECURRENCE_H
#define QUIRE_RECURRENCE_H

#include "states.h"

struct turn; /* layer.h */

/* A head's state is a matrix [k_dim, v_dim], in pieces of `columns` columns; the pieces of all heads come before those of
 * the convolution. */
SHARED struct recurrence {
    const float *taps, *bias; /* of the convolution: [kernel][channels]; [channels], or NULL */
    int64_t num_heads, num_k_heads, k_dim, v_dim, columns, channels, kernel, segment;
    int64_t shared;      /* head h goes with queries and keys h / shared % num_k_heads */
    int32_t state_dtype; /* of the matrices: float32, or bfloat16, into which each token's result is rounded */
};

/* Some tokens of a step, which are numbered slice by slice, replays included. Passes bound the memory that tokens take;
 * none begins between two drafts, whose state is nowhere in between. */
struct pass {
    const struct recurrence *sizes;
    const void *rule;       /* struct delta, or struct mamba */
    char *rows;             /* [T, width] as projected, in the model's type; set by `lay_out_pass` */
    int64_t width, inputs;  /* of a row; where in it the convolution's inputs begin */
    int64_t q, k, v;        /* where in a token its queries, keys and values begin */
    float *tokens;          /* [end - begin][stride]: the channels behind the convolution; then of each head how it decays,
                               and how far it goes; a head's values are replaced by its result */
    int64_t stride;
    int64_t *firsts;        /* [slices + 1]: the first token of each slice */
    int64_t begin, end;
    int64_t slice, num_slices; /* those with tokens in the pass */
    struct convolution convolution;
    void *out; /* [rows, num_heads * v_dim] in the model's type */
    float eps; /* of the norm */
};

enum { MOST_TOKENS = 1024 }; /* of a pass */

/* Return the bytes of room that all passes of a step need, and place what they need there unless it is NULL. */
size_t lay_out_pass(struct pass *pass, int32_t dtype, int64_t rows, char *room);

/* Compute all tokens of a turn, of which the rows are projected, pass by pass: `prepare` what needs no state, token by token,
 * `advance` pieces of slices, and `finish` the results. Returns a status. */
int32_t run_passes(const struct turn *turn, struct pass *pass, range_work *prepare, range_work *advance,
                   int32_t (*finish)(const struct turn *turn, const struct pass *pass));

#endif
