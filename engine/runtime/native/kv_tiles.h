/* Where the keys and values of a chunk are: tiles of TILE keys, in the pool or in copies.
 *
 * A tile is read in place if it is inside one block. Otherwise (the context's end, or blocks shorter than a tile) its
 * keys are first copied and padded with zeros, so values beyond a sequence's end are never used.
 * A pool of latents has K alone: a tile of V is a transposed tile of K, made once for all heads.
 * An int8 pool holds numbers from -127 to 127 and a float32 scale a row. Its tiles are widened into copies, to bfloat16 or
 * float32, which hold these numbers exactly; where products are of 16-bit integers, they are widened as they are read. The
 * scales are not multiplied in: K's belong to a column of scores and V's to a column of weights, and there they cost one
 * product a column. */

/* The layout of a pool's numbers inside a block of one head. */
struct layout {
    size_t dim, block_size, size, pair, lane; /* size, lane: bytes of a number, and of a `pair` of adjacent ones */
};

/* Where a key is: its block's first number in K or V, of the task's head, and its place in the block. */
struct place {
    size_t at, o;
};

INLINE struct layout layout_of(const struct pool *p) {
    size_t size = p->is_int8 ? 1 : p->dtype == DT_F32 ? 4 : 2, pair = size == 4 ? 1 : 2;
    return (struct layout){(size_t)p->head_dim, (size_t)p->block_size, size, pair, pair * size};
}

/* Neighbouring keys of a block are adjacent in V, as many as a pair, if the block has so many. */
INLINE size_t v_pair_of(struct layout l) { return l.pair < l.block_size ? l.pair : l.block_size; }

struct chunk {
    const char *k[CHUNK / TILE], *v[CHUNK / TILE];
    size_t num_tiles, num_direct, lane_stride; /* tiles from num_direct on are copies, TILE lanes apart */
    const float *k_scales, *v_scales;          /* [CHUNK], 0 from the last key on; NULL unless the pool is int8 */
    int is_cold;                               /* V is worth fetching while scores are made, */
    const char *next_k[CHUNK / TILE];          /* and these tiles of K, or NULL, while they are used as weights: */
    size_t num_lines, line_stride;             /* lines for each row of lanes in a tile of V, bytes apart */
};

/* Where tiles that cannot be read in place are copied to. */
struct copies {
    uint32_t *tiles; /* K and V of a whole chunk */
    char *raw;       /* a tile of K and one of V as an int8 pool has them */
    float *scales;   /* [2][CHUNK + TILE] */
};

/* Block sizes are powers of two: a division takes as long as the products of a lane. */
INLINE struct place place_of(const struct attend_args *a, const struct attend_task *task, int64_t key) {
    int64_t size = a->pool.block_size;
    int64_t block = a->block_tables[task->slice * a->table_stride + (key >> __builtin_ctzll((uint64_t)size))];
    size_t at = (size_t)(task->head * a->pool.head_stride + block * a->pool.block_stride);
    return (struct place){at, (size_t)(key & (size - 1))};
}

INLINE const char *k_at(const struct pool *p, struct layout l, struct place place) {
    return (const char *)p->k + place.at * l.size + place.o * l.lane;
}

/* Of a key that begins a tile. */
INLINE const char *v_at(const struct pool *p, struct layout l, struct place place) {
    return (const char *)p->v + (place.at + place.o * l.dim) * l.size;
}

/* Scales lie behind a block's numbers. */
INLINE const char *scale_at(const void *base, struct layout l, struct place place) {
    return (const char *)base + place.at + l.block_size * l.dim + place.o * 4;
}

/* Copy keys [key, end) of a tile into a whole tile of K and one of V, where the tile lies in one block and a lane is
 * four bytes: vectors under a mask, as every decode step ends in a tile like this. */
INLINE void copy_tile_whole(const struct attend_args *a, const struct attend_task *task, int64_t key, int64_t end,
                            struct layout l, char *k_tile, char *v_tile) {
    size_t num = (size_t)(end - key), row = l.dim * 4, whole = num / l.pair;
    struct place place = place_of(a, task, key);
    const char *k = k_at(&a->pool, l, place);
    vu keep[NV], index;
    for (int i = 0; i < W; i++) index[i] = (uint32_t)i;
    UNROLL for (int t = 0; t < NV; t++) keep[t] = (vu)COMPARE(index + (uint32_t)(t * W), <, splat_u((uint32_t)num));
    for (size_t d = 0; d < l.dim / l.pair; d++)
        UNROLL for (int t = 0; t < NV; t++) {
            vu lane = load_u(k + (d * l.block_size + (size_t)(t * W)) * 4) & keep[t];
            memcpy(k_tile + (d * TILE + (size_t)(t * W)) * 4, &lane, sizeof lane);
        }
    if (!a->pool.v) return;
    const char *v = v_at(&a->pool, l, place);
    memcpy(v_tile, v, whole * row);
    memset(v_tile + whole * row, 0, (TILE / l.pair - whole) * row);
    if (num % l.pair)
        for (size_t d = 0; d < l.dim; d++) memcpy(v_tile + whole * row + d * 4, v + whole * row + d * 4, 2);
}

