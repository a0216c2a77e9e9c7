/* The forward pass (decoder.h): a sequence of the library's own operations over one workspace. */
#include "decoder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The intermediate results of a step. */
struct workspace {
    float *stream, *delta;     /* [T, hidden] */
    float *all_streams;        /* [T, num_altup, hidden] */
    char *mixed, *beside;      /* [T, last.k] in the model's type, the results of the mixer and of a second one */
    float *added;              /* [T, hidden], what the second one adds */
    char *normed;              /* [T, hidden] in the model's type, only for parts that read rows, and for adapters */
    void *packed;              /* input of the next product */
    char *room;                /* of the part that runs */
    float *cos, *sin;          /* [rotaries][T, dim], the sign of the negated half inside sin */
    float *kept_stream;        /* [num_rows, hidden], in the last layer */
    float *kept_all;           /* [num_rows, num_altup, hidden], likewise */
    char *kept_mixed, *kept_beside; /* likewise */
    float *inputs, *projected; /* [T, layers * width]; [INPUT_ROWS, layers * width] */
    float *kept_inputs;        /* [num_rows, layers * width] */
    float *kept_cos, *kept_sin; /* [rotaries][num_rows, dim], only with kept queries */
    struct kept_queries kept;  /* the rows that go on behind layer `last_whole` */
    int64_t last_whole;        /* the layer whose mixer is the last to need all rows */
    struct adapter_rows adapters; /* only with adapters */
    int64_t *ids;              /* of the tokens' rows in this rank's embedding, or in the table of inputs */
};

enum { INPUT_ROWS = 64 }; /* tokens whose inputs of layers are projected together */

/* What the parts of all layers need at most, one after the other. */
struct needs {
    size_t packed, room;
    int64_t mixed, beside, num_readers; /* num_readers: parts that read rows */
};

static void add_part(struct needs *needs, const struct part *part, const struct decoder *d, int64_t rows) {
    size_t room = measure_part(part, d, rows, &needs->packed);
    if (room > needs->room) needs->room = room;
    needs->num_readers += part->kind && (part->reads_rows || !part->first.packed);
}

/* Numbers of a token's inputs of all layers. */
static int64_t inputs_of(const struct decoder *d) { return d->inputs ? d->num_layers * d->inputs->width : 0; }

/* The layer behind whose mixer the rows that are wanted go on alone: layers behind it read keys and values that are there. */
static int64_t last_whole(const struct forward_args *f) {
    const struct decoder *d = f->decoder;
    int64_t last = d->num_layers - 1;
    if (f->num_streams || f->num_rows >= f->num_tokens || (f->num_rows && !f->rows)) return last;
    for (int64_t r = 1; r < f->num_rows; r++)
        if (f->rows[r] < f->rows[r - 1]) return last;
    return d->last_holder;
}

static size_t lay_out_kept(const struct forward_args *f, char *base, int64_t after, struct kept_queries *kept) {
    int64_t widest = 0, rows = f->num_rows;
    size_t used = 0;
    for (int64_t i = after + 1; i < f->decoder->num_layers; i++) {
        const struct attend_args *attend = f->decoder->layers[i].attend;
        if (attend && attend->table_stride > widest) widest = attend->table_stride;
    }
    if (!widest || !f->rows) return 0;
    kept->num = rows;
    kept->slices = carve(base, &used, rows, sizeof(int64_t));
    kept->starts = carve(base, &used, rows + 1, sizeof(int32_t));
    kept->contexts = carve(base, &used, rows, sizeof(int32_t));
    kept->tables = carve(base, &used, rows * widest, sizeof(int32_t));
    return used;
}

