/* Low-rank adapters (lora.h): rows are gathered adapter by adapter, and go through two thin products each. */
#include "lora.h"

#include <string.h>

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes that rows take at most, packed for any of the adapters' matrices, and the highest rank. */
static size_t most_packed(const struct adapters *a, int64_t num_layers, int64_t num_rows, int64_t *rank) {
    size_t most = 0;
    for (int64_t i = 0; i < a->num * num_layers * NUM_PLACES; i++) {
        const struct low_rank *low = &a->layers[i / (num_layers * NUM_PLACES)][i / NUM_PLACES % num_layers].at[i % NUM_PLACES];
        if (!low->down.packed) continue;
        struct gemm_args down = {.w = low->down, .m = num_rows}, up = {.w = low->up, .m = num_rows};
        size_t bytes = quire_rows_bytes(&down), up_bytes = quire_rows_bytes(&up);
        if (up_bytes > bytes) bytes = up_bytes;
        if (bytes > most) most = bytes;
        if (low->down.n > *rank) *rank = low->down.n;
    }
    return most;
}

size_t adapter_rows_lay_out(struct adapter_rows *r, const struct adapters *adapters, int64_t num_layers,
                            int64_t num_rows, int64_t widest, size_t value_size, char *base) {
    if (!adapters->num) return 0;
    int64_t rank = 0;
    size_t packed = most_packed(adapters, num_layers, num_rows, &rank), rows = (size_t)num_rows, used = 0;
    void **parts[] = {(void **)&r->starts, (void **)&r->order, (void **)&r->addends, (void **)&r->x,
                      (void **)&r->low, (void **)&r->sums, &r->packed};
    size_t sizes[] = {((size_t)adapters->num + 1) * sizeof(int64_t), rows * sizeof(int64_t), rows * sizeof(float *),
                      rows * (size_t)widest * value_size, rows * (size_t)rank * value_size,
                      rows * (size_t)widest * sizeof(float), packed};
    for (int i = 0; i < 7; i++) {
        if (base) *parts[i] = base + used;
        used += aligned(sizes[i]);
    }
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
    memset(r->addends, 0, (size_t)num_rows * sizeof(*r->addends));
}

int32_t adapter_rows_multiply(struct adapter_rows *r, int64_t layer, enum place place, const void *x,
                              int64_t num_outputs, int32_t dtype) {
    size_t value_size = dtype == DT_F32 ? 4 : 2;
    for (int64_t i = 0; i < r->adapters->num; i++) {
        const struct low_rank *low = &r->adapters->layers[i][layer].at[place];
        int64_t first = r->starts[i], num = r->starts[i + 1] - first;
        float *sums = r->sums + first * num_outputs;
        for (int64_t j = 0; j < num; j++) r->addends[r->order[first + j]] = low->down.packed ? sums + j * num_outputs : NULL;
        if (!low->down.packed || !num) continue;
        size_t row_bytes = (size_t)low->down.k * value_size;
        for (int64_t j = 0; j < num; j++)
            memcpy(r->x + (size_t)j * row_bytes, (const char *)x + (size_t)r->order[first + j] * row_bytes, row_bytes);
        struct gemm_args down = {low->down, r->x, r->packed, r->low, num, low->down.k, low->down.n, dtype, NULL};
        struct gemm_args up = {low->up, r->low, r->packed, sums, num, low->up.k, num_outputs, DT_F32, NULL};
        int32_t status = quire_gemm(&down);
        if (!status) status = quire_gemm(&up);
        if (status) return status;
    }
    return QUIRE_OK;
}
