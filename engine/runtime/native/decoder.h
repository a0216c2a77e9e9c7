/* The forward pass of a decoder as one call: models/decoder.py in C, layer by layer. The residual stream and its addends are
 * float32; the inputs of matrices have the model's type. */
#ifndef QUIRE_DECODER_H
#define QUIRE_DECODER_H

#include "group.h"
#include "layer.h"

/* One step: a flat batch in, the normed hidden states of some of its rows out. */
SHARED struct forward_args {
    const struct decoder *decoder;
    const int64_t *ids, *positions;   /* [num_tokens]; positions of three axes: [3][num_tokens] */
    const int64_t *types;             /* [num_tokens], if the decoder has rows of types */
    const int64_t *rows;              /* [num_rows]; NULL: all */
    void *hidden;                     /* [num_rows, hidden] */
    int64_t num_tokens, num_rows;
    struct adapters adapters; /* of the tokens */
    void *streams;                /* [num_tokens, num_streams, hidden], written: the residual sums that enter some layers */
    const int64_t *stream_layers; /* [num_streams], those layers. num_layers stands for the sum that leaves the last layer, */
    int64_t num_streams;          /* which is written only if `rows` is NULL */
    int64_t axis_step; /* from a token's position on one axis to that on the next; 0: all of them are equal */
    const int64_t *vector_of; /* [num_tokens]: the row of `vectors` in the place of an embedding, or -1; NULL: none */
    const float *vectors; /* [1 + num_deep, num_vectors, hidden]: embeddings, then what is added behind the first layers */
    int64_t num_vectors, num_deep;
};

EXPORT int32_t quire_forward(const struct forward_args *);

#endif
