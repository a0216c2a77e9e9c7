/* The forward pass (decoder.h): a sequence of the library's own operations over one workspace. */
#include "decoder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where a step's intermediate results lie. */
struct workspace {
    float *stream, *delta;                        /* [T, hidden] */
    char *normed, *qkv, *attended, *gate_up, *up; /* of the model's type, [T, as wide as their matrices] */
    float *cos, *sin;                             /* [rotaries][T, dim], the sign of the negated half inside sin */
    float *kept_stream;                           /* [num_rows, hidden], of the last layer */
    char *kept_attended;                          /* likewise */
};

static size_t size_of(int32_t dtype) { return dtype == DT_F32 ? 4 : 2; }

/* The next `count` values of `size` bytes, on a cache line of their own; counts only, where there is no memory yet. */
static void *carve(char *base, size_t *used, int64_t count, size_t size) {
    void *at = base ? base + *used : NULL;
    *used += ((size_t)count * size + 63) / 64 * 64;
    return at;
}

static size_t lay_out(const struct forward_args *f, char *base, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t tokens = f->num_tokens > f->num_rows ? f->num_tokens : f->num_rows, angles = 0;
    size_t used = 0, size = size_of(d->dtype);
    for (int64_t i = 0; i < d->num_rotaries; i++) angles += d->rotaries[i].dim;
    w->stream = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->delta = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->normed = carve(base, &used, tokens * d->hidden, size);
    w->qkv = carve(base, &used, tokens * (d->num_heads + 2 * d->num_kv_heads) * d->head_dim, size);
    w->attended = carve(base, &used, tokens * d->num_heads * d->head_dim, size);
    w->gate_up = carve(base, &used, tokens * 2 * d->intermediate, size);
    w->up = carve(base, &used, tokens * d->intermediate, size);
    w->cos = carve(base, &used, tokens * angles, sizeof(float));
    w->sin = carve(base, &used, tokens * angles, sizeof(float));
    w->kept_stream = carve(base, &used, f->num_rows * d->hidden, sizeof(float));
    w->kept_attended = carve(base, &used, f->num_rows * d->num_heads * d->head_dim, size);
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

static int32_t linear(const struct linear *weight, const void *x, void *y, int64_t rows, int32_t y_dtype) {
    struct gemm_args args = {*weight, x, y, rows, weight->k, weight->n, y_dtype};
    return quire_gemm(&args);
}

/* out = norm(stream), after stream += scale * delta unless delta is NULL; where there is no norm, stream itself. */
static void add_norm(const struct decoder *d, struct norm norm, float *stream, const float *delta, void *out,
                     int32_t out_dtype, int64_t rows) {
    struct norm_args args = {
        .residual = stream, .delta = delta, .weight = norm.weight, .out = out,
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

static void rotate(const struct forward_args *f, const struct layer *layer, struct workspace *w, int64_t stride) {
    const struct decoder *d = f->decoder;
    int per_head = d->qk_norm == QK_NORM_HEAD;
    size_t angles = 0;
    for (int64_t i = 0; i < layer->rotary; i++) angles += (size_t)(d->rotaries[i].dim * f->num_tokens);
    if (layer->rotary < 0 && !per_head) return;
    struct rope_args args = {
        .qk = w->qkv, .cos = w->cos + angles, .signed_sin = w->sin + angles,
        .q_weight = per_head ? layer->q.weight : NULL, .k_weight = per_head ? layer->k.weight : NULL,
        .tokens = f->num_tokens, .stride = stride, .num_heads = d->num_heads, .num_kv_heads = d->num_kv_heads,
        .head_dim = d->head_dim, .rope_dim = layer->rotary < 0 ? 0 : d->rotaries[layer->rotary].dim,
        .dtype = d->dtype, .weight_dtype = layer->q.dtype, .angle_dtype = DT_F32, .eps = d->eps,
    };
    quire_rope(&args);
}

/* Queries, keys and values of w->normed; keys and values into the pool; the heads' results into w->attended. */
static int32_t attention(const struct forward_args *f, const struct layer *layer, struct workspace *w) {
    const struct decoder *d = f->decoder;
    size_t size = size_of(d->dtype);
    int64_t q_width = d->num_heads * d->head_dim, kv_width = d->num_kv_heads * d->head_dim;
    int64_t stride = q_width + 2 * kv_width;
    char *k = w->qkv + (size_t)q_width * size, *v = k + (size_t)kv_width * size;
    int32_t status = linear(&layer->qkv, w->normed, w->qkv, f->num_tokens, d->dtype);
    if (status) return status;
    if (d->qk_norm == QK_NORM_FULL) {
        norm_whole(d, layer->q, w->qkv, q_width, stride, f->num_tokens);
        norm_whole(d, layer->k, k, kv_width, stride, f->num_tokens);
    }
    rotate(f, layer, w, stride);
    struct store_args store = *f->store;
    store.pool = layer->pool, store.k = k, store.v = v, store.k_stride = store.v_stride = stride;
    quire_store(&store);
    struct attend_args attend = *f->attend;
    attend.pool = layer->pool, attend.q = w->qkv, attend.q_stride = stride, attend.out = w->attended;
    attend.num_heads = d->num_heads, attend.sinks = NULL, attend.window = layer->window;
    attend.scale = d->attention_scale, attend.softcap = d->softcap;
    return quire_attend(&attend);
}

/* Nothing reads the last layer's other rows: go on with those that are asked for, one perhaps more than once. */
static void keep_rows(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    size_t stream = (size_t)d->hidden * sizeof(float);
    size_t attended = (size_t)(d->num_heads * d->head_dim) * size_of(d->dtype);
    for (size_t i = 0; i < (size_t)f->num_rows; i++) {
        size_t row = (size_t)f->rows[i];
        memcpy((char *)w->kept_stream + i * stream, (char *)w->stream + row * stream, stream);
        memcpy(w->kept_attended + i * attended, w->attended + row * attended, attended);
    }
    w->stream = w->kept_stream, w->attended = w->kept_attended;
}

/* What a part of the layer has put into w->delta joins the stream (normed first, where the family does), and what the
 * next part reads is made: `next` of the stream, into `out`. */
static void join(const struct decoder *d, struct norm after, struct norm next, struct workspace *w, void *out,
                 int64_t rows) {
    if (after.weight) add_norm(d, after, w->delta, NULL, w->delta, DT_F32, rows);
    add_norm(d, next, w->stream, w->delta, out, d->dtype, rows);
}

static int32_t run_layers(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t rows = f->num_tokens;
    add_norm(d, d->layers[0].before_attention, w->stream, NULL, w->normed, d->dtype, rows);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *layer = &d->layers[i];
        int is_last = i + 1 == d->num_layers;
        int32_t status = attention(f, layer, w);
        if (status) return status;
        if (is_last && f->num_rows == 0) return QUIRE_OK; /* a prompt's chunk: keys and values were all it was for */
        if (is_last && f->rows) {
            keep_rows(f, w);
            rows = f->num_rows;
        }
        if ((status = linear(&layer->o, w->attended, w->delta, rows, DT_F32))) return status;
        join(d, layer->after_attention, layer->before_mlp, w, w->normed, rows);
        if ((status = linear(&layer->gate_up, w->normed, w->gate_up, rows, d->dtype))) return status;
        struct act_args act = {w->gate_up, w->up, rows, d->intermediate, 2 * d->intermediate, d->intermediate,
                               d->dtype, d->activation};
        quire_act_mul(&act);
        if ((status = linear(&layer->down, w->up, w->delta, rows, DT_F32))) return status;
        join(d, layer->after_mlp, is_last ? d->norm : layer[1].before_attention, w,
             is_last ? f->hidden : (void *)w->normed, rows);
    }
    return QUIRE_OK;
}

/* Run the model. Returns a status; `hidden` holds the result of the final norm. */
EXPORT int32_t quire_forward(const struct forward_args *f) {
    struct workspace w;
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, lay_out(f, NULL, &w))) return QUIRE_NO_MEMORY;
    lay_out(f, memory, &w);
    const struct decoder *d = f->decoder;
    struct embed_args embed = {d->embedding, f->ids, w.stream, f->num_tokens, d->hidden, d->dtype, d->is_embedding_packed,
                               d->embedding_scale};
    quire_embed(&embed);
    fill_angles(f, &w);
    int32_t status = run_layers(f, &w);
    free(memory);
    return status;
}
