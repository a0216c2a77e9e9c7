/* Any machine: vectors of four, which the compiler maps to SSE2, NEON or plain scalars. */
#define VECTOR_BYTES 16
#include "kernels.h"

DEFINE_KERNELS(portable)
