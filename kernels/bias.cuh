// A dense bias, one number per query and key: the tile of it that a block of keys meets, in shared memory.
//
// The tile has a row per query (heads of one tile share their bias rows) and a column per key of the block, in the bias'
// own type. Where the block's keys follow each other and rows are aligned it comes in asynchronous copies of 16 bytes,
// otherwise (gathered keys, odd strides, one number for all keys) element by element.
//
// Prelude: BIAS, BIAS_ELEMENT (__half, __nv_bfloat16 or float), KEYS, BLOCK_M, BLOCK_N, HEADS, WARPS.
#pragma once
#include "arch.cuh"
#include "mask.cuh"
#include "params.cuh"

#define BIAS_NONE 0
#define BIAS_OF_KEYS 1
#define BIAS_DENSE 2

#if BIAS == BIAS_DENSE
constexpr int BIAS_ROWS = (BLOCK_M + HEADS - 1) / HEADS;
constexpr int BIAS_STRIDE = BLOCK_N + 8;  // a warp's lanes read different banks, whatever the type
constexpr int BIAS_WIDTH = 16 / sizeof(BIAS_ELEMENT);

struct alignas(16) BiasTile {
    BIAS_ELEMENT x[BIAS_ROWS * BIAS_STRIDE];
};

struct alignas(2 * sizeof(BIAS_ELEMENT)) BiasPair {
    BIAS_ELEMENT x[2];
};

// The bias of one tile of queries.
struct BiasRows {
    const BIAS_ELEMENT* first;  // of its first query, at key 0
    long long query, key;       // strides
    int count;                  // queries that exist
    bool aligned;

    __device__ __forceinline__ BiasRows(const AttentionParams& p, int batch, int group, int head, int first_query)
        : first(static_cast<const BIAS_ELEMENT*>(p.bias_rows) + batch * p.bias_batch + group * p.bias_group +
                head * p.bias_head + first_query * p.bias_query),
          query(p.bias_query), key(p.bias_key), count(min(p.query_length - first_query, BIAS_ROWS)),
          aligned(p.bias_aligned != 0) {}
};

// Whether the block has BLOCK_N keys that follow each other, the first of them at 16 bytes. `index`: its entries.
__device__ __forceinline__ bool keys_follow(const KeyBlocks& blocks, KeyBlock block, const int* index) {
    if (block.first + BLOCK_N > blocks.source.length) return false;
#if KEYS == KEYS_CONTIGUOUS
    return true;
#else
#if KEYS == KEYS_LISTED
    if (block.first < blocks.source.full && block.first + BLOCK_N > blocks.source.full) return false;
#endif
    return index[BLOCK_N - 1] - index[0] == BLOCK_N - 1 && index[0] % BIAS_WIDTH == 0;  // entries are in order
#endif
}

// Starts the copies of the block's tile; rows of queries and columns of keys that do not exist become 0.
__device__ __forceinline__ void gather_bias(BiasTile& tile, const BiasRows& rows, const KeyBlocks& blocks, KeyBlock block,
                                            const int* index) {
    constexpr int THREADS_ = WARPS * 32;
    if (rows.aligned && keys_follow(blocks, block, index)) {
        constexpr int PIECES = BLOCK_N / BIAS_WIDTH;
#if KEYS == KEYS_CONTIGUOUS
        const int first = block.first;
#else
        const int first = index[0];
#endif
#pragma unroll
        for (int i = threadIdx.x; i < BIAS_ROWS * PIECES; i += THREADS_) {
            const int row = i / PIECES, column = i % PIECES * BIAS_WIDTH;
            const bool exists = row < rows.count;
            copy_async_16(tile.x + row * BIAS_STRIDE + column,
                          rows.first + (exists ? row * rows.query : 0) + first + column, exists ? 16 : 0);
        }
        return;
    }
    // A thread keeps to one column and reads BATCH rows at a time.
    constexpr int DISTANCE = THREADS_ / BLOCK_N, BATCH = 8;
    static_assert(THREADS_ % BLOCK_N == 0, "a thread keeps to one column");
    const int column = threadIdx.x % BLOCK_N;
    const bool some = block.first + column < blocks.source.length;
#if KEYS == KEYS_CONTIGUOUS
    const long long key = block.first + column;
#else
    const long long key = some ? index[column] : 0;
#endif
    const BIAS_ELEMENT* source = rows.first + key * rows.key;
    for (int at = threadIdx.x / BLOCK_N; at < BIAS_ROWS; at += BATCH * DISTANCE) {
        BIAS_ELEMENT x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int row = at + k * DISTANCE;
            from_float(x[k], 0.0f);
            if (some && row < rows.count) x[k] = source[row * rows.query];
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            if (at + k * DISTANCE < BIAS_ROWS) tile.x[(at + k * DISTANCE) * BIAS_STRIDE + column] = x[k];
    }
}

// The two numbers of a tile's row at this lane's columns `column` and `column + 1`, in log 2 units.
__device__ __forceinline__ float2 bias_pair(const BiasTile& tile, int row, int column) {
    const BiasPair pair = *reinterpret_cast<const BiasPair*>(tile.x + row / HEADS * BIAS_STRIDE + column);
    return make_float2(to_float(pair.x[0]) * LOG2_E, to_float(pair.x[1]) * LOG2_E);
}
#endif
