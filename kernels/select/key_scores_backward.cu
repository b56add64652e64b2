// Gradients of value and parameters, from the gradients ddt of a key's projection and dA_partial of the key alone:
//
// score_gradients      dvalue[b,j,c] = sum over h of ddt[b,h,j] * dt_proj[h,c]  (+ dvalue_in), c = g*D + d
//                      partial[s,h,c] = sum over the keys j of slice s of ddt[b,h,j] * value[b,j,c]
// add_score_gradients  ddt_proj[h,c] = sum over s of partial[s,h,c]
//                      dA[h], ddt_bias[h] = sum over b, j of dA_partial[b,h,j], ddt[b,h,j]
//
// ddt, dA_partial // (B, Hkv, Lk) f32, contiguous    value // (B, Lk, Hkv, D) VALUE, any batch, row and head strides
// dt_proj // (Hkv, Hkv * D) WEIGHT, any row stride; ddt_proj the same, contiguous    dA, ddt_bias // (Hkv) PARAMETER
// dvalue, dvalue_in // (B, Lk, Hkv, D) VALUE; dvalue is contiguous
// partial // (slices, Hkv, Hkv * D) f32, a slice being slice_keys keys of one batch entry
//
// A thread owns one channel c: of BLOCK_KEYS keys, or of the sums of a slice; or one sum over slices. A key whose ddt
// is 0 adds nothing, even if its value is NaN. Results that are not requested get no blocks.
//
// Prelude: VALUE, WEIGHT, PARAMETER, HEAD_DIM, KV_HEADS, HEAD_TILE (heads whose sums a thread keeps at a time).
#include "common/sums.cuh"

struct ScoreBackwardParams {
    const float* ddt;
    const float* dA_partial;
    const VALUE* value;
    const WEIGHT* dt_proj;
    const VALUE* dvalue_in;  // or null
    VALUE* dvalue;
    float* partial;
    WEIGHT* ddt_proj;
    PARAMETER* dA;        // or null
    PARAMETER* ddt_bias;  // or null
    long long value_batch, value_row, value_head;  // strides, in elements
    long long in_batch, in_row, in_head, weight_row;
    int batch, key_length, key_blocks, channel_blocks;
    int slice_keys, slices, all_slices;  // of a batch entry, of all
    int weight_blocks;                   // the first blocks: of partial, or of ddt_proj
};

constexpr int THREADS = SUM_THREADS;
constexpr int ALL_CHANNELS = KV_HEADS * HEAD_DIM;
constexpr int BLOCK_KEYS = 32;
constexpr int MAX_SLICE = 512;
constexpr int HEAD_ROW = HEAD_TILE > 4 ? 8 : HEAD_TILE > 2 ? 4 : HEAD_TILE;

struct alignas(4 * (HEAD_ROW > 4 ? 4 : HEAD_ROW)) Heads {  // of a key
    float x[HEAD_ROW];
};

union Shared {
    float by_head[HEAD_TILE][BLOCK_KEYS];
    Heads by_key[MAX_SLICE];
};

__device__ __forceinline__ float read_ddt(const ScoreBackwardParams& p, long long batch, int head, int key, bool exists) {
    return exists && head < KV_HEADS ? p.ddt[(batch * KV_HEADS + head) * p.key_length + key] : 0.0f;
}

