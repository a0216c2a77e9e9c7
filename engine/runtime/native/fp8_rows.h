/* FP8 weights, float8_e4m3fn with scales, rounded to bytes with a float16 scale for every QBLOCK. Used at load.
 *
 * weights/stored/packed.py has the same arithmetic in torch operations, to the bit. */

/* Four bits of exponent, with a bias of 7, and three of mantissa; the largest magnitude is NaN. */
INLINE vf widen_fp8(vu bits) {
    vu magnitude = bits & 0x7f;
    vf value = (vf)(magnitude << 20 | (bits & 0x80) << 24) * splat(0x1p120f);
    return select_f(COMPARE(magnitude, ==, splat_u(0x7f)), splat(__builtin_nanf("")), value);
}

/* Write values of a row, and the scale of each block: its largest magnitude / 127, NaN if one is. */
static void widen_fp8_row(const struct fp8_row *row, float *values, float *peaks) {
    for (int64_t b = 0; b < row->k / QBLOCK; b++) {
        vf scale = splat(row->scales[b / row->group_blocks]);
        vf most = splat(0);
        UNROLL for (int i = 0; i < QBLOCK; i += W) {
            vb bytes;
            memcpy(&bytes, row->codes + b * QBLOCK + i, sizeof bytes);
            vf value = widen_fp8(__builtin_convertvector(bytes, vu) & 0xff) * scale;
            most = larger(magnitude_of(value), most);
            store_f(values + b * QBLOCK + i, value);
        }
        peaks[b] = largest_of(most) / 127;
    }
}

/* `scratch` has room for k + k / QBLOCK values, and as many float16. */
void round_fp8(const struct fp8_row *row, float *scratch, uint8_t *to) {
    enum { BLOCK_BYTES = 2 + QBLOCK };
    int64_t num_blocks = row->k / QBLOCK;
    float *peaks = scratch + row->k;
    uint16_t *halves = (uint16_t *)(peaks + num_blocks);
    widen_fp8_row(row, scratch, peaks);
    narrow_halves(peaks, halves, num_blocks);
    for (int64_t b = 0; b < num_blocks; b++) {
        float scale = widen_f16(splat_u(halves[b]))[0], inverse = scale > 0 ? 1 / scale : 0;
        for (int i = 0; i < QBLOCK; i += W)
            store_f(scratch + b * QBLOCK + i, load_f(scratch + b * QBLOCK + i) * inverse);
    }
    __asm__ volatile("" : : "r"(scratch) : "memory"); /* or the sum below would swallow the product's rounding */
    for (int64_t b = 0; b < num_blocks; b++, to += BLOCK_BYTES) {
        memcpy(to, halves + b, sizeof *halves);
        for (int i = 0; i < QBLOCK; i += W) {
            vf value = load_f(scratch + b * QBLOCK + i);
            value = select_f(COMPARE(value, ==, value), value, splat(0));
            value = clamp_f(value, splat(-127), splat(127));
            vb bytes = __builtin_convertvector((vi)(value + 12582912.f) - 0x4b400000, vb); /* the nearest integers */
            memcpy(to + 2 + i, &bytes, sizeof bytes);
        }
    }
}
