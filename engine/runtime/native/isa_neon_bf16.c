/* NEON with products of matrices of bytes and of bfloat16 pairs: 64-bit Arm since 2020 (Neoverse V1 and N2, Apple M2). */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm,bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+bf16")
#endif
#include <arm_neon.h>
#define ARM_INTRINSICS
#define ARM_DOT
#define ARM_MATRIX
#define BF16_DOT
#define VECTOR_BYTES 16
#include "kernels.h"

DEFINE_KERNELS(neon_bf16)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
