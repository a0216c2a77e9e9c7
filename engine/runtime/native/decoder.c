/* The forward pass (decoder.h): a sequence of the library's own operations over one workspace. */
#include "decoder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The intermediate results of a step. */
struct workspace {
    float *stream, *delta;      /* [T, hidden] */
    char *qkv, *attended, *mlp; /* in the model's type, [T, width of their matrices] */
    void *rows;                 /* input of the next product, packed */
    float *cos, *sin;                             /* [rotaries][T, dim], the sign of the negated half inside sin */
    float *kept_stream;                           /* [num_rows, hidden], in the last layer */
    char *kept_attended;                          /* likewise */
    struct latent_room latent;                    /* only with latents */
    struct adapter_rows adapters;                 /* only with adapters, ... */
    char *normed;                                 /* ... like this; without them norms for qkv and gate_up are packed directly */
    char *routed, *moe; /* only with mixtures of experts: their input [T, hidden], and their memory */
    int64_t *ids;       /* only with a group: the tokens' rows of this rank's embedding */
};

static size_t size_of(int32_t dtype) { return dtype == DT_F32 ? 4 : 2; }

/* Allocate `count` values of `size` bytes, aligned to a cache line; only counts bytes while there is no memory. */
static void *carve(char *base, size_t *used, int64_t count, size_t size) {
    void *at = base ? base + *used : NULL;
    *used += ((size_t)count * size + 63) / 64 * 64;
    return at;
}

static const struct linear *matrix_at(const struct layer *layer, enum place place) {
    const struct linear *all[NUM_PLACES] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down,
                                            layer->latent ? &layer->latent->queries : NULL};
    return all[place];
}

/* Most bytes of packed rows, for any of the matrices. */
static size_t packed_bytes(const struct decoder *d, int64_t rows) {
    size_t most = 0;
    for (int64_t i = 0; i < d->num_layers; i++)
        for (enum place place = 0; place < NUM_PLACES; place++) {
            const struct linear *matrix = matrix_at(&d->layers[i], place);
            if (!matrix) continue;
            struct gemm_args args = {.w = *matrix, .m = rows};
            size_t bytes = quire_rows_bytes(&args);
            if (bytes > most) most = bytes;
        }
    return most;
}

/* Most bytes that a mixture of experts needs; 0: there is none. */
static size_t mixture_bytes(const struct decoder *d, int64_t rows) {
    size_t most = 0;
    for (int64_t i = 0; i < d->num_layers; i++) {
        size_t bytes = d->layers[i].moe ? moe_bytes(d->layers[i].moe, rows) : 0;
        if (bytes > most) most = bytes;
    }
    return most;
}

static size_t lay_out(const struct forward_args *f, char *base, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t tokens = f->num_tokens > f->num_rows ? f->num_tokens : f->num_rows, angles = 0;
    size_t used = 0, size = size_of(d->dtype);
    for (int64_t i = 0; i < d->num_rotaries; i++) angles += d->rotaries[i].dim;
    w->stream = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->delta = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->qkv = carve(base, &used, tokens * d->layers->qkv.n, size);
    w->attended = carve(base, &used, tokens * d->layers->o.k, size);
    w->mlp = carve(base, &used, tokens * d->intermediate, size);
    w->rows = carve(base, &used, 1, packed_bytes(d, tokens));
    w->cos = carve(base, &used, tokens * angles, sizeof(float));
    w->sin = carve(base, &used, tokens * angles, sizeof(float));
    w->kept_stream = carve(base, &used, f->num_rows * d->hidden, sizeof(float));
    w->kept_attended = carve(base, &used, f->num_rows * d->layers->o.k, size);
    size_t mixture = mixture_bytes(d, tokens);
    w->routed = carve(base, &used, mixture ? tokens * d->hidden : 0, size);
    w->moe = carve(base, &used, 1, mixture);
    w->ids = carve(base, &used, d->group ? tokens : 0, sizeof(int64_t));
    if (d->layers->latent)
        used += latent_lay_out(d->layers->latent, d->num_heads, d->dtype, tokens, base ? base + used : NULL, &w->latent);
    w->normed = NULL;
    if (f->adapters.num) {
        w->normed = carve(base, &used, tokens * d->hidden, size);
        used += adapter_rows_lay_out(&w->adapters, &f->adapters, d->num_layers, tokens, base ? base + used : NULL);
    }
    return used;
}

