/* A step of rows that are drawn from the logits as they are, in one call: what its tokens attend to, the forward pass, the
 * head and the draws. pool/batch.py and sampling/draw.py do the same one after the other, for all steps. */
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

/* What layers of one block table read in a step. */
SHARED struct step_group {
    struct store_args *store;
    struct attend_args *attend;
    int64_t table;
};

SHARED struct step_args {
    const struct decoder *decoder;
    const struct linear *head;
    const struct step_group *groups;
    int32_t *tables; /* [tables][num_slots][width], blocks; with states three more: those that rows read, write, and write midway */
    struct step_states *states; /* NULL: the model has none */
    struct scaled_logits scaled; /* how logits are scaled */
    const struct draw *draws; /* [num_slots], but for the position */
    int64_t num_groups, num_tables, num_slots, width, block_size, state_blocks; /* state_blocks: of a slot of states */
    /* The slots of decodes and their positions; of each chunk its slot, first position, tokens, draws, and tokens after which its
     * state is written midway; the ids of all. */
    const int64_t *numbers;
    int64_t num_decodes, num_chunks;
    int64_t *ids; /* [draws] */
    uint8_t *is_finite;
};

struct slice {
    int64_t slot, first, tokens, draws, midway;
};

static struct slice slice_of(const struct step_args *a, int64_t index) {
    int64_t decodes = a->num_decodes;
    if (index < decodes) return (struct slice){a->numbers[index], a->numbers[decodes + index], 1, 1, 0};
    const int64_t *chunk = a->numbers + 2 * decodes + 5 * (index - decodes);
    return (struct slice){chunk[0], chunk[1], chunk[2], chunk[3], chunk[4]};
}

struct sizes {
    int64_t slices, tokens, draws, blocks; /* blocks: of the longest context */
};

static struct sizes sizes_of(const struct step_args *a) {
    struct sizes n = {.slices = a->num_decodes + a->num_chunks};
    for (int64_t i = 0; i < n.slices; i++) {
        struct slice s = slice_of(a, i);
        int64_t blocks = (s.first + s.tokens - 1) / a->block_size + 1;
        n.tokens += s.tokens, n.draws += s.draws;
        if (blocks > n.blocks) n.blocks = blocks;
    }
    return n;
}

struct arrays {
    int64_t *positions, *places; /* [tokens]; [tables][tokens] */
    int32_t *starts, *contexts, *tables; /* [slices + 1]; [slices]; [tables][slices][blocks] */
    int64_t *rows; /* [draws], the tokens that are drawn from */
    struct draw *draws;
    int32_t *read, *written, *midway, *kept, *replays, *midway_after, *slots; /* of states: [slices][width of one]; [slices] */
    char *hidden;
    float *logits;
};

static size_t lay_out(const struct step_args *a, struct sizes n, char *base, struct arrays *to) {
    size_t used = 0;
    int64_t stateful = a->states ? n.slices : 0;
    to->positions = carve(base, &used, n.tokens, sizeof(int64_t));
    to->places = carve(base, &used, a->num_tables * n.tokens, sizeof(int64_t));
    to->starts = carve(base, &used, n.slices + 1, sizeof(int32_t));
    to->contexts = carve(base, &used, n.slices, sizeof(int32_t));
    to->tables = carve(base, &used, a->num_tables * n.slices * n.blocks, sizeof(int32_t));
    to->read = carve(base, &used, stateful * a->state_blocks, sizeof(int32_t));
    to->written = carve(base, &used, stateful * a->state_blocks, sizeof(int32_t));
    to->midway = carve(base, &used, stateful * a->state_blocks, sizeof(int32_t));
    to->kept = carve(base, &used, stateful, sizeof(int32_t));
    to->replays = carve(base, &used, stateful, sizeof(int32_t));
    to->midway_after = carve(base, &used, stateful, sizeof(int32_t));
    to->slots = carve(base, &used, stateful, sizeof(int32_t));
    to->rows = carve(base, &used, n.draws, sizeof(int64_t));
    to->draws = carve(base, &used, n.draws, sizeof(struct draw));
    to->hidden = carve(base, &used, n.draws * a->decoder->hidden, size_of(a->decoder->dtype));
    to->logits = carve(base, &used, n.draws * a->head->n, sizeof(float));
    return used;
}

