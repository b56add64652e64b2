// Shared memory of the Hopper forward, and where in it a row, a key and a lane's own numbers lie.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/work.cuh"

struct Shared {
    ELEMENT query[QUERY_STAGES][CHUNKS * BLOCK_M * CHUNK_COLUMNS];  // later the tile's output
    ELEMENT keys[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT values[VALUE_STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];  // with BIAS_FIRST in units of the products, with POWERS_OF_2 times log2(e)
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
#if KEYS_KNOWN
    int key[STAGES][BLOCK_N];  // rows of the block's keys
#endif
#if KEYS != KEYS_CONTIGUOUS
    int listed[LISTS][BLOCK_N];  // the producer's own: rows of the keys of the block at hand, of those around it
#endif
    BlockInfo block_info[STAGES];
    int nonfinite_seen;  // whether an output is not finite
    int isolate_nonfinite;  // whether values are looked at where not all queries see their keys
    int active_consumers;  // how many consumers have a part in the block's first tile
    Tile tile[QUERY_STAGES];
    Output output[QUERY_STAGES];
    Plan plans[PRODUCER_WARPS][2];  // the producer's own: of the tile at hand and of the next one
    Barrier all_written;  // of all threads, when all tiles have been written
    // `restart` goes through all of these, from the first to the last.
    Barrier query_full[QUERY_STAGES], query_empty[QUERY_STAGES];
    Barrier key_full[STAGES], key_empty[STAGES], value_full[VALUE_STAGES], value_empty[VALUE_STAGES];
};

// Place of piece `piece` of row `row` in a matrix of `rows` rows.
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * CHUNK_COLUMNS + ((piece ^ row) & 7) * 8;
}

// Where key `key` of a block stands in its matrices. Gathered, eight keys that follow each other are one lane's columns of two
// accumulator fragments (2t, 2t + 1, 2t + 8, ...), so that it reads what is known of them in whole vectors.
__device__ __forceinline__ constexpr int row_of_key(int key) {
    return KV_TMA ? key : key / 32 * 32 + key % 8 / 2 * 8 + key / 8 % 4 * 2 + key % 2;
}

// Which key of the block is the (i + k)-th of producer warp `warp`. Of 96 keys it has eight of every 32, for of 24 that follow
// each other its groups of lanes would have rows at changing distances.
__device__ __forceinline__ constexpr int key_of(int warp, int i, int k = 0) {
    return BY_EIGHTS ? (i + k) / 8 * 32 + warp * 8 + (i + k) % 8 : warp * WARP_KEYS + i + k;
}

// Of the eight keys that a lane has of fragments n and n + 1 (n even): which one element i of fragment n + h is.
__device__ __forceinline__ constexpr int lane_key(int h, int i) { return 4 * h + i / 4 * 2 + i % 2; }

// Key of the block that the t-th of four lanes has as the k-th of its four columns in fragment n; gathered, the four follow
// each other.
__device__ __forceinline__ constexpr int fragment_key(int t, int n, int k) {
    return KV_TMA ? 16 * n + 2 * t + k % 2 + k / 2 * 8 : n / 2 * 32 + 8 * t + lane_key(n % 2, 0) + k;
}

// Of this lane. Where registers are few it is worked out anew in each block that asks.
__device__ __forceinline__ int fragment_key(int n, int k) {
    return fragment_key((HEAD_DIM > 64 && BIAS != BIAS_DENSE ? lane_now() : threadIdx.x) & 3, n, k);
}

#if BIAS == BIAS_DENSE
// The bias of a tile's rows at key 0; rows past the last query have the last one's.
__device__ __forceinline__ const BIAS_ELEMENT* bias_row(const AttentionParams& p, const Tile& t, int row) {
    const long long query = min(t.first_query + row / HEADS, p.query_length - 1);
    return static_cast<const BIAS_ELEMENT*>(p.bias_rows) + t.batch * p.bias_batch + t.group * p.bias_group +
           (t.first_head + row % HEADS) * p.bias_head + query * p.bias_query;
}
#endif
