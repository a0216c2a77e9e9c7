/* Repacking of codes as safetensors hold them into rows of GGUF's types, at load: Q4_0, Q4_1, Q8_0 and MXFP4.
 *
 * Codes are read from the file in tiles, of rows or of inputs, as they lie there; quant_pack.c packs the rows. Scales and
 * minimums are small and are in memory. weights/stored/packed.py makes the same rows by torch operations. */
#include <string.h>

#include "quant_format.h"
#include "stored_rows.h"

enum {
    STRIP_BLOCKS = 8, /* of inputs that are read in turn; what they take stays in the cache */
    OUTPUTS = 8,      /* of a word of AWQ */
};
static const uint64_t ONES = 0x0101010101010101u;

/* The four halves of four bytes, as eight bytes. */
static inline uint64_t spread(uint32_t word) {
    uint64_t wide = word;
    wide = (wide | wide << 16) & 0x0000ffff0000ffffu;
    wide = (wide | wide << 8) & 0x00ff00ff00ff00ffu;
    return (wide | wide << 4) & 0x0f0f0f0f0f0f0f0fu;
}

static inline uint32_t word_at(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
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

/* Make the blocks of rows [begin, end) of a strip of words along the inputs: [words][rows]. */
static void make_of_input_words(const struct packed_codes *c, const uint8_t *stored, const struct strip *s, uint8_t *out) {
    const int num_words = c->bits; /* of QBLOCK inputs */
    for (int64_t b = s->first; b < s->first + s->num; b++, stored += num_words * c->row_bytes, out += s->block_bytes) {
        const int64_t heads = b / c->group_blocks * s->num_rows;
        for (int64_t row = s->begin; row < s->end; row++) {
            int64_t at = heads + row, shift = shift_of(c, at);
            uint8_t *to = write_heads(c, at, out + (row - s->begin) * s->num * s->block_bytes);
            uint32_t words[8];
            for (int i = 0; i < num_words; i++) words[i] = word_at(stored + i * c->row_bytes + 4 * row);
            if (c->bits == 4) {
                write_nibbles(words, shift, to);
            } else {
                memcpy(to, words, sizeof words);
                for (int i = 0; i < QBLOCK; i++) to[i] = (uint8_t)(to[i] + shift);
            }
        }
    }
}

/* Exchange bytes of eight words: byte i of word j becomes byte j of word i. */
static inline void transpose(uint64_t words[8]) {
    static const uint64_t masks[] = {0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu, 0x00000000ffffffffu};
    for (int level = 0; level < 3; level++) {
        int step = 1 << level, bits = 8 << level;
        for (int i = 0; i < 8; i++) {
            if (i & step) continue;
            uint64_t moved = (words[i] >> bits ^ words[i + step]) & masks[level];
            words[i + step] ^= moved;
            words[i] ^= moved << bits;
        }
    }
}

/* Halves i and i + 16 of eight outputs as bytes, those of even halves of the word first. */
static inline uint64_t pair_words(uint32_t low, uint32_t high) {
    const uint32_t mask = 0x0f0f0f0fu;
    uint32_t even = (low & mask) | (high & mask) << 4, odd = (low >> 4 & mask) | (high & ~mask);
    return even | (uint64_t)odd << 32;
}

/* Make the blocks of rows [begin, end) of a strip of AWQ's words, of eight outputs each: [inputs][words]. */
static void make_of_output_words(const struct packed_codes *c, const uint8_t *stored, const struct strip *s, uint8_t *out) {
    static const int place_of[OUTPUTS] = {0, 2, 4, 6, 1, 3, 5, 7}; /* of each output */
    for (int64_t b = s->first; b < s->first + s->num; b++, stored += QBLOCK * c->row_bytes, out += s->block_bytes) {
        const int64_t heads = b / c->group_blocks * s->num_rows;
        for (int64_t row = s->begin; row < s->end; row += OUTPUTS) {
            const uint8_t *from = stored + row / OUTPUTS * 4;
            uint64_t pairs[2][8];
            for (int i = 0; i < 16; i++)
                pairs[i / 8][i % 8] = pair_words(word_at(from + i * c->row_bytes), word_at(from + (i + 16) * c->row_bytes));
            transpose(pairs[0]);
            transpose(pairs[1]);
            for (int i = 0; i < OUTPUTS && row + i < s->end; i++) {
                const int64_t at = heads + row + i;
                uint8_t *to = write_heads(c, at, out + (row + i - s->begin) * s->num * s->block_bytes);
                for (int half = 0; half < 2; half++) {
                    uint64_t shifted = pairs[half][place_of[i]] + (uint64_t)(17 * shift_of(c, at)) * ONES;
                    memcpy(to + 8 * half, &shifted, sizeof shifted);
                }
            }
        }
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
            active_kernels()->round_fp8(&(struct fp8_row){stored, scales, c->k, c->group_blocks}, scratch, to);
        } else if (c->layout == CODES_BYTES) {
            make_bytes(c, stored, row, to);
        } else {
            make_nibbles(c, stored, row, to);
        }
    }
    free(scratch);
    return QUIRE_OK;
}

