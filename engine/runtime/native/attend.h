/* Attention of one task (attend_task): query rows against a range of keys.
 *
 * All query heads that share a kv head are rows of one small matrix, so a key or value is loaded once for the group,
 * and where sequences have the same blocks, once for all of them. Keys come in chunks; within a chunk: scores = rows . K,
 * running softmax, sums = sums * fade + weights . V, for a few rows at a time, so that their scores and the chunk stay
 * in the first cache. Everything behind the scores is to the base 2: a weight is 2^(score * bits - peak). */

#include "tiles.h"

#include "attend_strips.h"
#include "attend_tiles.h"

/* Rows that go through a chunk together, in strips; their peaks fit one vector. On tiles they are one strip. */
enum { BLOCK_STRIPS = 2, BLOCK_ROWS = HAS_TILES ? TILE_ROWS : BLOCK_STRIPS * STRIP_ROWS };

/* The result of a span, row by row. */
struct state {
    float *sums, *peak, *mass; /* [R][width of a value], [R], [R][W]: a mass is summed up only at the very end */
};

struct scratch {
    float *rows;   /* queries in the kernel's layout, by strips of rows: [lanes][rows of the strip] */
    float *scores; /* [BLOCK_ROWS][CHUNK] scores, then weights */
    float *fade;   /* [R] */
    float *query_units, *weight_units; /* [R], of rows of integers */
    struct state span, joined; /* of the current span, of all spans so far */
    struct copies copies;
    size_t num_rows, strip_rows; /* of the task; of each strip but the last */
    int64_t position;            /* of the task's first query; shared keys are all before it */
    const int32_t *ends;         /* of the task's queries; NULL: behind their own keys */
    const struct attend_task *next; /* what this thread probably takes then, or NULL */
    uint64_t shapes; /* the name of those that tiles have */
};

INLINE int64_t group_of(const struct attend_args *a) { return a->num_heads / a->pool.num_kv_heads; }
INLINE size_t rows_of(const struct attend_args *a, const struct attend_task *task) {
    return (size_t)(task->num_queries * group_of(a));
}

INLINE size_t room_for_rows(const struct attend_args *a) { return ROWS + (size_t)group_of(a) + W; }

size_t attend_scratch(const struct attend_args *a) {
    size_t dim = (size_t)a->pool.head_dim;
    return (room_for_rows(a) * (3 * dim + 5 + 2 * W) + BLOCK_ROWS * CHUNK + (2 * CHUNK + TILE / 2) * dim + 2 * (CHUNK + TILE)) *
           sizeof(float);
}

static struct scratch carve(const struct attend_args *a, float *at) {
    size_t dim = (size_t)a->pool.head_dim, rows = room_for_rows(a);
    struct scratch s;
    s.scores = at, at += BLOCK_ROWS * CHUNK;
    s.copies.tiles = (uint32_t *)at, at += 2 * CHUNK * dim;
    s.copies.raw = (char *)at, at += TILE / 2 * dim;
    s.copies.scales = at, at += 2 * (CHUNK + TILE);
    s.rows = at, at += rows * dim;
    s.span.sums = at, at += rows * dim;
    s.joined.sums = at, at += rows * dim;
    s.span.mass = at, at += rows * W;
    s.joined.mass = at, at += rows * W;
    s.span.peak = at, at += rows;
    s.joined.peak = at, at += rows;
    s.fade = at, at += rows;
    s.query_units = at, at += rows;
    s.weight_units = at;
    s.shapes = 0;
    return s;
}

/* The factor that turns a score into an exponent of 2. With a softcap, scores are capped first, in units of the cap. */
INLINE float bits_of(const struct attend_args *a) { return (a->softcap > 0 ? a->softcap : a->scale) * 1.44269504f; }

/* The token that a row (query * group + head of the group) belongs to. */
INLINE int64_t token_of(const struct attend_args *a, const struct attend_task *task, int64_t query) {
    if (task->sharers) return a->query_starts[task->sharers[query]];
    return a->query_starts[task->slice] + task->first_query + query;
}

