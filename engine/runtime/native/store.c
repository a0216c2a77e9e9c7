/* New keys and values into the pool: a transposition inside a block, bit by bit the same numbers. */
#include <string.h>

#include "quire_cpu.h"

void store_tokens(const void *args, int64_t token_begin, int64_t token_end) {
    const struct store_args *a = args;
    const struct pool *p = &a->pool;
    size_t dim = (size_t)p->head_dim, bs = (size_t)p->block_size, size = size_of(p->dtype);
    size_t pair = 4 / size, v_pair = pair < bs ? pair : bs;
    for (int64_t token = token_begin; token < token_end; token++) {
        size_t block = (size_t)a->slots[token] / bs, o = (size_t)a->slots[token] % bs;
        for (int64_t head = 0; head < p->num_kv_heads; head++) {
            size_t at = (size_t)(head * p->head_stride) + block * (size_t)p->block_stride;
            const char *k = (const char *)a->k + (size_t)(token * a->k_stride + head * p->head_dim) * size;
            char *k_to = (char *)p->k + at * size + o * 4;
            for (size_t l = 0; l < dim / pair; l++) memcpy(k_to + l * bs * 4, k + l * 4, 4);
            if (!p->v) continue;
            const char *v = (const char *)a->v + (size_t)(token * a->v_stride + head * p->head_dim) * size;
            char *v_to = (char *)p->v + (at + o / v_pair * dim * v_pair + o % v_pair) * size;
            if (size == 4)
                memcpy(v_to, v, dim * 4);
            else
                for (size_t d = 0; d < dim; d++) memcpy(v_to + d * v_pair * 2, v + d * 2, 2);
        }
    }
}
