/* Multi-head latent attention in a forward pass: layers/latent.py in C. A token's row in the pool is a latent, then numbers
 * with a position, which all heads share. */
#ifndef QUIRE_LATENT_H
#define QUIRE_LATENT_H

#include "quire_cpu.h"

/* A layer's matrices between its first product and its last. A head's query is `nope_dim` numbers that `keys` takes to the
 * width of a latent, then `rope_dim` numbers that are rotated. */
struct latent {
    struct linear queries;              /* of the queries' own latent; packed NULL: the first product has the queries */
    const struct linear *keys, *values; /* [num_heads], for quire_gemm_heads */
    int64_t rank, nope_dim, rope_dim;
    int32_t is_interleaved; /* rotated pairs are neighbours, not halves */
    float eps;              /* of the norms of latents */
};

/* The intermediate results of a layer, in the model's type. */
struct latent_room {
    char *normed, *queries; /* the input of `queries`, unless it is packed directly, and its result */
    char *absorbed;         /* [T, num_heads, rank + rope_dim], queries that meet the rows of the pool */
    char *keys;             /* [T, rank + rope_dim], new rows of the pool */
    char *mixed;            /* [T, num_heads, rank], weighted sums of latents */
};

/* Rows of one layer between two products: `keys` and the rotated part of `absorbed` are written. */
struct latent_rows {
    const struct latent *latent;
    const void *norm;       /* weight [rank] of the latents' norm */
    const char *queries, *rows; /* of the first token; rows: latents as projected, then their shared part */
    struct latent_room *room;
    const float *cos, *signed_sin; /* [tokens, rope_dim] */
    int64_t num_heads, query_stride, row_stride; /* in values */
    int32_t dtype, norm_dtype;
};

/* Point `room` at its parts of `base`, or with NULL count their bytes, which are returned. */
size_t latent_lay_out(const struct latent *l, int64_t num_heads, int32_t dtype, int64_t rows, char *base,
                      struct latent_room *room);

void latent_rotate(const struct latent_rows *args, int64_t num_rows);

/* y [T, num_heads, n] = each head of x, `x_stride` values a token and `x_step` a head, times its matrix; `y_step` values
 * a head in y. */
int32_t latent_multiply(const struct linear *heads, int64_t num_heads, const void *x, int64_t x_stride, int64_t x_step,
                        void *y, int64_t y_step, int64_t num_rows);

#endif