/* Rows are taken in strips of about equal size, because few rows use few registers. */
INLINE void cut_rows(struct scratch *s, size_t num_rows, enum kind kind) {
    size_t most = kind == KIND_TILES ? TILE_ROWS : STRIP_ROWS, strips = (num_rows + most - 1) / most;
    s->num_rows = num_rows, s->strip_rows = (num_rows + strips - 1) / strips;
}

/* Write a query as its products take it: as `dtype`. In int8 pools of latents, numbers beside the latent are followed by
 * their products with 256, which meet high bytes. */
INLINE void spread_query(const struct pool *p, struct view q, void *to, enum dtype dtype) {
    int64_t dim = query_dim_of(p), num_more = p->head_dim - dim;
    struct view out = {to, 0, dtype}, more = {to, (size_t)dim, dtype};
    for (int64_t d = 0; d < dim; d += W) put(out, d, dim, get(q, d, dim));
    q.at += (size_t)p->value_dim;
    for (int64_t d = 0; d < num_more; d += W) put(more, d, num_more, 256.f * get(q, d, num_more));
}

/* The query of a row = query * group + head of the group. */
INLINE struct view query_of(const struct attend_args *a, const struct attend_task *task, int64_t row) {
    int64_t group = group_of(a), head = task->head * group + row % group, token = token_of(a, task, row / group);
    return (struct view){(void *)a->q, (size_t)(token * a->q_stride + head * query_dim_of(&a->pool)), (enum dtype)a->pool.dtype};
}

/* The unit of a row of numbers that become 16-bit integers, from their largest magnitude: the power of two by which that
 * is at least 2^14, and at most 32767 when it is rounded. NaN if one is NaN, or infinite. */
INLINE float unit_of(float peak) {
    float more = (peak < 0x1p-100f ? 0x1p-100f : peak) * 1.0001f;
    return ((vf)((vu)splat(more) & 0x7f800000))[0] * 0x1p-14f + (peak - peak);
}

/* W numbers in this unit's inverse, as 16-bit integers. */
INLINE void put_int16(vf x, float inverse, char *to) {
    vh halves = __builtin_convertvector((vu)(x * inverse + 12582912.f), vh);
    memcpy(to, &halves, sizeof halves);
}

/* A row of `dim` numbers as 16-bit integers; returns their unit. */
static float round_query(struct view q, int64_t dim, char *to) {
    float unit = unit_of(peak_of_row(q, dim));
    for (int64_t d = 0; d < dim; d += W) put_int16(get(q, d, dim), 1.f / unit, to + d * 2);
    return unit;
}

/* Load the task's query rows. */
INLINE void load_rows(const struct attend_args *a, const struct attend_task *task, struct scratch *s, enum kind kind) {
    int64_t dim = a->pool.head_dim, query_dim = query_dim_of(&a->pool);
    size_t lanes = (size_t)dim / pair_of(kind), width = width_of(kind);
    const float *from[STRIP_ROWS];
    for (size_t r = 0; kind == KIND_TILES && r < s->num_rows; r++)
        spread_query(&a->pool, query_of(a, task, (int64_t)r), (uint16_t *)s->rows + r * (size_t)dim, DT_BF16);
    for (size_t begin = 0, num; kind != KIND_TILES && begin < s->num_rows; begin += num) {
        num = s->num_rows - begin < s->strip_rows ? s->num_rows - begin : s->strip_rows;
        for (size_t r = 0; r < num; r++) {
            struct view q = query_of(a, task, (int64_t)(begin + r));
            from[r] = (const float *)((const uint16_t *)a->q + q.at);
            if (kind == KIND_INT16) {
                char *rounded = (char *)(s->span.sums + r * (size_t)dim);
                s->query_units[begin + r] = round_query(q, dim, rounded);
                from[r] = (const float *)rounded;
            } else if (kind != KIND_BF16_DOT || query_dim < dim) {
                float *wide = s->span.sums + r * (size_t)dim;
                spread_query(&a->pool, q, wide, kind == KIND_BF16_DOT ? DT_BF16 : DT_F32);
                from[r] = wide;
            }
        }
        for (size_t r = num; r < STRIP_ROWS; r++) from[r] = from[0];
        float *to = s->rows + begin * lanes * width; /* all possible rows of a strip: a loop of constant length is faster */
        for (size_t l = 0; l < lanes; l++, to += num * width)
            UNROLL for (size_t r = 0; r < STRIP_ROWS; r++) memcpy(to + r * width, from[r] + l * width, width * sizeof(float));
    }
}

