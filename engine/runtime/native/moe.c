/* Mixtures of experts (moe.h). Rows are sorted by expert, so that the matrices of an expert are read once, however many
 * rows it has. All experts' products are one piece of work for the team, the first matrices and then the second ones: for a
 * single row they are small, and waking the team takes microseconds.
 *
 * A row's results have the same bits in any batch: its choice depends on that row alone, products do so by themselves
 * (gemm.h), and its experts' results are added by rank. */
#include "moe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_ROWS = 1024, /* rows that are computed together: more would need more memory, and be no faster */
    NUM_FORMATS = 32,
};

/* The intermediate results of at most MOST_ROWS rows. A row has `ranks` experts, the shared one being the last. */
struct room {
    float *wide, *logits;      /* what the router reads; [rows, num_experts] */
    float *shared, *weights;   /* [rows]; [rows, ranks] */
    int32_t *chosen, *places;  /* [rows, ranks] */
    int32_t *row_of, *starts;  /* [places]; [num_experts + 2], the first place of each expert */
    char *alone[NUM_FORMATS];  /* [rows], each packed as one group, for the formats of gate_up */
    char *packed;              /* [places], packed by expert */
    float *gate_up;            /* [places, 2 * width], only with a clamp */
    char *inner;               /* [places, width], the inputs of down */
    float *results;            /* [places, down->n] */
    struct gemm_job *jobs;     /* [num_experts + 1] */
};

/* One call's mixture, rows and room. */
struct mixture {
    const struct moe *moe;
    struct room room;
    int64_t rows, ranks, num_jobs;
};

static int64_t num_experts_of(const struct moe *m) { return m->router.num_experts + m->has_shared; }

/* Bytes of a row packed for weights of a format. */
static size_t packed_row_bytes(const struct linear *like, int32_t format) {
    struct gemm_args row = {.w = *like, .m = 1};
    row.w.format = format;
    return quire_rows_bytes(&row);
}

static size_t most_packed_bytes(const struct linear *like, uint32_t formats) {
    size_t most = 0;
    for (int32_t f = 0; f < NUM_FORMATS; f++)
        if (formats >> f & 1 && packed_row_bytes(like, f) > most) most = packed_row_bytes(like, f);
    return most;
}

/* Bytes of all places packed for gate_up or for down; the shared expert's rows are behind the others. */
static size_t all_packed_bytes(const struct moe *m, const struct linear *of, uint32_t formats, int64_t rows) {
    size_t bytes = (size_t)(rows * m->router.num_chosen) * most_packed_bytes(of, formats);
    const struct linear *shared = of + m->router.num_experts;
    if (m->has_shared) bytes += (size_t)rows * packed_row_bytes(shared, shared->format);
    return bytes;
}

static size_t lay_out(const struct moe *m, int64_t rows, struct room *r, char *base) {
    const struct router *router = &m->router;
    int64_t ranks = router->num_chosen + m->has_shared, places = rows * ranks;
    int64_t values = rows * router->num_chosen * m->down->k; /* of inner */
    if (m->has_shared) values += rows * m->down[router->num_experts].k;
    size_t used = 0, packed = all_packed_bytes(m, m->gate_up, m->gate_up_formats, rows);
    size_t packed_inner = all_packed_bytes(m, m->down, m->down_formats, rows);
    r->wide = carve(base, &used, rows * router->gate.k, sizeof(float));
    r->logits = carve(base, &used, rows * router->num_experts, sizeof(float));
    r->shared = carve(base, &used, rows, sizeof(float));
    r->weights = carve(base, &used, places, sizeof(float));
    r->chosen = carve(base, &used, places, sizeof(int32_t));
    r->places = carve(base, &used, places, sizeof(int32_t));
    r->row_of = carve(base, &used, places, sizeof(int32_t));
    r->starts = carve(base, &used, router->num_experts + 2, sizeof(int32_t));
    for (int32_t f = 0; f < NUM_FORMATS; f++)
        if (m->gate_up_formats >> f & 1) r->alone[f] = carve(base, &used, rows, packed_row_bytes(m->gate_up, f));
    r->packed = carve(base, &used, 1, packed > packed_inner ? packed : packed_inner);
    r->gate_up = carve(base, &used, m->clamp_limit != 0 ? 2 * values : 0, sizeof(float));
    r->inner = carve(base, &used, values, size_of(m->down->dtype));
    r->results = carve(base, &used, places * m->down->n, sizeof(float));
    r->jobs = carve(base, &used, router->num_experts + 1, sizeof(struct gemm_job));
    return used;
}