static size_t lay_out(const struct forward_args *f, char *base, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t tokens = f->num_tokens > f->num_rows ? f->num_tokens : f->num_rows, angles = 0;
    size_t used = 0, size = size_of(d->dtype);
    struct needs needs = {0};
    for (int64_t i = 0; i < d->num_rotaries; i++) angles += d->rotaries[i].dim;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *layer = &d->layers[i];
        add_part(&needs, &layer->mixer, d, tokens);
        add_part(&needs, &layer->beside, d, tokens);
        add_part(&needs, &layer->feed_forward, d, tokens);
        add_part(&needs, &layer->gate, d, tokens);
        if (layer->mixer.last.k > needs.mixed) needs.mixed = layer->mixer.last.k;
        if (layer->beside.last.k > needs.beside) needs.beside = layer->beside.last.k;
    }
    add_part(&needs, &d->start, d, tokens);
    if (d->inputs) widen_packed(&needs.packed, &d->inputs->projection, INPUT_ROWS);
    w->stream = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->delta = carve(base, &used, tokens * d->hidden, sizeof(float));
    w->all_streams = carve(base, &used, tokens * d->num_altup * d->hidden, sizeof(float));
    w->mixed = carve(base, &used, tokens * needs.mixed, size);
    w->beside = carve(base, &used, tokens * needs.beside, size);
    w->added = carve(base, &used, needs.beside ? tokens * d->hidden : 0, sizeof(float));
    w->normed = carve(base, &used, needs.num_readers || f->adapters.num ? tokens * d->hidden : 0, size);
    w->packed = carve(base, &used, 1, needs.packed);
    w->room = carve(base, &used, 1, needs.room);
    w->cos = carve(base, &used, tokens * angles, sizeof(float));
    w->sin = carve(base, &used, tokens * angles, sizeof(float));
    w->kept_stream = carve(base, &used, f->num_rows * d->hidden, sizeof(float));
    w->kept_all = carve(base, &used, f->num_rows * d->num_altup * d->hidden, sizeof(float));
    w->kept_mixed = carve(base, &used, f->num_rows * needs.mixed, size);
    w->kept_beside = carve(base, &used, f->num_rows * needs.beside, size);
    w->ids = carve(base, &used, d->group || d->inputs ? tokens : 0, sizeof(int64_t));
    w->inputs = carve(base, &used, tokens * inputs_of(d), sizeof(float));
    w->projected = carve(base, &used, INPUT_ROWS * inputs_of(d), sizeof(float));
    w->kept_inputs = carve(base, &used, f->rows ? f->num_rows * inputs_of(d) : 0, sizeof(float));
    w->kept_cos = carve(base, &used, w->last_whole < d->num_layers - 1 ? f->num_rows * angles : 0, sizeof(float));
    w->kept_sin = carve(base, &used, w->last_whole < d->num_layers - 1 ? f->num_rows * angles : 0, sizeof(float));
    w->kept = (struct kept_queries){0};
    used += lay_out_kept(f, base ? base + used : NULL, w->last_whole, &w->kept);
    return used + adapter_rows_lay_out(&w->adapters, &f->adapters, tokens, base ? base + used : NULL);
}

/* Angles of all tokens, one rotary after the other. */
static void fill_angles(const struct forward_args *f, struct workspace *w) {
    float *cos_at = w->cos, *sin_at = w->sin;
    for (int64_t i = 0; i < f->decoder->num_rotaries; i++) {
        const struct rotary *r = &f->decoder->rotaries[i];
        int64_t half = r->dim / 2;
        for (int64_t t = 0; t < f->num_tokens; t++, cos_at += r->dim, sin_at += r->dim)
            for (int64_t j = 0; j < half; j++) {
                int64_t axis = r->axes ? r->axes[j] : 0;
                float angle = (float)f->positions[axis * f->axis_step + t] * r->inverse[j];
                cos_at[j] = cos_at[half + j] = cosf(angle) * r->magnitude;
                sin_at[half + j] = sinf(angle) * r->magnitude;
                sin_at[j] = -sin_at[half + j];
            }
    }
}

int32_t part_multiply(const struct turn *t, enum place place, const struct linear *weight, const void *x, void *y,
                      int32_t y_dtype) {
    return part_multiply_into(t, place, weight, x, y, num_columns_of(weight), y_dtype);
}

int32_t part_multiply_into(const struct turn *t, enum place place, const struct linear *weight, const void *x, void *y,
                           int64_t y_stride, int32_t y_dtype) {
    struct gemm_args args = {*weight, x, t->packed, y, t->rows, weight->k, y_stride, y_dtype, NULL};
    if (t->adapters && t->index < t->adapters->adapters->num_layers) {
        int32_t status = adapter_rows_multiply(t->adapters, t->index, t->first_place + place, x);
        if (status) return status;
        args.addends = t->adapters->addends;
    }
    return quire_gemm(&args);
}

