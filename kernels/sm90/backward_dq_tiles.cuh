// What the warps of the Hopper query gradient share: the tile's shape, shared memory with its barriers, the parameters.
//
// Prelude: as sm90/backward_dq.cu.
#pragma once
#define WIDE (HEAD_DIM > 128)
#include "common/bias.cuh"
#include "common/query_tile.cuh"
#include "common/softmax.cuh"
#include "sm90/backward_mma.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/swizzle.cuh"

constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int PRODUCER_THREADS = 128, CONSUMER_THREADS = 256, THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(!(BITS && DELAY), "with bits a row has no position");
constexpr int PRODUCER_BARRIER = 1;
constexpr int WARP_KEYS = BLOCK_N / 4;  // of a block, gathered by one warp
static_assert(HEAD_DIM <= 256 && BLOCK_M == PRODUCER_THREADS && BLOCK_M % HEADS == 0 && WARP_KEYS <= 32, "what the kernel is made for");

struct BackwardDqParams {
    TensorMap query, dout, out;
    AttentionParams attention;
    unsigned* tickets;  // one, 0 before
    int tiles;
};

enum : int { MASKED = 1, LAST = 2 };  // of a block: not all rows see all its keys; the last one of its tile

struct Shared {
    ELEMENT query[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
    ELEMENT dout[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
#if !WIDE
    ELEMENT out[CHUNKS * BLOCK_M * CHUNK_COLUMNS];
#endif
    ELEMENT key[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT value[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];
#if DELAY
    int far_from[STAGES][BLOCK_N];
    int4 mixed[STAGES];  // by producer warp: whether some bias of its keys applies to only some rows
#endif
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
    int flags[STAGES];
    float lse[BLOCK_M], dlse[BLOCK_M];  // WIDE: delta in place of dlse
    int tile;     // that the rows belong to; END: there are no more
    int next[2];  // of the producer alone
    Barrier query_full, query_empty;
    Barrier key_full[STAGES], key_empty[STAGES];
};
constexpr int END = -1;
