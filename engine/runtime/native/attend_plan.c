/* Attention of a batch: find shared keys, cut the work into tasks (attend_task), run them on the team, join the parts. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attend_prefix.h"

/* Where a slice finds its query's results over the shared keys. */
struct share {
    int64_t num_keys; /* 0: it shares none */
    const float *records;
    int64_t stride, head_stride;
};

struct plan {
    const struct attend_args *args;
    struct share *shares;        /* [num_slices] */
    struct prefixes prefixes;    /* the prefixes of the shares */
    struct attend_task *covers;  /* a slice and a tile of its queries each, with all their unshared keys */
    struct attend_task *tasks;   /* prefixes first, because the others begin where they end */
    float *prefix_records, *records;
    int64_t num_covers, num_tasks, num_prefix_tasks;
    int64_t group, heads, width; /* width: floats of a row's record */
    int64_t spans;               /* that a task may take before it is cut */
    int threads;
};

struct attend_job {
    const struct attend_args *args;
    const struct attend_task *tasks;
    int64_t num_tasks, threads;
    size_t scratch_bytes;
    double pause_at;
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
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_tasks;) {
        const struct attend_task *next = i + job->threads < job->num_tasks ? &job->tasks[i + job->threads] : NULL;
        attend(job->args, &job->tasks[i], next, scratch);
        if (team_must_pause(job->pause_at)) break;
    }
    free(scratch);
}

static enum status run_tasks(const struct plan *plan, int64_t begin, int64_t end) {
    if (begin == end) return QUIRE_OK;
    size_t scratch = attend_scratch(plan->args);
    struct attend_job job = {plan->args, plan->tasks + begin, end - begin, plan->threads, scratch, HUGE_VAL, 0, 0};
    do {
        job.pause_at = team_pause_at();
        team_run(take_tasks, &job, plan->threads);
        if (atomic_load(&job.out_of_memory)) return QUIRE_NO_MEMORY;
    } while (atomic_load(&job.next) < job.num_tasks && team_goes_on());
    return QUIRE_OK;
}

/* The unshared keys that any of the queries [first, first + num) of a slice sees. */
static struct attend_task cover(const struct plan *plan, int64_t slice, int64_t first, int64_t num) {
    const struct attend_args *a = plan->args;
    int64_t num_queries = a->query_starts[slice + 1] - a->query_starts[slice];
    int64_t start = a->context_lens[slice] - num_queries + first;
    int64_t begin = a->window ? start - a->window + 1 : 0, end = start + num;
    for (int64_t i = 0; a->ends && i < num; i++) {
        int64_t visible = a->ends[a->query_starts[slice] + first + i];
        if (visible > end) end = visible;
    }
    return (struct attend_task){
        .slice = slice,
        .first_query = first,
        .num_queries = num,
        .key_begin = begin > 0 ? begin / CHUNK * CHUNK : plan->shares[slice].num_keys,
        .key_end = end,
    };
}

/* All (slice, tile of queries), latest queries first: they see most keys and should start early. */
static enum status make_covers(struct plan *plan) {
    const struct attend_args *a = plan->args;
    int64_t per_tile = plan->group < ROWS ? ROWS / plan->group : 1;
    for (int64_t slice = 0; slice < a->num_slices; slice++)
        plan->num_covers += (a->query_starts[slice + 1] - a->query_starts[slice] + per_tile - 1) / per_tile;
    plan->covers = malloc((size_t)plan->num_covers * sizeof *plan->covers);
    if (!plan->covers) return QUIRE_NO_MEMORY;
    struct attend_task *next = plan->covers;
    for (int64_t slice = 0; slice < a->num_slices; slice++) {
        int64_t num = a->query_starts[slice + 1] - a->query_starts[slice];
        for (int64_t at = (num - 1) / per_tile * per_tile; at >= 0; at -= per_tile)
            *next++ = cover(plan, slice, at, num - at < per_tile ? num - at : per_tile);
    }
    return QUIRE_OK;
}

