// dquery = scale * its float32 sums, which sm90/backward_dkv.cu has made with DQUERY; a CTA a unit of queries of one head. A
// row that sees nothing gets zeros.
//
// Prelude: as sm90/backward_dkv.cu.
#include "sm90/backward_dkv_tiles.cuh"

constexpr int POSTPROCESS_THREADS = 256;

extern "C" __global__ void __launch_bounds__(POSTPROCESS_THREADS) backward_dq_postprocess(
    const __grid_constant__ BackwardDkvParams launch) {
    wait_for_earlier_kernels();
    constexpr int PIECES = (HEAD_DIM + 7) / 8;
    __shared__ uint4 rows[UNIT_QUERIES][8 * CHUNKS + 1];  // 8 elements each; the odd width spreads rows over the banks
    const AttentionParams& p = launch.attention;
    const int unit = blockIdx.x % launch.query_units, head_row = blockIdx.x / launch.query_units;
#if SEQUENCES
    const RowTile queries = row_tile(p.bounds, p.bounds + p.sequences, p.sequences, UNIT_QUERIES, unit);
    const int first = queries.first, end = queries.end;
#else
    const int first = unit * UNIT_QUERIES, end = min(first + UNIT_QUERIES, p.query_length);
#endif
    if (first >= end) return;
    const float4* sums = reinterpret_cast<const float4*>(launch.dquery_sums + (long long)blockIdx.x * DQ_UNIT);
#pragma unroll
    for (int i = threadIdx.x; i < DQ_UNIT / 4; i += POSTPROCESS_THREADS) {
        const float4 x = __ldcs(sums + i);  // of rows r and r + 8, as add_dq has them
        const int r = i % 128 / 32 * 16 + i % 32 / 4, pair = i / 128 * 4 + i % 4;
        reinterpret_cast<unsigned*>(rows[r])[pair] = pack_pair(x.x * p.scale, x.y * p.scale);
        reinterpret_cast<unsigned*>(rows[r + 8])[pair] = pack_pair(x.z * p.scale, x.w * p.scale);
    }
    __syncthreads();
    const long long batch = head_row / p.heads, head = head_row % p.heads;
#pragma unroll
    for (int i = threadIdx.x; i < UNIT_QUERIES * PIECES; i += POSTPROCESS_THREADS) {
        const int row = i / PIECES, query = first + row;
        if (query >= end) continue;
        const bool sees = p.lse[(long long)head_row * p.query_length + query] != -infinity();
        *reinterpret_cast<uint4*>(p.dquery + ((batch * p.query_length + query) * p.heads + head) * HEAD_DIM + i % PIECES * 8) =
            sees ? rows[row][i % PIECES] : make_uint4(0, 0, 0, 0);
    }
}
