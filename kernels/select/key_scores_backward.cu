// What the gradient ddt of a key's projection carries on to the values and the projection:
//
// value_gradient   dvalue[b,j,c] = sum over h of ddt[b,h,j] * dt_proj[h,c]  (+ what dvalue_in holds), c = g*D + d
// weight_gradient  partial[s,h,c] = sum over the keys j of slice s of ddt[b,h,j] * value[b,j,c]; the host adds the slices
//
// ddt     // (B, Hkv, Lk) f32, contiguous        value   // (B, Lk, Hkv, D) VALUE, any batch, row and head strides
// dt_proj // (Hkv, Hkv * D) WEIGHT               dvalue, dvalue_in // (B, Lk, Hkv, D) VALUE; dvalue is contiguous
// partial // (slices, Hkv, Hkv * D) f32, a slice being SLICE_KEYS keys of one batch entry
//
// A thread owns one channel c: of BLOCK_KEYS keys, or of the sums of a slice. A key whose ddt is 0 adds nothing,
// whatever its value holds.
//
// Prelude: VALUE, WEIGHT, HEAD_DIM, KV_HEADS, HEAD_TILE (heads whose sums a thread keeps at a time).
#include "common/arch.cuh"

struct ScoreBackwardParams {
    const float* ddt;
    const VALUE* value;
    const WEIGHT* dt_proj;
    const VALUE* dvalue_in;  // or null
    VALUE* dvalue;
    float* partial;
    long long value_batch, value_row, value_head;  // strides, in elements
    long long in_batch, in_row, in_head, weight_row;
    int key_length, key_blocks, channel_blocks;
};

constexpr int THREADS = 256;
constexpr int ALL_CHANNELS = KV_HEADS * HEAD_DIM;
constexpr int BLOCK_KEYS = 32;
constexpr int SLICE_KEYS = 512;

extern "C" __global__ void __launch_bounds__(THREADS) value_gradient(const ScoreBackwardParams p) {
    wait_for_earlier_kernels();
    __shared__ float ddt[HEAD_TILE][BLOCK_KEYS];
    const int c = blockIdx.x % p.channel_blocks * THREADS + threadIdx.x;
    const int first_key = blockIdx.x / p.channel_blocks % p.key_blocks * BLOCK_KEYS;
    const long long batch = blockIdx.x / p.channel_blocks / p.key_blocks;
    const bool exists = c < ALL_CHANNELS;
    float accumulators[BLOCK_KEYS] = {};
    for (int head = 0; head < KV_HEADS; head += HEAD_TILE) {
        __syncthreads();  // all threads are done with the heads before
        for (int i = threadIdx.x; i < HEAD_TILE * BLOCK_KEYS; i += THREADS) {
            const int h = head + i / BLOCK_KEYS, key = first_key + i % BLOCK_KEYS;
            ddt[i / BLOCK_KEYS][i % BLOCK_KEYS] =
                h < KV_HEADS && key < p.key_length ? p.ddt[(batch * KV_HEADS + h) * p.key_length + key] : 0.0f;
        }
        __syncthreads();  // ddt is in place
#pragma unroll
        for (int h = 0; h < HEAD_TILE; ++h) {
            const float w = exists && head + h < KV_HEADS ? to_float(p.dt_proj[(head + h) * p.weight_row + c]) : 0.0f;
#pragma unroll
            for (int k = 0; k < BLOCK_KEYS; ++k) accumulators[k] = fmaf(ddt[h][k], w, accumulators[k]);
        }
    }
    if (!exists) return;
    const VALUE* in = p.dvalue_in + batch * p.in_batch + c / HEAD_DIM * p.in_head + c % HEAD_DIM;
#pragma unroll
    for (int k = 0; k < BLOCK_KEYS; ++k) {
        const long long key = first_key + k;
        if (key >= p.key_length) continue;
        if (p.dvalue_in != nullptr) accumulators[k] += to_float(in[key * p.in_row]);
        from_float(p.dvalue[(batch * p.key_length + key) * ALL_CHANNELS + c], accumulators[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) weight_gradient(const ScoreBackwardParams p) {
    wait_for_earlier_kernels();
    __shared__ float ddt[HEAD_TILE][SLICE_KEYS];
    const int c = blockIdx.x % p.channel_blocks * THREADS + threadIdx.x;
    const long long slice = blockIdx.x / p.channel_blocks, batch = slice / p.key_blocks;
    const int first_key = static_cast<int>(slice % p.key_blocks) * SLICE_KEYS;
    const int count = min(SLICE_KEYS, p.key_length - first_key);
    const int own = min(c, ALL_CHANNELS - 1);
    const VALUE* value = p.value + batch * p.value_batch + own / HEAD_DIM * p.value_head + own % HEAD_DIM;
    for (int head = 0; head < KV_HEADS; head += HEAD_TILE) {
        __syncthreads();  // all threads are done with the heads before
        for (int i = threadIdx.x; i < HEAD_TILE * SLICE_KEYS; i += THREADS) {
            const int h = head + i / SLICE_KEYS, k = i % SLICE_KEYS;
            ddt[i / SLICE_KEYS][k] =
                h < KV_HEADS && k < count ? p.ddt[(batch * KV_HEADS + h) * p.key_length + first_key + k] : 0.0f;
        }
        __syncthreads();  // ddt is in place
        float accumulators[HEAD_TILE] = {};
#pragma unroll 8
        for (int k = 0; k < count; ++k) {
            const float v = to_float(value[(first_key + k) * p.value_row]);
#pragma unroll
            for (int h = 0; h < HEAD_TILE; ++h)
                if (ddt[h][k] != 0.0f) accumulators[h] = fmaf(ddt[h][k], v, accumulators[h]);
        }
#pragma unroll
        for (int h = 0; h < HEAD_TILE; ++h)
            if (c < ALL_CHANNELS && head + h < KV_HEADS)
                p.partial[(slice * KV_HEADS + head + h) * ALL_CHANNELS + c] = accumulators[h];
    }
}