/* Angles of all tokens, one rotary after the other. */
static void fill_angles(const struct forward_args *f, struct workspace *w) {
    float *cos_at = w->cos, *sin_at = w->sin;
    for (int64_t i = 0; i < f->decoder->num_rotaries; i++) {
        const struct rotary *r = &f->decoder->rotaries[i];
        int64_t half = r->dim / 2;
        for (int64_t t = 0; t < f->num_tokens; t++, cos_at += r->dim, sin_at += r->dim)
            for (int64_t j = 0; j < half; j++) {
                float angle = (float)f->positions[t] * r->inverse[j];
                cos_at[j] = cos_at[half + j] = cosf(angle) * r->magnitude;
                sin_at[half + j] = sinf(angle) * r->magnitude;
                sin_at[j] = -sin_at[half + j];
            }
    }
}

/* y = x . weight, for matrix `place` of layer `layer`; without x, the rows are packed already. */
static int32_t linear(const struct forward_args *f, int64_t layer, enum place place, const void *x,
                      struct workspace *w, void *y, int64_t rows, int32_t y_dtype) {
    const struct linear *weight = matrix_at(&f->decoder->layers[layer], place);
    struct gemm_args args = {*weight, x, w->rows, y, rows, weight->k, num_columns_of(weight), y_dtype, NULL};
    if (f->adapters.num) {
        int32_t status = adapter_rows_multiply(&w->adapters, layer, place, x);
        if (status) return status;
        args.addends = w->adapters.addends;
    }
    return quire_gemm(&args);
}

/* stream += scale * delta unless delta is NULL. Then the stream, normalised if there is a norm, is written to `out`, or
 * packed for the matrix `next` if there is no `out`. */
static void add_norm(const struct decoder *d, struct norm norm, float *stream, const float *delta, void *out,
                     int32_t out_dtype, int64_t rows, const struct linear *next, struct workspace *w) {
    struct gemm_args packs;
    if (!out) packs = (struct gemm_args){.w = *next, .rows = w->rows, .m = rows};
    struct norm_args args = {
        .residual = stream, .delta = delta, .weight = norm.weight, .out = out, .packs = out ? NULL : &packs,
        .rows = rows, .width = d->hidden,
        .residual_stride = d->hidden, .delta_stride = d->hidden, .out_stride = d->hidden,
        .dtype = out_dtype, .weight_dtype = norm.dtype, .stream_dtype = DT_F32,
        .alpha = d->residual_scale, .eps = d->eps,
    };
    quire_add_rms_norm(&args);
}

/* Norms of all query heads as one vector, and of all key heads. */
static void norm_whole(const struct decoder *d, struct norm norm, char *at, int64_t width, int64_t stride,
                       int64_t rows) {
    struct norm_args args = {
        .residual = at, .weight = norm.weight, .out = at,
        .rows = rows, .width = width, .residual_stride = stride, .out_stride = stride,
        .dtype = d->dtype, .weight_dtype = norm.dtype, .stream_dtype = d->dtype, .eps = d->eps,
    };
    quire_add_rms_norm(&args);
}

static void run_clip(const void *args, int64_t begin, int64_t end) { active_kernels()->clip(args, begin, end); }

/* Where the angles of a layer's rotary begin. */
static size_t angles_of(const struct forward_args *f, const struct layer *layer) {
    size_t angles = 0;
    for (int64_t i = 0; i < layer->rotary; i++) angles += (size_t)(f->decoder->rotaries[i].dim * f->num_tokens);
    return angles;
}

