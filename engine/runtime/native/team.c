/* Threads: torch's own. Two pools on the same cores would spin against each other, so the library brings none: it is
 * handed libgomp's GOMP_parallel, by which torch's OpenMP loops start as well, and works alone where there is none. */
#include <stdatomic.h>

#include "quire_cpu.h"

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

static parallel_fn parallel;
static int num_threads_max = 1;

__attribute__((visibility("default"))) void quire_set_team(void *gomp_parallel, int32_t num_threads) {
    parallel = (parallel_fn)gomp_parallel;
    num_threads_max = parallel && num_threads > 1 ? num_threads : 1;
}

int team_size(void) { return num_threads_max; }

void team_run(team_work work, void *context, int num_threads) {
    if (num_threads > 1 && num_threads_max > 1)
        parallel(work, context, (unsigned)num_threads_max, 0);
    else
        work(context);
}
