// Scores by the norm of keys: keys with a small norm attract much attention, so they rank high.
//
//     score[b, h, j] = -sqrt(sum_d key[b, j, h, d]^2)
//
// key    // ELEMENT, (B, Lk, Hkv, HEAD_DIM), any strides but 1 for the last axis
// score  // f32, (B, Hkv, Lk), contiguous
//
// A warp owns a key: its lanes read the row side by side, add their squares, and lane 0 writes. A block has THREADS / 32
// warps, which share nothing.
//
// Prelude: ELEMENT, HEAD_DIM, THREADS.
#include "common/arch.cuh"

struct NormParams {
    const ELEMENT* key;
    float* score;
    long long key_batch, key_row, key_head;  // strides, in elements
    int kv_heads, key_length;
    long long rows;  // B * Hkv * Lk
};

extern "C" __global__ void __launch_bounds__(THREADS) key_norms(const NormParams p) {
    wait_for_earlier_kernels();  // the previous kernel may write key
    const int lane = threadIdx.x % 32;
    const long long row = static_cast<long long>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;  // whole warps: no lane misses the shuffles below
    const long long j = row % p.key_length, head = row / p.key_length % p.kv_heads;
    const long long batch = row / p.key_length / p.kv_heads;
    const ELEMENT* key = p.key + batch * p.key_batch + j * p.key_row + head * p.key_head;
    float sum = 0.0f;
#pragma unroll
    for (int d = lane; d < HEAD_DIM; d += 32) {
        const float x = to_float(key[d]);
        sum += x * x;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (lane == 0) p.score[row] = -sqrtf(sum);
}