static void rotate(const struct forward_args *f, const struct layer *layer, struct workspace *w, int64_t stride,
                   int64_t rows) {
    const struct decoder *d = f->decoder;
    int per_head = d->qk_norm == QK_NORM_HEAD;
    size_t angles = angles_of(f, layer);
    if (layer->rotary < 0 && !per_head) return;
    struct rope_args args = {
        .qk = w->qkv, .cos = w->cos + angles, .signed_sin = w->sin + angles,
        .q_weight = per_head ? layer->q.weight : NULL, .k_weight = per_head ? layer->k.weight : NULL,
        .tokens = rows, .stride = stride, .num_heads = d->num_heads, .num_kv_heads = d->num_kv_heads,
        .head_dim = d->head_dim, .rope_dim = layer->rotary < 0 ? 0 : d->rotaries[layer->rotary].dim,
        .dtype = d->dtype, .weight_dtype = layer->q.dtype, .angle_dtype = DT_F32, .eps = d->eps,
    };
    quire_rope(&args);
}

/* Store new rows of the pool, and attend with queries, into `out`. */
static int32_t store_and_attend(const struct forward_args *f, const struct layer *layer, const void *k, const void *v,
                                int64_t kv_stride, const void *q, int64_t q_stride, void *out, int64_t rows) {
    const struct decoder *d = f->decoder;
    struct store_args store = *layer->store;
    store.num_tokens = rows;
    store.pool = layer->pool, store.k = k, store.v = v, store.k_stride = store.v_stride = kv_stride;
    quire_store(&store);
    struct attend_args attend = *layer->attend;
    attend.pool = layer->pool, attend.q = q, attend.q_stride = q_stride, attend.out = out;
    attend.num_heads = d->num_heads, attend.sinks = layer->sinks, attend.window = layer->window;
    attend.scale = d->attention_scale, attend.softcap = d->softcap;
    return quire_attend(&attend);
}

/* Queries of all heads, from w->qkv where that has their latent only. */
static int32_t queries_of(const struct forward_args *f, int64_t index, struct workspace *w, int64_t rows) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[index];
    const struct linear *matrix = &layer->latent->queries;
    struct gemm_args packs = {.w = *matrix, .rows = w->rows, .m = rows};
    char *normed = f->adapters.num ? w->latent.normed : NULL;
    struct norm_args norm = {
        .residual = w->qkv, .weight = layer->q.weight, .out = normed, .packs = normed ? NULL : &packs,
        .rows = rows, .width = matrix->k, .residual_stride = layer->qkv.n, .out_stride = matrix->k,
        .dtype = d->dtype, .weight_dtype = layer->q.dtype, .stream_dtype = d->dtype, .eps = layer->latent->eps,
    };
    quire_add_rms_norm(&norm);
    return linear(f, index, PLACE_Q_B, normed, w, w->latent.queries, rows, d->dtype);
}

/* The same as `attention`, over a pool of latents. */
static int32_t latent_attention(const struct forward_args *f, int64_t index, struct workspace *w, int64_t rows) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[index];
    const struct latent *l = layer->latent;
    int64_t heads = d->num_heads, width = l->rank + l->rope_dim, head = l->nope_dim + l->rope_dim;
    size_t angles = angles_of(f, layer), first = (size_t)(layer->qkv.n - width) * size_of(d->dtype);
    int32_t status = linear(f, index, PLACE_QKV, w->normed, w, w->qkv, rows, d->dtype);
    struct latent_rows args = {
        .latent = l, .norm = layer->k.weight, .queries = w->qkv, .rows = w->qkv + first, .room = &w->latent,
        .cos = w->cos + angles, .signed_sin = w->sin + angles,
        .num_heads = heads, .query_stride = layer->qkv.n, .row_stride = layer->qkv.n,
        .dtype = d->dtype, .norm_dtype = layer->k.dtype,
    };
    if (!status && l->queries.packed) {
        status = queries_of(f, index, w, rows);
        args.queries = w->latent.queries, args.query_stride = l->queries.n;
    }
    if (status) return status;
    latent_rotate(&args, rows);
    char *absorbed = w->latent.absorbed;
    status = latent_multiply(l->keys, heads, args.queries, args.query_stride, head, absorbed, width, rows);
    if (!status) status = store_and_attend(f, layer, w->latent.keys, NULL, width, absorbed, heads * width, w->latent.mixed, rows);
    if (status) return status;
    return latent_multiply(l->values, heads, w->latent.mixed, heads * l->rank, l->rank, w->attended, l->values->n, rows);
}

