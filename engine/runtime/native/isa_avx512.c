/* AVX-512: x86 servers since 2017 (Skylake-SP), Zen 4. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw")
#endif
#include <immintrin.h>
#define X86_INTRINSICS
#define VECTOR_BYTES 64
#include "kernels.h"

DEFINE_KERNELS(avx512)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
