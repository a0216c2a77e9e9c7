/* New keys and values into an int8 pool: each row of a head gets a scale of its own, its largest magnitude / 127.
 *
 * A row of latents has the scale of its latent, or the least that its other numbers fit.
 * engine/runtime/kv_layout.py does the same in torch, to the bit. A row with a NaN or an infinity gets a scale that
 * makes every product NaN, so that a sequence with broken arithmetic is still detected. */

/* The largest magnitude of a row; NaN if the row has one, or an infinity. */
INLINE float row_peak(struct view row, int64_t dim) {
    float peak = peak_of_row(row, dim);
    return peak + (peak - peak);
}

/* The nearest integers to row * factor, each in the low 22 bits of a float. Both outputs have room for whole vectors. */
INLINE void round_row(struct view row, int64_t dim, float factor, float *rounded) {
    for (int64_t d = 0; d < dim; d += W) store_f(rounded + d, get(row, d, dim) * factor);
    __asm__ volatile("" : : "r"(rounded) : "memory"); /* or the sum below would swallow the product's rounding */
    for (int64_t d = 0; d < dim; d += W) store_f(rounded + d, load_f(rounded + d) + 12582912.f);
}

INLINE void keep_bytes(const float *rounded, int64_t dim, int8_t *out) {
    for (int64_t d = 0; d < dim; d += W) {
        vi whole = ((vi)load_f(rounded + d) << 16) >> 16;
        vb bytes = __builtin_convertvector(whole, vb);
        memcpy(out + d, &bytes, sizeof bytes);
    }
}

INLINE float at_least_smallest(float peak) { return peak < 0x1p-116f ? 0x1p-116f : peak; /* not NaN */ }

/* Quantise a row to `out`; returns its scale. */
INLINE float quantize_row(struct view row, int64_t dim, float *rounded, int8_t *out) {
    float peak = at_least_smallest(row_peak(row, dim));
    round_row(row, dim, 127.f / peak, rounded);
    keep_bytes(rounded, dim, out);
    return peak / 127.f;
}

/* The same for a row of a latent, `dim` wide, and `num_more` numbers, which become 16-bit integers. */
static float quantize_latent(struct view row, int64_t dim, int64_t num_more, float *rounded, int8_t *out) {
    struct view more = row;
    more.at += (size_t)dim;
    float peak = row_peak(row, dim), other = row_peak(more, num_more) / 257.f; /* 257 * 127 is a high byte of 127 */
    peak = at_least_smallest(peak > other || peak != peak ? peak : other);
    round_row(row, dim, 127.f / peak, rounded);
    keep_bytes(rounded, dim, out);
    round_row(more, num_more, 127.f / peak, rounded);
    for (int64_t i = 0; i < num_more; i++) {
        int32_t bits;
        memcpy(&bits, rounded + i, sizeof bits);
        int32_t whole = (int32_t)((uint32_t)bits << 10) >> 10, high = (whole + 128) >> 8;
        out[dim + i] = (int8_t)(whole - high * 256);
        out[dim + num_more + i] = (int8_t)high;
    }
    return peak / 127.f;
}

void store_int8(const void *args, int64_t token_begin, int64_t token_end) {
    const struct store_args *a = args;
    const struct pool *p = &a->pool;
    int64_t dim = p->head_dim, bs = p->block_size, v_pair = bs > 1 ? 2 : 1;
    int8_t row[dim + W];
    float rounded[dim + W];
    int64_t k_dim = query_dim_of(p);
    for (int64_t token = token_begin; token < token_end; token++) {
        int64_t block = a->slots[token] / bs, o = a->slots[token] % bs;
        for (int64_t head = 0; head < p->num_kv_heads; head++) {
            int64_t at = head * p->head_stride + block * p->block_stride;
            struct view k = {(void *)a->k, (size_t)(token * a->k_stride + head * k_dim), (enum dtype)p->dtype};
            struct view v = {(void *)a->v, (size_t)(token * a->v_stride + head * dim), (enum dtype)p->dtype};
            int8_t *k_block = (int8_t *)p->k + at, *v_block = (int8_t *)p->v + at;
            float scale = p->v ? quantize_row(k, dim, rounded, row)
                               : quantize_latent(k, p->value_dim, dim - k_dim, rounded, row);
            memcpy(k_block + bs * dim + o * 4, &scale, sizeof scale);
            for (int64_t d = 0; d < dim / 2; d++) memcpy(k_block + (d * bs + o) * 2, row + 2 * d, 2);
            if (!p->v) continue;
            scale = quantize_row(v, dim, rounded, row);
            memcpy(v_block + bs * dim + o * 4, &scale, sizeof scale);
            int8_t *to = v_block + o / v_pair * dim * v_pair + o % v_pair;
            for (int64_t d = 0; d < dim; d++) to[d * v_pair] = row[d];
        }
    }
}
