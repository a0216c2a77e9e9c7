/* Rows of a weight file, read in tiles of PANEL rows: from memory, or piece by piece from the file itself.
 *
 * What is read by a system call takes no memory beyond the tile, and its pages are not mapped one by one. */
#ifndef QUIRE_STORED_ROWS_H
#define QUIRE_STORED_ROWS_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "quire_cpu.h"

typedef void (*tile_work)(const void *context, const uint8_t *rows, int64_t begin, int64_t end);

/* repack.c: make rows [begin, end) of `stored`. */
int32_t repack_rows(const struct stored_rows *from, const uint8_t *stored, int64_t begin, int64_t end, uint8_t *to);

/* A float16. */
static inline __attribute__((always_inline)) float f16_to_f32(const uint8_t *p) {
    uint32_t half = (uint32_t)p[0] | (uint32_t)p[1] << 8, magnitude = half & 0x7fff, bits;
    float value, two_112 = 0x1p112f;
    bits = magnitude << 13;
    memcpy(&value, &bits, sizeof value);
    value *= two_112; /* rebiases the exponent; subnormals come out right as well */
    memcpy(&bits, &value, sizeof bits);
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    bits |= (half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The compiler may neither merge a product with the difference behind it, nor take these loops for unimportant. */
#if defined(__GNUC__) && !defined(__clang__)
#define ROUNDED __attribute__((optimize("O3", "fp-contract=off")))
#else
#define ROUNDED
#endif

/* Values [first, first + num) of a row of floats. */
static inline void read_floats(int32_t kind, const uint8_t *row, int64_t first, int64_t num, float *to) {
    if (kind == STORED_F32) memcpy(to, row + first * 4, (size_t)num * sizeof(float));
    for (int64_t i = 0; kind == STORED_F16 && i < num; i++) to[i] = f16_to_f32(row + 2 * (first + i));
    for (int64_t i = 0; kind == STORED_BF16 && i < num; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)row)[first + i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* The nearest bfloat16. */
ROUNDED static inline void narrow_bf16(const float *values, uint16_t *to, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, is_nan = (bits & 0x7fffffff) > 0x7f800000;
        to[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : nearest);
    }
}

static int32_t read_file(int32_t file, uint8_t *to, int64_t size, int64_t offset) {
    while (size > 0) {
        ssize_t got = pread(file, to, (size_t)size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return QUIRE_CANNOT_READ;
        to += got, offset += got, size -= got;
    }
    return QUIRE_OK;
}

enum { WORTH_A_CALL = 4096 }; /* bytes between two rows; fewer are read, too */

/* Read rows [begin, end), `step` bytes apart, which have `row_bytes` each in the file; between them lie others. */
static int32_t read_rows(const struct stored_rows *from, int64_t row_bytes, uint8_t *to, int64_t begin, int64_t end) {
    const int64_t num = end - begin, step = from->step > row_bytes ? from->step : row_bytes;
    if (step - row_bytes >= WORTH_A_CALL) {
        int32_t status = QUIRE_OK;
        for (int64_t i = begin; i < end && !status; i++, to += row_bytes)
            status = read_file(from->file, to, row_bytes, from->offset + i * step);
        return status;
    }
    int32_t status = read_file(from->file, to, (num - 1) * step + row_bytes, from->offset + begin * step);
    for (int64_t i = 1; i < num && step > row_bytes; i++) memmove(to + i * row_bytes, to + i * step, (size_t)row_bytes);
    return status;
}

/* Call `work` for rows [begin, end), at most PANEL at a time. */
static int32_t for_each_tile(const struct stored_rows *from, int64_t begin, int64_t end, tile_work work,
                             const void *context) {
    const int64_t stored_bytes = from->codes ? from->codes->row_bytes : from->row_bytes;
    const int64_t step = from->step > stored_bytes ? from->step : stored_bytes;
    uint8_t *tile = from->rows ? NULL : malloc((size_t)(PANEL * step)), *made = NULL;
    int32_t status = from->rows || tile ? QUIRE_OK : QUIRE_NO_MEMORY;
    if (from->codes && !(made = malloc((size_t)(PANEL * from->row_bytes)))) status = QUIRE_NO_MEMORY;
    for (int64_t i = begin; i < end && !status; i += PANEL) {
        int64_t after = i + PANEL < end ? i + PANEL : end;
        const uint8_t *rows = from->rows ? (const uint8_t *)from->rows + i * stored_bytes : tile;
        if (tile) status = read_rows(from, stored_bytes, tile, i, after);
        if (made && !status) status = repack_rows(from, rows, i, after, made);
        if (!status) work(context, made ? made : rows, i, after);
    }
    free(tile);
    free(made);
    return status;
}

/* The position of row `i` of a part among the rows of the panels. */
static inline int64_t target_row(const struct quant_source *s, int64_t i) {
    if (s->head_rows) { /* neighbours in a head are rotated together; here the halves are */
        int64_t in_head = i % s->head_rows;
        i += in_head / 2 + in_head % 2 * (s->head_rows / 2) - in_head;
    }
    return packed_row(s->first_row + i, s->n, s->activation);
}

#endif
