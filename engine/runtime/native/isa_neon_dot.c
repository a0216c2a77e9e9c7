/* NEON with products of bytes: 64-bit Arm since 2017 (Cortex-A76, Neoverse N1, Apple M1). Without these, isa_portable.c is NEON. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>
#define ARM_INTRINSICS
#define ARM_DOT
#define VECTOR_BYTES 16
#include "kernels.h"

DEFINE_KERNELS(neon_dot)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_machine; /* a translation unit may not be empty */
#endif
