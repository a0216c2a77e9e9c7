/* Collectives over shared memory (group.h).
 *
 * Each rank has two slots and uses them in turn. In a call, a rank writes one slot, raises its count of calls, waits until
 * every rank's count is as high, and then reads the slots of all ranks.
 *
 * A slot is not overwritten while another rank reads it. A rank writes the same slot again two calls later. Before that it
 * has waited, in the call between, until every rank had begun that call; a rank begins a call only after it has finished
 * reading the slots of the call before. */
#include "group.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    LINE = 128,             /* bytes between what different ranks write */
    SLOT_BYTES = 256 << 10, /* more is sent in pieces, which stay in the cache */
    YIELDS = 100,           /* of the core to other threads, before a rank sleeps */
    NAP_MS = 50,            /* of sleep between looks at the clock and at `aborted` */
};

/* What a rank tells the others. */
struct line {
    atomic_uint calls, num_asleep; /* num_asleep: ranks that wait for `calls` */
    atomic_uint aborted;           /* of the first line, for all */
};

typedef float lanes __attribute__((vector_size(16), aligned(4), may_alias));

EXPORT int64_t quire_group_bytes(int32_t size) { return size * (LINE + 2 * (int64_t)SLOT_BYTES); }

static struct line *line_of(const struct group *g, int32_t rank) { return (struct line *)(g->shared + rank * LINE); }

/* A rank's slot of the call that comes next. */
static char *slot_of(const struct group *g, int32_t rank) {
    int64_t slot = (g->calls & 1) * (int64_t)g->size + rank;
    return g->shared + (int64_t)g->size * LINE + slot * SLOT_BYTES;
}

/* Sleep until *at is no longer `seen`, or for a nap. */
static void nap(atomic_uint *at, unsigned seen) {
    struct timespec limit = {0, NAP_MS * 1000000L};
#if defined(__linux__)
    syscall(SYS_futex, at, FUTEX_WAIT, seen, &limit, NULL, 0);
#else
    limit.tv_nsec = 50000;
    if (atomic_load(at) == seen) nanosleep(&limit, NULL);
#endif
}

static void wake(atomic_uint *at) {
#if defined(__linux__)
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)at;
#endif
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void quire_group_abort(struct group *g) { atomic_store(&line_of(g, 0)->aborted, 1); }

/* Wait until a rank has made as many calls as this one. */
static int32_t wait_for(struct group *g, int32_t rank) {
    struct line *line = line_of(g, rank);
    for (int32_t i = 0; i < g->spins + YIELDS; i++) {
        if ((int32_t)(atomic_load_explicit(&line->calls, memory_order_acquire) - g->calls) >= 0) return QUIRE_OK;
        if (i < g->spins) relax();
        else sched_yield();
    }
    int64_t last = now_ms(), waited = 0; /* a pause of all processes counts as a nap: the others go on now, too */
    int32_t status = QUIRE_OK;
    atomic_fetch_add(&line->num_asleep, 1);
    for (unsigned seen; (int32_t)((seen = atomic_load(&line->calls)) - g->calls) < 0;) {
        int64_t now = now_ms();
        waited += now - last < NAP_MS ? now - last : NAP_MS;
        last = now;
        if (waited > g->timeout_ms) quire_group_abort(g);
        if (atomic_load(&line_of(g, 0)->aborted)) {
            status = QUIRE_NO_GROUP;
            break;
        }
        nap(&line->calls, seen);
    }
    atomic_fetch_sub(&line->num_asleep, 1);
    return status;
}

/* Publish this rank's slot, and wait for all others'. */
static int32_t meet(struct group *g) {
    struct line *own = line_of(g, g->rank);
    int32_t status = atomic_load(&line_of(g, 0)->aborted) ? QUIRE_NO_GROUP : QUIRE_OK;
    g->calls++;
    atomic_store(&own->calls, g->calls);
    if (atomic_load(&own->num_asleep)) wake(&own->calls);
    for (int32_t rank = 0; rank < g->size && !status; rank++) status = wait_for(g, rank);
    return status;
}

struct sum {
    const struct group *group;
    const char *slots; /* of the ranks, one behind the other */
    float *x;
};

static void run_sum(const void *context, int64_t begin, int64_t end) {
    const struct sum *sum = context;
    const int32_t size = sum->group->size;
    for (int64_t i = begin; i < end; i += 4) {
        const char *from = sum->slots + i * (int64_t)sizeof(float);
        if (i + 4 <= end) {
            lanes total = *(const lanes *)from;
            for (int32_t rank = 1; rank < size; rank++) total += *(const lanes *)(from + rank * (int64_t)SLOT_BYTES);
            *(lanes *)(sum->x + i) = total;
        } else {
            for (int64_t j = i; j < end; j++, from += sizeof(float)) {
                float total = *(const float *)from;
                for (int32_t rank = 1; rank < size; rank++) total += *(const float *)(from + rank * (int64_t)SLOT_BYTES);
                sum->x[j] = total;
            }
        }
    }
}

int32_t quire_group_sum(struct group *g, float *x, int64_t num) {
    const int64_t most = SLOT_BYTES / (int64_t)sizeof(float);
    int32_t status = QUIRE_OK;
    for (int64_t first = 0; !status && (first < num || !first); first += most) {
        int64_t count = num - first < most ? num - first : most;
        struct sum sum = {g, slot_of(g, 0), x + first};
        memcpy(slot_of(g, g->rank), x + first, (size_t)count * sizeof(float));
        if (!(status = meet(g))) run_ranges(run_sum, &sum, count, g->size);
    }
    return status;
}

/* Copy bytes [first, first + count) of a rank's x [rows, num] to its place in out [rows, width]. */
static void place(int32_t rank, const char *from, char *out, int64_t first, int64_t count, int64_t num, int64_t width) {
    while (count > 0) {
        int64_t row = first / num, column = first % num, length = num - column < count ? num - column : count;
        int64_t at = rank * num + column, room = width - at < length ? width - at : length;
        if (room > 0) memcpy(out + row * width + at, from, (size_t)room);
        from += length, first += length, count -= length;
    }
}

int32_t quire_group_gather(struct group *g, const char *x, char *out, int64_t rows, int64_t num, int64_t width) {
    int32_t status = QUIRE_OK;
    for (int64_t first = 0; first < rows * num && !status; first += SLOT_BYTES) {
        int64_t count = rows * num - first < SLOT_BYTES ? rows * num - first : SLOT_BYTES;
        const char *slots = slot_of(g, 0);
        if (g->rank) memcpy(slot_of(g, g->rank), x + first, (size_t)count);
        else place(0, x + first, out, first, count, num, width);
        status = meet(g);
        for (int32_t rank = 1; rank < g->size && !g->rank && !status; rank++)
            place(rank, slots + rank * (int64_t)SLOT_BYTES, out, first, count, num, width);
    }
    return status;
}

int32_t quire_group_broadcast(struct group *g, char *x, int64_t num) {
    int32_t status = QUIRE_OK;
    for (int64_t first = 0; first < num && !status; first += SLOT_BYTES) {
        size_t count = (size_t)(num - first < SLOT_BYTES ? num - first : SLOT_BYTES);
        char *slot = slot_of(g, 0);
        if (!g->rank) memcpy(slot, x + first, count);
        status = meet(g);
        if (g->rank && !status) memcpy(x + first, slot, count);
    }
    return status;
}
