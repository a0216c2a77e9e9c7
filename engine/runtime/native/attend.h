/* Attention of one task (attend_task): query rows against a range of keys, read in place.
 *
 * All query heads that share a kv head are rows of one small matrix, so a key or value is loaded once for the group.
 * Keys come in chunks; within a chunk: scores = rows . K, running softmax, sums = sums * fade + weights . V.
 * A tile that is not whole (the context's end, or blocks shorter than a tile) is first copied with zeros behind it, so
 * what a pool holds beyond a sequence's end is never computed with. */

struct scratch {
    float *rows;   /* [R][head_dim] queries as the kernel wants them: float32, or pairs of bfloat16 */
    float *scores; /* [R][CHUNK] scores, then weights */
    float *sums;   /* [R][head_dim] */
    float *peak, *mass, *fade; /* [R] */
    float *joined;             /* [R][head_dim + 2] sums, peak and mass of all spans so far */
    uint32_t *tiles;           /* copies of K and V tiles, for a whole chunk */
};

INLINE int64_t group_of(const struct attend_args *a) { return a->num_heads / a->pool.num_kv_heads; }

static size_t attend_scratch(const struct attend_args *a) {
    size_t dim = (size_t)a->pool.head_dim, rows = ROWS + (size_t)group_of(a);
    return (rows * (3 * dim + CHUNK + 5) + 2 * CHUNK * dim + 6 * TILE) * sizeof(float);
}

static struct scratch carve(const struct attend_args *a, float *at) {
    size_t dim = (size_t)a->pool.head_dim, rows = ROWS + (size_t)group_of(a);
    struct scratch s;
    s.rows = at, at += rows * dim;
    s.scores = at, at += rows * CHUNK;
    s.sums = at, at += rows * dim;
    s.tiles = (uint32_t *)at, at += 2 * CHUNK * dim;
    s.peak = at, at += rows;
    s.mass = at, at += rows;
    s.fade = at, at += rows;
    s.joined = at;
    return s;
}

INLINE const char *block_at(const struct attend_args *a, const void *base, const struct attend_task *task, int64_t key,
                            size_t size) {
    int64_t block = a->block_tables[task->slice * a->table_stride + key / a->pool.block_size];
    return (const char *)base + size * (size_t)(task->head * a->pool.head_stride + block * a->pool.block_stride);
}

/* Copy keys [key, end) of a tile, value by value, into a whole tile of K and one of V. */
static void copy_tile(const struct attend_args *a, const struct attend_task *task, int64_t key, int64_t end,
                      uint32_t *k_tile, uint32_t *v_tile) {
    size_t dim = (size_t)a->pool.head_dim, bs = (size_t)a->pool.block_size;
    size_t size = a->pool.dtype == DT_F32 ? 4 : 2, pair = 4 / size, v_pair = pair < bs ? pair : bs;
    memset(k_tile, 0, TILE * dim * size);
    memset(v_tile, 0, TILE * dim * size);
    for (size_t i = 0; i < (size_t)(end - key); i++) {
        size_t o = (size_t)(key + (int64_t)i) % bs;
        const char *k = block_at(a, a->pool.k, task, key + (int64_t)i, size);
        const char *v = block_at(a, a->pool.v, task, key + (int64_t)i, size);
        v += (o / v_pair * dim * v_pair + o % v_pair) * size;
        for (size_t l = 0; l < dim / pair; l++) memcpy(k_tile + l * TILE + i, k + (l * bs + o) * 4, 4);
        char *to = (char *)v_tile + (i / pair * dim * pair + i % pair) * size;
        if (size == 4)
            memcpy(to, v, dim * 4);
        else
            for (size_t d = 0; d < dim; d++) memcpy(to + d * 4, v + d * v_pair * 2, 2);
    }
}

struct chunk {
    const uint32_t *k[CHUNK / TILE], *v[CHUNK / TILE];
    size_t num_tiles, num_direct, lane_stride; /* tiles from num_direct on are copies, TILE lanes apart */
};

static struct chunk locate(const struct attend_args *a, const struct attend_task *task, int64_t key, int64_t end,
                           uint32_t *copies) {
    struct chunk c = {.num_tiles = (size_t)(end - key + TILE - 1) / TILE};
    size_t dim = (size_t)a->pool.head_dim, bs = (size_t)a->pool.block_size;
    size_t size = a->pool.dtype == DT_F32 ? 4 : 2, pair = 4 / size, tile_lanes = TILE * dim / pair;
    c.lane_stride = bs < TILE ? TILE : bs;
    c.num_direct = bs < TILE ? c.num_tiles : (size_t)(end - key) / TILE;
    for (size_t t = 0; t < c.num_tiles; t++, key += TILE) {
        if (bs >= TILE && t < c.num_direct) {
            size_t o = (size_t)key % bs;
            c.k[t] = (const uint32_t *)block_at(a, a->pool.k, task, key, size) + o;
            c.v[t] = (const uint32_t *)block_at(a, a->pool.v, task, key, size) + o / pair * dim;
        } else {
            uint32_t *k_tile = copies + t * 2 * tile_lanes, *v_tile = k_tile + tile_lanes;
            copy_tile(a, task, key, end < key + TILE ? end : key + TILE, k_tile, v_tile);
            c.k[t] = k_tile, c.v[t] = v_tile;
        }
    }
    return c;
}

