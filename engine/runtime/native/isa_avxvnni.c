/* AVX2 with products of bytes: x86 without AVX-512 since 2021 (Alder Lake). Compilers before 2021 make what isa_avx2.c has. */
#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ >= 12
#pragma clang attribute push(__attribute__((target("avxvnni,avx2,fma,f16c,prfchw"))), apply_to = function)
#define VNNI_DOT
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,prfchw"))), apply_to = function)
#elif __GNUC__ >= 11
#pragma GCC target("avxvnni,avx2,fma,f16c,prfchw")
#define VNNI_DOT
#else
#pragma GCC target("avx2,fma,f16c,prfchw")
#endif
#include <immintrin.h>
#define X86_INTRINSICS
#define VECTOR_BYTES 32
#include "kernels.h"

DEFINE_KERNELS(avxvnni)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
