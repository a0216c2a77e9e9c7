/* Products with weights, for one instruction set. */
#define LANES_ARE_ROWS
#include "vec.h"

#include "quant.h"
#include "quant_tiles.h"
#include "wide_rows.h"
#include "gemm.h"

const int32_t pairs_are_wide = KIND_OF_PAIRS == KIND_BF16;
