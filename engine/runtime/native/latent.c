/* The steps of latent attention that are not a whole product (latent.h). */
#include "latent.h"

#include <string.h>

static size_t size_of(int32_t dtype) { return dtype == DT_F32 ? 4 : 2; }

size_t latent_lay_out(const struct latent *l, int64_t num_heads, int32_t dtype, int64_t rows, char *base,
                      struct latent_room *room) {
    int64_t has_queries = l->queries.packed != NULL, width = l->rank + l->rope_dim;
    int64_t widths[] = {has_queries * l->queries.k, has_queries * l->queries.n, num_heads * width, width, num_heads * l->rank};
    char **parts[] = {&room->normed, &room->queries, &room->absorbed, &room->keys, &room->mixed};
    size_t used = 0;
    for (int i = 0; i < 5; i++) {
        *parts[i] = base ? base + used : NULL;
        used += ((size_t)(rows * widths[i]) * size_of(dtype) + 63) / 64 * 64;
    }
    return used;
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
    const struct latent_rows *a = context;
    const struct latent *l = a->latent;
    size_t size = size_of(a->dtype), width = (size_t)(l->rank + l->rope_dim), rank = (size_t)l->rank;
    struct norm_args norm = {
        .residual = (void *)a->rows, .weight = a->norm, .out = a->room->keys, .width = l->rank,
        .residual_stride = a->row_stride, .out_stride = (int64_t)width,
        .dtype = a->dtype, .weight_dtype = a->norm_dtype, .stream_dtype = a->dtype, .eps = l->eps,
    };
    active_kernels()->add_rms_norm(&norm, begin, end);
    for (int64_t token = begin; token < end; token++) {
        const char *row = a->rows + (size_t)(token * a->row_stride) * size;
        const char *query = a->queries + (size_t)(token * a->query_stride + l->nope_dim) * size;
        char *to = a->room->absorbed + ((size_t)(token * a->num_heads) * width + rank) * size;
        for (int64_t head = 0; head < a->num_heads; head++, to += width * size)
            copy_pairs(l, query + (size_t)(head * (l->nope_dim + l->rope_dim)) * size, to, size);
        copy_pairs(l, row + rank * size, a->room->keys + ((size_t)token * width + rank) * size, size);
    }
    struct rope_args rope = {
        .qk = a->room->absorbed + rank * size, .cos = a->cos, .signed_sin = a->signed_sin,
        .stride = a->num_heads * (int64_t)width, .num_heads = a->num_heads, .head_dim = (int64_t)width,
        .rope_dim = l->rope_dim, .dtype = a->dtype, .angle_dtype = DT_F32,
    };
    active_kernels()->rope(&rope, begin, end);
    rope.qk = a->room->keys + rank * size, rope.stride = (int64_t)width, rope.num_heads = 1;
    active_kernels()->rope(&rope, begin, end);
}

void latent_rotate(const struct latent_rows *a, int64_t num_rows) {
    int64_t values = a->num_heads * a->latent->rope_dim + a->latent->rank;
    run_ranges(run_rotate, a, num_rows, values, WORTH_SHARING);
}

int32_t latent_multiply(const struct linear *heads, int64_t num_heads, const void *x, int64_t x_stride, int64_t x_step,
                        void *y, int64_t y_step, int64_t num_rows) {
    struct heads_args args = {heads, x, y, num_heads, num_rows, x_stride, x_step, num_heads * y_step, y_step};
    return quire_gemm_heads(&args);
}
