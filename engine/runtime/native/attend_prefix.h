/* Which slices of a batch begin with the same blocks. */
#ifndef QUIRE_ATTEND_PREFIX_H
#define QUIRE_ATTEND_PREFIX_H

#include "quire_cpu.h"

/* Keys that slices of one query each have in common: whole chunks, and never a query's own. */
struct prefix {
    int64_t num_keys, num_slices;
    const int32_t *slices;
};

/* No slice is in two. */
struct prefixes {
    struct prefix *all;
    int64_t num;
    int32_t *slices; /* of one prefix after the other */
};

/* Fills `found`, which is empty; free_prefixes in any case. */
enum status find_prefixes(const struct attend_args *a, struct prefixes *found);
void free_prefixes(struct prefixes *found);

#endif
