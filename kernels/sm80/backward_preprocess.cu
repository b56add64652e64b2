// delta_i = sum over d of dout[i,d] * out[i,d]  (- dlse_i), one row per warp; 0 for a row that sees nothing. This is
// the first kernel of the backward pass, so it also clears what later ones add to.
//
// dout, out // (B, Lq, H, D) ELEMENT, any strides    delta, dlse // (B, H, Lq) f32
// zeros // 16 bytes each
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR (four elements are read at a time).
#include "common/arch.cuh"
#include "common/params.cuh"

constexpr int WARPS = 8;

struct alignas(4 * sizeof(ELEMENT)) Four {
    ELEMENT x[4];
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
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;  // (b, i, h), heads running fastest
    const int lane = threadIdx.x & 31;
    if (row >= (long long)p.batch * p.query_length * p.heads) return;
    const unsigned index = static_cast<unsigned>(row), batch_row = index / p.heads;  // 2^32 rows fit no GPU
    const int head = index % p.heads, query = batch_row % p.query_length;
    const long long batch = batch_row / p.query_length;
    const long long target = (batch * p.heads + head) * p.query_length + query;
    const float lse = p.lse[target], dlse = p.dlse != nullptr ? p.dlse[target] : 0.0f;  // not behind the sum's latency
    const ELEMENT* out = p.out + batch * p.out_batch + query * p.out_row + head * p.out_head;
    const ELEMENT* dout = p.dout + batch * p.dout_batch + query * p.dout_row + head * p.dout_head;
    float sum = 0.0f;
#if VECTOR
    for (int d = 4 * lane; d < HEAD_DIM; d += 128) {
        const Four a = *reinterpret_cast<const Four*>(out + d), b = *reinterpret_cast<const Four*>(dout + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(to_float(a.x[i]), to_float(b.x[i]), sum);
    }
#else
    for (int d = lane; d < HEAD_DIM; d += 32) sum = fmaf(to_float(out[d]), to_float(dout[d]), sum);
#endif
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (lane != 0) return;
    p.delta[target] = lse == -infinity() ? 0.0f : sum - dlse;
}
