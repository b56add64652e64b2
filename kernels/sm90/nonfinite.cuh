// Keeps NaN and infinite values from rows that do not see their keys. Used only in a CTA's second pass over its tiles
// (sm90/forward.cu).
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/logits.cuh"

// Sets the non-finite values of a block to zero; called by all consumers together.
__device__ __forceinline__ void clear_nonfinite(ELEMENT* value, int keys) {
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // all consumers have read the values cleared below
    for (int i = thread_now() - PRODUCER_THREADS; i < keys * HEAD_DIM_PADDED; i += CONSUMER_THREADS) {
        const int column = i % HEAD_DIM_PADDED;
        ELEMENT& x = piece_of<BLOCK_N>(value, i / HEAD_DIM_PADDED, column / 8)[column % 8];
        if (!isfinite(to_float(x))) from_float(x, 0.0f);
    }
    shared_write_fence();
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // the block is finite
}

// A non-finite value must not reach a row that does not see its key, but 0 * inf is NaN: such values are added to the
// rows that see them one by one, and are zero in the MMA. Called by all consumers together.
__device__ __forceinline__ void isolate_nonfinite(Fragment (&o)[DIM_FRAGMENTS], ELEMENT* value, const Shared& shared,
                                                  int stage, int keys, const Tile& t, int first_row) {
    const int row_of_lane = first_row + lane_now() / 4;
    const int position[2] = {position_of(t, row_of_lane), position_of(t, row_of_lane + 8)};
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
        const int row = row_of_key(key), piece = lane_now() % ROW_PIECES;
        const unsigned found = nonfinite(*reinterpret_cast<const uint4*>(piece_of<BLOCK_N>(value, row, piece)), value);
        if (!__any_sync(ALL_LANES, (found & sign_bits(sizeof(ELEMENT))) != 0)) continue;
        const auto seen = visibility(shared, stage, key);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int column = 16 * d + 2 * (lane_now() & 3) + fragment_column(i);
                const float v = to_float(piece_of<BLOCK_N>(value, row, column / 8)[column % 8]);
                if (!isfinite(v) && visible(position[fragment_row(i)], seen)) o[d].x[i] += v;
            }
    }
    clear_nonfinite(value, keys);
}