int32_t part_attend(const struct turn *t, const struct scores *scores, const void *k, const void *v, int64_t kv_stride,
                    const void *q, int64_t q_stride, void *out) {
    struct store_args store = *t->layer->store;
    store.num_tokens = t->rows;
    store.pool = t->layer->pool, store.k = k, store.v = v, store.k_stride = store.v_stride = kv_stride;
    if (k) quire_store(&store);
    if (t->stores_only) return QUIRE_OK;
    struct attend_args attend = *t->layer->attend;
    if (t->kept) {
        const struct kept_queries *kept = t->kept;
        size_t row = (size_t)attend.table_stride * sizeof(int32_t);
        for (int64_t i = 0; i < kept->num; i++)
            memcpy((char *)kept->tables + (size_t)i * row, (const char *)attend.block_tables + (size_t)kept->slices[i] * row, row);
        attend.num_slices = kept->num, attend.query_starts = kept->starts;
        attend.context_lens = kept->contexts, attend.block_tables = kept->tables;
    }
    if (t->kept || scores->is_causal) attend.ends = NULL;
    attend.pool = t->layer->pool, attend.q = q, attend.q_stride = q_stride, attend.out = out;
    attend.num_heads = scores->num_heads, attend.sinks = scores->sinks, attend.window = scores->window;
    attend.scale = scores->scale, attend.softcap = scores->softcap;
    return quire_attend(&attend);
}

/* stream = scale * (stream + d->residual_scale * delta) unless delta is NULL. Then the stream, normalised if there is a norm, is written to `out`, or
 * packed for the matrix `next` if there is no `out`. */
static void add_norm(const struct decoder *d, struct norm norm, float *stream, const float *delta, void *out,
                     int32_t out_dtype, int64_t rows, const struct linear *next, float scale, struct workspace *w) {
    struct gemm_args packs;
    if (!out) packs = (struct gemm_args){.w = *next, .rows = w->packed, .m = rows};
    struct norm_args args = {
        .residual = stream, .delta = delta, .weight = norm.weight, .out = out, .packs = out ? NULL : &packs,
        .rows = rows, .width = d->hidden,
        .residual_stride = d->hidden, .delta_stride = d->hidden, .out_stride = d->hidden,
        .dtype = out_dtype, .weight_dtype = norm.dtype, .stream_dtype = DT_F32,
        .alpha = d->residual_scale, .eps = d->eps, .scale = scale, .kind = norm.kind, .bias = norm.bias,
    };
    quire_add_rms_norm(&args);
}

/* Where the input of a part goes as rows; NULL: it is packed for the part's first matrix. */
static void *input_of(const struct forward_args *f, const struct workspace *w, const struct part *part) {
    return f->adapters.num || part->reads_rows || !part->first.packed ? w->normed : NULL;
}

/* The turn of a part of layer `index`, whose input is where `join` has put it. */
static struct turn turn_of(const struct forward_args *f, struct workspace *w, int64_t index, const struct part *part,
                           void *out, int64_t rows) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[index];
    int64_t angles = 0;
    int is_kept = w->kept.num && index > w->last_whole;
    int64_t tokens = is_kept ? rows : f->num_tokens;
    for (int64_t i = 0; i < layer->rotary; i++) angles += d->rotaries[i].dim * tokens;
    return (struct turn){
        .decoder = d, .layer = layer, .part = part, .index = index, .rows = rows, .x = input_of(f, w, part), .out = out,
        .room = w->room, .packed = w->packed, .cos = w->cos + angles, .signed_sin = w->sin + angles,
        .stream = w->stream, .all_streams = w->all_streams,
        .rope_dim = layer->rotary < 0 ? 0 : d->rotaries[layer->rotary].dim,
        .adapters = f->adapters.num ? &w->adapters : NULL, .inputs = w->inputs, .input_stride = inputs_of(d),
        .kept = is_kept ? &w->kept : NULL, .stores_only = index == w->last_whole && f->num_rows == 0,
    };
}

