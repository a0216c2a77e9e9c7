/* The layout of the structures that library.py mirrors, which it compares when it loads the library. */

#include <stddef.h>

#include "decoder.h"

/* Each structure and its fields; an element of an array is a field that the mirror names as its index. */
#define STRUCTURES(X) \
    X(pool, k, v, head_stride, block_stride, num_kv_heads, head_dim, block_size, value_dim, dtype, is_int8) \
    X(store_args, pool, k, v, k_stride, v_stride, num_tokens, slots) \
    X(attend_args, pool, q, out, q_stride, num_heads, num_slices, table_stride, query_starts, context_lens, \
          block_tables, sinks, window, scale, softcap) \
    X(linear, packed, scales, bias, n, k, format, dtype, activation) \
    X(packed_codes, scales, minimums, shifts, k, row_bytes, num_groups, group_blocks, scale_rows, layout, bits, \
          shift) \
    X(stored_rows, rows, grid, codes, offset, row_bytes, num_rows, step, kind, file) \
    X(quant_source, stored, packed, scales, first_row, n, k, head_rows, format, activation, first_block, num_blocks) \
    X(dequant_args, stored, out, k, dtype) \
    X(gemm_args, w, x, rows, y, m, x_stride, y_stride, y_dtype, addends) \
    X(heads_args, heads, x, y, num_heads, m, x_stride, x_step, y_stride, y_step) \
    X(norm_args, residual, delta, weight, out, packs, rows, width, residual_stride, delta_stride, out_stride, dtype, \
          weight_dtype, stream_dtype, alpha, eps) \
    X(rope_args, qk, cos, signed_sin, q_weight, k_weight, tokens, stride, num_heads, num_kv_heads, head_dim, \
          rope_dim, dtype, weight_dtype, angle_dtype, eps) \
    X(embed_args, table, ids, out, rows, width, dtype, format, scale) \
    X(norm, weight, dtype) \
    X(rotary, inverse, dim, magnitude) \
    X(router, gate, correction, num_experts, num_chosen, num_groups, num_chosen_groups, scoring, group_scoring, \
          is_normalised, scale) \
    X(moe, router, shared_gate, gate_up, down, gate_up_formats, down_formats, has_shared, clamp_alpha, clamp_limit) \
    X(moe_args, moe, x, y, chosen, weights, rows) \
    X(latent, queries, keys, values, rank, nope_dim, rope_dim, is_interleaved, eps) \
    X(layer, qkv, o, gate_up, down, latent, moe, sinks, before_attention, after_attention, before_mlp, after_mlp, q, \
          k, pool, store, attend, window, rotary) \
    X(decoder, layers, rotaries, embedding, norm, num_layers, num_rotaries, hidden, intermediate, num_heads, \
          num_kv_heads, head_dim, dtype, qk_norm, embedding_format, eps, embedding_scale, residual_scale, \
          attention_scale, softcap, qkv_clip, group, first_id, num_ids) \
    X(low_rank, down, up) \
    X(adapter_layer, at[PLACE_QKV], at[PLACE_O], at[PLACE_GATE_UP], at[PLACE_DOWN], at[PLACE_Q_B]) \
    X(adapters, layers, of_rows, num) \
    X(forward_args, decoder, ids, positions, rows, hidden, num_tokens, num_rows, adapters, streams, \
          stream_layers, num_streams) \
    X(group, shared, timeout_ms, rank, size, spins, calls) \
    X(draw, top_p, temperature, lowest_score, top_k, seed, position) \
    X(sample_args, logits, draws, ids, is_finite, rows, vocab_size)

/* EACH(s, f, g) is AT(s, f) AT(s, g): a macro cannot call itself, but be scanned again. */
#define SCAN(...) SCAN3(SCAN3(SCAN3(SCAN3(__VA_ARGS__)))) /* 64 times, more than any structure has fields */
#define SCAN3(...) SCAN2(SCAN2(SCAN2(SCAN2(__VA_ARGS__))))
#define SCAN2(...) SCAN1(SCAN1(SCAN1(SCAN1(__VA_ARGS__))))
#define SCAN1(...) __VA_ARGS__
#define NO_ARGUMENTS ()
#define EACH(s, ...) SCAN(NEXT(s, __VA_ARGS__))
#define NEXT(s, field, ...) AT(s, field) __VA_OPT__(AGAIN NO_ARGUMENTS(s, __VA_ARGS__))
#define AGAIN() NEXT
#define AT(s, field) (int32_t)offsetof(struct s, field), (int32_t)sizeof(((struct s *)0)->field),

#define NAMES(s, ...) #s ":" #__VA_ARGS__ ";"
#define NUMBERS(s, ...) (int32_t)sizeof(struct s), EACH(s, __VA_ARGS__)

/* Return "structure:field, field;" of all; *numbers: of each structure its size, and the offset and size of each field. */
EXPORT const char *quire_layout(const int32_t **numbers) {
    static const int32_t all[] = {STRUCTURES(NUMBERS) 0};
    *numbers = all;
    return STRUCTURES(NAMES);
}