/* Adjust scores that need more than a factor: of an int8 pool, capped or hidden. Visible are [low, high). */
INLINE vf adjust(const struct attend_args *a, const float *scales, vf x, size_t c, int64_t low, int64_t high) {
    if (scales) x *= load_f(scales + c);
    if (a->softcap > 0) x = tanh_f(x * (a->scale / a->softcap));
    if ((int64_t)c >= low && (int64_t)(c + W) <= high) return x;
    vi at;
    for (int i = 0; i < W; i++) at[i] = (int32_t)c + i;
    return select_f(COMPARE(at, >=, (int32_t)low) & COMPARE(at, <, (int32_t)high), x, splat(-INFINITY));
}

/* The highest score of a row, after adjustment. */
INLINE float highest(const struct attend_args *a, const struct chunk *chunk, float *row, size_t columns, int64_t low,
                     int64_t high) {
    vf peak = splat(-INFINITY);
    if (chunk->k_scales || a->softcap > 0 || low > 0 || high < (int64_t)columns) {
        for (size_t c = 0; c < columns; c += W) {
            vf x = adjust(a, chunk->k_scales, load_f(row + c), c, low, high);
            store_f(row + c, x);
            peak = max_f(x, peak);
        }
    } else {
        for (size_t c = 0; c < columns; c += W) peak = max_f(load_f(row + c), peak);
    }
    return peak_f(peak);
}

/* 2^x for x <= 0, as precisely as weights are multiplied: to 8e-5 where they become bfloat16. */
INLINE vf weight_f(vf x, enum kind kind) {
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    if (kind == KIND_BF16_DOT || kind == KIND_INT16) {
        /* x - floor(x), 0 for -inf */
        vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        vf p = 0.22606716f + f * 0.07802452f;
        p = 0.69583354f + f * p;
        p = 0.99992522f + f * p;
        return (vf)_mm512_scalef_ps((__m512)p, (__m512)x); /* p * 2^floor(x) */
    }
#endif
    return exp2_f(x, kind == KIND_F32);
}

/* Scores of a row become weights; returns their sum, not yet summed across. */
INLINE vf weights_of(float *row, size_t columns, float bits, float top, const float *v_scales, float *unit, enum kind kind) {
    vf mass = splat(0);
    vf most = splat(0);
    for (size_t c = 0; c < columns; c += 2 * W) {
        vf p = weight_f(load_f(row + c) * bits - top, kind), q = weight_f(load_f(row + c + W) * bits - top, kind);
        mass += p + q;
        if (v_scales) p *= load_f(v_scales + c), q *= load_f(v_scales + c + W);
        if (kind == KIND_INT16) most = larger(larger(p, q), most);
#ifdef BF16_DOT
        if (kind == KIND_BF16_DOT) { /* in place: two vectors shrink to one */
            vu both = narrow_both(p, q);
            memcpy((uint16_t *)row + c, &both, sizeof both);
            continue;
        }
#endif
        store_f(row + c, p);
        store_f(row + c + W, q);
    }
    if (kind == KIND_INT16) {
        *unit = unit_of(largest_of(most));
        for (size_t c = 0; c < columns; c += W) put_int16(load_f(row + c), 1.f / *unit, (char *)row + c * 2);
    }
    return mass;
}

/* Turn the scores of a block of rows, `num` from row r on, into weights, and update peak, mass and fade of the rows.
 * Lanes of other rows after them keep their peak. */
