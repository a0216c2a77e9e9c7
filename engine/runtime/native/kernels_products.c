/* Products with weights, for one instruction set. */
#include "vec.h"

#include "quant.h"
#include "gemm.h"
