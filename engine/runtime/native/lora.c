/* Low-rank adapters (lora.h): rows are gathered by adapter and multiplied with the first of its two matrices; the model's
 * product continues from there. */
#include "layer.h"

#include <string.h>

/* The most that products of an adapter's layer need. */
struct room {
    size_t x, low, packed;
};

static void widen(struct room *room, const struct low_rank *low, int64_t num_rows) {
    struct gemm_args down = {.w = low->down, .m = num_rows};
    size_t x = (size_t)(num_rows * low->down.k) * size_of(low->down.dtype), packed = quire_rows_bytes(&down);
    size_t out = (size_t)(num_rows * low->up.k) * size_of(quire_low_dtype(&low->up));
    if (x > room->x) room->x = x;
    if (out > room->low) room->low = out;
    if (packed > room->packed) room->packed = packed;
}

size_t adapter_rows_lay_out(struct adapter_rows *r, const struct adapters *adapters, int64_t num_rows, char *base) {
    if (!adapters->num) return 0;
    struct room room = {0};
    for (int64_t i = 0; i < adapters->num; i++)
        for (int64_t at = 0; at < adapters->num_layers * NUM_PLACES; at++) {
            const struct low_rank *low = &adapters->layers[i][at];
            if (low->down.packed) widen(&room, low, num_rows);
        }
    size_t used = 0;
    r->starts = carve(base, &used, adapters->num + 1, sizeof(int64_t));
    r->order = carve(base, &used, num_rows, sizeof(int64_t));
    r->addends = carve(base, &used, num_rows, sizeof(struct addend));
    r->x = carve(base, &used, 1, room.x);
    r->low = carve(base, &used, 1, room.low);
    r->packed = carve(base, &used, 1, room.packed);
    r->adapters = adapters;
    return used;
}

void adapter_rows_sort(struct adapter_rows *r, const int64_t *rows, int64_t num_rows) {
    const struct adapters *a = r->adapters;
    int64_t at = 0;
    for (int64_t i = 0; i < a->num; i++) {
        r->starts[i] = at;
        for (int64_t row = 0; row < num_rows; row++)
            if (a->of_rows[rows ? rows[row] : row] == i) r->order[at++] = row;
    }
    r->starts[a->num] = at;
    r->num_rows = num_rows;
    memset(r->addends, 0, (size_t)num_rows * sizeof(*r->addends));
}

/* The contiguous rows of an adapter; x itself, if those are all. */
static const void *gather(const struct adapter_rows *r, const void *x, const int64_t *order, int64_t num, size_t bytes) {
    if (num == r->num_rows) return x;
    for (int64_t i = 0; i < num; i++)
        memcpy(r->x + (size_t)i * bytes, (const char *)x + (size_t)order[i] * bytes, bytes);
    return r->x;
}

int32_t adapter_rows_multiply(struct adapter_rows *r, int64_t layer, enum place place, const void *x) {
    char *low = r->low;
    for (int64_t i = 0; i < r->adapters->num; i++) {
        const struct low_rank *of = &r->adapters->layers[i][layer * NUM_PLACES + place];
        const struct linear *down = &of->down, *up = down->packed ? &of->up : NULL;
        const int64_t *order = r->order + r->starts[i], num = r->starts[i + 1] - r->starts[i];
        int32_t dtype = up ? quire_low_dtype(up) : DT_F32;
        size_t row_bytes = up ? (size_t)up->k * size_of(dtype) : 0;
        for (int64_t j = 0; j < num; j++)
            r->addends[order[j]] = (struct addend){up, low + (size_t)j * row_bytes};
        if (!up || !num) continue;
        const void *rows = gather(r, x, order, num, (size_t)down->k * size_of(down->dtype));
        struct gemm_args args = {*down, rows, r->packed, low, num, down->k, down->n, dtype, NULL};
        int32_t status = quire_gemm(&args);
        if (status) return status;
        low += (size_t)num * row_bytes;
    }
    return QUIRE_OK;
}