__attribute__((noinline)) static void soften(const struct attend_args *a, struct scratch *s, const struct chunk *chunk,
                                             size_t r, size_t num, int64_t key, int64_t end, enum kind kind) {
    int64_t group = group_of(a), first = s->position;
    size_t columns = chunk->num_tiles * TILE;
    int all_see_all = end <= first + 1 && !a->window;
    if (columns % (2 * W)) { /* weights are made from pairs of vectors: an odd one gets a hidden neighbour */
        for (size_t i = 0; i < num; i++) store_f(s->scores + i * CHUNK + columns, splat(0));
        columns += W;
    }
    float peaks[W];
    store_f(peaks, splat(-INFINITY));
    for (size_t i = 0; i < num; i++) {
        int64_t low = 0, high = end - key;
        if (!all_see_all) {
            int64_t query = (int64_t)(r + i) / group, position = first + query;
            int64_t visible = s->ends ? s->ends[query] : position + 1;
            if (a->window) low = position - a->window + 1 - key;
            if (visible < end) high = visible - key;
        }
        peaks[i] = highest(a, chunk, s->scores + i * CHUNK, columns, low, high);
    }
    float bits = bits_of(a);
    vf old = load_f(s->span.peak + r), top = max_f(load_f(peaks) * bits, old);
    store_f(s->fade + r, exp2_f(old - top, 1));
    store_f(s->span.peak + r, top);
    for (size_t i = 0; i < num; i++) {
        float *mass = s->span.mass + (r + i) * W;
        vf sum = weights_of(s->scores + i * CHUNK, columns, bits, s->span.peak[r + i], chunk->v_scales,
                            s->weight_units + r + i, kind);
        store_f(mass, load_f(mass) * s->fade[r + i] + sum);
    }
}

/* How many of a chunk's tiles rows before `last` see: a prompt's early queries fewer than its late ones. */
INLINE size_t tiles_seen(const struct attend_args *a, const struct scratch *s, size_t num_tiles, size_t last,
                         int64_t key) {
    int64_t visible = s->position + 1 - key; /* of the first query */
    if (s->ends || visible >= (int64_t)num_tiles * TILE) return num_tiles;
    visible += (int64_t)(last - 1) / group_of(a);
    size_t num = visible > 0 ? (size_t)(visible + TILE - 1) / TILE : 0;
    return num < num_tiles ? num : num_tiles;
}

/* Scores, softmax and weighted sums of the task's rows over keys [begin, stop), which lie in one span: s->span moves
 * on. */
INLINE void attend_span(const struct attend_args *a, const struct attend_task *task, struct scratch *s, int64_t begin,
                        int64_t stop, enum kind kind) {
    size_t dim = (size_t)a->pool.head_dim, row_floats = dim / pair_of(kind) * width_of(kind);
    size_t value_dim = (size_t)value_dim_of(&a->pool);
    size_t block = kind == KIND_TILES ? s->strip_rows : BLOCK_STRIPS * s->strip_rows, next;
    int64_t num_queries = task->num_queries;
    const enum kind read_as = kind == KIND_TILES ? KIND_BF16_DOT : kind;
    for (int64_t key = begin; key < stop; key += CHUNK) {
        int64_t end = key + CHUNK < stop ? key + CHUNK : stop;
        int is_last = end == task->key_end && s->next;
        const struct attend_task *next_task = is_last ? s->next : task;
        int64_t next_key = is_last ? next_task->key_begin : end;
        int64_t next_end = next_key + CHUNK < next_task->key_end ? next_key + CHUNK : next_task->key_end;
        if (kind != KIND_INT16) prefetch_int8(a, task, a->pool.v, key, end);
        struct chunk c = locate(a, task, key, end, &s->copies, read_as);
        look_ahead(a, task, next_task, next_key, next_end, &c, kind);
        size_t num_tiles = c.num_tiles;
        for (size_t first = 0; first < s->num_rows; first += block) {
            size_t last = first + block < s->num_rows ? first + block : s->num_rows;
            if (num_queries > 1) c.num_tiles = tiles_seen(a, s, num_tiles, last, key);
            if (c.num_tiles == 0) continue;
            for (size_t r = first; r < last; r = next) {
                next = r + s->strip_rows < last ? r + s->strip_rows : last;
                const float *rows = s->rows + r * row_floats;
                float *scores = s->scores + (r - first) * CHUNK;
                if (kind == KIND_TILES) score_strip_tiles(next - r, rows, &c, dim, scores, &s->shapes);
                else score_strip(kind, next - r, rows, s->query_units + r, &c, dim, scores);
            }
            if (first == 0 && kind != KIND_INT16) prefetch_int8(a, next_task, a->pool.k, next_key, next_end);
            soften(a, s, &c, first, last - first, key, end, read_as);
            for (size_t r = first; r < last; r = next) {
                next = r + s->strip_rows < last ? r + s->strip_rows : last;
                const float *weights = s->scores + (r - first) * CHUNK;
                float *sums = s->span.sums + r * value_dim;
                if (kind == KIND_TILES) weigh_strip_tiles(next - r, weights, s->fade + r, sums, &c, value_dim, &s->shapes);
                else weigh_strip(kind, next - r, weights, s->fade + r, s->weight_units + r, sums, &c, value_dim);
            }
        }
    }
}