/* Sharers of a prefix that one task takes, all but the last. */
static int64_t sharers_per_task(const struct plan *plan, const struct prefix *prefix) {
    int64_t most = plan->group < ROWS ? ROWS / plan->group : 1;
    int64_t num_tasks = (prefix->num_slices + most - 1) / most;
    return (prefix->num_slices + num_tasks - 1) / num_tasks;
}

static int64_t spans_before(int64_t num_keys) { return (num_keys + SPAN - 1) / SPAN; }

/* One task for some sharers, a head and a span, which leaves a record. */
static struct attend_task *add_prefix(struct plan *plan, const struct prefix *prefix, struct attend_task *next,
                                      float *records) {
    int64_t most = sharers_per_task(plan, prefix), num_spans = spans_before(prefix->num_keys);
    int64_t row = plan->group * plan->width, head_stride = prefix->num_slices * num_spans * row;
    for (int64_t first = 0; first < prefix->num_slices; first += most) {
        int64_t num = prefix->num_slices - first < most ? prefix->num_slices - first : most;
        float *at = records + first * num_spans * row;
        for (int64_t i = 0; i < num; i++)
            plan->shares[prefix->slices[first + i]] =
                (struct share){prefix->num_keys, at + i * row, num * row, head_stride};
        for (int64_t head = 0; head < plan->heads; head++)
            for (int64_t begin = 0; begin < prefix->num_keys; begin += SPAN)
                *next++ = (struct attend_task){
                    .slice = prefix->slices[first],
                    .head = head,
                    .num_queries = num,
                    .key_begin = begin,
                    .key_end = begin + SPAN < prefix->num_keys ? begin + SPAN : prefix->num_keys,
                    .sharers = prefix->slices + first,
                    .records = at + head * head_stride + begin / SPAN * num * row,
                };
    }
    return next;
}

/* The keys from `begin` that one task takes: up to a multiple of SPAN, at most `spans` of them. */
static int64_t part_end(const struct attend_task *cover, int64_t begin, int64_t spans) {
    int64_t end = (begin / SPAN + spans) * SPAN;
    return end < cover->key_end ? end : cover->key_end;
}

/* A cover's tasks: one a head, or several that leave records if it is cut. */
static struct attend_task *add_cover(const struct plan *plan, const struct attend_task *cover, struct attend_task *next,
                                     float **records) {
    const struct share *share = &plan->shares[cover->slice];
    int is_cut = spans_of(cover) > plan->spans;
    for (int64_t head = 0; head < plan->heads; head++)
        for (int64_t begin = cover->key_begin, end; begin < cover->key_end; begin = end, next++) {
            end = part_end(cover, begin, plan->spans);
            *next = *cover;
            next->head = head, next->key_begin = begin, next->key_end = end;
            if (share->num_keys && begin == cover->key_begin)
                next->before = share->records + head * share->head_stride, next->before_stride = share->stride;
            if (!is_cut) continue;
            next->records = *records;
            *records += spans_of(next) * cover->num_queries * plan->group * plan->width;
        }
    return next;
}

/* Cut the batch so that a thread has about four shares: by slice, head and tile of queries, and where that is too few,
 * by spans of keys; the last kind leaves records that attend_merge joins. */
