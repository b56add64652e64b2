// Stored dS: what the Hopper key pass (sm90/backward_dkv.cu with STORED) leaves for the query pass
// (sm90/backward_dq_stored.cu), which then is one product, dq = dS K. A tile is one of the launch: BLOCK_N keys of a
// super-tile's list.
//
//   ds    // (tiles, H / Hkv * super_steps, BLOCK_N, STEP_QUERIES) ELEMENT; of a tile its own steps only, head by head
//   keys  // (tiles, BLOCK_N) int32: row of the key, or -1 where it counts as zeros
//   steps // (tiles) int2: the first step and the one behind the last, counted from the super-tile's first query
//
// A tile without keys has none of them. Rows of dS are keys; the queries of a row are in the order in which the lanes of
// a warp hold them, so that a lane stores 16 bytes and four lanes 64 neighbouring ones: query_of_column.
//
// Prelude: ELEMENT.
#pragma once
#include "common/arch.cuh"

constexpr int STEP_QUERIES = 64;

struct StoredDs {
    ELEMENT* ds;
    int* keys;
    int2* steps;
    int first_tile;   // of the launch, among the tiles of all lists
    int super_steps;  // of a super-tile
    int tile_steps;   // those of all heads of a group: as many as a tile has room for
};

// Which query of its step stands in column `column` of dS.
__device__ __forceinline__ int query_of_column(int column) {
    return (column & 33) | (column & 24) >> 2 | (column & 2) << 2 | (column & 4) << 2;
}

// Stores this lane's part of a warpgroup's dS^T, rounded to a left operand: two rows, 8 apart, of which `row` is the first.
__device__ __forceinline__ void store_ds(ELEMENT* row, const unsigned (&x)[STEP_QUERIES / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            __stcs(reinterpret_cast<uint4*>(row + 8 * r * STEP_QUERIES + half * 32),
                   make_uint4(x[2 * half][r], x[2 * half][r + 2], x[2 * half + 1][r], x[2 * half + 1][r + 2]));
}