/* Ask for what lies whole in [key, end) of K, or of V, ahead of its use: blocks are scattered, so the machine cannot
 * guess where the next one is. Prompt tiles do without, their arithmetic hides the way. */
INLINE void prefetch(const struct attend_args *a, const struct attend_task *task, const void *base, int is_key,
                     int64_t key, int64_t end, size_t size) {
    size_t dim = (size_t)a->pool.head_dim, bs = (size_t)a->pool.block_size, pair = 4 / size;
    if (bs < TILE || task->num_queries > 1) return;
    for (; key + TILE <= end; key += TILE) {
        const uint32_t *tile = (const uint32_t *)block_at(a, base, task, key, size);
        tile += (size_t)key % bs / (is_key ? 1 : pair) * (is_key ? 1 : dim);
        for (size_t l = 0; l < dim / pair; l++) __builtin_prefetch(tile + l * (is_key ? bs : TILE), 0, 2);
    }
}

/* Load the task's query rows: row = query * group + head of the group. */
INLINE void load_rows(const struct attend_args *a, const struct attend_task *task, struct scratch *s, enum dtype dtype,
                      enum kind kind) {
    int64_t dim = a->pool.head_dim, group = group_of(a);
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

/* One row of scores becomes weights; peak, mass and fade of the row move on. Visible are columns [low, high). */
INLINE void soften(const struct attend_args *a, struct scratch *s, size_t r, size_t columns, int64_t low, int64_t high,
                   enum kind kind) {
    float *row = s->scores + r * CHUNK;
    vf scale = splat(a->scale), peak = splat(s->peak[r]), mass = splat(0);
    vi index;
    for (int i = 0; i < W; i++) index[i] = i;
    for (size_t c = 0; c < columns; c += W) {
        vf x = load_f(row + c) * scale;
        if (a->softcap > 0) x = a->softcap * tanh_f(x / a->softcap);
        if ((int64_t)c < low || (int64_t)(c + W) > high) {
            vi at = index + (int32_t)c;
            x = select_f((at >= (int32_t)low) & (at < (int32_t)high), x, splat(-INFINITY));
        }
        peak = max_f(x, peak);
        store_f(row + c, x);
    }
    float top = peak_f(peak);
    for (size_t c = 0; c < columns; c += W) {
        vf p = exp_f(load_f(row + c) - top);
        mass += p;
        store_f(row + c, p);
    }
#ifdef BF16_DOT
    if (kind == KIND_BF16_DOT)
        for (size_t c = 0; c < columns; c += 2 * W) { /* in place: two vectors shrink to one */
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)load_f(row + c + W), (__m512)load_f(row + c));
            memcpy((uint16_t *)row + c, &both, sizeof both);
        }
#else
    (void)kind;
#endif
    s->fade[r] = expf(s->peak[r] - top);
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
                       float peak, float mass, enum dtype dtype) {
    int64_t dim = a->pool.head_dim, group = group_of(a), head = task->head * group + r % group;
    int64_t token = a->query_starts[task->slice] + task->first_query + r / group;
    float factor = 1.f / mass;
    if (a->sinks) {
        float top = fmaxf(peak, a->sinks[head]), share = expf(peak - top);
        factor = share / (mass * share + expf(a->sinks[head] - top));
    }
    struct view from = {(void *)sums, 0, DT_F32}, out = {a->out, (size_t)((token * a->num_heads + head) * dim), dtype};
    for (int64_t d = 0; d < dim; d += W) put(out, d, dim, get(from, d, dim) * factor);
}

