// Shared memory of the Hopper forward, and where in it a row, a key and the keys of a lane lie.
//
// A stage of keys contains the rows of one block and the data of each of its keys (bias, visibility, BlockInfo); a
// stage of values contains the rows of one block. Each stage has a full barrier, on which the consumers wait for the
// producer, and an empty one, on which the producer waits for the consumers.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/swizzle.cuh"
#include "sm90/work.cuh"

struct Shared {
    ELEMENT query[QUERY_STAGES][CHUNKS * BLOCK_M * CHUNK_COLUMNS];  // later the output of the tile
    ELEMENT keys[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT values[VALUE_STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];  // in units of Q K^T with BIAS_FIRST, times log2(e) with POWERS_OF_2
#if DELAY
    int far_from[STAGES][BLOCK_N];
    int4 mixed[STAGES];  // by producer warp: whether some bias of its keys applies to only some queries
#endif
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
#if KEYS_KNOWN
    int key[STAGES][BLOCK_N];  // indices of the keys
#endif
#if KEYS != KEYS_CONTIGUOUS
    int listed[LISTS][BLOCK_N];  // of the producer alone: the key indices of the current block and its neighbours
#endif
    BlockInfo block_info[STAGES];
    int nonfinite_seen;  // whether an output was NaN or infinite
    int isolate_nonfinite;  // second pass: values of masked blocks are checked one by one
    int active_consumers;  // how many consumers have rows of the CTA's first tile
    Tile tile[QUERY_STAGES];
    Output output[QUERY_STAGES];
    Plan plans[PRODUCER_WARPS][2];  // of the producer alone: the current tile and the next one
    Barrier all_written;  // all threads arrive when their tiles have been written
    // `restart` goes over these, from the first to the last.
    Barrier query_full[QUERY_STAGES], query_empty[QUERY_STAGES];
    Barrier key_full[STAGES], key_empty[STAGES], value_full[VALUE_STAGES], value_empty[VALUE_STAGES];
};

// The row of key `key` of a block in the matrices of its stage. Eight consecutive gathered keys are the columns of one
// lane in two accumulator fragments (2t, 2t + 1, 2t + 8, ...), so that a lane reads their bias and visibility as
// vectors.
__device__ __forceinline__ constexpr int row_of_key(int key) {
    return KV_TMA ? key : key / 32 * 32 + key % 8 / 2 * 8 + key / 8 % 4 * 2 + key % 2;
}

// Index in the block of the (i + k)-th key that producer warp `warp` gathers. Of 96 keys a warp has eight of every 32:
// with 24 consecutive keys its groups of lanes would have rows at varying distances.
__device__ __forceinline__ constexpr int key_of(int warp, int i, int k = 0) {
    return BY_EIGHTS ? (i + k) / 8 * 32 + warp * 8 + (i + k) % 8 : warp * WARP_KEYS + i + k;
}

// Which of the eight keys that a lane has in fragments n and n + 1 (n even) is element i of fragment n + h.
__device__ __forceinline__ constexpr int lane_key(int h, int i) { return 4 * h + i / 4 * 2 + i % 2; }

// Index in the block of the k-th key of lane t (of a quad) in fragment n; of gathered keys the four are consecutive.
__device__ __forceinline__ constexpr int fragment_key(int t, int n, int k) {
    return KV_TMA ? 16 * n + 2 * t + k % 2 + k / 2 * 8 : n / 2 * 32 + 8 * t + lane_key(n % 2, 0) + k;
}

// The same for this lane. If registers are scarce it is recomputed in each block that needs it.
__device__ __forceinline__ int fragment_key(int n, int k) {
    return fragment_key((HEAD_DIM > 64 && BIAS != BIAS_DENSE ? lane_now() : threadIdx.x) & 3, n, k);
}

#if BIAS == BIAS_DENSE
// The bias row of a tile's row, at key 0; rows past the last query use that of the last query.
__device__ __forceinline__ const BIAS_ELEMENT* bias_row(const AttentionParams& p, const Tile& t, int row) {
    const long long query = min(t.first_query + row / HEADS, p.query_length - 1);
    return static_cast<const BIAS_ELEMENT*>(p.bias_rows) + t.batch * p.bias_batch + t.group * p.bias_group +
           (t.first_head + row % HEADS) * p.bias_head + query * p.bias_query;
}
#endif