/* The same for any pool, value by value. */
static void copy_tile(const struct attend_args *a, const struct attend_task *task, int64_t key, int64_t end,
                      char *k_tile, char *v_tile) {
    struct layout l = layout_of(&a->pool);
    if (l.block_size >= TILE && l.size > 1) {
        copy_tile_whole(a, task, key, end, l, k_tile, v_tile);
        return;
    }
    size_t v_pair = v_pair_of(l);
    memset(k_tile, 0, TILE * l.dim * l.size);
    memset(v_tile, 0, TILE * l.dim * l.size);
    for (size_t i = 0; i < (size_t)(end - key); i++) {
        struct place place = place_of(a, task, key + (int64_t)i);
        const char *k = k_at(&a->pool, l, place), *v = a->pool.v ? a->pool.v : a->pool.k;
        v += (place.at + place.o / v_pair * l.dim * v_pair + place.o % v_pair) * l.size;
        char *k_to = k_tile + i * l.lane, *v_to = v_tile + (i / l.pair * l.dim * l.pair + i % l.pair) * l.size;
        if (l.size == 1) {
            for (size_t d = 0; d < l.dim / 2; d++) memcpy(k_to + d * TILE * 2, k + d * l.block_size * 2, 2);
            for (size_t d = 0; d < l.dim; d++) v_to[d * 2] = v[d * v_pair];
            continue;
        }
        for (size_t d = 0; d < l.dim / l.pair; d++) memcpy(k_to + d * TILE * 4, k + d * l.block_size * 4, 4);
        if (!a->pool.v) continue;
        if (l.size == 4)
            memcpy(v_to, v, l.dim * 4);
        else
            for (size_t d = 0; d < l.dim; d++) memcpy(v_to + d * 4, v + d * v_pair * 2, 2);
    }
}

/* W int8 as float32. Compilers do not find the one instruction that widens them. */
INLINE vf load_i8(const char *p) {
    typedef int8_t vi8 __attribute__((vector_size(W)));
    vi8 bytes;
    memcpy(&bytes, p, sizeof bytes);
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}

/* Widen 16 pairs of int8: to pairs of bfloat16, or to float32, the first of each pair to `low`, the other to `high`. */
INLINE void widen_pairs(const char *from, enum kind kind, uint32_t *low, uint32_t *high) {
#ifdef BF16_DOT
    for (size_t i = 0; kind == KIND_BF16_DOT && i < TILE; i += W) {
        vu pairs = narrow_both(load_i8(from + 2 * i), load_i8(from + 2 * i + W));
        memcpy(low + i, &pairs, sizeof pairs);
    }
    if (kind == KIND_BF16_DOT) return;
#endif
    (void)kind;
    for (size_t i = 0; i < TILE; i += W) {
        vh both;
        memcpy(&both, from + 2 * i, sizeof both);
        vi wide = __builtin_convertvector(both, vi);
        store_f(low + i, __builtin_convertvector(wide << 24 >> 24, vf));
        store_f(high + i, __builtin_convertvector(wide << 16 >> 24, vf));
    }
}

/* The same for fewer, the last of a row of V where head_dim is no multiple of TILE. */
static void widen_few(const char *from, size_t num, enum kind kind, uint32_t *low, uint32_t *high) {
    char own[2 * TILE] = {0};
    uint32_t wide_low[TILE], wide_high[TILE];
    widen_pairs(memcpy(own, from, num * 2), kind, wide_low, wide_high);
    memcpy(low, wide_low, num * 4);
    if (kind != KIND_BF16_DOT) memcpy(high, wide_high, num * 4);
}

/* Widen a whole int8 tile of K, with lanes `stride` bytes apart. */
INLINE void widen_k_tile(const char *k, size_t stride, size_t dim, enum kind kind, uint32_t *k_tile) {
    size_t step = kind == KIND_BF16_DOT ? 1 : 2; /* tile rows that a pair becomes */
    for (size_t l = 0; l < dim / 2; l++) {
        uint32_t *to = k_tile + l * step * TILE;
        widen_pairs(k + l * stride, kind, to, to + TILE);
    }
}

