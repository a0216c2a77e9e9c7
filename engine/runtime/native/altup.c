/* Alternating updates (altup.h): a part before the first layer, which makes the streams, and in each layer the part behind its
 * feed-forward. That corrects all streams by what the layer found, takes in the layer's input, and predicts those of the next
 * layer, or behind the last one makes one of them. Both leave in the residual stream what the decoder goes on with. */
#include "altup.h"
#include "layer.h"

SHARED struct altup {
    struct part gate; /* takes in the layer's input */
    struct mixing mixing;
};

/* The matrices that make all streams but the first, and of which they become one again. */
SHARED struct altup_ends {
    struct linear spread;        /* [(num - 1) * hidden] */
    const struct linear *gather; /* [num - 1] */
};

static void on_rows(const struct turn *t, range_work *run, const void *args) {
    run_ranges(run, args, t->rows, t->decoder->num_altup * t->decoder->hidden);
}

static struct altup_args args_of(const struct turn *t, const struct layer *layer) {
    const struct decoder *d = t->decoder;
    const struct altup *own = layer->gate.args;
    return (struct altup_args){
        .mixing = &own->mixing, .stream = t->stream, .streams = t->all_streams, .delta = t->out, .x = (void *)t->x,
        .num = d->num_altup, .width = d->hidden, .eps = d->eps, .dtype = d->dtype,
    };
}

/* y [rows, n] = matrix x, of rows `x_stride` numbers apart. */
static int32_t multiply(const struct turn *t, const struct linear *matrix, float *x, int64_t x_stride, float *y) {
    struct gemm_args product = {.w = *matrix, .rows = t->packed, .y = y, .m = t->rows, .y_stride = matrix->n,
                                .y_dtype = DT_F32};
    struct norm_args pack = {
        .residual = x, .packs = &product, .rows = t->rows, .width = matrix->k, .residual_stride = x_stride,
        .dtype = t->decoder->dtype, .stream_dtype = DT_F32,
    };
    quire_add_rms_norm(&pack);
    return quire_gemm(&product);
}

/* Stream `index` = from, as long as the first one. */
static void place(const struct turn *t, int64_t index, const float *from, int64_t from_stride) {
    int64_t hidden = t->decoder->hidden, stride = t->decoder->num_altup * hidden;
    struct lengthen_args args = {from, t->stream, t->all_streams + index * hidden, from_stride, hidden, stride, hidden};
    on_rows(t, lengthen, &args);
}

static size_t measure_start(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct altup_ends *ends = part->args;
    widen_packed(packed, &ends->spread, rows);
    for (int64_t i = 0; i < d->num_altup - 1; i++) widen_packed(packed, ends->gather + i, rows);
    return (size_t)(rows * ends->spread.n) * sizeof(float);
}

/* Make the streams of the first one, and predict those of the first layer. */
static int32_t start(const struct turn *t) {
    const struct altup_ends *ends = t->part->args;
    int64_t hidden = t->decoder->hidden;
    float *others = (float *)t->room;
    int32_t status = multiply(t, &ends->spread, t->stream, hidden, others);
    if (status) return status;
    struct norm_args copy = {
        .residual = t->stream, .out = t->all_streams, .rows = t->rows, .width = hidden, .residual_stride = hidden,
        .out_stride = t->decoder->num_altup * hidden,
    };
    quire_add_rms_norm(&copy);
    for (int64_t i = 1; i < t->decoder->num_altup; i++) place(t, i, others + (i - 1) * hidden, ends->spread.n);
    struct altup_args first = args_of(t, t->layer);
    on_rows(t, altup_predict, &first);
    return QUIRE_OK;
}

/* stream = the mean of all, each as long as the first. */
static int32_t gather(const struct turn *t) {
    const struct decoder *d = t->decoder;
    const struct altup_ends *ends = d->start.args;
    int64_t stride = d->num_altup * d->hidden;
    for (int64_t i = 1; i < d->num_altup; i++) {
        float *stream = t->all_streams + i * d->hidden;
        int32_t status = multiply(t, ends->gather + i - 1, stream, stride, t->out);
        if (status) return status;
        place(t, i, t->out, d->hidden);
    }
    for (int64_t i = 1; i < d->num_altup; i++) {
        float scale = i + 1 < d->num_altup ? 1 : 1.f / (float)d->num_altup;
        add_delta(t->stream, t->all_streams + i * d->hidden, stride, t->rows, d->hidden, 1, scale);
    }
    return QUIRE_OK;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    return measure_part(&((const struct altup *)part->args)->gate, d, rows, packed);
}

static int32_t run(const struct turn *t) {
    struct altup_args args = args_of(t, t->layer);
    on_rows(t, altup_correct_rows, &args);
    struct turn own = *t;
    own.part = &((const struct altup *)t->part->args)->gate;
    int32_t status = own.part->kind->run(&own);
    if (status) return status;
    on_rows(t, altup_share, &args);
    if (t->index + 1 == t->decoder->num_layers) return gather(t);
    args = args_of(t, t->layer + 1);
    on_rows(t, altup_predict, &args);
    return QUIRE_OK;
}

EXPORT const struct kind kind_altup_start = {measure_start, start};
EXPORT const struct kind kind_altup = {measure, run};
