/* Rows of a weight file, read in tiles of PANEL rows: from memory, or piece by piece from the file itself.
 *
 * What is read by a system call takes no memory beyond the tile, and its pages are not mapped one by one. */
#ifndef QUIRE_STORED_ROWS_H
#define QUIRE_STORED_ROWS_H

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "quire_cpu.h"

typedef void (*tile_work)(const void *context, const uint8_t *rows, int64_t begin, int64_t end);

static int32_t read_file(int32_t file, uint8_t *to, int64_t size, int64_t offset) {
    while (size > 0) {
        ssize_t got = pread(file, to, (size_t)size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return QUIRE_CANNOT_READ;
        to += got, offset += got, size -= got;
    }
    return QUIRE_OK;
}

/* Call `work` for rows [begin, end), at most PANEL at a time. */
static int32_t for_each_tile(const struct stored_rows *from, int64_t begin, int64_t end, tile_work work,
                             const void *context) {
    uint8_t *tile = from->rows ? NULL : malloc((size_t)(PANEL * from->row_bytes));
    if (!from->rows && !tile) return QUIRE_NO_MEMORY;
    int32_t status = QUIRE_OK;
    for (int64_t i = begin; i < end && !status; i += PANEL) {
        int64_t after = i + PANEL < end ? i + PANEL : end;
        const uint8_t *rows = from->rows ? (const uint8_t *)from->rows + i * from->row_bytes : tile;
        if (tile) status = read_file(from->file, tile, (after - i) * from->row_bytes, from->offset + i * from->row_bytes);
        if (!status) work(context, rows, i, after);
    }
    free(tile);
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
