/* Attention of one task (attend_task): query rows against a range of keys.
 *
 * All query heads that share a kv head are rows of one small matrix, so a key or value is loaded once for the group.
 * Keys come in chunks; within a chunk: scores = rows . K, running softmax, sums = sums * fade + weights . V.
 * Everything behind the scores is to the base 2: a weight is 2^(score * bits - peak). */

struct scratch {
    float *rows;   /* [R][head_dim] queries as the kernel wants them: float32, or pairs of bfloat16 */
    float *scores; /* [R][CHUNK] scores, then weights */
    float *sums, *peak, *mass, *fade; /* [R][head_dim], [R], [R], [R] of the span at hand */
    float *joined_sums, *joined_peak, *joined_mass; /* of all spans so far */
    struct copies copies;
};

INLINE int64_t group_of(const struct attend_args *a) { return a->num_heads / a->pool.num_kv_heads; }

static size_t attend_scratch(const struct attend_args *a) {
    size_t dim = (size_t)a->pool.head_dim, rows = ROWS + (size_t)group_of(a);
    return (rows * (3 * dim + CHUNK + 5) + (2 * CHUNK + TILE / 2) * dim + 2 * CHUNK) * sizeof(float);
}

static struct scratch carve(const struct attend_args *a, float *at) {
    size_t dim = (size_t)a->pool.head_dim, rows = ROWS + (size_t)group_of(a);
    struct scratch s;
    s.scores = at, at += rows * CHUNK;
    s.copies.tiles = (uint32_t *)at, at += 2 * CHUNK * dim;
    s.copies.raw = (char *)at, at += TILE / 2 * dim;
    s.copies.scales = at, at += 2 * CHUNK;
    s.rows = at, at += rows * dim;
    s.sums = at, at += rows * dim;
    s.joined_sums = at, at += rows * dim;
    s.peak = at, at += rows;
    s.mass = at, at += rows;
    s.fade = at, at += rows;
    s.joined_peak = at, at += rows;
    s.joined_mass = at;
    return s;
}

/* What a score is multiplied by to be an exponent of 2. With a softcap, scores are capped first, in units of the cap. */
INLINE float bits_of(const struct attend_args *a) { return (a->softcap > 0 ? a->softcap : a->scale) * 1.44269504f; }

/* Load the task's query rows: row = query * group + head of the group. */
INLINE void load_rows(const struct attend_args *a, const struct attend_task *task, struct scratch *s, enum kind kind) {
    int64_t dim = a->pool.head_dim, group = group_of(a);
    enum dtype dtype = (enum dtype)a->pool.dtype;
    int64_t first = a->query_starts[task->slice] + task->first_query;
    for (int64_t r = 0; r < task->num_queries * group; r++) {
        struct view q = {(void *)a->q, (size_t)((first + r / group) * a->q_stride), dtype};
        q.at += (size_t)((task->head * group + r % group) * dim);
        struct view row = {s->rows, (size_t)(r * dim), DT_F32};
        if (kind == KIND_BF16_DOT)
            memcpy(s->rows + row.at, (const uint16_t *)a->q + q.at, (size_t)dim * 2);
        else
            for (int64_t d = 0; d < dim; d += W) put(row, d, dim, get(q, d, dim));
    }
}

/* Scores that want more than a factor: those of an int8 pool, capped ones, hidden ones. Visible are [low, high). */
INLINE vf adjust(const struct attend_args *a, const float *scales, vf x, size_t c, int64_t low, int64_t high) {
    if (scales) x *= load_f(scales + c);
    if (a->softcap > 0) x = tanh_f(x * (a->scale / a->softcap));
    if ((int64_t)c >= low && (int64_t)(c + W) <= high) return x;
    vi at;
    for (int i = 0; i < W; i++) at[i] = (int32_t)c + i;
    return select_f((at >= (int32_t)low) & (at < (int32_t)high), x, splat(-INFINITY));
}

