/* Attention over keys and values of each token: layers/attention.py in C. */
#include "layer.h"
#include "quant_format.h"

#include <string.h>

enum qk_norm { QK_NORM_NONE = 0, QK_NORM_HEAD = 1, QK_NORM_FULL = 2 }; /* by head, or all heads as one */
enum gates { NO_GATES = 0, GATES_BETWEEN = 1, GATES_BY_HEAD = 2 }; /* behind each head's query; one a head, behind the values */

SHARED struct attention {
    struct scores scores;
    struct norm q, k, v; /* v: of each head, in float32 */
    /* A layer that reads the keys and values of another has no heads of its own, and its matrix makes queries alone. */
    int64_t num_kv_heads, head_dim;
    int32_t qk_norm;
    int32_t gates;
    float clip; /* bound of queries, keys and values before rotation; 0: none */
};

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    const struct attention *a = part->args;
    int64_t gates = a->gates ? a->scores.num_heads * a->head_dim : 0;
    (void)packed;
    return (size_t)(rows * (part->first.n + gates)) * size_of(d->dtype);
}

/* Rows of queries with a gate behind each: the gates are moved out, and the queries together, up to the keys. */
struct split {
    char *projected, *gates;
    size_t size, head, stride; /* bytes of a number, of a head, and from row to row */
    int64_t num_heads;
};

static void split_rows(const void *args, int64_t begin, int64_t end) {
    const struct split *s = args;
    size_t width = (size_t)s->num_heads * s->head;
    for (int64_t row = begin; row < end; row++) {
        char *from = s->projected + (size_t)row * s->stride, *gates = s->gates + (size_t)row * width;
        for (size_t at = width; at; at -= s->head) { /* the last head first: a query moves over those that have moved */
            memcpy(gates + at - s->head, from + 2 * at - s->head, s->head);
            memmove(from + width + at - s->head, from + 2 * (at - s->head), s->head);
        }
    }
}

/* Rows with a gate for each head at their ends, which is repeated for each number of the head. */
static void spread_rows(const void *args, int64_t begin, int64_t end) {
    const struct split *s = args;
    size_t size = s->size, num = s->head / size, width = (size_t)s->num_heads * s->head;
    for (int64_t row = begin; row < end; row++) {
        const char *from = s->projected + (size_t)(row + 1) * s->stride - (size_t)s->num_heads * size;
        char *gates = s->gates + (size_t)row * width;
        for (size_t i = 0; i < (size_t)s->num_heads * num; i++) memcpy(gates + i * size, from + i / num * size, size);
    }
}

/* Rotate `num_heads` heads of queries and those of keys behind them. */
static void rotate(const struct turn *t, const struct attention *a, char *qk, int64_t num_heads) {
    int per_head = a->qk_norm == QK_NORM_HEAD;
    if (!t->rope_dim && !per_head) return;
    struct rope_args args = {
        .qk = qk, .cos = t->cos, .signed_sin = t->signed_sin,
        .q_weight = per_head ? a->q.weight : NULL, .k_weight = per_head ? a->k.weight : NULL,
        .v_weight = a->v.weight,
        .tokens = t->rows, .stride = t->part->first.n, .num_heads = num_heads, .num_kv_heads = a->num_kv_heads,
        .head_dim = a->head_dim, .rope_dim = t->rope_dim,
        .dtype = t->decoder->dtype, .weight_dtype = a->q.dtype, .angle_dtype = DT_F32, .eps = t->decoder->eps,
    };
    quire_rope(&args);
}

/* Compute the columns of queries, keys and values from `first` on, or all where a panel is not cut there. */
static int32_t project(const struct turn *t, int64_t first) {
    const struct linear *qkv = &t->part->first;
    size_t size = size_of(t->decoder->dtype);
    if (t->adapters || first % PANEL) first = 0;
    struct linear some = *qkv;
    int64_t bytes = is_quantised(qkv->format) ? quire_quant_bytes(qkv->format, first, qkv->k) : first * qkv->k * (int64_t)size;
    some.packed = (const char *)qkv->packed + bytes, some.n = qkv->n - first;
    if (qkv->scales) some.scales = (const float *)qkv->scales + first;
    if (qkv->bias) some.bias = (const char *)qkv->bias + (size_t)first * size;
    return part_multiply_into(t, PLACE_QKV, &some, t->x, t->room + (size_t)first * size, qkv->n, t->decoder->dtype);
}

static int32_t run(const struct turn *t) {
    const struct attention *a = t->part->args;
    const struct linear *qkv = &t->part->first;
    size_t size = size_of(t->decoder->dtype);
    int64_t q_width = a->scores.num_heads * a->head_dim, kv_width = a->num_kv_heads * a->head_dim;
    char *q = t->room, *gates = q + (size_t)(t->rows * qkv->n) * size;
    int has_queries = !t->stores_only;
    int64_t keys = (a->gates == GATES_BETWEEN ? 2 : 1) * q_width; /* where they begin in a row */
    int32_t status = project(t, has_queries ? 0 : keys);
    if (status) return status;
    if (a->gates && has_queries) {
        struct split split = {q, gates, size, (size_t)a->head_dim * size, (size_t)qkv->n * size, a->scores.num_heads};
        run_ranges(a->gates == GATES_BETWEEN ? split_rows : spread_rows, &split, t->rows, qkv->n);
    }
    q += (size_t)(keys - q_width) * size;
    char *k = q + (size_t)q_width * size, *v = k + (size_t)kv_width * size;
    if (a->qk_norm == QK_NORM_FULL) {
        if (has_queries) norm_rows(t, a->q, q, q, q_width, qkv->n, t->decoder->dtype);
        norm_rows(t, a->k, k, k, kv_width, qkv->n, t->decoder->dtype);
    }
    if (a->clip != 0) {
        struct clip_args clip = {t->room, qkv->n, a->clip, t->decoder->dtype};
        run_ranges(clip_rows, &clip, t->rows, qkv->n);
    }
    rotate(t, a, has_queries ? q : k, has_queries ? a->scores.num_heads : 0);
    status = part_attend(t, &a->scores, kv_width ? k : NULL, v, qkv->n, q, qkv->n, t->out);
    if (status || !a->gates || !has_queries) return status;
    struct gate_args gate = {t->out, gates, q_width, t->decoder->dtype};
    run_ranges(gate_rows, &gate, t->rows, q_width);
    return 0;
}

EXPORT const struct kind kind_attention = {measure, run};
