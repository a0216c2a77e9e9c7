/* A mixer: each token sees the mean of a product over all tokens up to its own. running_mean.py in C. */
#include "layer.h"

#include <string.h>

/* Bytes of v(x), and of as many queries. */
static size_t bytes_of(const struct part *part, const struct decoder *d, int64_t rows) {
    return (size_t)(rows * part->first.n) * size_of(d->dtype);
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed; /* it has no matrix beside the first and the last */
    return 2 * bytes_of(part, d, rows);
}

static int32_t run(const struct turn *t) {
    const struct linear *v = &t->part->first;
    size_t bytes = bytes_of(t->part, t->decoder, t->rows);
    char *queries = t->room + bytes;
    int32_t status = part_multiply(t, PLACE_QKV, v, t->x, t->room, t->decoder->dtype);
    if (status) return status;
    memset(queries, 0, bytes);
    return part_attend(t, t->part->args, t->room, NULL, v->n, queries, v->n, t->out);
}

EXPORT const struct kind kind_running_mean = {measure, run};
