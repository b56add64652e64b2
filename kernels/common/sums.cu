// Sums of float32 numbers over outer axes, in a fixed order, in double precision, rounded once.
//
// add_rows    out[o, i] = sum over a < firsts, b < seconds of in[a * first + b * second + o * row + i]; a thread per sum
// add_all     out[o]    = sum over a < firsts, i < columns of in[a * first + o * row + i]; a block per sum
// add_splits  the requested ones of dkey[i], dvalue[i] and dbias[o, i], each summed over all query splits, dbias
//             also over the query heads of a group; a thread has four consecutive sums, or one of dbias
//
// in // f32                          out // RESULT, (rows, columns) or (rows), contiguous
// partial_key, partial_value // f32, (splits, size), or null     dkey, dvalue // RESULT, (size), a multiple of 4
// partial_bias // f32, (splits, rows, group, length), or null    dbias // f32, (rows, length)
//
// Prelude: RESULT.
#include "common/sums.cuh"

struct SumParams {
    const float* in;
    RESULT* out;
    long long first, second, row;  // strides, in elements
    int firsts, seconds, rows, columns;
};

struct SplitParams {
    const float* partial_key;
    const float* partial_value;
    const float* partial_bias;
    RESULT* dkey;
    RESULT* dvalue;
    float* dbias;
    long long size;
    int splits, rows, group, length;
};

extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_rows(const SumParams p) {
    wait_for_earlier_kernels();
    const long long index = static_cast<long long>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    if (index >= static_cast<long long>(p.rows) * p.columns) return;
    const float* in = p.in + index / p.columns * p.row + index % p.columns;
    from_float(p.out[index], sum_of(in, p.firsts, p.first, p.seconds, p.second));
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_all(const SumParams p) {
    wait_for_earlier_kernels();
    __shared__ SumsOfWarps sums;
    const float sum = sum_of_block(sums, p.in + blockIdx.x * p.row, p.firsts, p.first, p.columns);
    if (threadIdx.x == 0) from_float(p.out[blockIdx.x], sum);
}

struct alignas(4 * sizeof(RESULT)) Four {
    RESULT x[4];
};

// Writes the four numbers of this index and returns true. If out has fewer, returns false and counts index on from the
// end of out.
bool add_four(const float* in, RESULT* out, long long size, int splits, long long& index) {
    if (in == nullptr) return false;
    if (index >= size / 4) {
        index -= size / 4;
        return false;
    }
    double sums[4] = {};
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
        const float4 x = *reinterpret_cast<const float4*>(in + split * size + 4 * index);
        sums[0] += x.x;
        sums[1] += x.y;
        sums[2] += x.z;
        sums[3] += x.w;
    }
    Four rounded;
#pragma unroll
    for (int i = 0; i < 4; ++i) from_float(rounded.x[i], static_cast<float>(sums[i]));
    reinterpret_cast<Four*>(out)[index] = rounded;
    return true;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) add_splits(const SplitParams p) {
    wait_for_earlier_kernels();
    long long index = static_cast<long long>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    if (add_four(p.partial_key, p.dkey, p.size, p.splits, index)) return;
    if (add_four(p.partial_value, p.dvalue, p.size, p.splits, index)) return;
    if (p.partial_bias == nullptr || index >= static_cast<long long>(p.rows) * p.length) return;
    const long long row = static_cast<long long>(p.group) * p.length, all = p.rows * row;
    const float* in = p.partial_bias + index / p.length * row + index % p.length;
    p.dbias[index] = sum_of(in, p.splits, all, p.group, p.length);
}