/* The result of one row: sums / mass, a sink counted in. */
INLINE void finish_row(const struct attend_args *a, const struct attend_task *task, int64_t r, const float *sums,
                       float peak, const float *masses) {
    int64_t dim = value_dim_of(&a->pool);
    int64_t group = group_of(a), head = task->head * group + r % group;
    float mass = sum_f(load_f(masses)), factor = 1.f / mass;
    if (a->sinks) {
        float sink = a->sinks[head] * 1.44269504f, top = fmaxf(peak, sink), share = exp2f(peak - top);
        factor = share / (mass * share + exp2f(sink - top));
    }
    struct view from = {(void *)sums, 0, DT_F32};
    size_t at = (size_t)((token_of(a, task, r / group) * a->num_heads + head) * dim);
    struct view out = {a->out, at, (enum dtype)a->pool.dtype};
    for (int64_t d = 0; d < dim; d += W) put(out, d, dim, get(from, d, dim) * factor);
}

/* Join a later span's sums, peak and mass of one row to those of all spans before it. Never inlined: one piece of code,
 * one rounding. */
__attribute__((noinline)) static void join(float *sums, float *peak, float *mass, const float *later, float later_peak,
                                           const float *later_mass, int64_t dim) {
    float top = fmaxf(*peak, later_peak);
    float keep = exp2_f(splat(*peak - top), 1)[0], add = exp2_f(splat(later_peak - top), 1)[0];
    struct view to = {sums, 0, DT_F32}, from = {(void *)later, 0, DT_F32};
    for (int64_t d = 0; d < dim; d += W) put(to, d, dim, get(to, d, dim) * keep + get(from, d, dim) * add);
    store_f(mass, load_f(mass) * keep + load_f(later_mass) * add);
    *peak = top;
}

static void begin_span(struct state *state, size_t rows, size_t dim) {
    memset(state->sums, 0, rows * dim * sizeof(float));
    memset(state->mass, 0, rows * W * sizeof(float));
    for (size_t r = 0; r < rows; r++) state->peak[r] = -1e30f;
}

static void read_record(struct state *state, size_t rows, size_t dim, const float *record) {
    for (size_t r = 0; r < rows; r++, record += RECORD_FLOATS(dim)) {
        memcpy(state->sums + r * dim, record, dim * sizeof(float));
        memcpy(state->mass + r * W, record + dim, W * sizeof(float));
        state->peak[r] = record[dim + TILE];
    }
}

static void write_record(const struct state *state, size_t rows, size_t dim, float *record) {
    for (size_t r = 0; r < rows; r++, record += RECORD_FLOATS(dim)) {
        memcpy(record, state->sums + r * dim, dim * sizeof(float));
        memcpy(record + dim, state->mass + r * W, W * sizeof(float));
        record[dim + TILE] = state->peak[r];
    }
}

/* Join the current span to those before it, if there are any. */
static void end_span(struct scratch *s, size_t rows, size_t dim, int is_first) {
    struct state span = s->span;
    if (is_first) {
        s->span = s->joined, s->joined = span;
        return;
    }
    for (size_t r = 0; r < rows; r++)
        join(s->joined.sums + r * dim, s->joined.peak + r, s->joined.mass + r * W, span.sums + r * dim, span.peak[r],
             span.mass + r * W, (int64_t)dim);
}

