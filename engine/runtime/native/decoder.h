/* The forward pass of a decoder of the Llama lineage as one call: models/decoder.py in C, layer by layer. The residual
 * stream and its addends are float32; the inputs of matrices have the model's type. */
#ifndef QUIRE_DECODER_H
#define QUIRE_DECODER_H

#include "group.h"
#include "latent.h"
#include "lora.h"
#include "moe.h"

enum qk_norm { QK_NORM_NONE = 0, QK_NORM_HEAD = 1, QK_NORM_FULL = 2 };

/* An RMSNorm's weight; `weight` NULL: no norm here. */
struct norm {
    const void *weight;
    int32_t dtype;
};

/* One rotary embedding: the frequency of each pair of dimensions, radians a position. */
struct rotary {
    const float *inverse; /* [dim / 2] */
    int64_t dim;
    float magnitude;
};

struct layer {
    struct linear qkv, o, gate_up, down; /* with latents, qkv is the first product: of queries or their latent, and rows */
    const struct latent *latent; /* NULL: keys and values have heads of their own */
    const struct moe *moe; /* instead of gate_up and down; NULL: none */
    const float *sinks;    /* [num_heads], see struct attend_args, or NULL */
    struct norm before_attention, after_attention, before_mlp, after_mlp, q, k; /* q, k: of latents, if there are any */
    struct pool pool;
    const struct store_args *store;   /* the step's slots in the layer's group; pool, k and v are set for each layer */
    const struct attend_args *attend; /* its slices, contexts and tables; the rest is set for each layer */
    int64_t window; /* 0: none */
    int64_t rotary; /* which, -1: none */
};

struct decoder {
    const struct layer *layers;
    const struct rotary *rotaries;
    const void *embedding; /* [vocab, hidden], or panels of embedding_format, see struct embed_args */
    struct norm norm;
    int64_t num_layers, num_rotaries, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    int32_t dtype, qk_norm, embedding_format;
    float eps, embedding_scale, residual_scale, attention_scale, softcap;
    float qkv_clip; /* bound of queries, keys and values before rotation; 0: none */
    /* The ranks that hold the model: each has a share of the heads, of every MLP's width and of the vocabulary. NULL: this
     * process holds all of it. */
    struct group *group;
    int64_t first_id, num_ids; /* with a group: the rows of the embedding that this rank holds */
};

/* One step: a flat batch in, the normed hidden states of some of its rows out. */
struct forward_args {
    const struct decoder *decoder;
    const int64_t *ids, *positions;   /* [num_tokens] */
    const int64_t *rows;              /* [num_rows]; NULL: all */
    void *hidden;                     /* [num_rows, hidden] */
    int64_t num_tokens, num_rows;
    struct adapters adapters; /* of the tokens */
    void *streams;                /* [num_tokens, num_streams, hidden], written: the residual sums that enter stream_layers */
    const int64_t *stream_layers; /* [num_streams]; num_layers: the sum that leaves the last layer, only if `rows` is NULL */
    int64_t num_streams;
};

#endif