/* One row of scores becomes weights; peak, mass and fade of the row move on. */
INLINE void soften(const struct attend_args *a, struct scratch *s, const struct chunk *chunk, size_t r, size_t columns,
                   int64_t low, int64_t high, enum kind kind) {
    float *row = s->scores + r * CHUNK, bits = bits_of(a);
    vf peak = splat(-INFINITY), mass = splat(0);
    int is_plain = !chunk->k_scales && !(a->softcap > 0);
    for (size_t c = 0; c < columns; c += W) {
        vf x = load_f(row + c);
        if (!is_plain || (int64_t)c < low || (int64_t)(c + W) > high) {
            x = adjust(a, chunk->k_scales, x, c, low, high);
            store_f(row + c, x);
        }
        peak = max_f(x, peak);
    }
    float highest = peak_f(peak) * bits, top = highest > s->peak[r] ? highest : s->peak[r];
    for (size_t c = 0; c < columns; c += 2 * W) {
        vf p = exp2_f(load_f(row + c) * bits - top, kind == KIND_F32);
        vf q = exp2_f(load_f(row + c + W) * bits - top, kind == KIND_F32);
        mass += p + q;
        if (chunk->v_scales) p *= load_f(chunk->v_scales + c), q *= load_f(chunk->v_scales + c + W);
#ifdef BF16_DOT
        if (kind == KIND_BF16_DOT) { /* in place: two vectors shrink to one */
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)q, (__m512)p);
            memcpy((uint16_t *)row + c, &both, sizeof both);
            continue;
        }
#endif
        store_f(row + c, p);
        store_f(row + c + W, q);
    }
    s->fade[r] = exp2_f(splat(s->peak[r] - top), 1)[0];
    s->mass[r] = s->mass[r] * s->fade[r] + sum_f(mass);
    s->peak[r] = top;
}

/* sums[r][d ..] = sums * fade + weights . V, for R rows and C vectors of dimensions, kept in registers throughout. */
INLINE void weigh(enum kind kind, int R, int C, const struct scratch *s, size_t r0, const struct chunk *c, size_t dim,
                  size_t d) {
    size_t tile_lanes = TILE / pair_of(kind);
    const float *weights = s->scores + r0 * CHUNK;
    vf acc[4][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++)
            acc[r][v] = load_f(s->sums + (r0 + (size_t)r) * dim + d + (size_t)v * W) * s->fade[r0 + (size_t)r];
    for (size_t t = 0; t < c->num_tiles; t++)
        for (size_t j = 0; j < tile_lanes; j++)
            UNROLL for (int v = 0; v < C; v++) {
                vu lane = load_u(c->v[t] + j * dim + d + (size_t)v * W);
                UNROLL for (int r = 0; r < R; r++)
                    acc[r][v] = lane_fma(acc[r][v], lane, weights + r * CHUNK, t * tile_lanes + j, kind);
            }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < C; v++)
            store_f(s->sums + (r0 + (size_t)r) * dim + d + (size_t)v * W, acc[r][v]);
}

/* The last dimensions, where head_dim is no multiple of a vector: the same through a copy of those few. */
static void weigh_tail(enum kind kind, const struct scratch *s, size_t r, const struct chunk *c, size_t dim, size_t d) {
    size_t tile_lanes = TILE / pair_of(kind), rest = dim - d;
    float padded[TILE] = {0};
    memcpy(padded, s->sums + r * dim + d, rest * 4);
    vf acc = load_f(padded) * s->fade[r];
    for (size_t t = 0; t < c->num_tiles; t++)
        for (size_t j = 0; j < tile_lanes; j++) {
            memcpy(padded, c->v[t] + j * dim + d, rest * 4);
            acc = lane_fma(acc, load_u(padded), s->scores + r * CHUNK, t * tile_lanes + j, kind);
        }
    store_f(padded, acc);
    memcpy(s->sums + r * dim + d, padded, rest * 4);
}

