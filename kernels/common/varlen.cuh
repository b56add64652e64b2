// Sequences of different lengths packed in one row: to which of them a tile, a row or a key belongs.
//
// bounds // (4, count) int32: first and end query row, first and end key of each sequence. Sequences are consecutive:
//        // end[b] <= first[b + 1] on both sides, and no sequence meets another.
//
// Tiles of `size` rows do not cross sequences. To avoid adding up lengths, tile k of sequence b has the index
//     first[b] / size + b + k,        k < (end[b] - first[b]) / size, rounded up.
// Indices rise with (b, k), are distinct, and are below total / size + count. Some have no tile.
//
// Masks of sequences are moved from key positions to query rows (lists/varlen.cu): a key is seen by rows of its own
// sequence only, start <= row < stop, whatever the lengths.
#pragma once
#include "common/arch.cuh"

struct RowTile {
    int sequence, first, end;  // end <= first: no tile has this index
};

// The last b with first[b] / size + b * each <= index, searched by a whole warp; first[0] is 0.
__device__ __forceinline__ int sequence_of_index(const int* first, int count, int size, int each, int index) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, b = low + static_cast<int>(threadIdx.x & 31) * step;
        const bool begins_before = b < high && first[b] / size + b * each <= index;
        low += (__popc(__ballot_sync(ALL_LANES, begins_before)) - 1) * step;
        high = min(high, low + step);
    }
    return low;
}

// The tile of this index; all lanes of a warp pass the same index.
__device__ __forceinline__ RowTile row_tile(const int* first, const int* end, int count, int size, int index) {
    const int b = sequence_of_index(first, count, size, 1, index);
    const int row = first[b] + (index - first[b] / size - b) * size;
    return {b, row, min(row + size, end[b])};
}

// The sequence that contains a row or a key, if any does: the last b with first[b] <= row. Searched by a single lane.
__device__ __forceinline__ int sequence_of_row(const int* first, int count, int row) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

// ---- super-tiles, whose key lists follow each other ----
//
// The first super-tile of a sequence has room for all keys of the sequence, in units of SUPER_UNIT entries; each
// further one has room for `capacity`. The total is linear in the lengths, even for many short sequences.
constexpr int SUPER_UNIT = 128;

__device__ __forceinline__ long long first_super_entries(int key_length, int count) {
    return (long long)(key_length / SUPER_UNIT + count) * SUPER_UNIT;
}

// Where the list of super-tile k of sequence b begins.
__device__ __forceinline__ long long super_offset(const int* bounds, int count, int key_length, int queries, int capacity,
                                                 int b, int k) {
    if (k == 0) return (long long)(bounds[2 * count + b] / SUPER_UNIT + b) * SUPER_UNIT;
    return first_super_entries(key_length, count) + (long long)(bounds[b] / queries + k - 1) * capacity;
}
