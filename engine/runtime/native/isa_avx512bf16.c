/* AVX-512 with products of bfloat16 pairs and of bytes: Cooper Lake, Sapphire Rapids, Zen 4 and later. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw")
#endif
#include <immintrin.h>
#define X86_INTRINSICS
#define BF16_DOT
#define VNNI_DOT
#define VECTOR_BYTES 64
#include "kernels.h"

DEFINE_KERNELS(avx512bf16)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
