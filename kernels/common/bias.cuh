// A dense bias, one element per query and key: a tile of it in shared memory.
//
// A tile has a row per query (heads that share a bias share its rows) and a column per key of a block, in the bias's
// own type. If the block's keys are consecutive and rows are aligned, it is copied asynchronously 16 bytes at a time,
// otherwise (gathered keys, odd strides, one element for all keys) element by element. The gradient of a tile is
// written back the same way.
//
// A bias per key may be delayed (DELAY): it applies to queries at or after position `far_from` and is 0 before.
//
// Prelude: BIAS (BIAS_NONE, BIAS_OF_KEYS: one float32 per key, or BIAS_DENSE), DELAY (with BIAS_OF_KEYS only),
// BIAS_ELEMENT (__half, __nv_bfloat16, float).
#pragma once
#include "common/arch.cuh"
#include "common/params.cuh"

#define BIAS_NONE 0
#define BIAS_OF_KEYS 1
#define BIAS_DENSE 2
#if DELAY && BIAS != BIAS_OF_KEYS
#error only the bias of keys has a delay
#endif

// Whether a key's bias applies to all positions from first_position to last_position (far), to none of them (near), or
// only to the later ones (mixed).
__device__ __forceinline__ bool is_far(int far_from, int first_position) { return far_from <= first_position; }
__device__ __forceinline__ bool is_near(int far_from, int last_position) { return far_from > last_position; }
__device__ __forceinline__ bool is_mixed(int far_from, int first_position, int last_position) {
    return !is_far(far_from, first_position) && !is_near(far_from, last_position);
}

#if BIAS == BIAS_DENSE
constexpr int BIAS_WIDTH = 16 / sizeof(BIAS_ELEMENT);

template <int rows, int columns>
struct alignas(16) BiasTile {
    static constexpr int STRIDE = columns + 8;  // a warp's lanes read different banks, whatever the type
    BIAS_ELEMENT x[rows * STRIDE];
};

struct alignas(2 * sizeof(BIAS_ELEMENT)) BiasPair {
    BIAS_ELEMENT x[2];
};

// The bias of one head, from a query on.
struct BiasRows {
    const BIAS_ELEMENT* first;  // at key 0
    long long query, key;       // strides
    int count;                  // queries that exist
    bool aligned;

    __device__ __forceinline__ BiasRows(const AttentionParams& p, int batch, int group, int head, int first_query)
        : first(static_cast<const BIAS_ELEMENT*>(p.bias_rows) + batch * p.bias_batch + group * p.bias_group +
                head * p.bias_head + first_query * p.bias_query),
          query(p.bias_query), key(p.bias_key), count(p.query_length - first_query), aligned(p.bias_aligned != 0) {}
};

// Starts the copies of a tile; missing elements become 0. `following`: the key of column 0 if the columns are
// consecutive keys from a multiple of 16 bytes on, else -1. key_of(column): its key, or -1. All threads of a block call
// it; complete after copy_async_wait.
template <int rows, int columns, int threads, typename KeyOf>
__device__ __forceinline__ void load_bias(BiasTile<rows, columns>& tile, const BiasRows& source, int following,
                                          const KeyOf& key_of) {
    constexpr int STRIDE = BiasTile<rows, columns>::STRIDE;
    if (source.aligned && following >= 0) {
        constexpr int PIECES = columns / BIAS_WIDTH;
#pragma unroll
        for (int i = threadIdx.x; i < rows * PIECES; i += threads) {
            const int row = i / PIECES, column = i % PIECES * BIAS_WIDTH;
            const bool exists = row < source.count;
            copy_async_16(tile.x + row * STRIDE + column,
                          source.first + (exists ? row * source.query : 0) + following + column, exists ? 16 : 0);
        }
        return;
    }
    constexpr int DISTANCE = threads / columns, BATCH = 8;  // rows that a thread reads at a time
    static_assert(threads % columns == 0, "a thread keeps to one column");
    const int column = threadIdx.x % columns, key = key_of(column);
    const BIAS_ELEMENT* first = source.first + max(key, 0) * source.key;
    for (int at = threadIdx.x / columns; at < rows; at += BATCH * DISTANCE) {
        BIAS_ELEMENT x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int row = at + k * DISTANCE;
            from_float(x[k], 0.0f);
            if (key >= 0 && row < rows && row < source.count) x[k] = first[row * source.query];
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            if (at + k * DISTANCE < rows) tile.x[(at + k * DISTANCE) * STRIDE + column] = x[k];
    }
}

// Two neighbouring numbers of a tile's row, in log 2 units.
template <int rows, int columns>
__device__ __forceinline__ float2 bias_pair(const BiasTile<rows, columns>& tile, int row, int column) {
    const BiasPair pair =
        *reinterpret_cast<const BiasPair*>(tile.x + row * BiasTile<rows, columns>::STRIDE + column);
    return make_float2(log2_units(to_float(pair.x[0])), log2_units(to_float(pair.x[1])));
}

// The gradient in place of the bias.
template <int rows, int columns>
__device__ __forceinline__ void set_bias_pair(BiasTile<rows, columns>& tile, int row, int column, float x, float y) {
    BiasPair pair;
    from_float(pair.x[0], x);
    from_float(pair.x[1], y);
    *reinterpret_cast<BiasPair*>(tile.x + row * BiasTile<rows, columns>::STRIDE + column) = pair;
}

// A warp writes `count` rows of a tile, starting with `first_row`, to rows of `length` numbers at `target` (the row of
// first_row). `following` and key_of as for load_bias.
template <int rows, int columns, typename KeyOf>
__device__ __forceinline__ void store_bias(BIAS_ELEMENT* target, long long length, const BiasTile<rows, columns>& tile,
                                           int first_row, int count, int following, const KeyOf& key_of) {
    constexpr int STRIDE = BiasTile<rows, columns>::STRIDE;
    const int lane = threadIdx.x & 31;
    if (following >= 0 && length % BIAS_WIDTH == 0) {
        constexpr int PIECES = columns / BIAS_WIDTH;
        for (int i = lane; i < count * PIECES; i += 32) {
            const int row = i / PIECES, column = i % PIECES * BIAS_WIDTH;
            *reinterpret_cast<uint4*>(target + row * length + following + column) =
                *reinterpret_cast<const uint4*>(tile.x + (first_row + row) * STRIDE + column);
        }
        return;
    }
    for (int i = lane; i < count * columns; i += 32) {
        const int row = i / columns, column = i % columns, key = key_of(column);
        if (key >= 0) target[row * length + key] = tile.x[(first_row + row) * STRIDE + column];
    }
}
#endif