static void fill_tables(const struct step_args *a, struct sizes n, struct arrays *to) {
    int64_t *place = to->places;
    int32_t *own = to->tables;
    for (int64_t table = 0; table < a->num_tables; table++)
        for (int64_t i = 0; i < n.slices; i++, own += n.blocks) {
            struct slice s = slice_of(a, i);
            const int32_t *blocks = a->tables + (table * a->num_slots + s.slot) * a->width;
            memcpy(own, blocks, (size_t)n.blocks * sizeof(int32_t));
            for (int64_t at = s.first; at < s.first + s.tokens; at++)
                *place++ = blocks[at / a->block_size] * a->block_size + at % a->block_size;
        }
}

/* The blocks of each slice's states. In the next step a row reads what it writes in this one. */
static void fill_states(const struct step_args *a, struct sizes n, struct arrays *to) {
    struct step_states *states = a->states;
    int64_t width = states->width = a->state_blocks;
    size_t bytes = (size_t)width * sizeof(int32_t);
    for (int64_t i = 0; i < n.slices; i++) {
        struct slice s = slice_of(a, i);
        int32_t *read = a->tables + (a->num_tables * a->num_slots + s.slot) * a->width;
        int32_t *written = read + a->num_slots * a->width;
        memcpy(to->read + i * width, read, bytes);
        memcpy(to->written + i * width, written, bytes);
        memcpy(to->midway + i * width, written + a->num_slots * a->width, bytes);
        memcpy(read, written, bytes);
        to->kept[i] = (int32_t)s.tokens, to->replays[i] = 0, to->slots[i] = (int32_t)s.slot;
        to->midway_after[i] = (int32_t)s.midway;
    }
    states->num_slices = n.slices, states->starts = to->starts, states->rows = to->slots;
    states->read = to->read, states->written = to->written, states->kept = to->kept, states->replays = to->replays;
    states->midway = to->midway, states->midway_after = to->midway_after;
}

static void fill(const struct step_args *a, struct sizes n, struct arrays *to) {
    int64_t token = 0, row = 0;
    to->starts[0] = 0;
    for (int64_t i = 0; i < n.slices; i++) {
        struct slice s = slice_of(a, i);
        for (int64_t at = s.first; at < s.first + s.tokens; at++) to->positions[token++] = at;
        to->starts[i + 1] = (int32_t)token;
        to->contexts[i] = (int32_t)(s.first + s.tokens);
        if (!s.draws) continue;
        to->rows[row] = token - 1;
        to->draws[row] = a->draws[s.slot];
        to->draws[row++].position = (uint64_t)(s.first + s.tokens);
    }
    fill_tables(a, n, to);
    if (a->states) fill_states(a, n, to);
    for (int64_t i = 0; i < a->num_groups; i++) {
        struct store_args *store = a->groups[i].store;
        struct attend_args *attend = a->groups[i].attend;
        store->num_tokens = n.tokens, store->slots = to->places + a->groups[i].table * n.tokens;
        attend->num_slices = n.slices, attend->table_stride = n.blocks;
        attend->query_starts = to->starts, attend->context_lens = to->contexts;
        attend->block_tables = to->tables + a->groups[i].table * n.slices * n.blocks;
        attend->ends = NULL;
    }
}

/* Compute a step and draw from it. Returns a status. */
EXPORT int32_t quire_step(const struct step_args *a) {
    struct sizes n = sizes_of(a);
    struct arrays to;
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, lay_out(a, n, NULL, &to))) return QUIRE_NO_MEMORY;
    lay_out(a, n, memory, &to);
    fill(a, n, &to);
    struct forward_args forward = {
        .decoder = a->decoder, .ids = a->numbers + 2 * a->num_decodes + 5 * a->num_chunks, .positions = to.positions,
        .rows = to.rows, .hidden = to.hidden, .num_tokens = n.tokens, .num_rows = n.draws,
    };
    struct gemm_args head = {
        .w = *a->head, .x = to.hidden, .y = to.logits, .m = n.draws, .x_stride = a->head->k, .y_stride = a->head->n,
        .y_dtype = DT_F32,
    };
    struct sample_args draws = {to.logits, to.draws, a->ids, a->is_finite, n.draws, a->head->n, NULL};
    struct scaled_logits scaled = a->scaled;
    scaled.logits = to.logits, scaled.rows = n.draws, scaled.width = a->head->n;
    int32_t status = quire_forward(&forward);
    if (!status) status = quire_gemm(&head);
    if (!status) status = quire_scale_logits(&scaled);
    if (!status) status = quire_sample(&draws);
    free(memory);
    return status;
}
