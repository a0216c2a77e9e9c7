/* The native CPU library: shared declarations.
 *
 * C11 with GCC/Clang vector extensions, no Python or torch headers: pointers, sizes and strides come in, results are
 * written in place. Every pointer is the caller's; nothing is kept after a call. Each instruction set has a library, in
 * which the kernels (kernels_*.c) are compiled for it; isa.c says which of them a machine can run.
 *
 * A *lane* is four bytes: one float32, or two neighbouring bfloat16 / float16. The pool of one layer is
 * [kv heads][blocks][block_size * head_dim]; inside a block
 *   K is [head_dim / pair][block_size] lanes: a vector of lanes is one (pair of) dimension(s) of neighbouring keys,
 *   V is [block_size / pair][head_dim] lanes: a vector of lanes is one (pair of) key(s) of neighbouring dimensions,
 * so that neither q.k nor p.v ever sums across a vector. (Blocks shorter than a pair hold V as plain rows.)
 */
#ifndef QUIRE_CPU_H
#define QUIRE_CPU_H

#include <stddef.h>
#include <stdint.h>

#define SHARED /* Python has the same structure: it reads the fields from here (structs.py) */

enum dtype { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2 };
static inline size_t size_of(int32_t dtype) { return dtype == DT_F32 ? 4 : 2; }

enum status {
    QUIRE_OK = 0, QUIRE_BAD_ARGUMENT = 1, QUIRE_NO_MEMORY = 2, QUIRE_CANNOT_READ = 4,
    QUIRE_NO_GROUP = 5, /* another rank did not take part in time, or the group was aborted */
};

enum {
    TILE = 16,   /* keys in one tile, on every instruction set */
    PANEL = 32,  /* weight rows that are interleaved */
    CHUNK = 128, /* keys between two updates of the running softmax */
    SPAN = 256,  /* keys whose result is joined to that of the spans before; a task is cut between spans only */
    ROWS = 96,   /* query rows (queries x heads of a group) that share one pass over the keys */
};

/* One layer's K and V pool. Strides count elements. In an int8 pool a block of one head is followed by a float32 scale
 * for each of its keys; K and V are laid out as those of two bytes are, a lane being two bytes there.
 * Block sizes are powers of two.
 * A pool of latents has no V: a value is the first `value_dim` numbers of its key. In int8 the other numbers of a key, which
 * may be far larger, are 16-bit integers of the same scale: all low bytes, signed, then all high bytes. */
SHARED struct pool {
    void *k, *v; /* v: NULL for latents */
    int64_t head_stride, block_stride;
    int64_t num_kv_heads, head_dim, block_size, value_dim; /* head_dim: numbers of a key as stored; value_dim: of latents */
    int32_t dtype;   /* of queries, new keys and values, and results */
    int32_t is_int8; /* the pool's type: int8 with scales, else `dtype` */
};

/* The width of a value, and of a result. */
static inline int64_t value_dim_of(const struct pool *p) { return p->value_dim ? p->value_dim : p->head_dim; }

/* The width of a query, and of a new key. */
static inline int64_t query_dim_of(const struct pool *p) {
    return p->is_int8 && p->value_dim ? (p->head_dim + p->value_dim) / 2 : p->head_dim;
}

/* New keys and values, [num_tokens, num_kv_heads, head_dim] with a free stride between tokens. */
SHARED struct store_args {
    struct pool pool;
    const void *k, *v;
    int64_t k_stride, v_stride, num_tokens;
    const int64_t *slots; /* [num_tokens] block * block_size + offset */
};

/* Attention of a flat batch: q [T, num_heads, head_dim] with a free stride between tokens, out contiguous. */
SHARED struct attend_args {
    struct pool pool;
    const void *q;
    void *out;
    int64_t q_stride, num_heads, num_slices, table_stride;
    const int32_t *query_starts; /* [num_slices + 1] */
    const int32_t *context_lens; /* [num_slices], the slice's own tokens included */
    const int32_t *block_tables; /* [num_slices, table_stride] */
    const float *sinks;          /* [num_heads] or NULL */
    const int32_t *ends;         /* [tokens]: where the keys that a query sees end; NULL: behind its own */
    int64_t window;              /* 0: none */
    float scale, softcap;        /* softcap 0: none */
};

/* A share of attention: some queries of one kv head against some keys of one slice, which other slices may share.
 *
 * Chunks and spans begin at multiples of their size in the sequence, wherever a task begins, and spans are joined first
 * to last by one function. So a query's result is a function of its own sequence: the same bits alone or in a batch, as
 * a decode step or inside a prompt chunk, on one thread or many, with keys that it shares or without.
 *
 * A record is the result of a span, row by row: the sums of values, the parts of the mass, the peak. */