/* Widen a whole int8 tile of V, with keys in pairs. */
INLINE void widen_v_tile(const char *v, size_t dim, enum kind kind, uint32_t *v_tile) {
    size_t step = kind == KIND_BF16_DOT ? 1 : 2;
    for (size_t j = 0; j < TILE / 2; j++, v += 2 * dim) {
        uint32_t *to = v_tile + j * step * dim;
        size_t d = 0;
        for (; d + TILE <= dim; d += TILE) widen_pairs(v + 2 * d, kind, to + d, to + dim + d);
        if (d < dim) widen_few(v + 2 * d, dim - d, kind, to + d, to + dim + d);
    }
}

/* Scales of the keys of a tile, zeros from `end` on. */
INLINE void copy_scales(const struct attend_args *a, const struct attend_task *task, const void *base, int64_t key,
                        int64_t end, float *to) {
    struct layout l = layout_of(&a->pool);
    if (end - key >= TILE && l.block_size >= TILE) {
        memcpy(to, scale_at(base, l, place_of(a, task, key)), TILE * sizeof *to);
        return;
    }
    memset(to, 0, TILE * sizeof *to);
    for (size_t i = 0; i < TILE && key < end; i++, key++) memcpy(to + i, scale_at(base, l, place_of(a, task, key)), sizeof *to);
}

/* Exchange the middle halves of 64 bits: two keys' lanes, of two dimensions each, become two dimensions' lanes. */
INLINE uint64_t cross_lanes(uint64_t x) {
    return (x & 0xffff00000000ffff) | (x >> 16 & 0xffff0000) | (x << 16 & 0xffff00000000);
}