size_t moe_bytes(const struct moe *m, int64_t rows) {
    struct room room;
    return lay_out(m, rows < MOST_ROWS ? rows : MOST_ROWS, &room, NULL);
}

static float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

/* The index of the best value that is not yet taken, the lowest one of equals; 0 if none is left. */
static int64_t best_of(const float *values, const uint8_t *is_taken, int64_t num) {
    int64_t best = -1;
    for (int64_t i = 0; i < num; i++)
        if (!is_taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best < 0 ? 0 : best;
}

/* Take the experts outside the best groups. */
static void pass_over_groups(const struct router *r, const float *choice, uint8_t *is_taken) {
    int64_t size = r->num_experts / r->num_groups;
    float scores[r->num_groups];
    uint8_t is_kept[r->num_groups];
    memset(is_kept, 0, sizeof is_kept);
    for (int64_t g = 0; g < r->num_groups; g++) {
        const float *of = choice + g * size;
        uint8_t is_seen[size];
        memset(is_seen, 0, sizeof is_seen);
        int64_t first = best_of(of, is_seen, size);
        scores[g] = of[first];
        is_seen[first] = 1;
        if (r->group_scoring == GROUP_TOP2 && size > 1) scores[g] += of[best_of(of, is_seen, size)];
    }
    for (int64_t i = 0; i < r->num_chosen_groups; i++) is_kept[best_of(scores, is_kept, r->num_groups)] = 1;
    for (int64_t i = 0; i < r->num_experts; i++) is_taken[i] = !is_kept[i / size];
}

/* Choose one row's experts, and their weights. */
static void choose(const struct router *r, float *logits, int32_t *chosen, float *weights) {
    int64_t num = r->num_experts;
    float choice[num], peak = -INFINITY, sum = 0;
    uint8_t is_taken[num];
    memset(is_taken, 0, sizeof is_taken);
    for (int64_t i = 0; i < num; i++) {
        if (r->scoring == SCORE_SIGMOID) logits[i] = sigmoid(logits[i]);
        else if (logits[i] > peak) peak = logits[i];
        choice[i] = logits[i] + (r->correction ? r->correction[i] : 0);
    }
    if (r->num_groups > 1) pass_over_groups(r, choice, is_taken);
    for (int64_t rank = 0; rank < r->num_chosen; rank++) {
        int64_t best = best_of(choice, is_taken, num);
        is_taken[best] = 1;
        chosen[rank] = (int32_t)best;
        weights[rank] = r->scoring == SCORE_SIGMOID ? logits[best] : expf(logits[best] - peak);
        sum += weights[rank];
    }
    if (r->scoring == SCORE_SIGMOID) sum = r->is_normalised ? sum + 1e-20f : 1;
    else if (!r->is_normalised) {
        sum = 0;
        for (int64_t i = 0; i < num; i++) sum += expf(logits[i] - peak);
    }
    for (int64_t rank = 0; rank < r->num_chosen; rank++) {
        weights[rank] = weights[rank] / sum * r->scale;
        if (r->expert_scale) weights[rank] *= r->expert_scale[chosen[rank]];
    }
}

static void run_choose(const void *context, int64_t begin, int64_t end) {
    const struct mixture *m = context;
    const struct room *room = &m->room;
    const struct router *r = &m->moe->router;
    for (int64_t row = begin; row < end; row++) {
        int32_t *chosen = room->chosen + row * m->ranks;
        float *weights = room->weights + row * m->ranks;
        choose(r, room->logits + row * r->num_experts, chosen, weights);
        if (!m->moe->has_shared) continue;
        chosen[r->num_chosen] = (int32_t)r->num_experts;
        weights[r->num_chosen] = m->moe->shared_gate.packed ? sigmoid(room->shared[row]) : 1;
    }
}

/* y [rows, n] = x . gate, in float32. */
static int32_t multiply_gate(const struct mixture *m, const struct linear *gate, const void *x, float *y) {
    if (gate->dtype != m->moe->gate_up->dtype) x = m->room.wide;
    struct gemm_args args = {*gate, x, NULL, y, m->rows, gate->k, gate->n, DT_F32, NULL};
    return quire_gemm(&args);
}

static int32_t route(const struct mixture *m, const void *x) {
    const struct moe *moe = m->moe;
    struct widen_args widen = {x, m->room.wide, moe->router.gate.k, moe->gate_up->dtype};
    if (moe->router.gate.dtype != widen.dtype) run_ranges(widen_rows, &widen, m->rows, widen.width);
    int32_t status = multiply_gate(m, &moe->router.gate, x, m->room.logits);
    if (status) return status;
    if (moe->shared_gate.packed && (status = multiply_gate(m, &moe->shared_gate, x, m->room.shared))) return status;
    run_ranges(run_choose, m, m->rows, moe->router.num_experts * moe->router.num_chosen);
    return QUIRE_OK;
}

/* Give every row and rank a place: sorted by expert, rows of one expert in order. */
static void sort(const struct mixture *m) {
    const struct room *r = &m->room;
    int64_t num = num_experts_of(m->moe), places = m->rows * m->ranks;
    int32_t at = 0;
    memset(r->starts, 0, (size_t)(num + 1) * sizeof(*r->starts));
    for (int64_t i = 0; i < places; i++) r->starts[r->chosen[i]]++;
    for (int64_t e = 0; e <= num; e++) {
        int32_t count = r->starts[e];
        r->starts[e] = at;
        at += count;
    }
    for (int64_t i = 0; i < places; i++) {
        r->places[i] = r->starts[r->chosen[i]]++;
        r->row_of[r->places[i]] = (int32_t)(i / m->ranks);
    }
    for (int64_t e = num; e > 0; e--) r->starts[e] = r->starts[e - 1];
    r->starts[0] = 0;
}

/* Pack each row as one group, for all formats. */
static void run_pack_alone(const void *context, int64_t begin, int64_t end) {
    const struct mixture *m = context;
    const struct linear *like = m->moe->gate_up;
    const char *x = (const char *)m->room.jobs->args.x;
    for (int32_t f = 0; f < NUM_FORMATS; f++) {
        if (!(m->moe->gate_up_formats >> f & 1)) continue;
        size_t bytes = packed_row_bytes(like, f);
        struct gemm_args args = {.w = *like, .m = 1, .x_stride = like->k};
        args.w.format = f;
        for (int64_t row = begin; row < end; row++) {
            args.x = x + (size_t)(row * like->k) * size_of(like->dtype);
            args.rows = m->room.alone[f] + (size_t)row * bytes;
            gemm_pack_rows(&args, 0, 1);
        }
    }
}

/* Pack groups of the experts' rows for gate_up. */
static void run_gather(const void *context, int64_t begin, int64_t end) {
    const struct mixture *m = context;
    const struct room *room = &m->room;
    for (int64_t number = begin; number < end; number++) {
        const struct gemm_job *job = job_of(room->jobs, m->num_jobs, number);
        if (job->args.m == 1) continue; /* reads its row as it is */
        gemm_gather(&job->args, number - job->first, room->alone[job->args.w.format], job->args.x);
    }
}

/* Pack groups of the experts' rows for down. */
static void run_pack_inner(const void *context, int64_t begin, int64_t end) {
    const struct mixture *m = context;
    for (int64_t number = begin; number < end; number++) {
        const struct gemm_job *job = job_of(m->room.jobs, m->num_jobs, number);
        gemm_pack_rows(&job->args, number - job->first, number - job->first + 1);
    }
}

/* Number the groups of all jobs, and pack them. */
static void pack_groups(const struct mixture *m, range_work *run) {
    int64_t num = 0;
    for (int64_t i = 0; i < m->num_jobs; i++) {
        struct gemm_job *job = m->room.jobs + i;
        job->first = num;
        job->num_groups = gemm_num_groups(&job->args);
        num += job->num_groups;
    }
    int64_t values = m->rows * m->ranks * m->room.jobs->args.w.k;
    run_ranges(run, m, num, values / num);
}

/* Products with the first matrices: the rows of x, gathered, to `inner`. */
static void multiply_gate_up(struct mixture *m) {
    const struct moe *moe = m->moe;
    const struct room *r = &m->room;
    size_t most = most_packed_bytes(moe->gate_up, moe->gate_up_formats);
    int is_clamped = moe->clamp_limit != 0;
    m->num_jobs = 0;
    for (int64_t e = 0; e < num_experts_of(moe); e++) {
        int64_t first = r->starts[e], num = r->starts[e + 1] - first;
        if (!num) continue;
        const struct linear *w = moe->gate_up + e;
        struct gemm_args *args = &r->jobs[m->num_jobs++].args;
        *args = (struct gemm_args){.w = *w, .x = r->row_of + first, .m = num, .y_stride = num_columns_of(w)};
        args->rows = r->packed + (size_t)first * most;
        if (num == 1) args->rows = r->alone[w->format] + (size_t)r->row_of[first] * packed_row_bytes(w, w->format);
        args->y_dtype = is_clamped ? DT_F32 : w->dtype;
        args->y = is_clamped ? (char *)(r->gate_up + 2 * first * moe->down->k)
                             : r->inner + (size_t)(first * moe->down->k) * size_of(w->dtype);
    }
    pack_groups(m, run_gather);
    multiply_all(r->jobs, m->num_jobs);
}

static void clamp_inner(const struct mixture *m) {
    const struct moe *moe = m->moe;
    const struct room *r = &m->room;
    int64_t num = r->starts[moe->router.num_experts];
    struct clamp_args args = {r->gate_up, r->inner, moe->down->k, moe->clamp_alpha, moe->clamp_limit, moe->down->dtype};
    run_ranges(clamp_rows, &args, num, args.width);
    if (!moe->has_shared) return;
    args.gate_up += 2 * num * args.width;
    args.inner = r->inner + (size_t)(num * args.width) * size_of(args.dtype);
    args.width = moe->down[moe->router.num_experts].k;
    run_ranges(clamp_rows, &args, m->rows, args.width);
}

/* Products with the second matrices, of the same experts, to `results`. */
static void multiply_down(const struct mixture *m) {
    const struct moe *moe = m->moe;
    const struct room *r = &m->room;
    size_t most = most_packed_bytes(moe->down, moe->down_formats);
    struct gemm_job *job = r->jobs;
    for (int64_t e = 0; e < num_experts_of(moe); e++) {
        int64_t first = r->starts[e], num = r->starts[e + 1] - first;
        if (!num) continue;
        const struct linear *w = moe->down + e;
        struct gemm_args args = {.w = *w, .m = num, .x_stride = w->k, .y_stride = w->n, .y_dtype = DT_F32};
        args.x = r->inner + (size_t)(first * moe->down->k) * size_of(w->dtype);
        args.rows = r->packed + (size_t)first * most;
        args.y = r->results + first * w->n;
        job++->args = args;
    }
    pack_groups(m, run_pack_inner);
    multiply_all(r->jobs, m->num_jobs);
}

static int32_t forward_rows(const struct moe_args *a, int64_t first, int64_t rows, char *memory) {
    const struct moe *moe = a->moe;
    int64_t read = moe->gate_up->k, made = moe->down->n, ranks = moe->router.num_chosen + moe->has_shared;
    struct mixture m = {.moe = moe, .rows = rows, .ranks = ranks};
    lay_out(moe, rows, &m.room, memory);
    size_t size = size_of(moe->gate_up->dtype);
    const char *x = (const char *)a->x + (size_t)(first * read) * size, *routed = a->routed;
    int32_t status = route(&m, routed ? routed + (size_t)(first * moe->router.gate.k) * size : x);
    if (status) return status;
    sort(&m);
    m.room.jobs->args.x = x;
    run_ranges(run_pack_alone, &m, rows, read);
    multiply_gate_up(&m);
    if (moe->clamp_limit != 0) clamp_inner(&m);
    multiply_down(&m);
    struct ranks_args add = {m.room.results, m.room.weights, m.room.places, a->y + first * made, ranks, made};
    run_ranges(add_ranks, &add, rows, ranks * made);
    size_t places = (size_t)(rows * ranks);
    if (a->chosen) memcpy(a->chosen + first * ranks, m.room.chosen, places * sizeof(int32_t));
    if (a->weights) memcpy(a->weights + first * ranks, m.room.weights, places * sizeof(float));
    return QUIRE_OK;
}

int32_t moe_forward(const struct moe_args *a, char *memory) {
    for (int64_t first = 0; first < a->rows; first += MOST_ROWS) {
        int64_t rows = a->rows - first < MOST_ROWS ? a->rows - first : MOST_ROWS;
        int32_t status = forward_rows(a, first, rows, memory);
        if (status) return status;
    }
    return QUIRE_OK;
}

/* Compute a mixture in memory of the call. */
EXPORT int32_t quire_moe(const struct moe_args *a) {
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, moe_bytes(a->moe, a->rows))) return QUIRE_NO_MEMORY;
    int32_t status = moe_forward(a, memory);
    free(memory);
    return status;
}

static size_t measure(const struct part *part, const struct decoder *d, int64_t rows, size_t *packed) {
    (void)d, (void)packed;
    return moe_bytes(part->args, rows);
}

static int32_t run(const struct turn *t) {
    struct moe_args args = {t->part->args, t->x, t->out, NULL, NULL, t->rows, NULL};
    return moe_forward(&args, t->room);
}

EXPORT const struct kind kind_mixture = {measure, run};
