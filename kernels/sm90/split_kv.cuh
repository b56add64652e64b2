// The order in which the Hopper forward schedules tiles, and split-KV (SPLIT): if the last wave has too few tiles for
// all CTAs of the grid, each of them is split along its keys. CTA b computes split b % count of tile first + b / count
// and writes for sm90/combine.cu
//
// output // (split tiles, count, BLOCK_M, HEAD_DIM) f32   softmax over the split's keys, times v; 0 where a row sees none
// lse    // (split tiles, count, BLOCK_M, 2) f32          natural log as a sum of two (OnlineSoftmax::lse_in_two)
//
// Rows are those of the tile; nothing is written for rows past the last query.
//
// Prelude: HEAD_DIM, BLOCK_M.
#pragma once
#include "sm90/ptx.cuh"

struct Splits {
    float* output;
    float2* lse;
    int first;  // index of the first split tile in the order of the schedule
    int count;  // splits of each tile
    int blocks;  // CTAs that have a split, as their last tile
};

// Tile `index` of set `set` of heads.
struct TileIndex {
    int set, index;
};

// The tile at position `index` of the schedule of `sets` sets of `tiles` tiles: set by set, except for the last
// `tail_tiles` tiles of each set, which may meet fewer keys. Those come last, the longest of them first.
__device__ __forceinline__ TileIndex tile_at(int index, int sets, int tiles, int tail_tiles) {
    const int regular = tiles - tail_tiles, behind = index - sets * regular;
    const unsigned divisor = behind < 0 ? regular : sets, x = behind < 0 ? index : behind;
    const int quotient = x / divisor, remainder = x - quotient * divisor;
    return {behind < 0 ? quotient : remainder, behind < 0 ? remainder : regular + quotient};
}

// Row `row` of the results of CTA `block`.
__device__ __forceinline__ long long row_of_split(int block, int row) { return (long long)block * BLOCK_M + row; }

// Writes this warp's 16 rows of a split, of `rows` in total, straight from registers: the four lanes of a row fill
// 32-byte sectors. `nonfinite_seen` becomes 1 if a value of the split's keys is NaN or infinite, see `epilogue`.
template <typename Softmax, int fragments>
__device__ __forceinline__ void write_split(const Splits& splits, int rows, int first_row, const Fragment (&o)[fragments],
                                           Softmax& softmax, int& nonfinite_seen) {
    const int lane = lane_now(), row = first_row + lane / 4;
    const long long split_row = row_of_split(blockIdx.x, row);
    float* output = splits.output + split_row * HEAD_DIM + 2 * (lane & 3);
    softmax.finish();
    const float factor[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
    float nonfinite = 0.0f;
#pragma unroll
    for (int d = 0; d < fragments; ++d)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const int r = fragment_row(i), column = 16 * d + fragment_column(i);
            if (column >= HEAD_DIM) continue;
            const float2 pair = make_float2(o[d].x[i] * factor[r], o[d].x[i + 1] * factor[r]);
            if (r == 0 || Softmax::LARGE) nonfinite = fmaf(pair.x, 0.0f, fmaf(pair.y, 0.0f, nonfinite));
            if (row + 8 * r < rows) __stcg(reinterpret_cast<float2*>(output + 8 * r * HEAD_DIM + column), pair);
        }
    if (nonfinite != 0.0f) raise(nonfinite_seen);
    const int r = lane & 3;  // two of four lanes write one lse each
    if (r < 2 && row + 8 * r < rows) __stcg(splits.lse + split_row + 8 * r, softmax.lse_in_two(r));
}