#define RECORD_FLOATS(value_dim) ((value_dim) + TILE + 1)

struct attend_task {
    int64_t slice, head, first_query, num_queries, key_begin, key_end;
    const int32_t *sharers; /* NULL; or num_queries slices, each with one query that sees all these keys */
    float *records;         /* NULL: join and write out; else leave a record a span */
    const float *before;    /* NULL; or the task's first row in the records of the spans before key_begin, the last of */
    int64_t before_stride;  /* which may have been cut at a chunk; records lie so many floats apart */
};

/* Spans that a task touches. */
static inline int64_t spans_of(const struct attend_task *task) {
    return (task->key_end - 1) / SPAN - task->key_begin / SPAN + 1;
}

/* How a weight matrix is held. */
enum weight_format {
    WEIGHT_F32 = 0,
    WEIGHT_BF16 = 1,
    WEIGHT_INT8 = 2, /* from here on quantised: quant_format.h */
    WEIGHT_Q4 = 3,
    WEIGHT_Q4_MIN = 4,
    WEIGHT_Q8 = 5,
    WEIGHT_Q8_HALF = 6,
    WEIGHT_Q8_HALF_MIN = 7,
    WEIGHT_Q2_HALF_MIN = 8,
    WEIGHT_Q3_HALF = 9,
    WEIGHT_Q5 = 10,
    WEIGHT_Q5_MIN = 11,
    WEIGHT_Q6_HALF = 12,
    WEIGHT_Q6_HALF_MIN = 13,
    WEIGHT_IQ4 = 14, /* from here to WEIGHT_Q1 codes are indices of a table */
    WEIGHT_IQ3_XXS = 15,
    WEIGHT_IQ3_S = 16,
    WEIGHT_MXFP4 = 17,
    WEIGHT_NVFP4 = 18,
    WEIGHT_IQ2 = 19,
    WEIGHT_IQ1_M = 20,
    WEIGHT_Q1 = 21,
    WEIGHT_IQ1_S = 22, /* these have no table */
    WEIGHT_Q2 = 23,
    WEIGHT_Q4_SUPER = 24,
    WEIGHT_Q5_SUPER = 25,
    NUM_WEIGHT_FORMATS
};

enum activation { ACT_NONE, ACT_SILU, ACT_GELU_TANH, ACT_GELU, ACT_RELU2, ACT_GELU_ALONE, ACT_GELU_TANH_ALONE };

/* Whether half of the rows of a matrix with this activation are gates; without them it is that of each number. */
static inline int is_gated(int32_t activation) { return activation != ACT_NONE && activation < ACT_RELU2; }

/* A weight matrix [n, k] in panels of PANEL rows, as its format's kernels read them, and perhaps a bias [n].
 *
 * One with a gated activation is n / 2 gates and then as many ups, and its product is activation(gates x) * ups x. Its panels
 * are PANEL / 2 gates and their ups, so that a gate and its up are summed at the same time. */
SHARED struct linear {
    const void *packed, *scales, *bias;
    int64_t n, k;
    int32_t format, dtype; /* dtype: of x, of the bias, and of y if that is not asked for in float32 */
    int32_t activation;
};

/* The number of columns of the product, and of a panel. */
static inline int64_t num_columns_of(const struct linear *w) { return is_gated(w->activation) ? w->n / 2 : w->n; }
static inline int64_t panel_columns_of(const struct linear *w) { return is_gated(w->activation) ? PANEL / 2 : PANEL; }

/* The position of row `row`, of n, among the rows of the panels. */
static inline int64_t packed_row(int64_t row, int64_t n, int32_t activation) {
    if (!is_gated(activation)) return row;
    int64_t half = PANEL / 2, is_up = row >= n / 2, pair = is_up ? row - n / 2 : row;
    return pair / half * PANEL + is_up * half + pair % half;
}

/* Types of floats in a file, by GGUF's numbers. */
enum stored_float { STORED_F32 = 0, STORED_F16 = 1, STORED_BF16 = 30 };

/* How codes lie: in rows of nibbles, the low one first, of bytes, of float8_e4m3fn or of MXFP4. */
enum code_layout { CODES_NIBBLES, CODES_BYTES, CODES_FP8, CODES_MXFP4 };

