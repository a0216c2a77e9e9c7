/* AVX2 with FMA: x86 since 2013 (Haswell, Zen). All that have these convert float16 (F16C) as well; where PREFETCHW is missing it
 * does nothing. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,prfchw")
#endif
#include <immintrin.h>
#define X86_INTRINSICS
#define VECTOR_BYTES 32
#include "kernels.h"

DEFINE_KERNELS(avx2)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