/* Queries, keys and values of the normed rows; keys and values into the pool; the heads' results into w->attended. */
static int32_t attention(const struct forward_args *f, int64_t index, struct workspace *w, int64_t rows) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[index];
    if (layer->latent) return latent_attention(f, index, w, rows);
    size_t size = size_of(d->dtype);
    int64_t q_width = d->num_heads * d->head_dim, kv_width = d->num_kv_heads * d->head_dim;
    int64_t stride = q_width + 2 * kv_width;
    char *k = w->qkv + (size_t)q_width * size, *v = k + (size_t)kv_width * size;
    int32_t status = linear(f, index, PLACE_QKV, w->normed, w, w->qkv, rows, d->dtype);
    if (status) return status;
    if (d->qk_norm == QK_NORM_FULL) {
        norm_whole(d, layer->q, w->qkv, q_width, stride, rows);
        norm_whole(d, layer->k, k, kv_width, stride, rows);
    }
    if (d->qkv_clip != 0) {
        struct clip_args clip = {w->qkv, stride, d->qkv_clip, d->dtype};
        run_ranges(run_clip, &clip, rows, stride, WORTH_SHARING);
    }
    rotate(f, layer, w, stride, rows);
    return store_and_attend(f, layer, k, v, stride, w->qkv, stride, w->attended, rows);
}

/* Nothing reads the last layer's other rows: continue with the requested ones, which may repeat. */
static void keep_rows(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    size_t stream = (size_t)d->hidden * sizeof(float);
    size_t attended = (size_t)d->layers->o.k * size_of(d->dtype);
    for (size_t i = 0; i < (size_t)f->num_rows; i++) {
        size_t row = (size_t)f->rows[i];
        memcpy((char *)w->kept_stream + i * stream, (char *)w->stream + row * stream, stream);
        memcpy(w->kept_attended + i * attended, w->attended + row * attended, attended);
    }
    w->stream = w->kept_stream, w->attended = w->kept_attended;
    if (f->adapters.num) adapter_rows_sort(&w->adapters, f->rows, f->num_rows);
}

/* Add w->delta to the stream (normalised first, in some families), and compute the norm `before` the next part: into
 * `out`, or packed for the matrix `next` if there is no `out`. */
static void join(const struct decoder *d, struct norm after, struct norm before, struct workspace *w,
                 const struct linear *next, void *out, int64_t rows) {
    if (after.weight) add_norm(d, after, w->delta, NULL, w->delta, DT_F32, rows, NULL, w);
    add_norm(d, before, w->stream, w->delta, out, d->dtype, rows, next, w);
}

/* The MLP of a layer, of the rows that `join` has normed: into w->delta. */
static int32_t mlp(const struct forward_args *f, int64_t index, struct workspace *w, int64_t rows) {
    const struct moe *moe = f->decoder->layers[index].moe;
    if (moe) {
        struct moe_args args = {moe, w->routed, w->delta, NULL, NULL, rows};
        return moe_forward(&args, w->moe);
    }
    int32_t status = linear(f, index, PLACE_GATE_UP, w->normed, w, w->mlp, rows, f->decoder->dtype);
    return status ? status : linear(f, index, PLACE_DOWN, w->mlp, w, w->delta, rows, DT_F32);
}