/* Codes of which rows of a GGUF type are made: code + shift, behind a scale and perhaps a minimum for each block.
 * `scales` are float16, bytes of MXFP4, or float32 of FP8: [num_rows / scale_rows][num_groups]. */
SHARED struct packed_codes {
    const void *scales;
    const uint16_t *minimums; /* as scales; NULL: none */
    const int8_t *shifts;     /* as scales; NULL: `shift` for all */
    int64_t k, row_bytes;     /* row_bytes: of the codes */
    int64_t num_groups, group_blocks, scale_rows;
    int32_t layout, shift;
};

/* A row of FP8; a scale is for `group_blocks` blocks of 32. */
struct fp8_row {
    const uint8_t *codes;
    const float *scales;
    int64_t k, group_blocks;
};

/* Rows of a weight file, in memory or, with `rows` NULL, at an offset of an open file. */
SHARED struct stored_rows {
    const void *rows;
    const uint8_t *grid; /* types with a grid: levels from 0 on, four or eight for each entry */
    const struct packed_codes *codes; /* rows are made of these, which the file has; NULL: they are there as they are */
    int64_t offset, row_bytes, num_rows, step; /* step: bytes from a row to the next, if that is more than it has */
    int32_t kind, file; /* kind: GGUF's number for the type */
    float factor;       /* of all weights; not 1 for NVFP4 alone, whose second scale lies elsewhere */
};

/* Rows to be packed as `format`: as rows `first_row` and on of a matrix of `n`, in `packed`, which begins as zeros. */
SHARED struct quant_source {
    struct stored_rows stored;
    void *packed;
    float *scales; /* WEIGHT_INT8: [n] */
    int64_t first_row, n, k;
    int64_t head_rows; /* not 0: rows of a head, stored in pairs (0, d / 2), (1, d / 2 + 1) ... */
    int32_t format, activation;
};

/* Quantised rows to be written as floats of `dtype`: out [num_rows, k]. */
SHARED struct dequant_args {
    struct stored_rows stored;
    void *out;
    int64_t k;
    int32_t dtype;
};

/* A term added to a row's sums before bias and activation: += low up^T. `up` is float32 or bfloat16, with the n, the
 * activation and so the row order of the matrix that it is added to. */
struct addend {
    const struct linear *up; /* NULL: nothing */
    const void *low;         /* [up->k], of quire_low_dtype; neighbours with the same `up` are contiguous */
};

/* y [m, columns] = x [m, k] w^T + bias.
 *
 * Rows of x are first packed for the weight's format (gemm.h), into `rows`, or into memory of the call if that is NULL.
 * If x is NULL, `rows` holds them already. */
SHARED struct gemm_args {
    struct linear w;
    const void *x;
    void *rows, *y;
    int64_t m, x_stride, y_stride;
    int32_t y_dtype;
    const struct addend *addends; /* [m], or NULL */
    const struct linear *next;    /* y is packed for its product with this weight (gemm_packs_for); NULL: y has rows */
};

/* Each head's product with its matrix: y[:, h] = x[:, h] heads[h]^T. Heads lie `x_step` and `y_step` numbers apart. */
SHARED struct heads_args {
    const struct linear *heads; /* [num_heads], of one shape and dtype, without activation */
    const void *x;
    void *y;
    int64_t num_heads, m, x_stride, x_step, y_stride, y_step;
};

/* A thread's share of a product: some panels, for some groups of rows. */
struct gemm_share {
    int64_t panel_begin, panel_end, group_begin, group_end;
};

/* A product with packed rows, as a part of the team's work. Shares are numbered panel by panel, the blocks of groups of
 * one panel, or of a few, together: threads that work at the same time then read the same weights. On tiles all panels of a
 * block come first: its rows stay in a core's second cache. */
struct gemm_job {
    struct gemm_args args;
    int64_t num_groups, groups_per_block, num_blocks, panels_per_block, num_parts; /* parts: of the panels */
    int64_t first; /* number of its first share, or group, among those of all jobs */
};

/* Rows of a mixture of experts (moe.c). A *place* is a row's position among the rows sorted by expert. */
struct widen_args {
    const void *x; /* [rows, width] of `dtype` */
    float *y;      /* [rows, width] */
    int64_t width;
    int32_t dtype;
};

/* inner = (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and |up| <= limit. */
struct clamp_args {
    const float *gate_up; /* [rows, 2 * width], gates first */
    void *inner;          /* [rows, width] of `dtype` */
    int64_t width;
    float alpha, limit;
    int32_t dtype;
};

