/* What is computed row by row, for one instruction set. */
#include "vec.h"

#include "quant_format.h"

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