#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
/* Sixteen dimensions of a tile of V from the pairs of lanes of K, in registers. */
INLINE void transpose_dims(const uint32_t *k, size_t stride, size_t dim, uint32_t *v) {
    const __m512i cross = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i x[8], y[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(k + (size_t)i * stride), cross);
    UNROLL for (int i = 0; i < 8; i += 2) { /* two neighbouring dimensions each of one pair of keys in 128 bits */
        y[i] = _mm512_unpacklo_epi64(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i even_low = _mm512_shuffle_i64x2(y[i], y[i + 2], 0x88), odd_low = _mm512_shuffle_i64x2(y[i], y[i + 2], 0xdd);
        __m512i even = _mm512_shuffle_i64x2(y[i + 4], y[i + 6], 0x88), odd = _mm512_shuffle_i64x2(y[i + 4], y[i + 6], 0xdd);
        _mm512_storeu_si512(v + (size_t)i * dim, _mm512_shuffle_i64x2(even_low, even, 0x88));
        _mm512_storeu_si512(v + (size_t)(i + 2) * dim, _mm512_shuffle_i64x2(odd_low, odd, 0x88));
        _mm512_storeu_si512(v + (size_t)(i + 4) * dim, _mm512_shuffle_i64x2(even_low, even, 0xdd));
        _mm512_storeu_si512(v + (size_t)(i + 6) * dim, _mm512_shuffle_i64x2(odd_low, odd, 0xdd));
    }
}
#endif

/* Make a tile of V, `dim` wide, from one of K, whose lanes are `stride` apart. */
INLINE void transpose_tile(const uint32_t *k, size_t stride, size_t dim, size_t pair, uint32_t *v) {
    size_t d = 0;
#if defined(X86_INTRINSICS) && VECTOR_BYTES == 64
    for (; pair == 2 && d + TILE <= dim; d += TILE, k += TILE / 2 * stride) transpose_dims(k, stride, dim, v + d);
#endif
    for (; d < dim; d += pair, k += stride) {
        if (pair == 1) {
            for (size_t i = 0; i < TILE; i++) v[i * dim + d] = k[i];
            continue;
        }
        uint64_t lanes[TILE / 2];
        memcpy(lanes, k, sizeof lanes);
        for (size_t j = 0; j < TILE / 2; j++) {
            uint64_t both = cross_lanes(lanes[j]);
            memcpy(v + j * dim + d, &both, sizeof both);
        }
    }
}

/* The tiles of keys [key, end), read in place where they can be. */
INLINE struct chunk locate(const struct attend_args *a, const struct attend_task *task, int64_t key, int64_t end,
                           const struct copies *copies, enum kind kind) {
    struct layout l = layout_of(&a->pool);
    struct chunk c = {.num_tiles = (size_t)(end - key + TILE - 1) / TILE};
    size_t tile_bytes = TILE * l.dim * l.size, tile_lanes = TILE * l.dim / pair_of(kind);
    int is_int8 = a->pool.is_int8, is_split = l.block_size < TILE, is_widened = is_int8 && kind != KIND_INT16;
    c.lane_stride = is_split || is_widened ? TILE : l.block_size;
    c.num_direct = is_split || is_int8 ? c.num_tiles : (size_t)(end - key) / TILE;
    float *k_scales = copies->scales, *v_scales = a->pool.v ? k_scales + CHUNK + TILE : k_scales;
    if (is_int8) c.k_scales = k_scales, c.v_scales = v_scales;
    if (is_int8) /* those of a vector's rest */
        for (size_t i = 0; i < TILE; i++) k_scales[c.num_tiles * TILE + i] = v_scales[c.num_tiles * TILE + i] = 0;
    for (size_t t = 0; t < c.num_tiles; t++, key += TILE) {
        uint32_t *k_tile = copies->tiles + t * 2 * tile_lanes, *v_tile = k_tile + tile_lanes;
        size_t k_stride = l.block_size * l.lane;
        if (is_int8) {
            copy_scales(a, task, a->pool.k, key, end, k_scales + t * TILE);
            if (a->pool.v) copy_scales(a, task, a->pool.v, key, end, v_scales + t * TILE);
        }
        const char *k = NULL, *v = NULL;
        if (!is_split && (is_int8 || t < c.num_direct)) { /* int8 is finite, whatever it is, and the scales are zero */
            struct place place = place_of(a, task, key);
            k = k_at(&a->pool, l, place);
            if (a->pool.v) v = v_at(&a->pool, l, place);
        } else {
            char *to = is_widened ? copies->raw : (char *)k_tile;
            copy_tile(a, task, key, end < key + TILE ? end : key + TILE, to, to + tile_bytes);
            k = to, v = to + tile_bytes, k_stride = TILE * l.lane;
        }
        if (is_widened) {
            widen_k_tile(k, k_stride, l.dim, kind, k_tile);
            if (a->pool.v) widen_v_tile(v, l.dim, kind, v_tile);
            k = (const char *)k_tile, v = (const char *)v_tile, k_stride = TILE * 4;
        }
        if (!a->pool.v) {
            size_t dim = (size_t)value_dim_of(&a->pool);
            if (pair_of(kind) == 1) transpose_tile((const uint32_t *)k, k_stride / 4, dim, 1, v_tile);
            else transpose_tile((const uint32_t *)k, k_stride / 4, dim, 2, v_tile);
            v = (const char *)v_tile;
        }
        c.k[t] = k, c.v[t] = v;
    }
    return c;
}

/* Whether a task should fetch ahead: blocks are scattered, so the machine cannot guess where the next one is. Prompt
 * tiles and shared prefixes do without, their arithmetic hides the way. */
INLINE int is_fetching(const struct attend_args *a, const struct attend_task *task) {
    return a->pool.block_size >= TILE && task->num_queries == 1;
}

/* Prefetch during the chunk: its V, and K of [key, end) of `next`, the same task or the one behind it. A line of every tile in turn,
 * between products: lines requested in a burst wait for one another, and the products wait for them. */
INLINE void look_ahead(const struct attend_args *a, const struct attend_task *task, const struct attend_task *next, int64_t key,
                       int64_t end, struct chunk *c, enum kind kind) {
    struct layout l = layout_of(&a->pool);
    c->is_cold = is_fetching(a, task) && (!a->pool.is_int8 || kind == KIND_INT16);
    size_t lane_stride = l.block_size * l.lane;
    c->line_stride = lane_stride < 64 ? 64 : lane_stride, c->num_lines = l.dim / TILE * lane_stride / c->line_stride;
    for (size_t t = 0; t < CHUNK / TILE; t++, key += TILE) {
        c->next_k[t] = NULL;
        if (!c->is_cold || key >= end) continue;
        struct place place = place_of(a, next, key);
        c->next_k[t] = k_at(&a->pool, l, place);
        if (!a->pool.is_int8) continue;
        __builtin_prefetch(scale_at(a->pool.k, l, place), 0, 2);
        __builtin_prefetch(scale_at(a->pool.v, l, place), 0, 2);
    }
}

/* Prefetch the whole tiles in [key, end) of an int8 pool's K, or V, before they are widened. */
INLINE void prefetch_int8(const struct attend_args *a, const struct attend_task *task, const void *base, int64_t key,
                          int64_t end) {
    struct layout l = layout_of(&a->pool);
    if (!a->pool.is_int8 || !base || !is_fetching(a, task)) return;
    int is_key = base == a->pool.k;
    size_t run = is_key && l.block_size > TILE ? TILE * l.lane : TILE * l.dim; /* bytes that lie together */
    for (; key + TILE <= end; key += TILE) {
        struct place place = place_of(a, task, key);
        const char *tile = (const char *)base + place.at + place.o * (is_key ? l.lane : l.dim);
        for (size_t r = 0; r < TILE * l.dim / run; r++)
            for (size_t i = 0; i < run; i += 64) __builtin_prefetch(tile + r * l.block_size * l.lane + i, 0, 2);
        __builtin_prefetch(scale_at(base, l, place), 0, 2);
    }
}
