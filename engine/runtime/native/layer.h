/* Layers and their parts. A layer is a mixer, in which a token sees others, and a feed-forward, which computes each token
 * alone; or one of them. A kind of either is one C file, which exports a `struct kind`; a part's description names it. */
#ifndef QUIRE_LAYER_H
#define QUIRE_LAYER_H

#include "lora.h"
#include "states.h"

/* A norm's weight; `weight` NULL: no norm here. */
SHARED struct norm {
    const void *weight;
    int32_t dtype;    /* of weight and bias */
    int32_t kind;     /* enum norm_kind */
    const void *bias; /* of a LayerNorm, or NULL */
};

/* One rotary embedding: the frequency of each pair of dimensions, radians a position. */
SHARED struct rotary {
    const float *inverse; /* [dim / 2] */
    int64_t dim;
    const int64_t *axes; /* [dim / 2]: of which of a position's axes it is; NULL: positions have one */
    float magnitude;
};

/* A mixer or a feed-forward. */
SHARED struct part {
    const struct kind *kind; /* NULL: the layer has no such part */
    const void *args;    /* the kind's own description; NULL: it needs none */
    struct linear first; /* the input is packed for it; packed NULL: the part reads rows */
    struct linear last;  /* a mixer's is multiplied by the decoder */
    int32_t reads_rows;  /* other parts read the same input, so that it is not packed */
};

SHARED struct layer {
    struct part mixer, feed_forward;
    struct part beside; /* a second mixer, which reads the same rows */
    struct part gate; /* a third part, which reads the stream and the layer's input */
    struct norm before_mixer, after_mixer, before_feed_forward, after_feed_forward, after_gate;
    float mixer_scale, beside_scale; /* multiply the results of two mixers */
    float stream_scale; /* multiplies the stream behind the last part */
    struct pool pool; /* the mixer's state; of two mixers one has a pool, and the other states */
    const struct store_args *store;   /* the step's slots in that; pool, k and v are set for each layer */
    const struct attend_args *attend; /* its slices, contexts and tables; the rest is set for each layer */
    const struct step_states *states; /* of a recurrent mixer, which has no pool, store and attend */
    const int32_t *places;            /* [pieces][2]: the block of a slot, and the first byte there */
    char *drafts;                     /* [runner rows][max_drafts], projected rows of drafts */
    int64_t rotary; /* the index of its rotary; -1: the layer has no positions */
};

/* The inputs of all layers: scale * row(id) of a table, plus a norm of a projection of the scaled embedding. */
SHARED struct per_layer_inputs {
    const void *table;        /* [num_rows, num_layers * width] of `dtype`, or panels of `format` */
    struct linear projection; /* to [num_layers * width] */
    struct norm norm;         /* of each layer's part */
    int64_t width, num_rows;  /* num_rows: a further token has the first row */
    int32_t format, dtype;
    float scale, eps;
};

SHARED struct decoder {
    const struct layer *layers;
    const struct rotary *rotaries;
    const void *embedding; /* [vocab, hidden], or panels of embedding_format, see struct embed_args */
    struct norm norm;
    const struct per_layer_inputs *inputs; /* NULL: layers have none */
    struct part start; /* reads the embeddings before the first layer, and changes the residual stream; kind NULL: none */
    int64_t num_layers, num_rotaries, hidden;
    int64_t num_altup; /* residual streams, which `start` and the gates change (altup.h); 0: one, to which parts are added */
    int64_t last_holder; /* the last layer that keeps keys and values; those behind it read others' */
    int32_t dtype, embedding_format;
    float eps, embedding_scale, residual_scale;
    /* The ranks that hold the model: each has a share of the heads, of every MLP's width and of the vocabulary. NULL: this
     * process holds all of it. */
    struct group *group;
    int64_t first_id, num_ids; /* with a group: the rows of the embedding that this rank holds */
    const void *position_rows, *type_rows; /* [.., hidden] of `dtype`, added to a token's embedding; NULL: none */
};

