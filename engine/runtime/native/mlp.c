/* The dense feed-forward: layers/mlp.py in C. */
#include "layer.h"

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)packed;
    return (size_t)(rows * num_columns_of(&part->first)) * size_of(d->dtype);
}

static int32_t run(const struct turn *t) {
    const struct linear *first = &t->part->first, *last = &t->part->last;
    if (!t->adapters && gemm_packs_for(first, last)) {
        struct gemm_args up = {.w = *first, .x = t->x, .rows = t->packed, .y = t->room, .m = t->rows, .x_stride = first->k,
                               .y_dtype = t->decoder->dtype, .next = last};
        struct gemm_args down = {.w = *last, .rows = t->room, .y = t->out, .m = t->rows, .y_stride = last->n, .y_dtype = DT_F32};
        int32_t status = quire_gemm(&up);
        return status ? status : quire_gemm(&down);
    }
    int32_t status = part_multiply(t, PLACE_GATE_UP, first, t->x, t->room, t->decoder->dtype);
    return status ? status : part_multiply(t, PLACE_DOWN, last, t->room, t->out, DT_F32);
}

EXPORT const struct kind kind_mlp = {measure, run};