/* y = the sum over ranks, in order, of weight * the result at the rank's place. */
struct ranks_args {
    const float *results;  /* [places, width] */
    const float *weights;  /* [rows, num_ranks] */
    const int32_t *places; /* [rows, num_ranks] */
    float *y;              /* [rows, width] */
    int64_t num_ranks, width;
};

/* RMSNorm; LayerNorm; LayerNorm whose result is the stream from then on, too. */
enum norm_kind { NORM_RMS, NORM_LAYER, NORM_LAYER_OF_STREAM };

SHARED struct norm_args {
    void *residual;     /* [rows, width] = scale * (residual + alpha * delta), unless delta is NULL */
    const void *delta;  /* [rows, width] */
    const void *weight; /* [width]; NULL: out = residual, no norm */
    void *out;          /* [rows, width], or NULL: */
    const struct gemm_args *packs; /* the results are packed directly for this product */
    int64_t rows, width, residual_stride, delta_stride, out_stride;
    int32_t dtype, weight_dtype; /* dtype: of out */
    int32_t stream_dtype;        /* of residual and delta: as `dtype`, or float32 */
    float alpha, eps;
    float scale;                 /* 0: 1 */
    int32_t kind;                /* enum norm_kind; a stream that is replaced is float32 */
    const void *bias;            /* [width] of `weight_dtype`, of a LayerNorm; or NULL */
};

/* x = activation(x) * input, in place. */
struct act_args {
    void *x;            /* [rows, width], of `dtype` */
    const float *input; /* [rows, width] */
    int64_t width, input_stride;
    int32_t dtype, activation;
};

/* x = the nearest number to x within +-limit, in place. */
struct clip_args {
    void *x; /* [rows, width], of `dtype` */
    int64_t width;
    float limit;
    int32_t dtype;
};

/* x *= sigmoid(gate), in place. */
struct gate_args {
    void *x;          /* [rows, width], of `dtype` */
    const void *gate; /* likewise */
    int64_t width;
    int32_t dtype;
};

/* Per head: norm (optional), then rotation of the first rope_dim dimensions, in place. With v_weight, heads of values follow
 * those of keys, and are normalised alone. */
SHARED struct rope_args {
    void *qk;                     /* [tokens, heads, head_dim], heads = query heads, then key heads */
    const void *cos, *signed_sin; /* [tokens, rope_dim] */
    const void *q_weight, *k_weight, *v_weight;
    int64_t tokens, stride, num_heads, num_kv_heads, head_dim, rope_dim;
    int32_t dtype, weight_dtype, angle_dtype; /* the others: as `dtype`, or float32 */
    float eps;
};

/* out = scale * table[ids], in float32. */
SHARED struct embed_args {
    const void *table;  /* [vocab, width] of `dtype`, or the panels of a matrix */
    const int64_t *ids; /* [rows] */
    float *out;         /* [rows, width] */
    int64_t rows, width;
    int32_t dtype;  /* of the result, before it is scaled */
    int32_t format; /* of the panels; -1: none */
    float scale;
    int32_t adds;   /* out +=, of a table that is no matrix */
};

/* Logits, which are multiplied, and then capped: cap * tanh(x / cap), in place. */
SHARED struct scaled_logits {
    float *logits; /* [rows, width] */
    int64_t rows, width;
    float multiplier, cap; /* 1; 0: none */
};

/* How one row is drawn. */
SHARED struct draw {
    double top_p;       /* 1: off */
    float temperature;  /* 0: greedy */
    float lowest_score; /* of those kept, counted from the best: log(min_p); -inf: off */
    int32_t top_k;      /* 0: off */
    uint64_t seed, position;
    int64_t slot; /* of the row's last id */
};

SHARED struct sample_args {
    float *logits;            /* [rows, vocab_size], overwritten */
    const struct draw *draws; /* [rows] */
    int64_t *ids;             /* [rows] */
    uint8_t *is_finite;       /* [rows] 0 where a logit is NaN or the best one infinite: the id is void */
    int64_t rows, vocab_size;
    int64_t *last_ids; /* [slots], which get the ids too; may be NULL */
};

/* Work on a range of rows, tokens or tiles, of what `args` describes. */
typedef void range_work(const void *args, int64_t begin, int64_t end);