/* One part's turn in a step. */
struct turn {
    const struct decoder *decoder;
    const struct layer *layer;
    const struct part *part;
    int64_t index, rows; /* of the layer; of x */
    enum place first_place; /* of a mixer's matrices that adapters change */
    const void *x;       /* [rows, hidden] in the model's type; NULL: packed for the part's first matrix */
    void *out;           /* of a mixer [rows, last.k] in the model's type; of a feed-forward [rows, hidden] in float32 */
    char *room;          /* as many bytes as the kind wants */
    float *stream;       /* [rows, hidden] */
    float *all_streams;  /* [rows, num_altup, hidden] */
    void *packed;        /* for the packed rows of one product */
    const float *cos, *signed_sin;  /* [rows, rope_dim], of the layer's rotary */
    int64_t rope_dim;               /* 0: the layer has no positions */
    struct adapter_rows *adapters;  /* NULL: none */
    const float *inputs;            /* [rows, input_stride] of all layers; NULL: none */
    int64_t input_stride;
    const struct kept_queries *kept; /* NULL: x has all tokens of the step */
    int32_t stores_only;             /* nothing reads a mixer's `out`: it stores keys and values, or advances its state */
};

/* Tokens of a step that go on alone, as if each were a slice. */
struct kept_queries {
    int64_t *slices;        /* [num]: the slice of the step that each is of */
    int32_t *starts, *contexts, *tables; /* [num + 1]; [num]; [num, the widest table] */
    int64_t num;
};

struct kind {
    /* Return the bytes of room that `run` needs. Raise *packed to those of packed rows of matrices beside first and last. */
    size_t (*measure)(const struct part *part, const struct decoder *decoder, int64_t rows, size_t *packed);
    /* Compute `out`. Returns a status. */
    int32_t (*run)(const struct turn *turn);
};

/* y [rows, columns] = x . weight, and what adapters add at a place. Without x, its rows are packed already. */
EXPORT int32_t part_multiply(const struct turn *t, enum place place, const struct linear *weight, const void *x, void *y,
                             int32_t y_dtype);
/* The same into wider rows, `y_stride` values apart. */
int32_t part_multiply_into(const struct turn *t, enum place place, const struct linear *weight, const void *x, void *y,
                           int64_t y_stride, int32_t y_dtype);

/* How the heads of a mixer attend; see struct attend_args. */
SHARED struct scores {
    const float *sinks;
    int64_t num_heads, window;
    float scale, softcap;
    int32_t is_causal; /* a query sees no keys behind its own, whatever the step says */
};

/* Store new keys and values unless k is NULL, `kv_stride` values a token, and attend with queries into `out`, unless the turn
 * only stores. */
EXPORT int32_t part_attend(const struct turn *t, const struct scores *scores, const void *k, const void *v,
                           int64_t kv_stride, const void *q, int64_t q_stride, void *out);

/* x [rows, width] = scale * (x + alpha * delta), in float32; rows of delta lie `delta_stride` numbers apart. */
static inline void add_delta(float *x, const float *delta, int64_t delta_stride, int64_t rows, int64_t width, float alpha,
                             float scale) {
    struct norm_args args = {
        .residual = x, .delta = delta, .out = x, .rows = rows, .width = width,
        .residual_stride = width, .delta_stride = delta_stride, .out_stride = width, .alpha = alpha, .scale = scale,
    };
    quire_add_rms_norm(&args);
}

/* out = norm(x), both of `dtype`, rows `stride` numbers apart. */
static inline void norm_rows(const struct turn *t, struct norm norm, const void *x, void *out, int64_t width, int64_t stride,
                             int32_t dtype) {
    struct norm_args args = {
        .residual = (void *)x, .weight = norm.weight, .out = out, .rows = t->rows, .width = width,
        .residual_stride = stride, .out_stride = stride,
        .dtype = dtype, .weight_dtype = norm.dtype, .stream_dtype = dtype, .eps = t->decoder->eps,
    };
    quire_add_rms_norm(&args);
}

/* Raise *most to the bytes of packed rows for a matrix. */
static inline void widen_packed(size_t *most, const struct linear *matrix, int64_t rows) {
    struct gemm_args args = {.w = *matrix, .m = rows};
    size_t bytes = matrix->packed ? quire_rows_bytes(&args) : 0;
    if (bytes > *most) *most = bytes;
}

/* Return the bytes of room of a part, if there is one. Raise *packed to those of packed rows for all of its matrices. */
static inline size_t measure_part(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    if (!part->kind) return 0;
    widen_packed(packed, &part->first, rows);
    widen_packed(packed, &part->last, rows);
    return part->kind->measure(part, d, rows, packed);
}

/* Allocate `count` values of `size` bytes, aligned to a cache line; only counts bytes while there is no memory. */
static inline void *carve(char *base, size_t *used, int64_t count, size_t size) {
    void *at = base ? base + *used : NULL;
    *used += ((size_t)count * size + 63) / 64 * 64;
    return at;
}

#endif
