// The two MMAs (GEMMs) of a block on the tensor cores: S = Q K^T and O += P V, by a warpgroup for its 64 rows of the tile.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"

using Queries = unsigned[QUERIES_KEPT ? DIM_FRAGMENTS : 1][4];  // a warp's queries as operands

// s = q . k^T, or s += q . k^T (BIAS_FIRST), with queries in registers or in shared memory.
__device__ __forceinline__ void mma_qk(Fragment (&s)[KEY_FRAGMENTS], Queries& kept, const ELEMENT* query,
                                       const ELEMENT* key) {
    const unsigned a = matrix_descriptor(query, 0), b = matrix_descriptor(key, 0);
    pin(s);
    if (QUERIES_KEPT) pin(kept);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        const int chunk = d / 4, step = d % 4 * 32;
        const unsigned keys = moved(b, chunk * BLOCK_N * CHUNK_ROW_BYTES + step);
        const bool add = d > 0 || BIAS_FIRST;
        if (QUERIES_KEPT)
            Wgmma<KEY_FRAGMENTS>::multiply<Major::K>(s, kept[QUERIES_KEPT ? d : 0], keys, add);
        else
            Wgmma<KEY_FRAGMENTS>::multiply<Major::K, Major::K>(
                s, moved(a, chunk * BLOCK_M * CHUNK_ROW_BYTES + step), keys, add);
    }
    wgmma_commit();
}

// o += p . v for 16 keys, in MMAs of at most 128 columns; without `add` o = p . v.
template <int first>
__device__ __forceinline__ void mma_pv_columns(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&a)[4], unsigned value,
                                               bool add) {
    if constexpr (first < DIM_FRAGMENTS) {
        constexpr int REST = DIM_FRAGMENTS - first;
        constexpr int SIZE = REST >= 8 ? 8 : REST == 6 ? 6 : REST >= 4 ? 4 : REST >= 2 ? 2 : 1;
        Wgmma<SIZE>::template multiply<Major::MN>(
            &o[first], a, moved(value, first / 4 * BLOCK_N * CHUNK_ROW_BYTES + first % 4 * 32), add);
        mma_pv_columns<first + SIZE>(o, a, value, add);
    }
}

// The same for the first `fragments` key fragments of a block, as one group of MMAs.
template <int fragments>
__device__ __forceinline__ void mma_pv_fragments(Fragment (&o)[DIM_FRAGMENTS],
                                                 const unsigned (&probability)[KEY_FRAGMENTS][4], unsigned value, bool add) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < fragments; ++n)
        mma_pv_columns<0>(o, probability[n], moved(value, n * 16 * CHUNK_ROW_BYTES), n > 0 || add);
    wgmma_commit();
}

// o += p . v for a block. The branch lies outside the groups, because the compiler treats a group with a branch inside
// as several groups.
__device__ __forceinline__ void mma_pv(Fragment (&o)[DIM_FRAGMENTS], unsigned (&probability)[KEY_FRAGMENTS][4],
                                       const ELEMENT* value, bool is_short, bool add) {
    const unsigned b = matrix_descriptor(value, BLOCK_N * CHUNK_ROW_BYTES);
    pin(o);
    pin(probability);
    if (SHORT_BLOCK && is_short)
        mma_pv_fragments<SHORT_BLOCK_FRAGMENTS>(o, probability, b, add);
    else
        mma_pv_fragments<KEY_FRAGMENTS>(o, probability, b, add);
}