/* Blocks of a strip: fewer than STRIP_BLOCKS if threads would have nothing to do. */
static int64_t strip_blocks(const struct stored_rows *from) {
    int64_t num_blocks = from->codes->k / QBLOCK, num = num_blocks / (2 * team_size());
    return num < 1 ? 1 : num < STRIP_BLOCKS ? num : STRIP_BLOCKS;
}

int64_t repack_num_strips(const struct stored_rows *from) {
    int64_t num = strip_blocks(from);
    return (from->codes->k / QBLOCK + num - 1) / num;
}

int32_t for_each_strip(const struct stored_rows *from, int64_t begin, int64_t end, strip_work work, const void *context) {
    const struct packed_codes *c = from->codes;
    const int64_t num = strip_blocks(from), num_blocks = c->k / QBLOCK;
    const int64_t num_words = c->layout == CODES_OUTPUT_WORDS ? QBLOCK : c->bits; /* rows of words of a block */
    const int64_t step = from->step > c->row_bytes ? from->step : c->row_bytes;
    struct strip strip = {.num_rows = from->num_rows, .block_bytes = from->row_bytes / num_blocks};
    uint8_t *stored = malloc((size_t)(num * num_words * step)), *rows = malloc((size_t)(num * PANEL * strip.block_bytes));
    int32_t status = stored && rows ? QUIRE_OK : QUIRE_NO_MEMORY;
    for (int64_t i = begin; i < end && !status; i++) {
        strip.first = i * num;
        strip.num = strip.first + num < num_blocks ? num : num_blocks - strip.first;
        status = read_rows(from, c->row_bytes, stored, strip.first * num_words, (strip.first + strip.num) * num_words);
        for (strip.begin = 0; strip.begin < strip.num_rows && !status; strip.begin = strip.end) {
            strip.end = strip.begin + PANEL < strip.num_rows ? strip.begin + PANEL : strip.num_rows;
            if (c->layout == CODES_OUTPUT_WORDS) make_of_output_words(c, stored, &strip, rows);
            else make_of_input_words(c, stored, &strip, rows);
            work(context, rows, &strip);
        }
    }
    free(stored);
    free(rows);
    return status;
}

struct whole {
    const struct stored_rows *from;
    uint8_t *out;
};

static void keep_tile(const void *context, const uint8_t *rows, int64_t begin, int64_t end) {
    const struct whole *whole = context;
    memcpy(whole->out + begin * whole->from->row_bytes, rows, (size_t)((end - begin) * whole->from->row_bytes));
}

static void keep_strip(const void *context, const uint8_t *rows, const struct strip *strip) {
    const struct whole *whole = context;
    size_t num_bytes = (size_t)(strip->num * strip->block_bytes);
    for (int64_t row = strip->begin; row < strip->end; row++, rows += num_bytes)
        memcpy(whole->out + row * whole->from->row_bytes + strip->first * strip->block_bytes, rows, num_bytes);
}

int32_t quire_repack(const struct stored_rows *from, uint8_t *out) {
    struct whole whole = {from, out};
    if (is_in_strips(from)) return for_each_strip(from, 0, repack_num_strips(from), keep_strip, &whole);
    return for_each_tile(from, 0, from->num_rows, keep_tile, &whole);
}
