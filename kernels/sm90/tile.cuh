// What the warps of the Hopper forward share: the tile's shape, shared memory, tiles and their keys, turns.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "arch.cuh"
#include "sm90/arch.cuh"
#include "bias.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "softmax.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
constexpr int PRODUCER_WARPS = 4;
constexpr int PRODUCER_THREADS = PRODUCER_WARPS * 32;
constexpr int THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 56 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 224 : 160;
constexpr int QUERIES = BLOCK_M / HEADS;
constexpr int WORDS = (QUERIES + 31) / 32;  // BITS: of a key
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / 8;  // 16-byte pieces of a row
constexpr int ROW_LANES = ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;  // lanes that share a row
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;
constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;  // keys of a block that a producer warp gathers
constexpr int CONSUMER_BARRIER = 1;  // a named barrier
static_assert(WARP_KEYS <= 32 && WARP_KEYS * ROW_LANES % 32 == 0, "a producer lane knows one key");

// Whether the consumers must know the rows of keys: to compare them with positions, or to find their bias.
#define KEYS_KNOWN ((CAUSAL && KEYS != KEYS_CONTIGUOUS) || BIAS == BIAS_DENSE)

// What the consumers are told of a block of keys.
struct Order {
    int tile;  // negative: the work is done
    int opens;  // it is the tile's first block
    int masked;
    int following;  // BIAS_DENSE: the first key, if BLOCK_N keys follow each other from a multiple of 16 bytes on, else -1
};

struct Tile {
    int batch, group, first_head, first_query, first_position, last_position;
};

struct Shared {
    ELEMENT query[QUERY_STAGES][CHUNKS * BLOCK_M * CHUNK_COLUMNS];  // later the tile's output
    ELEMENT keys[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT values[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
#if KEYS_KNOWN
    int key[STAGES][BLOCK_N];  // rows of the block's keys
#endif
    Order order[STAGES];
    Tile tile[QUERY_STAGES];
    Barrier query_arrived[QUERY_STAGES], query_free[QUERY_STAGES];
    Barrier key_arrived[STAGES], key_free[STAGES], value_arrived[STAGES], value_free[STAGES];
};

__device__ __forceinline__ int all_tiles(const AttentionParams& p) { return p.batch * (p.heads / HEADS) * p.tiles; }

__device__ __forceinline__ Tile tile_at(const AttentionParams& p, int index) {
    const int sets = p.heads / p.kv_heads / HEADS;  // tiles side by side that share a kv head
    Tile t;
    t.first_query = (p.tiles - 1 - index % p.tiles) * QUERIES;  // the longest causal tiles first
    int rest = index / p.tiles;
    const int set = rest % sets;
    rest /= sets;
    t.group = rest % p.kv_heads;
    t.batch = rest / p.kv_heads;
    t.first_head = (t.group * sets + set) * HEADS;
    t.first_position = t.first_query + p.key_length - p.query_length;
    t.last_position = min(t.first_query + QUERIES, p.query_length) - 1 + p.key_length - p.query_length;
    return t;
}

__device__ __forceinline__ long long mask_row_of(const AttentionParams& p, const Tile& t) {
    return (long long)t.batch * p.mask_batch + t.group * p.mask_group + t.first_head * p.mask_head;
}

__device__ __forceinline__ long long list_of(const AttentionParams& p, const Tile& t) {
    return mask_row_of(p, t) * p.tiles + t.first_query / QUERIES;
}

// What is known without reading: KEYS_LISTED leaves out how long the list is.
__device__ __forceinline__ KeySource keys_of(const AttentionParams& p, const Tile& t) {
    KeySource source = {};
#if KEYS == KEYS_CONTIGUOUS
    source.length = p.key_length;
#else
    const long long row = mask_row_of(p, t);
#if BITS
    source.columns = p.columns + (row * p.query_words + t.first_query / 32) * p.key_stride;
#else
    const long long head = row % p.mask_heads, batch = row / p.mask_heads;
    source.start = p.start + batch * p.start_batch + head * p.start_head;
    source.stop = p.stop + batch * p.stop_batch + head * p.stop_head;
#endif
#if KEYS == KEYS_LISTED
    source.list = p.list + list_of(p, t) * p.capacity;
    source.capacity = p.capacity;
#else
    source.list = p.list + row * p.key_length;
    source.summaries = p.summaries + row * ((p.key_length + BLOCK_N - 1) / BLOCK_N);
    source.length = p.list_lengths[row];
#endif
#endif
    return source;
}

// Place of piece `piece` of row `row` in a matrix of `rows` rows.
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * CHUNK_COLUMNS + ((piece ^ row) & 7) * 8;
}

// Which stage is next, and in which of its two phases.
template <int count>
struct Turn {
    int stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == count) {
            stage = 0;
            phase ^= 1;
        }
    }
};

#if BIAS == BIAS_DENSE
// The bias of a tile's rows at key 0; rows past the last query have the last one's.
__device__ __forceinline__ const BIAS_ELEMENT* bias_row(const AttentionParams& p, const Tile& t, int row) {
    const long long query = min(t.first_query + row / HEADS, p.query_length - 1);
    return static_cast<const BIAS_ELEMENT*>(p.bias_rows) + t.batch * p.bias_batch + t.group * p.bias_group +
           (t.first_head + row % HEADS) * p.bias_head + query * p.bias_query;
}
#endif