__device__ __forceinline__ void value_gradient(Shared& shared, const ScoreBackwardParams& p, int block) {
    const int c = block % p.channel_blocks * THREADS + threadIdx.x;
    const int first_key = block / p.channel_blocks % p.key_blocks * BLOCK_KEYS;
    const long long batch = block / p.channel_blocks / p.key_blocks;
    const bool exists = c < ALL_CHANNELS;
    float accumulators[BLOCK_KEYS] = {};
    for (int head = 0; head < KV_HEADS; head += HEAD_TILE) {
        __syncthreads();  // all threads are done with the heads before
        for (int i = threadIdx.x; i < HEAD_TILE * BLOCK_KEYS; i += THREADS) {
            const int h = i / BLOCK_KEYS, k = i % BLOCK_KEYS, key = first_key + k;
            shared.by_head[h][k] = read_ddt(p, batch, head + h, key, key < p.key_length);
        }
        __syncthreads();  // ddt is in place
#pragma unroll
        for (int h = 0; h < HEAD_TILE; ++h) {
            const float w = exists && head + h < KV_HEADS ? to_float(p.dt_proj[(head + h) * p.weight_row + c]) : 0.0f;
#pragma unroll
            for (int k = 0; k < BLOCK_KEYS; ++k) accumulators[k] = fmaf(shared.by_head[h][k], w, accumulators[k]);
        }
    }
    if (!exists) return;
    if (p.dvalue_in != nullptr) {  // read everything before writing: a read would wait for the write before it
        const VALUE* in = p.dvalue_in + batch * p.in_batch + c / HEAD_DIM * p.in_head + c % HEAD_DIM;
        VALUE x[BLOCK_KEYS];
#pragma unroll
        for (int k = 0; k < BLOCK_KEYS; ++k) x[k] = in[min(first_key + k, p.key_length - 1) * p.in_row];
#pragma unroll
        for (int k = 0; k < BLOCK_KEYS; ++k) accumulators[k] += to_float(x[k]);
    }
    VALUE* out = p.dvalue + (batch * p.key_length + first_key) * ALL_CHANNELS + c;
#pragma unroll
    for (int k = 0; k < BLOCK_KEYS; ++k)
        if (first_key + k < p.key_length) from_float(out[k * ALL_CHANNELS], accumulators[k]);
}

__device__ __forceinline__ void weight_gradient(Shared& shared, const ScoreBackwardParams& p, int block) {
    const int c = block % p.channel_blocks * THREADS + threadIdx.x;
    const long long slice = block / p.channel_blocks, batch = slice / p.slices;
    const int first_key = static_cast<int>(slice % p.slices) * p.slice_keys;
    const int count = min(p.slice_keys, p.key_length - first_key);
    const int own = min(c, ALL_CHANNELS - 1);
    const VALUE* value = p.value + batch * p.value_batch + own / HEAD_DIM * p.value_head + own % HEAD_DIM;
    for (int head = 0; head < KV_HEADS; head += HEAD_TILE) {
        __syncthreads();  // all threads are done with the heads before
        for (int i = threadIdx.x; i < HEAD_ROW * p.slice_keys; i += THREADS) {
            const int h = i / p.slice_keys, k = i % p.slice_keys;
            shared.by_key[k].x[h] = read_ddt(p, batch, head + h, first_key + k, h < HEAD_TILE && k < count);
        }
        __syncthreads();  // ddt is in place
        float accumulators[HEAD_TILE] = {};
#pragma unroll 8
        for (int k = 0; k < count; ++k) {
            const float v = to_float(value[(first_key + k) * p.value_row]);
            const Heads ddt = shared.by_key[k];
#pragma unroll
            for (int h = 0; h < HEAD_TILE; ++h)
                if (ddt.x[h] != 0.0f) accumulators[h] = fmaf(ddt.x[h], v, accumulators[h]);
        }
#pragma unroll
        for (int h = 0; h < HEAD_TILE; ++h)
            if (c < ALL_CHANNELS && head + h < KV_HEADS)
                p.partial[(slice * KV_HEADS + head + h) * ALL_CHANNELS + c] = accumulators[h];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) score_gradients(const ScoreBackwardParams p) {
    wait_for_earlier_kernels();
    __shared__ Shared shared;
    const int block = static_cast<int>(blockIdx.x);
    if (block < p.weight_blocks)
        weight_gradient(shared, p, block);
    else
        value_gradient(shared, p, block - p.weight_blocks);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_score_gradients(const ScoreBackwardParams p) {
    wait_for_earlier_kernels();
    __shared__ SumsOfWarps sums;
    constexpr int WEIGHTS = KV_HEADS * ALL_CHANNELS;
    const int block = static_cast<int>(blockIdx.x), index = block * THREADS + threadIdx.x;
    if (block < p.weight_blocks) {
        if (index < WEIGHTS) from_float(p.ddt_proj[index], sum_of(p.partial + index, 1, 0, p.all_slices, WEIGHTS));
        return;
    }
    const int number = block - p.weight_blocks, head = number % KV_HEADS;
    const bool of_a = p.dA != nullptr && number < KV_HEADS;
    const long long entry = static_cast<long long>(KV_HEADS) * p.key_length;
    const float* in = (of_a ? p.dA_partial : p.ddt) + static_cast<long long>(head) * p.key_length;
    const float sum = sum_of_block(sums, in, p.batch, entry, p.key_length);
    if (threadIdx.x == 0) from_float((of_a ? p.dA : p.ddt_bias)[head], sum);
}
