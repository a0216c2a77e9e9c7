/* The ranks of one model on one machine: sums and copies through memory that their processes share. */
#ifndef QUIRE_GROUP_H
#define QUIRE_GROUP_H

#include "quire_cpu.h"

/* One process's view. All ranks make the same calls in the same order. A call returns QUIRE_NO_GROUP if another rank does
 * not arrive in time, or if the group was aborted. */
SHARED struct group {
    char *shared;       /* group_bytes(size), zeros at first */
    int64_t timeout_ms;
    int32_t rank, size;
    int32_t spins;      /* looks at another rank before this one yields its core, and then sleeps */
    uint32_t calls;     /* so far */
};

EXPORT int64_t quire_group_bytes(int32_t size);
EXPORT void quire_group_abort(struct group *); /* may be called by another thread */

/* x [num] = the sum of all ranks' x, in the order of the ranks. */
EXPORT int32_t quire_group_sum(struct group *, float *x, int64_t num);

/* On rank 0, out [rows, width] = the bytes of all ranks' x [rows, num], side by side; those beyond the width are dropped. */
EXPORT int32_t quire_group_gather(struct group *, const char *x, char *out, int64_t rows, int64_t num, int64_t width);

/* x [num] = rank 0's, bytes. */
EXPORT int32_t quire_group_broadcast(struct group *, char *x, int64_t num);

#endif
