/* Repacking of codes as safetensors hold them into rows of GGUF's types, at load: Q4_0, Q4_1, Q8_0 and MXFP4.
 *
 * Codes are read in tiles of rows; quant_pack.c packs what is made of them. Scales and minimums are small and in memory. */
#include <string.h>

#include "quant_format.h"
#include "stored_rows.h"

static const uint64_t ONES = 0x0101010101010101u;

/* The four halves of four bytes, as eight bytes. */
static inline uint64_t spread(uint32_t word) {
    uint64_t wide = word;
    wide = (wide | wide << 16) & 0x0000ffff0000ffffu;
    wide = (wide | wide << 8) & 0x00ff00ff00ff00ffu;
    return (wide | wide << 4) & 0x0f0f0f0f0f0f0f0fu;
}

static int64_t scale_of(const struct packed_codes *c, int64_t row, int64_t b) {
    return row / c->scale_rows * c->num_groups + b / c->group_blocks;
}

/* Write what is ahead of a block's codes; returns the place of these. */
static inline uint8_t *write_heads(const struct packed_codes *c, int64_t at, uint8_t *to) {
    if (c->layout == CODES_MXFP4) {
        *to = ((const uint8_t *)c->scales)[at];
        return to + 1;
    }
    memcpy(to, (const uint16_t *)c->scales + at, 2);
    if (!c->minimums) return to + 2;
    memcpy(to + 2, c->minimums + at, 2);
    return to + 4;
}

static inline int64_t shift_of(const struct packed_codes *c, int64_t at) { return c->shifts ? c->shifts[at] : c->shift; }

/* Write 32 codes of four words, eight each, the first one lowest; the sums have four bits. */
static inline void write_nibbles(const uint32_t words[4], int64_t shift, uint8_t *to) {
    for (int i = 0; i < 2; i++) {
        uint64_t pairs = (spread(words[i]) | spread(words[2 + i]) << 4) + (uint64_t)(17 * shift) * ONES;
        memcpy(to + 8 * i, &pairs, sizeof pairs);
    }
}

static void make_nibbles(const struct packed_codes *c, const uint8_t *stored, int64_t row, uint8_t *to) {
    for (int64_t b = 0; b < c->k / QBLOCK; b++, stored += 16, to += 16) {
        int64_t at = scale_of(c, row, b);
        uint32_t words[4];
        memcpy(words, stored, sizeof words);
        to = write_heads(c, at, to);
        write_nibbles(words, c->layout == CODES_MXFP4 ? 0 : shift_of(c, at), to);
    }
}

static void make_bytes(const struct packed_codes *c, const uint8_t *stored, int64_t row, uint8_t *to) {
    for (int64_t b = 0; b < c->k / QBLOCK; b++, stored += QBLOCK, to += QBLOCK) {
        int64_t at = scale_of(c, row, b), shift = shift_of(c, at);
        to = write_heads(c, at, to);
        for (int i = 0; i < QBLOCK; i++) to[i] = (uint8_t)(stored[i] + shift);
    }
}

int32_t repack_rows(const struct stored_rows *from, const uint8_t *stored, int64_t begin, int64_t end, uint8_t *to) {
    const struct packed_codes *c = from->codes;
    float *scratch = NULL;
    if (c->layout == CODES_FP8 && !(scratch = malloc((size_t)(c->k + c->k / QBLOCK * 2 + 64) * sizeof(float))))
        return QUIRE_NO_MEMORY;
    for (int64_t row = begin; row < end; row++, stored += c->row_bytes, to += from->row_bytes) {
        if (c->layout == CODES_FP8) {
            const float *scales = (const float *)c->scales + row / c->scale_rows * c->num_groups;
            round_fp8(&(struct fp8_row){stored, scales, c->k, c->group_blocks}, scratch, to);
        } else if (c->layout == CODES_BYTES) {
            make_bytes(c, stored, row, to);
        } else {
            make_nibbles(c, stored, row, to);
        }
    }
    free(scratch);
    return QUIRE_OK;
}
