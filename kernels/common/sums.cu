// Sums of float32 numbers over outer axes, in a fixed order, in double precision, rounded once.
//
// add_rows   out[o, i] = sum over a < firsts, b < seconds of in[a * first + b * second + o * row + i]; a thread a sum
// add_all    out[o]    = sum over a < firsts, i < columns of in[a * first + o * row + i]; a block a sum
//
// in // f32                          out // RESULT, (rows, columns) or (rows), contiguous
//
// Prelude: RESULT.
#include "common/arch.cuh"

struct SumParams {
    const float* in;
    RESULT* out;
    long long first, second, row;  // strides, in elements
    int firsts, seconds, rows, columns;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) add_rows(const SumParams p) {
    wait_for_earlier_kernels();
    const long long index = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= static_cast<long long>(p.rows) * p.columns) return;
    const float* in = p.in + index / p.columns * p.row + index % p.columns;
    double sum = 0.0;
    for (int a = 0; a < p.firsts; ++a)
        for (int b = 0; b < p.seconds; ++b) sum += in[a * p.first + b * p.second];
    from_float(p.out[index], static_cast<float>(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS) add_all(const SumParams p) {
    wait_for_earlier_kernels();
    __shared__ double sums[THREADS / 32];
    const float* in = p.in + blockIdx.x * p.row;
    double sum = 0.0;
    for (int a = 0; a < p.firsts; ++a)
        for (int i = threadIdx.x; i < p.columns; i += THREADS) sum += in[a * p.first + i];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();  // the sums of all warps are there
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS / 32; ++i) sum += sums[i];
    from_float(p.out[blockIdx.x], static_cast<float>(sum));
}
