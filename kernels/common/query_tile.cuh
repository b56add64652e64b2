// Tiles of queries and where their keys are, for all kernels that visit the keys of a tile of queries.
//
// A tile is BLOCK_M / HEADS consecutive queries times HEADS query heads of one GQA group. With SEQUENCES its queries
// belong to one sequence (common/varlen.cuh). common/mask.cuh says how the keys come in blocks.
//
// Prelude: HEADS, BLOCK_M, BLOCK_N, KEYS, CAUSAL, BITS, SEQUENCES, DELAY.
#pragma once
#include "common/arch.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/varlen.cuh"

constexpr int QUERIES = BLOCK_M / HEADS;
constexpr int WORDS = (QUERIES + 31) / 32;  // BITS: of a key

struct Tile {
    int batch, group, first_head, index, first_query, end_query, first_position, last_position;
    int first_key, end_key;  // SEQUENCES: of the tile's sequence
#if DELAY
    int bias_delay;  // a key's far_from less its index (common/bias.cuh)
#endif

    // Whether the tile exists: packed sequences leave some indices without one.
    __device__ __forceinline__ bool exists() const { return !SEQUENCES || first_query < end_query; }
};

// What a key's visibility is compared with: the position of the query of row `row`, or its bit (BITS).
__device__ __forceinline__ int position_of(const Tile& t, int row) {
    const int query = row / HEADS;
    return BITS ? static_cast<int>(1u << ((t.first_query + query) & 31)) : t.first_position + query;
}

// Tile `index` of set `rest` of tiles: of one or more heads, counted along heads first, then along the batch.
template <typename Index>
__device__ __forceinline__ Tile find_tile(const AttentionParams& p, Index rest, int index) {
    const int sets = p.heads / p.kv_heads / HEADS;  // tiles side by side that share a kv head
    Tile t;
    t.index = p.tiles - 1 - index;  // longest causal tiles first
    const int set = static_cast<int>(rest % sets);
    rest /= sets;
    t.group = static_cast<int>(rest % p.kv_heads);
    t.batch = static_cast<int>(rest / p.kv_heads);
    t.first_head = (t.group * sets + set) * HEADS;
#if SEQUENCES
    const RowTile rows = row_tile(p.bounds, p.bounds + p.sequences, p.sequences, QUERIES, t.index);
    t.first_query = rows.first;
    t.end_query = rows.end;
    t.first_key = p.bounds[2 * p.sequences + rows.sequence];
    t.end_key = p.bounds[3 * p.sequences + rows.sequence];
    const int shift = KEYS == KEYS_CONTIGUOUS ? t.end_key - p.bounds[p.sequences + rows.sequence] : 0;
    t.first_position = t.first_query + shift;
    t.last_position = t.end_query - 1 + shift;
#if DELAY
    t.bias_delay = p.bias_delay + shift - (t.end_key - p.bounds[p.sequences + rows.sequence]);
#endif
#else
    t.first_query = t.index * QUERIES - min(t.index, p.short_tiles) * (64 / HEADS);
    t.end_query = p.query_length;
    t.first_position = t.first_query + p.key_length - p.query_length;
    t.last_position = min(t.first_query + QUERIES, p.query_length) - 1 + p.key_length - p.query_length;
#if DELAY
    t.bias_delay = p.bias_delay;
#endif
#endif
    return t;
}

// Tile `rest` of the grid, counted along queries first.
template <typename Index>
__device__ __forceinline__ Tile find_tile(const AttentionParams& p, Index rest) {
    return find_tile(p, rest / p.tiles, static_cast<int>(rest % p.tiles));
}

__device__ __forceinline__ long long mask_row_of(const AttentionParams& p, const Tile& t) {
    return (long long)t.batch * p.mask_batch + t.group * p.mask_group + t.first_head * p.mask_head;
}

// KEYS_LISTED: index of the tile's list in `list` and `list_lengths`.
__device__ __forceinline__ long long list_of(const AttentionParams& p, const Tile& t) {
    return mask_row_of(p, t) * p.tiles + t.index;
}

// All of a tile's keys except the length of its own list, which must be read (find_keys).
__device__ __forceinline__ KeySource locate_keys(const AttentionParams& p, const Tile& t) {
    KeySource source = {};
#if KEYS == KEYS_CONTIGUOUS
    source.first = SEQUENCES ? t.first_key : 0;
    source.length = SEQUENCES ? t.end_key : p.key_length;
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
#if SEQUENCES
    // Only chunks that hold keys of the sequence are visited; no row of the tile sees the other sequences' keys in
    // them.
    const int4* chunks = p.chunk_info + row * ((p.key_length + p.chunk - 1) / p.chunk);
    const int4 last = t.first_key < t.end_key ? chunks[(t.end_key - 1) / p.chunk] : make_int4(0, 0, 0, 0);
    source.first = t.first_key < t.end_key ? chunks[t.first_key / p.chunk].w : 0;
    source.length = last.x + last.w;
#endif
#endif
#endif
    return source;
}

__device__ __forceinline__ KeySource find_keys(const AttentionParams& p, const Tile& t) {
    KeySource source = locate_keys(p, t);
#if KEYS == KEYS_LISTED
    const int* lengths = p.list_lengths + 2 * list_of(p, t);
    source.full = lengths[0];
    source.length = lengths[1];
#endif
    return source;
}
