// What the warps of the Hopper query gradient share: the tile's shape, shared memory with its barriers, the parameters.
//
// Prelude: as sm90/backward_dq.cu.
#pragma once
#include "common/bias.cuh"
#include "common/query_tile.cuh"
#include "common/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/swizzle.cuh"

constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int DIM_FRAGMENTS = (HEAD_DIM + 15) / 16, KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int OUT_FRAGMENTS = DIM_FRAGMENTS <= 1 ? 1 : (DIM_FRAGMENTS + 1) / 2 * 2;  // columns of dq, in wgmma's sizes
constexpr int PRODUCER_THREADS = 128, CONSUMERS = BLOCK_M / 64, CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32, CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr int PRODUCER_BARRIER = 1;
constexpr int WARP_KEYS = BLOCK_N / 4;  // of a block, gathered by one warp
static_assert(HEAD_DIM <= 128 && BLOCK_M % HEADS == 0 && (CONSUMERS == 2 || CONSUMERS == 3) && WARP_KEYS <= 32,
              "what the kernel is made for");

struct QueryParams {
    TensorMap query, dout, out;
    AttentionParams attention;
    unsigned* tickets;  // one, 0
    int tiles;
};

enum : int { MASKED = 1, LAST = 2 };  // of a block: not all rows see all its keys; the last one of its tile

struct Shared {
    ELEMENT query[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
    ELEMENT dout[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
    ELEMENT out[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
    ELEMENT key[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT value[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N], index[STAGES][BLOCK_N];
    int flags[STAGES];
    float lse[BLOCK_M], dlse[BLOCK_M];
    int tile;     // that the rows belong to; END: there are no more
    int next[2];  // of the producer alone
    Barrier query_full, query_empty;
    Barrier key_full[STAGES], key_empty[STAGES];
};
constexpr int END = -1;
