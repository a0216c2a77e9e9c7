/* New keys and values into an int8 pool: each row of a head gets a scale of its own, its largest magnitude / 127.
 *
 * engine/runtime/kv_layout.py does the same in torch, to the bit. A row with a NaN or an infinity gets a scale that
 * makes every product NaN, so that a sequence with broken arithmetic is still detected. */

typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));

/* Quantise a row to `out`; returns its scale. Both `out` and `scaled` have room for whole vectors. */
INLINE float quantize_row(struct view row, int64_t dim, float *scaled, int8_t *out) {
    vf largest = splat(0), sum = splat(0);
    for (int64_t d = 0; d < dim; d += W) {
        vf x = get(row, d, dim);
        largest = max_f(max_f(x, -x), largest);
        sum += x - x; /* NaN where x is, or is infinite */
    }
    float peak = peak_f(largest) + sum_f(sum);
    if (peak < 0x1p-116f) peak = 0x1p-116f; /* not NaN */
    float factor = 127.f / peak;
    for (int64_t d = 0; d < dim; d += W) store_f(scaled + d, get(row, d, dim) * factor);
    __asm__ volatile("" : : "r"(scaled) : "memory"); /* or the sum below would swallow the product's rounding */
    for (int64_t d = 0; d < dim; d += W) {
        vf nearest = load_f(scaled + d) + 12582912.f; /* rounded, in the low bits */
        vi whole = ((vi)nearest << 16) >> 16;
        vb bytes = __builtin_convertvector(whole, vb);
        memcpy(out + d, &bytes, sizeof bytes);
    }
    return peak / 127.f;
}

static void store_int8(const struct store_args *a, int64_t token_begin, int64_t token_end) {
    const struct pool *p = &a->pool;
    int64_t dim = p->head_dim, bs = p->block_size, v_pair = bs > 1 ? 2 : 1;
    int8_t row[dim + W];
    float scaled[dim + W];
    for (int64_t token = token_begin; token < token_end; token++) {
        int64_t block = a->slots[token] / bs, o = a->slots[token] % bs;
        for (int64_t head = 0; head < p->num_kv_heads; head++) {
            int64_t at = head * p->head_stride + block * p->block_stride;
            struct view k = {(void *)a->k, (size_t)(token * a->k_stride + head * dim), (enum dtype)p->dtype};
            struct view v = {(void *)a->v, (size_t)(token * a->v_stride + head * dim), (enum dtype)p->dtype};
            int8_t *k_block = (int8_t *)p->k + at, *v_block = (int8_t *)p->v + at;
            float scale = quantize_row(k, dim, scaled, row);
            memcpy(k_block + bs * dim + o * 4, &scale, sizeof scale);
            for (int64_t d = 0; d < dim / 2; d++) memcpy(k_block + (d * bs + o) * 2, row + 2 * d, 2);
            scale = quantize_row(v, dim, scaled, row);
            memcpy(v_block + bs * dim + o * 4, &scale, sizeof scale);
            int8_t *to = v_block + o / v_pair * dim * v_pair + o % v_pair;
            for (int64_t d = 0; d < dim; d++) to[d * v_pair] = row[d];
        }
    }
}
