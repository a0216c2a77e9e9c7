/* Packing of weights of floats into panels, once at load: [inputs / 2][PANEL] pairs of bfloat16, or [inputs][PANEL]
 * float32. Rows come from a file, of float32, float16 or bfloat16, or from a tensor. Plain C for every machine. */
#include <string.h>

#include "stored_rows.h"

enum { STRIP = 64 }; /* values of a row that are packed in turn: what several rows write then stays in the cache */

/* Values [first, first + num) of a row as the panels hold them; `to` has room for STRIP float32. */
static void convert(const uint8_t *row, int64_t first, int64_t num, int32_t kind, int32_t format, uint32_t *to) {
    const int is_kept = kind == (format == WEIGHT_F32 ? STORED_F32 : STORED_BF16);
    const size_t size = kind == STORED_F32 ? 4 : 2;
    float values[STRIP];
    if (is_kept) {
        memcpy(to, row + (size_t)first * size, (size_t)num * size);
        return;
    }
    read_floats(kind, row, first, num, values);
    if (format == WEIGHT_F32) memcpy(to, values, (size_t)num * sizeof(float));
    else narrow_bf16(values, (uint16_t *)to, num);
}

static void pack_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct quant_source *s = context;
    const int64_t pair = s->format == WEIGHT_F32 ? 1 : 2, lanes = s->k / pair;
    for (int64_t first = 0; first < s->k; first += STRIP) {
        int64_t num = first + STRIP < s->k ? STRIP : s->k - first;
        for (int64_t i = begin; i < end; i++) {
            uint32_t strip[STRIP];
            int64_t at = target_row(s, i);
            uint32_t *to = (uint32_t *)s->packed + (at / PANEL * lanes + first / pair) * PANEL + at % PANEL;
            convert(rows + (i - begin) * s->stored.row_bytes, first, num, s->stored.kind, s->format, strip);
            for (int64_t l = 0; l < num / pair; l++) to[l * PANEL] = strip[l];
        }
    }
}

int32_t float_pack(const void *args, int64_t begin, int64_t end) {
    const struct quant_source *s = args;
    return for_each_tile(&s->stored, begin, end, pack_tile, s);
}
