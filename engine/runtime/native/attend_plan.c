/* Attention of a batch: cut it into tasks (attend_task), let the team take them, join what was cut. */
#include <stdatomic.h>
#include <stdlib.h>

#include "quire_cpu.h"

struct attend_job {
    const struct attend_args *args;
    struct attend_task *tasks;
    int64_t num_tasks;
    size_t scratch_bytes;
    atomic_llong next;
    atomic_int out_of_memory;
};

static void take_tasks(void *context) {
    struct attend_job *job = context;
    void *scratch = aligned_alloc(64, (job->scratch_bytes + 63) / 64 * 64);
    if (!scratch) {
        atomic_store(&job->out_of_memory, 1);
        return;
    }
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_tasks;)
        active_kernels()->attend(job->args, &job->tasks[i], scratch);
    free(scratch);
}

/* The keys that queries [first, first + num) of a slice see between them. */
static struct attend_task cover(const struct attend_args *a, int64_t slice, int64_t first, int64_t num) {
    int64_t num_queries = a->query_starts[slice + 1] - a->query_starts[slice];
    int64_t start = a->context_lens[slice] - num_queries + first;
    int64_t begin = a->window ? start - a->window + 1 : 0;
    return (struct attend_task){
        .slice = slice,
        .first_query = first,
        .num_queries = num,
        .key_begin = begin > 0 ? begin / CHUNK * CHUNK : 0,
        .key_end = start + num,
    };
}

/* Visit every (slice, tile of queries): latest queries first, for they see most and should start early. */
#define FOR_EACH_COVER(task, a, per_tile)                                                             \
    for (int64_t slice_ = 0; slice_ < (a)->num_slices; slice_++)                                      \
        for (int64_t num_ = (a)->query_starts[slice_ + 1] - (a)->query_starts[slice_],               \
                     at_ = (num_ - 1) / (per_tile) * (per_tile);                                      \
             at_ >= 0; at_ -= (per_tile))                                                             \
            for (struct attend_task task = cover(a, slice_, at_, num_ - at_ < (per_tile) ? num_ - at_ : (per_tile)), \
                                    *once_ = &task;                                                   \
                 once_; once_ = NULL)

struct plan {
    struct attend_task *tasks;
    float *partials;
    int64_t num_tasks;
    int threads;
};

/* The keys from `begin` that one share takes: up to a multiple of SPAN, `spans` of them or what is left. */
static int64_t share_end(const struct attend_task *task, int64_t begin, int64_t spans) {
    int64_t end = (begin / SPAN + spans) * SPAN;
    return end < task->key_end ? end : task->key_end;
}

/* Cut the batch so that a thread has about four shares: by slice, head and tile of queries, and where that is too few,
 * by spans of keys; the last kind leaves partial results that attend_merge joins. */
static enum status make_plan(const struct attend_args *a, struct plan *plan) {
    int64_t group = a->num_heads / a->pool.num_kv_heads, heads = a->pool.num_kv_heads, dim = a->pool.head_dim;
    int64_t per_tile = group < ROWS ? ROWS / group : 1, work = 0, spans = INT32_MAX, count = 0, rows = 0;
    FOR_EACH_COVER(task, a, per_tile) work += heads * (task.key_end - task.key_begin);
    plan->threads = work * dim * 2 > WORTH_SHARING ? team_size() : 1;
    if (plan->threads > 1) spans = work / (4 * plan->threads) / SPAN + 1;
    FOR_EACH_COVER(task, a, per_tile) {
        int64_t parts = (spans_of(&task) - 1) / spans + 1;
        count += heads * parts;
        if (parts > 1) rows += heads * spans_of(&task) * task.num_queries * group;
    }
    plan->tasks = malloc((size_t)count * sizeof *plan->tasks);
    plan->partials = rows ? malloc((size_t)(rows * (dim + 2)) * sizeof(float)) : NULL;
    if (!plan->tasks || (rows && !plan->partials)) return QUIRE_NO_MEMORY;
    struct attend_task *next = plan->tasks;
    float *partial = plan->partials;
    FOR_EACH_COVER(task, a, per_tile) {
        int is_cut = spans_of(&task) > spans;
        for (task.head = 0; task.head < heads; task.head++) {
            for (int64_t begin = task.key_begin, end; begin < task.key_end; begin = end) {
                end = share_end(&task, begin, spans);
                *next = task;
                next->key_begin = begin;
                next->key_end = end;
                if (is_cut) next->partial = partial, partial += spans_of(next) * task.num_queries * group * (dim + 2);
                next++;
            }
        }
    }
    plan->num_tasks = next - plan->tasks;
    return QUIRE_OK;
}

static void merge_parts(const struct attend_args *a, const struct plan *plan) {
    const struct attend_task *end = plan->tasks + plan->num_tasks;
    for (const struct attend_task *task = plan->tasks, *after; task < end; task = after) {
        for (after = task + 1; after < end && after->partial && after->key_begin == after[-1].key_end &&
                               after->head == task->head && after->slice == task->slice; after++) {}
        if (task->partial) active_kernels()->attend_merge(a, task, after - task);
    }
}

EXPORT int32_t quire_attend(const struct attend_args *a) {
    struct plan plan = {0};
    enum status status = make_plan(a, &plan);
    if (status == QUIRE_OK) {
        struct attend_job job = {a, plan.tasks, plan.num_tasks, active_kernels()->attend_scratch(a), 0, 0};
        team_run(take_tasks, &job, plan.threads);
        if (atomic_load(&job.out_of_memory))
            status = QUIRE_NO_MEMORY;
        else if (plan.partials)
            merge_parts(a, &plan);
    }
    free(plan.partials);
    free(plan.tasks);
    return status;
}
