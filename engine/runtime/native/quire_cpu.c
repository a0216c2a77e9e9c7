/* The library's entry points: cut a call's work into shares, let the team take them. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "quant_format.h"
#include "quire_cpu.h"

enum { KEPT_BYTES = 256 << 20 };

/* Keep freed memory in the process: a step's results are tens of megabytes, and allocating them again, cleared, would
 * cost every step a few percent. */
EXPORT void quire_keep_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, KEPT_BYTES);
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES);
#endif
}

/* Ranges of [0, count) for free threads: large ones first, small ones to even out the end. */
struct range_job {
    range_work *run;
    const void *args;
    int64_t count, threads, most;
    double pause_at;
    atomic_llong next;
};

static void take_ranges(void *context) {
    struct range_job *job = context;
    long long begin = atomic_load(&job->next);
    while (begin < job->count) {
        int64_t step = (job->count - begin + 2 * job->threads - 1) / (2 * job->threads);
        if (job->threads == 1) step = job->count - begin;
        if (step > job->most) step = job->most;
        if (!atomic_compare_exchange_weak(&job->next, &begin, begin + step)) continue;
        job->run(job->args, begin, begin + step);
        if (team_must_pause(job->pause_at)) return;
        begin = atomic_load(&job->next);
    }
}

void run_ranges(range_work *run, const void *args, int64_t count, int64_t unit) {
    struct range_job job = {
        .run = run, .args = args, .count = count, .most = count,
        .threads = count > 1 && count * unit > WORTH_SHARING ? team_size() : 1,
    };
    if (team_pause_at() != HUGE_VAL) job.most = BETWEEN_PAUSES / (unit > 0 ? unit : 1) + 1;
    if (count > 0) do {
        job.pause_at = team_pause_at();
        team_run(take_ranges, &job, (int)job.threads);
    } while (atomic_load(&job.next) < count && team_goes_on());
}

EXPORT int32_t quire_store(const struct store_args *a) {
    int64_t values = 2 * a->pool.num_kv_heads * a->pool.head_dim;
    run_ranges(a->pool.is_int8 ? store_int8 : store_tokens, a, a->num_tokens, values);
    return QUIRE_OK;
}

EXPORT int32_t quire_add_rms_norm(const struct norm_args *a) {
    int64_t num = a->packs ? gemm_num_groups(a->packs) : a->rows;
    if (num > 0) run_ranges(add_rms_norm_rows, a, num, a->rows * a->width / num);
    return QUIRE_OK;
}

EXPORT int32_t quire_rope(const struct rope_args *a) {
    run_ranges(rope_rows, a, a->tokens, (a->num_heads + a->num_kv_heads) * a->head_dim);
    return QUIRE_OK;
}

EXPORT int32_t quire_embed(const struct embed_args *a) {
    run_ranges(is_quantised(a->format) ? quant_unpack_rows : embed_rows, a, a->rows, a->width);
    return QUIRE_OK;
}

EXPORT int32_t quire_scale_logits(const struct scaled_logits *a) {
    if (a->multiplier != 1 || a->cap != 0) run_ranges(scale_logits_rows, a, a->rows, a->width);
    return QUIRE_OK;
}

EXPORT int32_t quire_sample(const struct sample_args *a) {
    run_ranges(sample_rows, a, a->rows, a->vocab_size);
    return QUIRE_OK;
}

struct gemm_jobs {
    const struct gemm_job *jobs;
    int64_t num;
};

static int64_t num_panels_of(const struct gemm_job *job) { return (job->args.w.n + PANEL - 1) / PANEL; }

static void run_gemm(const void *context, int64_t begin, int64_t end) {
    const struct gemm_jobs *all = context;
    while (begin < end) {
        const struct gemm_job *job = job_of(all->jobs, all->num, begin);
        int64_t number = begin - job->first, num = job->num_blocks > 1 ? 1 : end - begin, most = job->panels_per_block;
        int64_t part = number / job->num_blocks, block = number % job->num_blocks;
        if (gemm_goes_by_rows(&job->args)) part = number % job->num_parts, block = number / job->num_parts;
        int64_t panel = part * most, group = block * job->groups_per_block;
        struct gemm_share share = {panel, panel + num * most, group, group + job->groups_per_block};
        if (share.panel_end > num_panels_of(job)) share.panel_end = num_panels_of(job);
        if (share.group_end > job->num_groups) share.group_end = job->num_groups;
        gemm(&job->args, &share);
        begin += (share.panel_end - panel + most - 1) / most;
    }
}

/* Cut a job into shares, `enough` if there are as many. */
static int64_t cut(struct gemm_job *job, int64_t first, int64_t enough) {
    int64_t num_panels = num_panels_of(job);
    job->first = first;
    job->num_groups = gemm_num_groups(&job->args);
    job->groups_per_block = gemm_block_groups(&job->args);
    while (job->groups_per_block > 1 && num_panels * ((job->num_groups - 1) / job->groups_per_block + 1) < enough)
        job->groups_per_block /= 2;
    job->num_blocks = (job->num_groups - 1) / job->groups_per_block + 1;
    job->panels_per_block = job->num_blocks > 1 ? gemm_block_panels() : 1;
    while (job->panels_per_block > 1 && num_panels / job->panels_per_block * job->num_blocks < enough) job->panels_per_block /= 2;
    job->num_parts = (num_panels - 1) / job->panels_per_block + 1;
    return job->num_parts * job->num_blocks;
}