/* The kernels: what is compiled for an instruction set (kernels_*.c). */
range_work store_int8;
size_t attend_scratch(const struct attend_args *); /* bytes a thread needs */
void attend(const struct attend_args *, const struct attend_task *, const struct attend_task *next, void *scratch);
void attend_merge(const struct attend_args *, const struct attend_task *parts, int64_t num_parts);
/* A product, its rows packed in groups. */
int64_t gemm_num_groups(const struct gemm_args *);
int64_t gemm_group_start(const struct gemm_args *, int64_t group);
int64_t gemm_block_panels(void); /* that a share has together, where groups of rows are several blocks */
int64_t gemm_block_groups(const struct gemm_args *);
int32_t gemm_goes_by_rows(const struct gemm_args *); /* all panels of a block of groups come before the next block */
size_t gemm_rows_bytes(const struct gemm_args *);
void gemm_pack_group(const struct gemm_args *, int64_t group, const void *x_rows, int64_t stride);
range_work gemm_pack_rows;
int32_t gemm_packs_for(const struct linear *, const struct linear *next); /* whether a product can be packed for the next one */
void gemm_gather(const struct gemm_args *, int64_t group, const char *alone, const int32_t *rows);
extern const int32_t pairs_are_wide; /* rows of bfloat16 are packed as float32 */
void gemm(const struct gemm_args *, const struct gemm_share *);
range_work add_rms_norm_rows, clip_rows, gate_rows, act_rows, rope_rows, embed_rows, scale_logits_rows, sample_rows;
range_work widen_rows, clamp_rows, add_ranks;
void narrow_halves(const float *from, uint16_t *to, int64_t num); /* to the nearest float16 */
void round_fp8(const struct fp8_row *, float *scratch, uint8_t *to); /* to Q8_0 */
range_work delta_prepare, delta_advance, delta_finish;
range_work mamba_prepare, mamba_advance, mamba_gate, mamba_norm;
range_work first_gate_rows, convolve_gated_rows;
range_work altup_predict, altup_correct_rows, altup_share, lengthen, add_laurel_rows, sparse_act_rows;

/* Leave the core's other thread, or its host, a moment. */
static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* team.c: run `work` on every thread of the team; returns when all have finished. */
typedef void (*team_work)(void *context);
void team_run(team_work work, void *context, int num_threads);
int team_size(void);

/* Work may pause at a time that is asked for before a run: threads that find it has come take no further piece. If some are
 * left then, the caller asks whether to go on, which waits until the answer is known, and runs the work again. */
double team_pause_at(void);
int team_must_pause(double at);
int team_goes_on(void);

enum {
    WORTH_SHARING = 32 * 1024, /* values touched, below which waking a second thread costs more than it saves */
    BETWEEN_PAUSES = 256 * 1024, /* values touched by a piece of work that may pause; some tenths of a millisecond */
};

/* Run [0, count) on the team if that is worth sharing, at `unit` values each; else here. */
void run_ranges(range_work *run, const void *args, int64_t count, int64_t unit);

/* Compute several products with packed rows as one piece of work: threads are woken once. Sets all of a job but `args`. */
void multiply_all(struct gemm_job *jobs, int64_t num_jobs);

/* The job that share, or group, `number` belongs to. */
static inline const struct gemm_job *job_of(const struct gemm_job *jobs, int64_t num_jobs, int64_t number) {
    int64_t low = 0, high = num_jobs;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (jobs[middle].first <= number) low = middle;
        else high = middle;
    }
    return jobs + low;
}

/* The entry points that decoder.c calls as well. Each returns a status. */
#define EXPORT __attribute__((visibility("default")))
EXPORT int32_t quire_gemm(const struct gemm_args *);
EXPORT int32_t quire_sample(const struct sample_args *);
EXPORT int32_t quire_scale_logits(const struct scaled_logits *);
EXPORT int32_t quire_gemm_heads(const struct heads_args *);
size_t quire_rows_bytes(const struct gemm_args *);
int64_t quire_quant_bytes(int32_t format, int64_t n, int64_t k);
EXPORT int32_t quire_low_dtype(const struct linear *up);
EXPORT int32_t quire_store(const struct store_args *);
EXPORT int32_t quire_attend(const struct attend_args *);
EXPORT int32_t quire_add_rms_norm(const struct norm_args *);
EXPORT int32_t quire_rope(const struct rope_args *);
EXPORT int32_t quire_embed(const struct embed_args *);

/* Rows [begin, end) of a quant_source or a dequant_args; these return a status. */
typedef int32_t tile_range(const void *args, int64_t begin, int64_t end);
tile_range quant_pack_gguf, float_pack, quant_pack_int8, quant_dequantise;
range_work quant_unpack_rows, store_tokens; /* of an embed_args; of a store_args */

#endif
