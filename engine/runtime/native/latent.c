/* Multi-head latent attention: layers/latent.py in C. A token's row in the pool is a latent, then numbers with a position,
 * which all heads share. */
#include "layer.h"

#include <string.h>

/* A head's query is `nope_dim` numbers that `keys` takes to the width of a latent, then `rope_dim` numbers that are
 * rotated. The part's first matrix makes queries or their latent, and rows. */
SHARED struct latent {
    struct scores scores;
    struct norm q, k;                   /* of the latents of queries and of keys */
    struct linear queries;              /* of the queries' own latent; packed NULL: the first product has the queries */
    const struct linear *keys, *values; /* [num_heads], for quire_gemm_heads */
    int64_t rank, nope_dim, rope_dim;
    int32_t is_interleaved; /* rotated pairs are neighbours, not halves */
    float eps;              /* of the norms of latents */
};

/* The intermediate results of a layer, in the model's type. */
struct room {
    char *first;            /* [T, first.n], queries or their latent, and rows as projected */
    char *normed, *queries; /* the input of `queries`, unless it is packed directly, and its result */
    char *absorbed;         /* [T, num_heads, rank + rope_dim], queries that meet the rows of the pool */
    char *keys;             /* [T, rank + rope_dim], new rows of the pool */
    char *mixed;            /* [T, num_heads, rank], weighted sums of latents */
};

/* Rows of one layer between two products: `keys` and the rotated part of `absorbed` are written. */
struct rows {
    const struct turn *turn;
    const struct latent *latent;
    const struct room *room;
    const char *queries, *rows;       /* of the first token; rows: latents as projected, then their shared part */
    int64_t query_stride, row_stride; /* in values */
};

/* Point `room` at its parts of `base`, or with NULL count their bytes, which are returned. */
static size_t lay_out(const struct part *part, int32_t dtype, int64_t rows, char *base, struct room *room) {
    const struct latent *l = part->args;
    int64_t has_queries = l->queries.packed != NULL, width = l->rank + l->rope_dim, heads = l->scores.num_heads;
    int64_t widths[] = {part->first.n, has_queries * l->queries.k, has_queries * l->queries.n, heads * width, width,
                        heads * l->rank};
    char **parts[] = {&room->first, &room->normed, &room->queries, &room->absorbed, &room->keys, &room->mixed};
    size_t used = 0;
    for (int i = 0; i < 6; i++) *parts[i] = carve(base, &used, rows * widths[i], size_of(dtype));
    return used;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    struct room room;
    widen_packed(packed, &((const struct latent *)part->args)->queries, rows);
    return lay_out(part, d->dtype, rows, NULL, &room);
}

/* Copy numbers to be rotated; interleaved pairs become halves, in queries and keys alike, so that scores do not change. */
static void copy_pairs(const struct latent *l, const char *from, char *to, size_t size) {
    size_t half = (size_t)l->rope_dim / 2;
    if (!l->is_interleaved)
        memcpy(to, from, 2 * half * size);
    else if (size == 2)
        for (size_t i = 0; i < half; i++) {
            memcpy(to + i * 2, from + i * 4, 2);
            memcpy(to + (half + i) * 2, from + i * 4 + 2, 2);
        }
    else
        for (size_t i = 0; i < half; i++) {
            memcpy(to + i * 4, from + i * 8, 4);
            memcpy(to + (half + i) * 4, from + i * 8 + 4, 4);
        }
}

