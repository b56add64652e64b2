// A tile's epilogue: out and lse from a warp's accumulators to global memory.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/smem.cuh"
#include "sm90/softmax.cuh"

#if OUT_TMA
// Starts the TMA store of this warp's 16 rows of out, which it has written to `staging`.
__device__ __forceinline__ void copy_rows(const ForwardParams& launch, const Output& t, const ELEMENT* staging,
                                          int first_row) {
    shared_write_fence();
    __syncwarp();
    if (lane_now() != 0) return;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        tma_store(&launch.out, staging + (chunk * BLOCK_M + first_row) * CHUNK_COLUMNS, chunk * CHUNK_COLUMNS, t.first_head,
                  t.first_query + first_row / HEADS, t.batch);
    bulk_commit();
}
#else
// Row `row` of a tile's output, which starts at `first`: query by query, within a query head by head.
__device__ __forceinline__ ELEMENT* row_of_output(ELEMENT* first, int row, int query_bytes) {
    const void* address = row_address(first + row % HEADS * HEAD_DIM, row / HEADS, query_bytes);
    return const_cast<ELEMENT*>(static_cast<const ELEMENT*>(address));
}

// Stores this warp's 16 rows of out, which it has written to `staging`.
__device__ __forceinline__ void copy_rows(const ForwardParams& launch, const Output& t, ELEMENT* staging, int first_row) {
    const AttentionParams& p = launch.attention;
    const int lane = lane_now();
    __syncwarp();  // the warp's rows are complete
    constexpr int STEP = 32 / ROW_LANES, COPIES = 16 / STEP;
    constexpr bool REGULAR = 16 % HEADS == 0;  // a lane's rows are equally far apart in all lanes and warps
    const int piece = lane % ROW_LANES, own = lane / ROW_LANES;
    ELEMENT* target =
        p.out + (((long long)t.batch * p.query_length + t.first_query) * p.heads + t.first_head) * HEAD_DIM + piece * 8;
    const int query_bytes = p.heads * HEAD_DIM * static_cast<int>(sizeof(ELEMENT));
    if (REGULAR) target = row_of_output(target, first_row + own, query_bytes);
    // Lanes without a piece read the last one: beyond it another tile's rows may be arriving.
    const unsigned first_piece = shared_address(piece_of<BLOCK_M>(staging, first_row + own, min(piece, ROW_PIECES - 1)));
    uint4 pieces[COPIES];
#pragma unroll
    for (int k = 0; k < COPIES; ++k)
        pieces[k] = load_shared_16((first_piece ^ k * STEP % 8 * 16) + k * STEP * CHUNK_ROW_BYTES);
#pragma unroll
    for (int k = 0; k < COPIES; ++k) {
        ELEMENT* address = row_of_output(target, REGULAR ? k * STEP : first_row + k * STEP + own, query_bytes);
        if (piece * 8 < HEAD_DIM && first_row + k * STEP + own < t.rows)
            __stcg(reinterpret_cast<uint4*>(address), pieces[k]);
    }
}
#endif

// Writes this warp's 16 rows of out and lse, staged in the tile's own query rows, which are no longer needed. Uses few
// instructions: it runs once per tile, so each one has to be fetched. `nonfinite_seen` becomes 1 if a value of the
// tile's keys is NaN or infinite: then 0 times it is NaN, every row has such an output in that column, and checking one
// of a lane's two rows is enough. If exponentials may be large (LARGE), a single row may overflow too.
__device__ __forceinline__ void epilogue(const ForwardParams& launch, const Output& output, ELEMENT* staging, int first_row,
                                         const Fragment (&o)[DIM_FRAGMENTS], OnlineSoftmax& softmax, int& nonfinite_seen) {
    const Output t = output;  // a copy: nothing is read ahead of the stores below
    const int lane = lane_now();
    softmax.finish();
    const float factor[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
    const unsigned corner = shared_address(piece_of<BLOCK_M>(staging, first_row + lane % 16, lane / 16));
    unsigned nonfinite = 0;
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float f = factor[fragment_row(i)];
            words[i / 2] = pack_pair(o[d].x[i] * f, o[d].x[i + 1] * f);
        }
        unsigned stored[4];  // 0 in rows that see no key: one hidden by a bias of -inf may have made NaN of them
#pragma unroll
        for (int i = 0; i < 4; ++i) stored[i] = factor[i % 2] == 0.0f ? 0 : words[i];
        store_matrices((corner ^ 2 * d % 8 * 16) + d / 4 * BLOCK_M * CHUNK_ROW_BYTES, stored);
        nonfinite = add_zero_times(add_zero_times(nonfinite, words[0]), words[2]);
        if (OnlineSoftmax::LARGE) nonfinite = add_zero_times(add_zero_times(nonfinite, words[1]), words[3]);
    }
    if (nonfinite != 0) raise(nonfinite_seen);
    copy_rows(launch, t, staging, first_row);
    const int r = lane & 3, row = first_row + lane / 4 + 8 * r;  // two of four lanes write one each
    if (r < 2 && row < t.rows)
        __stcg(t.lse + (long long)(row % HEADS) * launch.attention.query_length + row / HEADS, softmax.lse(r));
}
