/* Mixtures of experts: each row goes through the few experts that a router chooses for it. */
#ifndef QUIRE_MOE_H
#define QUIRE_MOE_H

#include "layer.h"

enum scoring { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1 };
enum group_scoring { GROUP_MAX = 0, GROUP_TOP2 = 1 }; /* a group's best choice, or the sum of its two best */

/* How a row chooses experts. SCORE_SOFTMAX: the choice is by logits, the weights are a softmax over all experts or, if
 * normalised, over the chosen ones. SCORE_SIGMOID: the choice is by sigmoid + correction, the weights are sigmoids. Ties
 * go to the lowest index. */
SHARED struct router {
    struct linear gate;      /* x -> logits [num_experts]; of dtype float32, or as the model's */
    const float *correction; /* [num_experts] or NULL */
    int64_t num_experts, num_chosen, num_groups, num_chosen_groups; /* experts outside the chosen groups are passed over */
    int32_t scoring, group_scoring, is_normalised;
    float scale; /* of the weights */
    const float *expert_scale; /* [num_experts], multiplies the weights at last; or NULL */
};

/* Experts are MLPs of one width. A shared one is expert number num_experts: it may have another width, and every row goes
 * through it with weight 1, or sigmoid(x . shared_gate). */
SHARED struct moe {
    struct router router;
    struct linear shared_gate;           /* packed NULL: none; of the router's dtype */
    const struct linear *gate_up, *down; /* [num_experts + has_shared] */
    uint32_t gate_up_formats, down_formats; /* bit f: some expert's matrix has format f */
    int32_t has_shared;
    float clamp_alpha, clamp_limit; /* limit not 0: struct clamp_args is the activation, and gate_up has none */
};

/* y [rows, down->n] = the mixture of x [rows, gate_up->k], rows contiguous, x of the experts' type. */
SHARED struct moe_args {
    const struct moe *moe;
    const void *x;
    float *y;
    int32_t *chosen; /* [rows, num_chosen + has_shared] or NULL: the experts of each row, best first */
    float *weights;  /* likewise */
    int64_t rows;
    const void *routed; /* [rows, router.gate.k], what the router reads; NULL: x */
};

/* Bytes of memory that moe_forward needs. */
size_t moe_bytes(const struct moe *moe, int64_t rows);

/* `memory` is aligned to a cache line. */
int32_t moe_forward(const struct moe_args *args, char *memory);

#endif