INLINE void weigh_rows(enum kind kind, int R, const struct scratch *s, size_t r, const struct chunk *c, size_t dim) {
    size_t d = 0;
    enum { MOST = W == 8 ? 2 : 4 };
    for (; d + MOST * W <= dim; d += MOST * W) weigh(kind, R, MOST, s, r, c, dim, d);
    for (; d + W <= dim; d += W) weigh(kind, R, 1, s, r, c, dim, d);
    for (size_t i = 0; d < dim && i < (size_t)R; i++) weigh_tail(kind, s, r + i, c, dim, d);
}

/* The result of one row: sums / mass, a sink counted in. */
INLINE void finish_row(const struct attend_args *a, const struct attend_task *task, int64_t r, const float *sums,
                       float peak, float mass) {
    int64_t dim = a->pool.head_dim, group = group_of(a), head = task->head * group + r % group;
    int64_t token = a->query_starts[task->slice] + task->first_query + r / group;
    float factor = 1.f / mass;
    if (a->sinks) {
        float sink = a->sinks[head] * 1.44269504f, top = fmaxf(peak, sink), share = exp2f(peak - top);
        factor = share / (mass * share + exp2f(sink - top));
    }
    struct view from = {(void *)sums, 0, DT_F32};
    struct view out = {a->out, (size_t)((token * a->num_heads + head) * dim), (enum dtype)a->pool.dtype};
    for (int64_t d = 0; d < dim; d += W) put(out, d, dim, get(from, d, dim) * factor);
}

/* Scores, softmax and weighted sums of the task's rows over keys [begin, stop) of one span, from nothing. */
INLINE void attend_span(const struct attend_args *a, const struct attend_task *task, struct scratch *s, int64_t begin,
                        int64_t stop, enum kind kind) {
    int64_t group = group_of(a), context = a->context_lens[task->slice];
    size_t dim = (size_t)a->pool.head_dim, rows = (size_t)(task->num_queries * group);
    int64_t first = context - (a->query_starts[task->slice + 1] - a->query_starts[task->slice]) + task->first_query;
    memset(s->sums, 0, rows * dim * sizeof(float));
    for (size_t r = 0; r < rows; r++) s->peak[r] = -1e30f, s->mass[r] = 0;
    for (int64_t key = begin; key < stop; key += CHUNK) {
        int64_t end = key + CHUNK < stop ? key + CHUNK : stop;
        prefetch(a, task, a->pool.v, 0, key, end);
        struct chunk c = locate(a, task, key, end, &s->copies, kind);
        size_t t = 0, columns = c.num_tiles * TILE, lanes = dim / pair_of(kind);
        for (; t + STEP_TILES <= c.num_direct; t += STEP_TILES)
            tile_dot_rows(kind, STEP_TILES, rows, s->rows, dim, c.k + t, c.lane_stride, lanes, s->scores + t * TILE,
                          CHUNK);
        for (; t < c.num_tiles; t++)
            tile_dot_rows(kind, 1, rows, s->rows, dim, c.k + t, t < c.num_direct ? c.lane_stride : TILE, lanes,
                          s->scores + t * TILE, CHUNK);
        prefetch(a, task, a->pool.k, 1, end, end + CHUNK < task->key_end ? end + CHUNK : task->key_end);
        if (columns % (2 * W)) { /* pairs of vectors below: the odd one gets a hidden neighbour */
            for (size_t r = 0; r < rows; r++) store_f(s->scores + r * CHUNK + columns, splat(0));
            columns += W;
        }
        for (size_t r = 0; r < rows; r++) {
            int64_t position = first + (int64_t)r / group;
            int64_t low = a->window ? position - a->window + 1 - key : 0;
            int64_t high = (position + 1 < end ? position + 1 : end) - key;
            soften(a, s, &c, r, columns, low, high, kind);
        }
        size_t r = 0;
        for (; r + STEP_ROWS <= rows; r += STEP_ROWS) weigh_rows(kind, STEP_ROWS, s, r, &c, dim);
        switch (rows - r) {
        case 1: weigh_rows(kind, 1, s, r, &c, dim); break;
        case 2: weigh_rows(kind, 2, s, r, &c, dim); break;
        case 3: weigh_rows(kind, 3, s, r, &c, dim); break;
        default: break;
        }
    }
}

