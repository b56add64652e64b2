// Sums of float32 numbers in a fixed order, in double precision, rounded once.
#pragma once
#include "common/arch.cuh"

constexpr int SUM_THREADS = 256;

// A thread's sum over a < firsts, b < seconds of in[a * first + b * second].
__device__ __forceinline__ float sum_of(const float* in, int firsts, long long first, int seconds, long long second) {
    double sum = 0.0;
    for (int a = 0; a < firsts; ++a)
#pragma unroll 8
        for (int b = 0; b < seconds; ++b) sum += in[a * first + b * second];
    return static_cast<float>(sum);
}

using SumsOfWarps = double[SUM_THREADS / 32];

// A block's sum over a < firsts, i < columns of in[a * first + i].
__device__ __forceinline__ float sum_of_block(SumsOfWarps& sums, const float* in, int firsts, long long first, int columns) {
    double sum = 0.0;
    for (int a = 0; a < firsts; ++a)
#pragma unroll 8
        for (int i = threadIdx.x; i < columns; i += SUM_THREADS) sum += in[a * first + i];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();  // the sums of all warps are there
    sum = 0.0;
#pragma unroll
    for (int i = 0; i < SUM_THREADS / 32; ++i) sum += sums[i];
    return static_cast<float>(sum);
}