static void run_rotate(const void *context, int64_t begin, int64_t end) {
    const struct rows *a = context;
    const struct latent *l = a->latent;
    int32_t dtype = a->turn->decoder->dtype;
    size_t size = size_of(dtype), width = (size_t)(l->rank + l->rope_dim), rank = (size_t)l->rank;
    int64_t heads = l->scores.num_heads;
    struct norm_args norm = {
        .residual = (void *)a->rows, .weight = l->k.weight, .out = a->room->keys, .width = l->rank,
        .residual_stride = a->row_stride, .out_stride = (int64_t)width,
        .dtype = dtype, .weight_dtype = l->k.dtype, .stream_dtype = dtype, .eps = l->eps,
    };
    add_rms_norm_rows(&norm, begin, end);
    for (int64_t token = begin; token < end; token++) {
        const char *row = a->rows + (size_t)(token * a->row_stride) * size;
        const char *query = a->queries + (size_t)(token * a->query_stride + l->nope_dim) * size;
        char *to = a->room->absorbed + ((size_t)(token * heads) * width + rank) * size;
        for (int64_t head = 0; head < heads; head++, to += width * size)
            copy_pairs(l, query + (size_t)(head * (l->nope_dim + l->rope_dim)) * size, to, size);
        copy_pairs(l, row + rank * size, a->room->keys + ((size_t)token * width + rank) * size, size);
    }
    struct rope_args rope = {
        .qk = a->room->absorbed + rank * size, .cos = a->turn->cos, .signed_sin = a->turn->signed_sin,
        .stride = heads * (int64_t)width, .num_heads = heads, .head_dim = (int64_t)width,
        .rope_dim = l->rope_dim, .dtype = dtype, .angle_dtype = DT_F32,
    };
    rope_rows(&rope, begin, end);
    rope.qk = a->room->keys + rank * size, rope.stride = (int64_t)width, rope.num_heads = 1;
    rope_rows(&rope, begin, end);
}

/* y [T, num_heads, n] = each head of x, `x_stride` values a token and `x_step` a head, times its matrix; `y_step` values
 * a head in y. */
static int32_t multiply_heads(const struct turn *t, const struct linear *heads, const void *x, int64_t x_stride,
                              int64_t x_step, void *y, int64_t y_step) {
    int64_t num = ((const struct latent *)t->part->args)->scores.num_heads;
    struct heads_args args = {heads, x, y, num, t->rows, x_stride, x_step, num * y_step, y_step};
    return quire_gemm_heads(&args);
}

/* Queries of all heads, from their latent. */
static int32_t expand_queries(const struct turn *t, const struct latent *l, const struct room *room) {
    int32_t dtype = t->decoder->dtype;
    struct gemm_args packs = {.w = l->queries, .rows = t->packed, .m = t->rows};
    char *normed = t->adapters ? room->normed : NULL;
    struct norm_args norm = {
        .residual = room->first, .weight = l->q.weight, .out = normed, .packs = normed ? NULL : &packs,
        .rows = t->rows, .width = l->queries.k, .residual_stride = t->part->first.n, .out_stride = l->queries.k,
        .dtype = dtype, .weight_dtype = l->q.dtype, .stream_dtype = dtype, .eps = l->eps,
    };
    quire_add_rms_norm(&norm);
    return part_multiply(t, PLACE_Q_B, &l->queries, normed, room->queries, dtype);
}

static int32_t run(const struct turn *t) {
    const struct latent *l = t->part->args;
    const struct linear *first = &t->part->first;
    int32_t dtype = t->decoder->dtype;
    int64_t heads = l->scores.num_heads, width = l->rank + l->rope_dim, head = l->nope_dim + l->rope_dim;
    struct room room;
    lay_out(t->part, dtype, t->rows, t->room, &room);
    struct rows rows = {t, l, &room, room.first, room.first + (size_t)(first->n - width) * size_of(dtype), first->n, first->n};
    int32_t status = part_multiply(t, PLACE_QKV, first, t->x, room.first, dtype);
    if (!status && l->queries.packed) {
        status = expand_queries(t, l, &room);
        rows.queries = room.queries, rows.query_stride = l->queries.n;
    }
    if (status) return status;
    run_ranges(run_rotate, &rows, t->rows, heads * l->rope_dim + l->rank);
    status = multiply_heads(t, l->keys, rows.queries, rows.query_stride, head, room.absorbed, width);
    if (!status) status = part_attend(t, &l->scores, room.keys, NULL, width, room.absorbed, heads * width, room.mixed);
    if (status || t->stores_only) return status;
    return multiply_heads(t, l->values, room.mixed, heads * l->rank, l->rank, t->out, l->values->n);
}

EXPORT const struct kind kind_latent = {measure, run};
