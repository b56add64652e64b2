// Ranks of keys by their scores (SPEC section 3).
#pragma once
#include "common/arch.cuh"

// Scores as unsigned integers of the same order, NaN above everything, -0 = +0; never 0.
__device__ __forceinline__ unsigned ordered(float score) {
    if (isnan(score)) return 0xffffffffu;
    const unsigned bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The score of a rank that `ordered` gave; NaN is the one with all bits set.
__device__ __forceinline__ float from_ordered(unsigned rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