static enum status make_tasks(struct plan *plan) {
    const struct prefixes *prefixes = &plan->prefixes;
    int64_t dim = plan->args->pool.head_dim, work = 0, rows = 0, prefix_rows = 0;
    for (int64_t i = 0; i < plan->num_covers; i++) work += plan->covers[i].key_end - plan->covers[i].key_begin;
    for (int64_t i = 0; i < prefixes->num; i++) {
        const struct prefix *p = &prefixes->all[i];
        int64_t num_spans = spans_before(p->num_keys), per_task = sharers_per_task(plan, p);
        work += p->num_keys * p->num_slices;
        plan->num_prefix_tasks += plan->heads * num_spans * ((p->num_slices + per_task - 1) / per_task);
        prefix_rows += plan->heads * num_spans * p->num_slices * plan->group;
    }
    work *= plan->heads;
    plan->threads = work * dim * 2 > WORTH_SHARING ? team_size() : 1;
    plan->spans = plan->threads > 1 ? work / (4 * plan->threads) / SPAN + 1 : INT32_MAX;
    plan->num_tasks = plan->num_prefix_tasks;
    for (int64_t i = 0; i < plan->num_covers; i++) {
        const struct attend_task *cover = &plan->covers[i];
        int64_t parts = (spans_of(cover) - 1) / plan->spans + 1;
        plan->num_tasks += plan->heads * parts;
        if (parts > 1) rows += plan->heads * spans_of(cover) * cover->num_queries * plan->group;
    }
    plan->tasks = malloc((size_t)plan->num_tasks * sizeof *plan->tasks);
    plan->records = rows ? malloc((size_t)(rows * plan->width) * sizeof(float)) : NULL;
    plan->prefix_records = prefix_rows ? malloc((size_t)(prefix_rows * plan->width) * sizeof(float)) : NULL;
    if (!plan->tasks || (rows && !plan->records) || (prefix_rows && !plan->prefix_records)) return QUIRE_NO_MEMORY;
    struct attend_task *next = plan->tasks;
    float *records = plan->prefix_records;
    for (int64_t i = 0; i < prefixes->num; i++) {
        const struct prefix *p = &prefixes->all[i];
        next = add_prefix(plan, p, next, records);
        records += plan->heads * spans_before(p->num_keys) * p->num_slices * plan->group * plan->width;
    }
    records = plan->records;
    for (int64_t i = 0; i < plan->num_covers; i++) next = add_cover(plan, &plan->covers[i], next, &records);
    return QUIRE_OK;
}

static enum status make_plan(const struct attend_args *a, struct plan *plan) {
    plan->args = a;
    plan->heads = a->pool.num_kv_heads, plan->group = a->num_heads / plan->heads;
    plan->width = RECORD_FLOATS(value_dim_of(&a->pool));
    plan->shares = calloc((size_t)a->num_slices, sizeof *plan->shares);
    if (!plan->shares) return QUIRE_NO_MEMORY;
    enum status status = find_prefixes(a, &plan->prefixes);
    if (status != QUIRE_OK) return status;
    for (int64_t i = 0; i < plan->prefixes.num; i++)
        for (int64_t s = 0; s < plan->prefixes.all[i].num_slices; s++)
            plan->shares[plan->prefixes.all[i].slices[s]].num_keys = plan->prefixes.all[i].num_keys;
    status = make_covers(plan);
    return status == QUIRE_OK ? make_tasks(plan) : status;
}

static void merge_parts(const struct plan *plan) {
    const struct attend_task *end = plan->tasks + plan->num_tasks;
    for (const struct attend_task *task = plan->tasks + plan->num_prefix_tasks, *after; task < end; task = after) {
        for (after = task + 1; after < end && after->records && after->key_begin == after[-1].key_end &&
                               after->head == task->head && after->slice == task->slice; after++) {}
        if (task->records) attend_merge(plan->args, task, after - task);
    }
}

EXPORT int32_t quire_attend(const struct attend_args *a) {
    struct plan plan = {0};
    enum status status = make_plan(a, &plan);
    if (status == QUIRE_OK) status = run_tasks(&plan, 0, plan.num_prefix_tasks);
    if (status == QUIRE_OK) status = run_tasks(&plan, plan.num_prefix_tasks, plan.num_tasks);
    if (status == QUIRE_OK && plan.records) merge_parts(&plan);
    free(plan.prefix_records);
    free(plan.records);
    free(plan.tasks);
    free(plan.covers);
    free_prefixes(&plan.prefixes);
    free(plan.shares);
    return status;
}
