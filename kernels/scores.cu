// Key scores: score[b,h,j] = exp(A[h] * softplus(dt)) or A[h] * softplus(dt),
//             dt = sum over (g, d) of value[b,j,g,d] * dt_proj[h, g*D + d]  (+ dt_bias[h]).
//
// With GRADIENT, instead of the scores, from their gradient dscore:
//             ddt = dscore * d score / d dt,  dA_part = dscore * d score / d A[h] of this key alone;
// both are 0 where dscore is 0, whatever the value holds (nobody saw the key).
//
// value    // (B, Lk, Hkv, D) VALUE, any batch, row and head strides
// dt_proj  // (Hkv, Hkv * D) WEIGHT, any row stride      A, dt_bias // (Hkv) f32
// score, dscore, ddt, dA_part // (B, Hkv, Lk) f32, contiguous; accumulated in float32
//
// A block owns BLOCK_KEYS keys and HEAD_TILE heads, whose weights pass through shared memory CHANNELS at a time (all at
// once, and once per block, where there are no more than that). A warp takes 32 / HEAD_TILE keys a round; its lanes
// share the channels, keep one partial sum per key and head, and are summed so that every lane ends with one finished
// (key, head), which it writes.
//
// Prelude: VALUE, WEIGHT, HEAD_DIM, KV_HEADS, HEAD_TILE (1, 2, 4 or 8), VECTOR (4 numbers a load, else 1), EXP_FORM,
// GRADIENT.
#include "arch.cuh"

struct ScoreParams {
    const VALUE* value;
    const WEIGHT* dt_proj;
    const float* A;
    const float* dt_bias;  // or null
    float* score;
    const float* dscore;  // GRADIENT
    float* ddt;
    float* dA_part;
    long long value_batch, value_row, value_head;  // strides, in elements
    long long weight_row;
    int key_length, key_blocks, head_tiles;
};

constexpr int WARPS = 8;
constexpr int KEYS = 32 / HEAD_TILE;  // of a warp at a time
constexpr int ROUNDS = HEAD_TILE == 8 ? 4 : 1;
constexpr int BLOCK_KEYS = WARPS * KEYS * ROUNDS;
constexpr int WIDTH = VECTOR ? 4 : 1;
constexpr int ALL_CHANNELS = KV_HEADS * HEAD_DIM;
constexpr int UNROLL = ALL_CHANNELS > 128 ? 2 : 1;
constexpr int CHANNELS = ALL_CHANNELS < 1024 ? (ALL_CHANNELS + 3) / 4 * 4 : 1024;

struct alignas(4 * sizeof(VALUE)) Four {
    VALUE x[4];
};

// Sums 2 * half values over the warp, half of them in each half of the lanes; after the call with half = 16 lane i holds
// the sum of every lane's values[i] in values[0].
template <int half>
__device__ __forceinline__ void transpose_sum(float (&values)[32]) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
        const float sent = upper ? values[i] : values[i + half], kept = upper ? values[i + half] : values[i];
        values[i] = kept + __shfl_xor_sync(ALL_LANES, sent, half);
    }
    if constexpr (half > 1) transpose_sum<half / 2>(values);
}

__device__ __forceinline__ void load_weights(float (&weights)[HEAD_TILE][CHANNELS], const ScoreParams& p, int first_head,
                                             int base, int count) {
    __syncthreads();  // everybody is done with the weights of the channels before
#pragma unroll
    for (int h = 0; h < HEAD_TILE; ++h) {
        const WEIGHT* row = p.dt_proj + min(first_head + h, KV_HEADS - 1) * p.weight_row + base;
        for (int c = threadIdx.x; c < count; c += WARPS * 32) weights[h][c] = to_float(row[c]);
    }
    __syncthreads();  // the weights are in place
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) key_scores(const ScoreParams p) {
    __shared__ __align__(16) float weights[HEAD_TILE][CHANNELS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int batch = blockIdx.x / p.head_tiles / p.key_blocks, first_head = blockIdx.x % p.head_tiles * HEAD_TILE;
    const int first_key = blockIdx.x / p.head_tiles % p.key_blocks * BLOCK_KEYS + warp * KEYS * ROUNDS;
    const VALUE* values = p.value + batch * p.value_batch;
    const int head = first_head + lane % HEAD_TILE;

    if (ALL_CHANNELS <= CHANNELS) load_weights(weights, p, first_head, 0, ALL_CHANNELS);
    for (int round = 0; round < ROUNDS; ++round) {
        float sums[32] = {};
        for (int base = 0; base < ALL_CHANNELS; base += CHANNELS) {
            const int count = min(CHANNELS, ALL_CHANNELS - base);
            if (ALL_CHANNELS > CHANNELS) load_weights(weights, p, first_head, base, count);
#pragma unroll UNROLL
            for (int c = lane * WIDTH; c < count; c += 32 * WIDTH) {
                const VALUE* column = values + (base + c) / HEAD_DIM * p.value_head + (base + c) % HEAD_DIM;
                float x[KEYS][WIDTH];
#pragma unroll
                for (int k = 0; k < KEYS; ++k) {  // keys past the end are read as the last one and not written
                    const VALUE* element = column + min(first_key + round * KEYS + k, p.key_length - 1) * p.value_row;
#if VECTOR
                    const Four four = *reinterpret_cast<const Four*>(element);
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[k][i] = to_float(four.x[i]);
#else
                    x[k][0] = to_float(*element);
#endif
                }
#pragma unroll
                for (int h = 0; h < HEAD_TILE; ++h) {
                    float w[WIDTH];
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) w[i] = weights[h][c + i];
#pragma unroll
                    for (int k = 0; k < KEYS; ++k)
#pragma unroll
                        for (int i = 0; i < WIDTH; ++i)
                            sums[k * HEAD_TILE + h] = fmaf(x[k][i], w[i], sums[k * HEAD_TILE + h]);
                }
            }
        }
        transpose_sum<16>(sums);
        const int key = first_key + round * KEYS + lane / HEAD_TILE;
        if (key >= p.key_length || head >= KV_HEADS) continue;
        const float dt = sums[0] + (p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f);
        const float softplus = dt > 20.0f ? dt : log1pf(expf(dt));  // e^-20 is below half a unit in the last place
        const float linear = p.A[head] * softplus;
        const long long place = ((long long)batch * KV_HEADS + head) * p.key_length + key;
#if GRADIENT
        const float dscore = p.dscore[place];
        const float dlinear = EXP_FORM ? dscore * expf(linear) : dscore;
        p.ddt[place] = dscore == 0.0f ? 0.0f : dlinear * p.A[head] / (1.0f + expf(-dt));
        p.dA_part[place] = dscore == 0.0f ? 0.0f : dlinear * softplus;
#else
        p.score[place] = EXP_FORM ? expf(linear) : linear;
#endif
    }
}