void multiply_all(struct gemm_job *jobs, int64_t num_jobs) {
    struct gemm_jobs all = {jobs, num_jobs};
    int64_t enough = 8 * team_size(), num_shares = 0;
    for (int64_t i = 0; i < num_jobs; i++) num_shares += cut(jobs + i, num_shares, (enough - 1) / num_jobs + 1);
    if (num_jobs) run_ranges(run_gemm, &all, num_shares, PANEL * jobs->args.w.k);
}

static void multiply(const struct gemm_args *a) {
    struct gemm_job job = {.args = *a};
    int64_t num_groups = gemm_num_groups(a);
    if (a->x) run_ranges(gemm_pack_rows, a, num_groups, a->m * a->w.k / num_groups);
    multiply_all(&job, 1);
}

/* Bytes that packed rows of x take. */
size_t quire_rows_bytes(const struct gemm_args *a) { return gemm_rows_bytes(a); }

/* The type of an addend's `low`: pairs that the machine cannot multiply as they are stay two float32. */
EXPORT int32_t quire_low_dtype(const struct linear *up) {
    return up->format == WEIGHT_F32 || pairs_are_wide ? DT_F32 : up->dtype;
}

/* Room for packed rows, from a line's begin on: what a tile loads lies in as few lines as it can. */
static void *room_for_rows(const struct gemm_args *a) { return aligned_alloc(64, (quire_rows_bytes(a) + 63) / 64 * 64); }

EXPORT int32_t quire_gemm(const struct gemm_args *a) {
    if (a->m == 0) return QUIRE_OK;
    struct gemm_args own = *a;
    if (!a->rows && !(own.rows = room_for_rows(a))) return QUIRE_NO_MEMORY;
    multiply(&own);
    if (!a->rows) free(own.rows);
    return QUIRE_OK;
}

struct heads_job {
    const struct heads_args *args;
    atomic_int out_of_memory;
};

/* Heads [begin, end), one after the other, each on this thread. */
static void run_heads(const void *context, int64_t begin, int64_t end) {
    struct heads_job *job = (struct heads_job *)context;
    const struct heads_args *a = job->args;
    for (int64_t head = begin; head < end; head++) {
        const struct linear *w = &a->heads[head];
        size_t size = size_of(w->dtype);
        struct gemm_args one = {.w = *w, .m = a->m, .x_stride = a->x_stride, .y_stride = a->y_stride, .y_dtype = w->dtype};
        one.x = (const char *)a->x + (size_t)(head * a->x_step) * size;
        one.y = (char *)a->y + (size_t)(head * a->y_step) * size;
        one.rows = room_for_rows(&one);
        if (!one.rows) {
            atomic_store(&job->out_of_memory, 1);
            return;
        }
        int64_t num_groups = gemm_num_groups(&one), most = gemm_block_groups(&one);
        gemm_pack_rows(&one, 0, num_groups);
        for (int64_t group = 0; group < num_groups; group += most) {
            int64_t after = group + most < num_groups ? group + most : num_groups;
            gemm(&one, &(struct gemm_share){0, (w->n + PANEL - 1) / PANEL, group, after});
        }
        free(one.rows);
    }
}

EXPORT int32_t quire_gemm_heads(const struct heads_args *a) {
    struct heads_job job = {a, 0};
    if (a->m > 0) run_ranges(run_heads, &job, a->num_heads, a->heads->n * a->heads->k);
    return atomic_load(&job.out_of_memory) ? QUIRE_NO_MEMORY : QUIRE_OK;
}

/* Back memory with pages, whose content stays as it is, until `must_stop` is set by another thread. */
EXPORT void quire_touch(char *memory, int64_t size, const volatile int32_t *must_stop) {
    enum { PAGE = 4096 };
    for (int64_t at = 0; at < size && !*must_stop; at += PAGE) __atomic_fetch_or(memory + at, 0, __ATOMIC_RELAXED);
}

/* Work on tiles of rows that may fail. */
struct tile_job {
    const void *args;
    int64_t num_rows;
    tile_range *run;
    atomic_int status;
};

static void run_tiles(const void *context, int64_t begin, int64_t end) {
    struct tile_job *job = (struct tile_job *)context;
    int64_t after = end * PANEL < job->num_rows ? end * PANEL : job->num_rows;
    int32_t status = job->run(job->args, begin * PANEL, after);
    if (status) atomic_store(&job->status, status);
}

static int32_t share_tiles(tile_range *run, const void *args, int64_t num_rows, int64_t k) {
    struct tile_job job = {args, num_rows, run, QUIRE_OK};
    run_ranges(run_tiles, &job, (num_rows + PANEL - 1) / PANEL, k * PANEL);
    return atomic_load(&job.status);
}

EXPORT int32_t quire_dequantise(const struct dequant_args *a) {
    return share_tiles(quant_dequantise, a, a->stored.num_rows, a->k);
}

/* Bytes of a quantised matrix [n, k]. */
EXPORT int64_t quire_quant_bytes(int32_t format, int64_t n, int64_t k) {
    return (n + PANEL - 1) / PANEL * (int64_t)quant_panel_bytes(quant_format_of(format), k);
}

/* Pack rows; float32 and bfloat16 of an even number of columns. */
EXPORT int32_t quire_pack(const struct quant_source *s) {
    tile_range *run = s->format == WEIGHT_INT8 ? quant_pack_int8 : is_quantised(s->format) ? quant_pack_gguf : float_pack;
    return share_tiles(run, s, s->stored.num_rows, s->k);
}