/* Join a later span's sums, peak and mass of one row to those of all spans before it. Never inlined: one piece of code,
 * one rounding. */
__attribute__((noinline)) static void join(float *sums, float *peak, float *mass, const float *later, float later_peak,
                                           float later_mass, int64_t dim) {
    float top = fmaxf(*peak, later_peak);
    float keep = exp2_f(splat(*peak - top), 1)[0], add = exp2_f(splat(later_peak - top), 1)[0];
    struct view to = {sums, 0, DT_F32}, from = {(void *)later, 0, DT_F32};
    for (int64_t d = 0; d < dim; d += W) put(to, d, dim, get(to, d, dim) * keep + get(from, d, dim) * add);
    *peak = top, *mass = *mass * keep + later_mass * add;
}

/* All spans of a task, first to last: joined and written out, or each left as a record for attend_merge. */
INLINE void attend_as(const struct attend_args *a, const struct attend_task *task, struct scratch *s, enum kind kind) {
    int64_t dim = a->pool.head_dim, rows = task->num_queries * group_of(a);
    load_rows(a, task, s, kind);
    struct scratch joined = *s;
    joined.sums = s->joined_sums, joined.peak = s->joined_peak, joined.mass = s->joined_mass;
    float *record = task->partial;
    for (int64_t begin = task->key_begin, stop; begin < task->key_end; begin = stop) {
        stop = (begin / SPAN + 1) * SPAN < task->key_end ? (begin / SPAN + 1) * SPAN : task->key_end;
        if (record) joined.sums = record;
        if (record || begin == task->key_begin) {
            attend_span(a, task, &joined, begin, stop, kind);
        } else {
            attend_span(a, task, s, begin, stop, kind);
            for (int64_t r = 0; r < rows; r++)
                join(joined.sums + r * dim, joined.peak + r, joined.mass + r, s->sums + r * dim, s->peak[r], s->mass[r],
                     dim);
        }
        if (record) {
            memcpy(record + rows * dim, joined.peak, (size_t)rows * sizeof(float));
            memcpy(record + rows * (dim + 1), joined.mass, (size_t)rows * sizeof(float));
            record += rows * (dim + 2);
        }
    }
    for (int64_t r = 0; !task->partial && r < rows; r++)
        finish_row(a, task, r, joined.sums + r * dim, joined.peak[r], joined.mass[r]);
}

/* How scores are multiplied: numbers of an int8 pool are widened to what the queries' type is multiplied in. */
static void attend(const struct attend_args *a, const struct attend_task *task, void *memory) {
    struct scratch s = carve(a, memory);
    enum kind kind = kind_of((enum dtype)a->pool.dtype);
    if (a->pool.is_int8 && kind != KIND_BF16_DOT) kind = KIND_F32;
    if (kind == KIND_F32)
        attend_as(a, task, &s, KIND_F32);
    else if (kind == KIND_F16)
        attend_as(a, task, &s, KIND_F16);
    else
        attend_as(a, task, &s, kind_of(DT_BF16));
}

/* Join the spans of all parts, which cover the keys of one set of rows from first to last. */
static void attend_merge(const struct attend_args *a, const struct attend_task *parts, int64_t num_parts) {
    int64_t dim = a->pool.head_dim, rows = parts->num_queries * group_of(a), record = rows * (dim + 2);
    for (int64_t r = 0; r < rows; r++) {
        float *into = parts[0].partial, *peak = into + rows * dim + r, *mass = peak + rows;
        for (int64_t p = 0; p < num_parts; p++)
            for (int64_t span = 0; span < spans_of(&parts[p]); span++) {
                const float *from = parts[p].partial + span * record, *own = from + rows * dim + r;
                if (p + span > 0) join(into + r * dim, peak, mass, from + r * dim, own[0], own[rows], dim);
            }
        finish_row(a, parts, r, into + r * dim, *peak, *mass);
    }
}