/* x [rows, hidden] = the sum of all ranks' x. */
static int32_t reduce(const struct decoder *d, float *x, int64_t rows) {
    return d->group ? quire_group_sum(d->group, x, rows * d->hidden) : QUIRE_OK;
}

/* Round the stream that enters a layer into the caller's copy, if that layer's is wanted. */
static void copy_stream(const struct forward_args *f, int64_t layer, struct workspace *w) {
    const struct decoder *d = f->decoder;
    for (int64_t i = 0; i < f->num_streams; i++) {
        if (f->stream_layers[i] != layer) continue;
        struct norm_args args = {
            .residual = w->stream, .out = (char *)f->streams + (size_t)(i * d->hidden) * size_of(d->dtype),
            .rows = f->num_tokens, .width = d->hidden,
            .residual_stride = d->hidden, .out_stride = f->num_streams * d->hidden,
            .dtype = d->dtype, .stream_dtype = DT_F32,
        };
        quire_add_rms_norm(&args);
    }
}

static int32_t run_layers(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t rows = f->num_tokens;
    if (f->adapters.num) adapter_rows_sort(&w->adapters, NULL, rows);
    add_norm(d, d->layers[0].before_attention, w->stream, NULL, w->normed, d->dtype, rows, &d->layers[0].qkv, w);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *layer = &d->layers[i];
        int is_last = i + 1 == d->num_layers;
        copy_stream(f, i, w);
        int32_t status = attention(f, i, w, rows);
        if (status) return status;
        if (is_last && f->num_rows == 0) return QUIRE_OK; /* a chunk of a prompt needs keys and values only */
        if (is_last && f->rows) {
            keep_rows(f, w);
            rows = f->num_rows;
        }
        if ((status = linear(f, i, PLACE_O, w->attended, w, w->delta, rows, DT_F32))) return status;
        if ((status = reduce(d, w->delta, rows))) return status;
        join(d, layer->after_attention, layer->before_mlp, w, &layer->gate_up, layer->moe ? w->routed : w->normed, rows);
        if ((status = mlp(f, i, w, rows)) || (status = reduce(d, w->delta, rows))) return status;
        join(d, layer->after_mlp, is_last ? d->norm : layer[1].before_attention, w,
             is_last ? NULL : &layer[1].qkv, is_last ? f->hidden : w->normed, rows);
    }
    copy_stream(f, d->num_layers, w);
    return QUIRE_OK;
}

/* Look the tokens up. With a group, a token's row is zeros on all ranks but one, and then the sum of them. */
static int32_t embed(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    const int64_t *ids = f->ids;
    for (int64_t t = 0; d->group && t < f->num_tokens; t++) {
        int64_t id = f->ids[t] - d->first_id;
        w->ids[t] = id < 0 || id >= d->num_ids ? 0 : id;
        ids = w->ids;
    }
    struct embed_args args = {d->embedding, ids, w->stream, f->num_tokens, d->hidden, d->dtype, d->embedding_format,
                              d->embedding_scale};
    quire_embed(&args);
    if (!d->group) return QUIRE_OK;
    for (int64_t t = 0; t < f->num_tokens; t++)
        if (w->ids[t] + d->first_id != f->ids[t]) memset(w->stream + t * d->hidden, 0, (size_t)d->hidden * sizeof(float));
    return reduce(d, w->stream, f->num_tokens);
}

/* Run the model. Returns a status; `hidden` holds the result of the final norm. */
EXPORT int32_t quire_forward(const struct forward_args *f) {
    struct workspace w;
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, lay_out(f, NULL, &w))) return QUIRE_NO_MEMORY;
    lay_out(f, memory, &w);
    fill_angles(f, &w);
    int32_t status = embed(f, &w);
    if (!status) status = run_layers(f, &w);
    free(memory);
    return status;
}
