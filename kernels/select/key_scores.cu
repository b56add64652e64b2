// Key scores: score[b,h,j] = exp(A[h] * softplus(dt)) or A[h] * softplus(dt),
//             dt = sum over (g, d) of value[b,j,g,d] * dt_proj[h, g*D + d]  (+ dt_bias[h]).
//
// With GRADIENT, computes from the scores' gradient dscore instead:
//             ddt = dscore * d score / d dt,  dA_partial = dscore * d score / d A[h] of this key alone;
// both are 0 where dscore is 0, even if the value is NaN (no query saw the key).
//
// value    // (B, Lk, Hkv, D) VALUE, any batch, row and head strides
// dt_proj  // (Hkv, Hkv * D) WEIGHT, any row stride      A, dt_bias // (Hkv) PARAMETER
// score, dscore, ddt, dA_partial // (B, Hkv, Lk) f32, contiguous; accumulated in float32
//
// With TENSOR_CORES (16-bit elements of one type, in rows of aligned 16 bytes) a warp multiplies 16 keys by all heads'
// weights on the tensor cores, without barriers. It rereads only the weights, so the bytes of the values bound it. The
// order of channels in a sum does not matter: those of a step are assigned so that a lane has 8 consecutive ones.
//
// Otherwise a block owns BLOCK_KEYS keys and HEAD_TILE heads, whose weights pass through shared memory CHANNELS at a
// time (once per block if that is all of them). A warp takes 32 / HEAD_TILE keys per round; its lanes share the
// channels, keep one partial sum per key and head, and are summed so that every lane ends with one finished (key,
// head), which it writes.
//
// Prelude: VALUE, WEIGHT, PARAMETER, HEAD_DIM, KV_HEADS, HEAD_TILE (1, 2, 4 or 8), VECTOR (4 numbers a load, else 1),
// EXP_FORM, GRADIENT, TENSOR_CORES.
#include "common/arch.cuh"

struct ScoreParams {
    const VALUE* value;
    const WEIGHT* dt_proj;
    const PARAMETER* A;
    const PARAMETER* dt_bias;  // or null
    float* score;
    const float* dscore;  // GRADIENT
    float* ddt;
    float* dA_partial;
    long long value_batch, value_row, value_head;  // strides, in elements
    long long weight_row;
    int key_length, key_blocks, head_tiles;
};

constexpr int WARPS = 8;
constexpr int ALL_CHANNELS = KV_HEADS * HEAD_DIM;

// For key `key` and head `head`, whose dt is complete except for the bias.
__device__ __forceinline__ void write_score(const ScoreParams& p, int batch, int head, int key, float sum) {
    const float dt = sum + (p.dt_bias != nullptr ? to_float(p.dt_bias[head]) : 0.0f);
    const float softplus = dt > 20.0f ? dt : log1pf(expf(dt));  // e^-20 is below half a unit in the last place
    const float a = to_float(p.A[head]), linear = a * softplus;
    const long long index = ((long long)batch * KV_HEADS + head) * p.key_length + key;
#if GRADIENT
    const float dscore = p.dscore[index];
    const float dlinear = EXP_FORM ? dscore * expf(linear) : dscore;
    p.ddt[index] = dscore == 0.0f ? 0.0f : dlinear * a / (1.0f + expf(-dt));
    p.dA_partial[index] = dscore == 0.0f ? 0.0f : dlinear * softplus;
#else
    p.score[index] = EXP_FORM ? expf(linear) : linear;
#endif
}

#if TENSOR_CORES
constexpr int BLOCK_KEYS = WARPS * 16;
constexpr int HEAD_TILES = (KV_HEADS + 7) / 8;
constexpr int PIECES = ALL_CHANNELS / 8;  // of 16 bytes
constexpr int STEPS = HEAD_TILES > 1 ? 2 : 4;  // of 32 channels, whose loads are in flight together

__device__ __forceinline__ void score_keys(const ScoreParams& p) {
    const int lane = threadIdx.x & 31, group = lane / 4, own = lane % 4;
    const int batch = blockIdx.x / p.key_blocks;
    const int first_key = blockIdx.x % p.key_blocks * BLOCK_KEYS + threadIdx.x / 32 * 16;
    if (first_key >= p.key_length) return;
    const VALUE* values = p.value + batch * p.value_batch;
    const VALUE* row[2];
    const WEIGHT* weight[HEAD_TILES];
#pragma unroll
    for (int r = 0; r < 2; ++r)  // keys past the end are read as the last one and not written; heads likewise
        row[r] = values + min(first_key + group + 8 * r, p.key_length - 1) * p.value_row;
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) weight[h] = p.dt_proj + min(8 * h + group, KV_HEADS - 1) * p.weight_row;

    float accumulators[HEAD_TILES][4] = {};