/* Go on with the queries of some rows: their angles, slices and contexts. */
static void keep_queries(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    const struct attend_args *attend = d->layers[d->num_layers - 1].attend;
    float *cos_at = w->kept_cos, *sin_at = w->kept_sin;
    for (int64_t i = 0, before = 0; i < d->num_rotaries; before += d->rotaries[i++].dim) {
        size_t dim = (size_t)d->rotaries[i].dim, first = (size_t)(before * f->num_tokens);
        for (int64_t r = 0; r < f->num_rows; r++, cos_at += dim, sin_at += dim) {
            memcpy(cos_at, w->cos + first + (size_t)f->rows[r] * dim, dim * sizeof(float));
            memcpy(sin_at, w->sin + first + (size_t)f->rows[r] * dim, dim * sizeof(float));
        }
    }
    w->cos = w->kept_cos, w->sin = w->kept_sin;
    for (int64_t r = 0, slice = 0; r < f->num_rows; r++) {
        while (attend->query_starts[slice + 1] <= f->rows[r]) slice++;
        w->kept.slices[r] = slice;
        w->kept.contexts[r] = attend->context_lens[slice] - (int32_t)(attend->query_starts[slice + 1] - 1 - f->rows[r]);
    }
    for (int64_t r = 0; r <= f->num_rows; r++) w->kept.starts[r] = (int32_t)r;
}

/* Nothing reads the other rows of the last layer that needs all: continue with the requested ones, which may repeat. */
static void keep_rows(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[w->last_whole];
    size_t stream = (size_t)d->hidden * sizeof(float), all = (size_t)d->num_altup * stream;
    size_t inputs = (size_t)inputs_of(d) * sizeof(float), size = size_of(d->dtype);
    size_t mixed = (size_t)layer->mixer.last.k * size, beside = (size_t)layer->beside.last.k * size;
    for (size_t i = 0; i < (size_t)f->num_rows; i++) {
        size_t row = (size_t)f->rows[i];
        memcpy((char *)w->kept_stream + i * stream, (char *)w->stream + row * stream, stream);
        memcpy((char *)w->kept_all + i * all, (char *)w->all_streams + row * all, all);
        memcpy(w->kept_mixed + i * mixed, w->mixed + row * mixed, mixed);
        memcpy(w->kept_beside + i * beside, w->beside + row * beside, beside);
        memcpy((char *)w->kept_inputs + i * inputs, (char *)w->inputs + row * inputs, inputs);
    }
    w->inputs = w->kept_inputs;
    w->stream = w->kept_stream, w->all_streams = w->kept_all;
    w->mixed = w->kept_mixed, w->beside = w->kept_beside;
    if (f->adapters.num) adapter_rows_sort(&w->adapters, f->rows, f->num_rows);
    if (w->kept.num) keep_queries(f, w);
}

/* A part, and the norm before it; `part` NULL: none is left, and the norm is the decoder's. */
struct upcoming {
    const struct part *part;
    struct norm norm;
};

/* The first part of some layer and those behind it, or but for its mixer. */
static struct upcoming upcoming(const struct decoder *d, int64_t index, int without_mixer) {
    for (; index < d->num_layers; index++, without_mixer = 0) {
        const struct layer *layer = &d->layers[index];
        if (layer->mixer.kind && !without_mixer) return (struct upcoming){&layer->mixer, layer->before_mixer};
        if (layer->feed_forward.kind) return (struct upcoming){&layer->feed_forward, layer->before_feed_forward};
    }
    return (struct upcoming){NULL, d->norm};
}

/* Add delta to the stream, and compute the norm before the next part: as rows, or packed for its first matrix. */
static void enter(const struct forward_args *f, struct upcoming next, const float *delta, float scale, struct workspace *w,
                  int64_t rows) {
    void *out = next.part ? input_of(f, w, next.part) : f->hidden;
    add_norm(f->decoder, next.norm, w->stream, delta, out, f->decoder->dtype, rows, next.part ? &next.part->first : NULL,
             scale, w);
}

