/* All kernels for one instruction set; isa_*.c sets the compiler's target and names the table. */
#include "vec.h"

#include "kv_store.h"
#include "kv_tiles.h"

#include "attend.h"
#include "quant.h"
#include "gemm.h"
#include "ops.h"
#include "moe_rows.h"
#include "fp8_rows.h"
#include "sampling.h"
#include "convolve.h"
#include "recurrence_rows.h"
#include "delta_rows.h"
#include "mamba_rows.h"
#include "short_conv_rows.h"
#include "altup_rows.h"

#define DEFINE_KERNELS(isa)                                                                        \
    const struct kernels kernels_##isa = {                                                         \
        #isa, store_int8, attend_scratch, attend, attend_merge, add_rms_norm, clip, gate, act, rope,  \
        embed, sample, gemm_num_groups, gemm_rows_bytes, gemm_pack_rows, gemm, widen, clamp,          \
        add_ranks, narrow_halves, round_fp8, delta_prepare, delta_advance, delta_finish,              \
        mamba_prepare, mamba_advance, mamba_gate, mamba_norm,                                         \
        first_gate, convolve_gated,                                                                   \
        altup_predict, altup_correct, altup_share, lengthen, add_laurel, sparse_act,                  \
    };