/* Scores, softmax and weighted sums of the task's rows over keys [begin, stop) of one span, from nothing. */
INLINE void attend_span(const struct attend_args *a, const struct attend_task *task, struct scratch *s, int64_t begin,
                        int64_t stop, enum dtype dtype) {
    enum kind kind = kind_of(dtype);
    int64_t group = group_of(a), context = a->context_lens[task->slice];
    size_t dim = (size_t)a->pool.head_dim, rows = (size_t)(task->num_queries * group);
    int64_t first = context - (a->query_starts[task->slice + 1] - a->query_starts[task->slice]) + task->first_query;
    size_t size = dtype == DT_F32 ? 4 : 2;
    memset(s->sums, 0, rows * dim * sizeof(float));
    for (size_t r = 0; r < rows; r++) s->peak[r] = -1e30f, s->mass[r] = 0;
    for (int64_t key = begin; key < stop; key += CHUNK) {
        int64_t end = key + CHUNK < stop ? key + CHUNK : stop;
        struct chunk c = locate(a, task, key, end, s->tiles);
        size_t t = 0, columns = c.num_tiles * TILE, lanes = dim / pair_of(kind);
        prefetch(a, task, a->pool.v, 0, key, end, size);
        for (; t + STEP_TILES <= c.num_direct; t += STEP_TILES)
            tile_dot_rows(kind, STEP_TILES, rows, s->rows, dim, c.k + t, c.lane_stride, lanes, s->scores + t * TILE,
                          CHUNK);
        for (; t < c.num_tiles; t++)
            tile_dot_rows(kind, 1, rows, s->rows, dim, c.k + t, t < c.num_direct ? c.lane_stride : TILE, lanes,
                          s->scores + t * TILE, CHUNK);
        prefetch(a, task, a->pool.k, 1, end, end + CHUNK < task->key_end ? end + CHUNK : task->key_end, size);
        if (columns % (2 * W)) { /* pairs of vectors below: the odd one gets a hidden neighbour */
            for (size_t r = 0; r < rows; r++) store_f(s->scores + r * CHUNK + columns, splat(0));
            columns += W;
        }
        for (size_t r = 0; r < rows; r++) {
            int64_t position = first + (int64_t)r / group;
            int64_t low = a->window ? position - a->window + 1 - key : 0;
            int64_t high = (position + 1 < end ? position + 1 : end) - key;
            soften(a, s, r, columns, low, high, kind);
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

/* Join one row's record of a later span to that of all before it. Never inlined: one piece of code, one rounding. */
__attribute__((noinline)) static void join(float *into, const float *later, int64_t dim) {
    float top = fmaxf(into[dim], later[dim]);
    float keep = expf(into[dim] - top), add = expf(later[dim] - top);
    for (int64_t d = 0; d < dim; d++) into[d] = into[d] * keep + later[d] * add;
    into[dim] = top, into[dim + 1] = into[dim + 1] * keep + later[dim + 1] * add;
}

INLINE void attend_as(const struct attend_args *a, const struct attend_task *task, struct scratch *s,
                      enum dtype dtype) {
    int64_t dim = a->pool.head_dim, rows = task->num_queries * group_of(a), record = dim + 2;
    load_rows(a, task, s, dtype, kind_of(dtype));
    float *to = task->partial ? task->partial : s->joined;
    for (int64_t begin = task->key_begin, stop; begin < task->key_end; begin = stop) {
        stop = (begin / SPAN + 1) * SPAN < task->key_end ? (begin / SPAN + 1) * SPAN : task->key_end;
        attend_span(a, task, s, begin, stop, dtype);
        int is_joined = !task->partial && begin > task->key_begin;
        for (int64_t r = 0; r < rows; r++) {
            float *sums = s->sums + r * dim, *row = to + r * record, own[is_joined ? record : 1];
            float *at = is_joined ? own : row;
            memcpy(at, sums, (size_t)dim * sizeof(float));
            at[dim] = s->peak[r], at[dim + 1] = s->mass[r];
            if (is_joined) join(row, own, dim);
        }
        if (task->partial) to += rows * record;
    }
    if (task->partial) return;
    for (int64_t r = 0; r < rows; r++) {
        const float *row = s->joined + r * record;
        finish_row(a, task, r, row, row[dim], row[dim + 1], dtype);
    }
}

static void attend(const struct attend_args *a, const struct attend_task *task, void *memory) {
    struct scratch s = carve(a, memory);
    if (a->pool.dtype == DT_F32)
        attend_as(a, task, &s, DT_F32);
    else if (a->pool.dtype == DT_BF16)
        attend_as(a, task, &s, DT_BF16);
    else
        attend_as(a, task, &s, DT_F16);
}

/* Join the spans of all parts, which cover the keys of one set of rows from first to last. */
static void attend_merge(const struct attend_args *a, const struct attend_task *parts, int64_t num_parts) {
    int64_t dim = a->pool.head_dim, rows = parts->num_queries * group_of(a), record = dim + 2;
    for (int64_t r = 0; r < rows; r++) {
        float *into = parts[0].partial + r * record;
        for (int64_t p = 0; p < num_parts; p++)
            for (int64_t span = 0; span < spans_of(&parts[p]); span++)
                if (p + span > 0) join(into, parts[p].partial + (span * rows + r) * record, dim);
        finish_row(a, parts, r, into, into[dim], into[dim + 1], (enum dtype)a->pool.dtype);
    }
}