/* All spans of a task, first to last: joined and written out, or each left as a record, the first one joined to what
 * came before. */
INLINE void attend_as(const struct attend_args *a, const struct attend_task *task, struct scratch *s, enum kind kind) {
    size_t dim = (size_t)value_dim_of(&a->pool), rows = rows_of(a, task);
    int is_first = 1;
    cut_rows(s, rows, kind);
    s->position = INT32_MAX;
    if (!task->sharers)
        s->position = a->context_lens[task->slice] - a->query_starts[task->slice + 1] + a->query_starts[task->slice] +
                      task->first_query;
    s->ends = a->ends && !task->sharers ? a->ends + a->query_starts[task->slice] + task->first_query : NULL;
    load_rows(a, task, s, kind);
    for (int64_t span = 0; task->before && span < task->key_begin / SPAN; span++, is_first = 0) {
        read_record(&s->span, rows, dim, task->before + span * task->before_stride);
        end_span(s, rows, dim, is_first);
    }
    float *record = task->records;
    for (int64_t begin = task->key_begin, stop; begin < task->key_end; begin = stop) {
        stop = (begin / SPAN + 1) * SPAN < task->key_end ? (begin / SPAN + 1) * SPAN : task->key_end;
        if (task->before && begin % SPAN)
            read_record(&s->span, rows, dim, task->before + begin / SPAN * task->before_stride);
        else
            begin_span(&s->span, rows, dim);
        attend_span(a, task, s, begin, stop, kind);
        end_span(s, rows, dim, is_first);
        is_first = 0;
        if (record) {
            write_record(&s->joined, rows, dim, record);
            record += rows * RECORD_FLOATS(dim), is_first = 1;
        }
    }
    for (size_t r = 0; !task->records && r < rows; r++)
        finish_row(a, task, (int64_t)r, s->joined.sums + r * dim, s->joined.peak[r], s->joined.mass + r * W);
}

enum { MOST_INT16 = INT32_MAX / (INT16_MAX * 127) }; /* products that 32 bits hold the sum of */

/* How scores are multiplied. Numbers of an int8 pool are widened to what the queries' type is multiplied in, or to 16 bits, as
 * which queries and weights of 16-bit types lose less than by their own rounding. */
void attend(const struct attend_args *a, const struct attend_task *task, const struct attend_task *next, void *memory) {
    struct scratch s = carve(a, memory);
    s.next = next;
    enum kind kind = kind_of((enum dtype)a->pool.dtype);
    if (a->pool.is_int8 && kind < KIND_BF16_DOT) kind = KIND_F32;
    if (HAS_INT16 && a->pool.is_int8 && a->pool.v && a->pool.dtype != DT_F32 && a->pool.head_dim <= MOST_INT16) {
        attend_as(a, task, &s, KIND_INT16);
    } else if (kind == KIND_F32) {
        attend_as(a, task, &s, KIND_F32);
    } else if (kind == KIND_F16) {
        attend_as(a, task, &s, KIND_F16);
    } else {
        attend_as(a, task, &s, kind_of(DT_BF16));
        tile_release();
    }
}

/* Join the records of all parts, which cover the keys of one set of rows from first to last. */
void attend_merge(const struct attend_args *a, const struct attend_task *parts, int64_t num_parts) {
    int64_t dim = value_dim_of(&a->pool), rows = (int64_t)rows_of(a, parts), width = RECORD_FLOATS(dim);
    for (int64_t r = 0; r < rows; r++) {
        float *into = parts[0].records + r * width;
        for (int64_t p = 0; p < num_parts; p++)
            for (int64_t span = 0; span < spans_of(&parts[p]); span++) {
                const float *from = parts[p].records + (span * rows + r) * width;
                if (p + span > 0) join(into, into + dim + TILE, into + dim, from, from[dim + TILE], from + dim, dim);
            }
        finish_row(a, parts, r, into, into[dim + TILE], into + dim);
    }
}
