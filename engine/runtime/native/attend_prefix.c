/* Finds shared prefixes. Slices are hashed into buckets by the blocks of their first chunk. Inside a bucket the first one is
 * compared with all others, and those that share enough with it become a prefix. */
#include "attend_prefix.h"

#include <stdlib.h>

enum { WORTH_JOINING = 256 }; /* saved key reads below which a prefix costs as much as it saves */

/* Slices still to be placed: linked lists, one a bucket. */
struct buckets {
    int32_t *heads, *next, *runs; /* runs: keys in common with the current slice, by slice */
    uint32_t mask;
};

static const int32_t *table_of(const struct attend_args *a, int64_t slice) {
    return a->block_tables + slice * a->table_stride;
}

static uint32_t hash_first_chunk(const struct attend_args *a, int64_t slice) {
    const int32_t *table = table_of(a, slice);
    uint32_t hash = 0;
    for (int64_t i = 0; i * a->pool.block_size < CHUNK; i++) hash = (hash ^ (uint32_t)table[i]) * 0x9e3779b1u;
    return hash ^ hash >> 16;
}

static int32_t common_keys(const struct attend_args *a, int64_t one, int64_t other) {
    const int32_t *x = table_of(a, one), *y = table_of(a, other);
    int64_t most = a->context_lens[one] < a->context_lens[other] ? a->context_lens[one] : a->context_lens[other];
    int64_t keys = 0, i = 0;
    most -= 1;
    for (; keys < most && x[i] == y[i]; i++) keys += a->pool.block_size;
    return (int32_t)((keys < most ? keys : most) / CHUNK * CHUNK);
}

/* The length of the run whose sharing with the current slice saves most, 0 if none is worth it. */
static int32_t best_run(const struct buckets *b, int32_t head) {
    int32_t best = 0, below = INT32_MAX;
    for (int64_t most_saved = WORTH_JOINING - 1;;) {
        int32_t run = 0;
        int64_t others = 0;
        for (int32_t s = b->next[head]; s >= 0; s = b->next[s])
            if (b->runs[s] < below && b->runs[s] > run) run = b->runs[s];
        if (run == 0) return best;
        for (int32_t s = b->next[head]; s >= 0; s = b->next[s]) others += b->runs[s] >= run;
        if (others * run > most_saved) best = run, most_saved = others * run;
        below = run;
    }
}

/* Take the prefixes out of one bucket. */
static void empty_bucket(const struct attend_args *a, struct buckets *b, int32_t head, struct prefixes *found,
                         int32_t **slices) {
    while (head >= 0 && b->next[head] >= 0) {
        for (int32_t s = b->next[head]; s >= 0; s = b->next[s]) b->runs[s] = common_keys(a, head, s);
        int32_t keys = best_run(b, head), rest = -1, *last = &rest;
        if (keys == 0) {
            head = b->next[head];
            continue;
        }
        struct prefix *prefix = &found->all[found->num++];
        *prefix = (struct prefix){keys, 0, *slices};
        b->runs[head] = keys;
        for (int32_t s = head; s >= 0; s = b->next[s])
            if (b->runs[s] >= keys)
                (*slices)[prefix->num_slices++] = s;
            else
                *last = s, last = &b->next[s];
        *last = -1;
        *slices += prefix->num_slices;
        head = rest;
    }
}

/* Keys of a window begin anywhere, so sliding slices are skipped. */
enum status find_prefixes(const struct attend_args *a, struct prefixes *found) {
    int64_t num = a->num_slices, num_buckets = 2;
    if (a->window || num < 2) return QUIRE_OK;
    while (num_buckets < 2 * num) num_buckets *= 2;
    int32_t *memory = malloc((size_t)(num_buckets + 2 * num) * sizeof *memory);
    found->slices = malloc((size_t)num * sizeof *found->slices);
    found->all = malloc((size_t)(num / 2) * sizeof *found->all);
    if (memory && found->slices && found->all) {
        struct buckets b = {memory, memory + num_buckets, memory + num_buckets + num, (uint32_t)num_buckets - 1};
        for (int64_t i = 0; i < num_buckets; i++) b.heads[i] = -1;
        for (int64_t s = num - 1; s >= 0; s--) {
            if (a->query_starts[s + 1] - a->query_starts[s] != 1 || a->context_lens[s] <= CHUNK) continue;
            int32_t *head = &b.heads[hash_first_chunk(a, s) & b.mask];
            b.next[s] = *head, *head = (int32_t)s;
        }
        int32_t *slices = found->slices;
        for (int64_t i = 0; i < num_buckets; i++) empty_bucket(a, &b, b.heads[i], found, &slices);
    }
    enum status status = memory && found->slices && found->all ? QUIRE_OK : QUIRE_NO_MEMORY;
    free(memory);
    return status;
}

void free_prefixes(struct prefixes *found) {
    free(found->all);
    free(found->slices);
}