#pragma unroll 1
    for (int first = own; first < PIECES + own; first += 4 * STEPS) {
        // A tensor core truncates its sums, so it sums short stretches only.
        float partial[2][HEAD_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int piece = first + 4 * step, channel = piece * 8;
            const long long index = channel / HEAD_DIM * p.value_head + channel % HEAD_DIM;
            uint4 x[2] = {}, w[HEAD_TILES] = {};
            if (PIECES % (4 * STEPS) == 0 || piece < PIECES) {
#pragma unroll
                for (int r = 0; r < 2; ++r) x[r] = *reinterpret_cast<const uint4*>(row[r] + index);
#pragma unroll
                for (int h = 0; h < HEAD_TILES; ++h) w[h] = *reinterpret_cast<const uint4*>(weight[h] + channel);
            }
            const unsigned a[2][4] = {{x[0].x, x[1].x, x[0].y, x[1].y}, {x[0].z, x[1].z, x[0].w, x[1].w}};
#pragma unroll
            for (int h = 0; h < HEAD_TILES; ++h) {
                const unsigned b[2][2] = {{w[h].x, w[h].y}, {w[h].z, w[h].w}};
                multiply_add_half(partial[0][h], a[0], b[0], p.value);
                multiply_add_half(partial[1][h], a[1], b[1], p.value);
            }
        }
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
            for (int i = 0; i < 4; ++i) accumulators[h][i] += partial[0][h][i] + partial[1][h][i];
    }
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = 8 * h + 2 * own + i % 2, key = first_key + group + i / 2 * 8;
            if (head < KV_HEADS && key < p.key_length) write_score(p, batch, head, key, accumulators[h][i]);
        }
}
#else
constexpr int KEYS = 32 / HEAD_TILE;  // per warp and round
constexpr int ROUNDS = HEAD_TILE == 8 ? 4 : 1;
constexpr int BLOCK_KEYS = WARPS * KEYS * ROUNDS;
constexpr int WIDTH = VECTOR ? 4 : 1;
constexpr int UNROLL = ALL_CHANNELS > 128 ? 2 : 1;
constexpr int CHANNELS = ALL_CHANNELS < 1024 ? (ALL_CHANNELS + 3) / 4 * 4 : 1024;
using Weights = float[HEAD_TILE][CHANNELS];

struct alignas(4 * sizeof(VALUE)) Four {
    VALUE x[4];
};

// Sums 2 * half values over the warp, half of them in each half of the lanes; after the call with half = 16, values[0]
// of lane i is the sum of all lanes' values[i].
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

__device__ __forceinline__ void load_weights(Weights& weights, const ScoreParams& p, int first_head, int base, int count) {
    __syncthreads();  // all threads are done with the weights of the channels before
#pragma unroll
    for (int h = 0; h < HEAD_TILE; ++h) {
        const WEIGHT* row = p.dt_proj + min(first_head + h, KV_HEADS - 1) * p.weight_row + base;
        for (int c = threadIdx.x; c < count; c += WARPS * 32) weights[h][c] = to_float(row[c]);
    }
    __syncthreads();  // the weights are in place
}

__device__ __forceinline__ void score_keys(const ScoreParams& p, Weights& weights) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int batch = blockIdx.x / p.head_tiles / p.key_blocks, first_head = blockIdx.x % p.head_tiles * HEAD_TILE;
    const int first_key = blockIdx.x / p.head_tiles % p.key_blocks * BLOCK_KEYS + warp * KEYS * ROUNDS;
    const VALUE* values = p.value + batch * p.value_batch;
    const int head = first_head + lane % HEAD_TILE;

    if (ALL_CHANNELS <= CHANNELS) load_weights(weights, p, first_head, 0, ALL_CHANNELS);
    for (int round = 0; round < ROUNDS; ++round) {
        float accumulators[32] = {};
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
                            accumulators[k * HEAD_TILE + h] = fmaf(x[k][i], w[i], accumulators[k * HEAD_TILE + h]);
                }
            }
        }
        transpose_sum<16>(accumulators);
        const int key = first_key + round * KEYS + lane / HEAD_TILE;
        if (key < p.key_length && head < KV_HEADS) write_score(p, batch, head, key, accumulators[0]);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) key_scores(const ScoreParams p) {
    wait_for_earlier_kernels();
#if TENSOR_CORES
    score_keys(p);
#else
    __shared__ __align__(16) Weights weights;
    score_keys(p, weights);
#endif
}