/* The same with w->delta, which is normalised first in some families; the sum is scaled. */
static void join(const struct forward_args *f, struct norm after, float scale, struct upcoming next, struct workspace *w,
                 int64_t rows) {
    if (after.weight) add_norm(f->decoder, after, w->delta, NULL, w->delta, DT_F32, rows, NULL, 1, w);
    enter(f, next, w->delta, scale, w, rows);
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

/* Add what vectors add behind a layer: to the stream, before the delta of the feed-forward, whose input is there already. */
static void add_deep(const struct forward_args *f, struct workspace *w, int64_t index, int64_t rows) {
    int64_t hidden = f->decoder->hidden;
    const float *deep = f->vectors + (1 + index) * f->num_vectors * hidden;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = f->vector_of[index >= w->last_whole && f->rows ? f->rows[r] : r];
        for (int64_t j = 0; at >= 0 && j < hidden; j++) w->stream[r * hidden + j] += deep[at * hidden + j];
    }
}

/* The third part of a layer: its delta is added to the stream by the join that follows. */
static int32_t run_gate(const struct forward_args *f, struct workspace *w, int64_t index, int64_t rows) {
    const struct layer *layer = &f->decoder->layers[index];
    const struct part *gate = &layer->gate;
    join(f, layer->after_feed_forward, 1, (struct upcoming){gate, {0}}, w, rows);
    struct turn turn = turn_of(f, w, index, gate, w->delta, rows);
    return gate->kind->run(&turn);
}

/* The feed-forward of a layer, if it has one, and its gate; what they add to the stream. */
static int32_t run_rest(const struct forward_args *f, struct workspace *w, int64_t index, int64_t rows) {
    const struct decoder *d = f->decoder;
    const struct layer *layer = &d->layers[index];
    if (!layer->feed_forward.kind) return QUIRE_OK;
    struct turn turn = turn_of(f, w, index, &layer->feed_forward, w->delta, rows);
    int32_t status = turn.part->kind->run(&turn);
    if (status || (status = reduce(d, w->delta, rows))) return status;
    if (layer->gate.kind && (status = run_gate(f, w, index, rows))) return status;
    struct norm after = layer->gate.kind ? layer->after_gate : layer->after_feed_forward;
    if (d->num_altup) enter(f, upcoming(d, index + 1, 0), NULL, 1, w, rows); /* the gate has changed all streams */
    else join(f, after, layer->stream_scale, upcoming(d, index + 1, 0), w, rows);
    return QUIRE_OK;
}

/* w->delta = what both mixers of a layer add to the stream, of which it has that of the first. */
static int32_t add_beside(const struct turn *second, struct workspace *w) {
    const struct decoder *d = second->decoder;
    const struct layer *layer = second->layer;
    int32_t status = part_multiply(second, PLACE_O, &layer->beside.last, w->beside, w->added, DT_F32);
    float alpha = layer->beside_scale / layer->mixer_scale;
    if (!status) add_delta(w->delta, w->added, d->hidden, second->rows, d->hidden, alpha, layer->mixer_scale);
    return status;
}

static int32_t run_layers(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    int64_t rows = f->num_tokens;
    if (f->adapters.num) adapter_rows_sort(&w->adapters, NULL, rows);
    if (d->start.kind) {
        struct turn turn = turn_of(f, w, 0, &d->start, w->delta, rows);
        int32_t status = d->start.kind->run(&turn);
        if (status) return status;
    }
    enter(f, upcoming(d, 0, 0), NULL, 1, w, rows);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *layer = &d->layers[i];
        int has_mixer = layer->mixer.kind != NULL;
        copy_stream(f, i, w);
        struct turn turn = turn_of(f, w, i, &layer->mixer, w->mixed, rows), second = turn;
        second.part = &layer->beside, second.out = w->beside, second.first_place = PLACE_BESIDE;
        int32_t status = has_mixer ? layer->mixer.kind->run(&turn) : QUIRE_OK;
        if (!status && layer->beside.kind) status = layer->beside.kind->run(&second);
        if (status) return status;
        if (i == w->last_whole && f->num_rows == 0) return QUIRE_OK; /* a chunk of a prompt needs keys and values only */
        if (i == w->last_whole && f->rows) {
            keep_rows(f, w);
            turn.rows = second.rows = rows = f->num_rows;
            if (!has_mixer) enter(f, upcoming(d, i, 0), NULL, 1, w, rows);
        }
        if (has_mixer) {
            if ((status = part_multiply(&turn, PLACE_O, &layer->mixer.last, w->mixed, w->delta, DT_F32))) return status;
            if (layer->beside.kind && (status = add_beside(&second, w))) return status;
            if ((status = reduce(d, w->delta, rows))) return status;
            float scale = layer->feed_forward.kind ? 1 : layer->stream_scale;
            join(f, layer->after_mixer, scale, upcoming(d, i, 1), w, rows);
        }
        if (i < f->num_deep) add_deep(f, w, i, rows);
        if ((status = run_rest(f, w, i, rows))) return status;
    }
    copy_stream(f, d->num_layers, w);
    return QUIRE_OK;
}

