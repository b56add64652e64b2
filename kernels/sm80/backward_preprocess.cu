// delta_i = sum over d of dout[i,d] * out[i,d]  (- dlse_i); 0 for a row that sees nothing. This is the first kernel of the
// backward pass, so it also clears what later ones add to.
//
// dout, out // (B, Lq, H, D) ELEMENT, any strides    delta, dlse // (B, H, Lq) f32
// zeros // 16 bytes each
//
// A warp sums QUERIES rows of one head, whose loads are all in flight at once; the warps of neighboring heads run side
// by side.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR (four elements are read at a time).
#include "common/arch.cuh"
#include "common/params.cuh"

constexpr int WARPS = 8, QUERIES = 8;
constexpr int STEP = VECTOR ? 4 : 1;                                           // elements that a lane reads at a time
constexpr int LANES = HEAD_DIM > 16 * STEP ? 32 : HEAD_DIM > 8 * STEP ? 16 : 8;  // of a row
constexpr int GROUPS = 32 / LANES;                                             // rows at a time

struct alignas(STEP * sizeof(ELEMENT)) Piece {
    ELEMENT x[STEP];
};

struct PreprocessParams {
    AttentionParams attention;
    uint4* zeros;
    long long zero_count;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) backward_preprocess(const PreprocessParams launch) {
    wait_for_earlier_kernels();
    const AttentionParams& p = launch.attention;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < launch.zero_count;
         i += (long long)gridDim.x * blockDim.x)
        launch.zeros[i] = make_uint4(0, 0, 0, 0);
    const int lane = threadIdx.x & 31;
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;  // (b, step of queries, h), heads running fastest
    const unsigned steps = (p.query_length + QUERIES - 1) / QUERIES, batch_step = warp / p.heads;
    const int head = warp % p.heads, first = batch_step % steps * QUERIES;
    const long long batch = batch_step / steps;
    if (batch >= p.batch) return;
    const long long target = (batch * p.heads + head) * p.query_length + first + lane;
    const bool writes = lane < QUERIES && first + lane < p.query_length;
    float lse = 0.0f, dlse = 0.0f;  // loaded before the sums, whose latency hides theirs
    if (writes) {
        lse = p.lse[target];
        if (p.dlse != nullptr) dlse = p.dlse[target];
    }
    const ELEMENT* out = p.out + batch * p.out_batch + head * p.out_head;
    const ELEMENT* dout = p.dout + batch * p.dout_batch + head * p.dout_head;
    float sums[QUERIES / GROUPS] = {};
    for (int d = STEP * (lane % LANES); d < HEAD_DIM; d += STEP * LANES) {
#pragma unroll
        for (int r = 0; r < QUERIES / GROUPS; ++r) {
            const long long query = min(first + r * GROUPS + lane / LANES, p.query_length - 1);
            const Piece a = *reinterpret_cast<const Piece*>(out + query * p.out_row + d);
            const Piece b = *reinterpret_cast<const Piece*>(dout + query * p.dout_row + d);
#pragma unroll
            for (int i = 0; i < STEP; ++i) sums[r] = fmaf(to_float(a.x[i]), to_float(b.x[i]), sums[r]);
        }
    }
    float sum = 0.0f;  // of the query first + lane
#pragma unroll
    for (int r = 0; r < QUERIES / GROUPS; ++r) {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance >>= 1)
            sums[r] += __shfl_xor_sync(ALL_LANES, sums[r], distance);
        const float found = __shfl_sync(ALL_LANES, sums[r], lane % GROUPS * LANES);
        if (lane / GROUPS == r) sum = found;
    }
    if (writes) p.delta[target] = lse == -infinity() ? 0.0f : sum - dlse;
}