/* Look the tokens up. With a group, a token's row is zeros on all ranks but one, and then the sum of them. */
static int32_t look_up(const struct forward_args *f, struct workspace *w) {
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

/* Add to each token's embedding its row of another table, if there is one. */
static void add_rows(const struct forward_args *f, struct workspace *w, const void *table, const int64_t *rows) {
    const struct decoder *d = f->decoder;
    if (!table) return;
    quire_embed(&(struct embed_args){table, rows, w->stream, f->num_tokens, d->hidden, d->dtype, -1, 1, .adds = 1});
}

/* The stream that enters the first layer: embeddings, or the vectors in their place. */
static int32_t embed(const struct forward_args *f, struct workspace *w) {
    size_t bytes = (size_t)f->decoder->hidden * sizeof(float);
    int32_t status = look_up(f, w);
    add_rows(f, w, f->decoder->type_rows, f->types);
    add_rows(f, w, f->decoder->position_rows, f->positions);
    for (int64_t t = 0; f->vector_of && t < f->num_tokens; t++)
        if (f->vector_of[t] >= 0)
            memcpy((char *)w->stream + (size_t)t * bytes, (const char *)f->vectors + (size_t)f->vector_of[t] * bytes, bytes);
    return status;
}

/* Compute the inputs of all layers, from the tokens and the stream that enters the first. */
static int32_t fill_inputs(const struct forward_args *f, struct workspace *w) {
    const struct decoder *d = f->decoder;
    const struct per_layer_inputs *p = d->inputs;
    int64_t wide = inputs_of(d);
    if (!wide) return QUIRE_OK;
    for (int64_t t = 0; t < f->num_tokens; t++) w->ids[t] = f->ids[t] < p->num_rows ? f->ids[t] : 0;
    struct embed_args rows = {p->table, w->ids, w->inputs, f->num_tokens, wide, p->dtype, p->format, p->scale};
    quire_embed(&rows);
    for (int64_t at = 0; at < f->num_tokens; at += INPUT_ROWS) {
        int64_t num = f->num_tokens - at < INPUT_ROWS ? f->num_tokens - at : INPUT_ROWS;
        add_norm(d, (struct norm){0}, w->stream + at * d->hidden, NULL, NULL, d->dtype, num, &p->projection, 1, w);
        struct gemm_args product = {.w = p->projection, .rows = w->packed, .y = w->projected, .m = num,
                                    .y_stride = wide, .y_dtype = DT_F32};
        int32_t status = quire_gemm(&product);
        if (status) return status;
        struct norm_args norm = {
            .residual = w->projected, .weight = p->norm.weight, .out = w->projected, .rows = num * d->num_layers,
            .width = p->width, .residual_stride = p->width, .out_stride = p->width, .eps = p->eps,
        };
        quire_add_rms_norm(&norm);
        add_delta(w->inputs + at * wide, w->projected, wide, num, wide, 1, 1);
    }
    return QUIRE_OK;
}

/* Run the model. Returns a status; `hidden` holds the result of the final norm. */
EXPORT int32_t quire_forward(const struct forward_args *f) {
    struct workspace w = {.last_whole = last_whole(f)};
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, lay_out(f, NULL, &w))) return QUIRE_NO_MEMORY;
    lay_out(f, memory, &w);
    fill_angles(f, &w);
    int32_t status = embed(f, &w);
    if (!status) status = fill_inputs(f, &w);
    if (!status) status = run_layers(f, &w);
    free(memory);
    return status;
}
