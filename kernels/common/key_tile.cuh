// Tiles of keys for the gradients of keys and values (backward_dkv.cu of sm80 and sm90): the keys of a tile, and the
// queries that it visits.
//
// Prelude: as sm80/backward_dkv.cu.
#pragma once
#include "common/arch.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/varlen.cuh"

constexpr int DIM_FRAGMENTS = (HEAD_DIM + 15) / 16;
constexpr int SLICE_FRAGMENTS = (DIM_FRAGMENTS + DIM_SLICES - 1) / DIM_SLICES;
constexpr int LIST_KEYS = 64;  // BITS: entries of a list that have one state

// A tile: BLOCK_N keys of one kv head.
struct KeyTile {
    int batch, group;
    int count;                     // number of keys
    int first;  // index of the first one in the list, or its row
    int first_query, end_query;    // queries to visit
    int sequence;                  // SEQUENCES; else 0
    int shift;                     // of a query's position from its row
#if DELAY
    int bias_delay;                // a key's far_from less its index (common/bias.cuh)
#endif
    int first_fragment;            // of the columns of dk and dv
    const int* list;               // KEYS_LISTED: the super-tile's keys; KEYS_SHARED: the mask row's, all of them
    long long partial;             // KEYS_LISTED without BITS: row of the first key's partial sums
    int entry;                     // BITS: of the first key, among those of the list row

    // The position after the last query's. A key that starts there or later counts as seen by nobody: columns of the
    // last step that are not queries would see it.
    __device__ __forceinline__ int end_position() const { return end_query + shift; }

    // Whether its sums are partial.
    __device__ __forceinline__ bool is_partial(const AttentionParams& p) const {
        return KEYS == KEYS_LISTED && !(BITS && end_query - first_query == p.query_length);
    }

    // Row of the partial sums of its key number `row`.
    __device__ __forceinline__ long long partial_row(const AttentionParams& p, int row) const {
        return (BITS ? ((long long)batch * p.kv_heads + group) * p.super_entries + entry : partial) + row;
    }
};

// The row of the mask for one head of the tile's group.
__device__ __forceinline__ long long mask_row_of(const AttentionParams& p, const KeyTile& t, int head) {
    return (long long)t.batch * p.mask_batch + t.group * p.mask_group + (long long)head * p.mask_head;
}

#if SEQUENCES
// The keys and queries of block number `block` of the row (b, kv head).
__device__ __forceinline__ void find_in_sequences(KeyTile& t, const AttentionParams& p, int block, int row) {
    const int n = p.sequences;
    const int* query_first = p.bounds;
    const int* query_end = p.bounds + n;
    const int* key_first = p.bounds + 2 * n;
    const int* key_end = p.bounds + 3 * n;
#if KEYS == KEYS_LISTED
    const long long entry = (long long)block * BLOCK_N, further = entry - first_super_entries(p.key_length, n);
    const bool is_first = further < 0;  // super-tile 0 of its sequence
    const int slot = static_cast<int>(further / p.super_capacity);
    const int b = is_first ? sequence_of_index(key_first, n, SUPER_UNIT, 1, static_cast<int>(entry / SUPER_UNIT))
                           : sequence_of_index(query_first, n, p.super_queries, 0, slot);
    const int k = is_first ? 0 : slot - query_first[b] / p.super_queries + 1;
    t.first = static_cast<int>(entry - super_offset(p.bounds, n, p.key_length, p.super_queries, p.super_capacity, b, k));
    t.sequence = b;
    t.first_query = query_first[b] + k * p.super_queries;
    t.end_query = min(t.first_query + p.super_queries, query_end[b]);
    if (t.first_query >= t.end_query) return;  // no keys
    const long long mask_row = t.group * p.mask_group;
    t.list = p.super_list + mask_row * p.super_entries + entry - t.first;
    t.count = min(BLOCK_N, p.super_lengths[mask_row * p.supers + query_first[b] / p.super_queries + b + k] - t.first);
    t.partial = row * p.super_entries + entry;
#else
    const RowTile keys = row_tile(key_first, key_end, n, BLOCK_N, block);
    t.first = keys.first;
    t.count = keys.end - keys.first;
    t.sequence = keys.sequence;
    t.first_query = query_first[keys.sequence];
    t.end_query = query_end[keys.sequence];
    t.shift = INTERVALS ? 0 : key_end[keys.sequence] - t.end_query;  // masks have been moved to rows
#endif
}
#endif

// The tile of this index, without keys if there is none; all lanes of a warp pass the same index.
__device__ __forceinline__ KeyTile find_key_tile(const AttentionParams& p, long long index) {
    KeyTile t = {};
    long long rest = index;
    t.first_fragment = static_cast<int>(rest % DIM_SLICES) * SLICE_FRAGMENTS;
    rest /= DIM_SLICES;
#if SEQUENCES
    const long long blocks = KEYS == KEYS_LISTED ? p.super_entries / BLOCK_N : p.key_length / BLOCK_N + p.sequences;
    const int block = static_cast<int>(rest % blocks);
    rest /= blocks;
#elif BITS
    const int blocks = static_cast<int>(p.super_entries / BLOCK_N), block = static_cast<int>(rest % blocks);
    rest /= blocks;
#elif KEYS == KEYS_LISTED
    const int blocks = p.super_capacity / BLOCK_N;
    t.first = static_cast<int>(rest % blocks) * BLOCK_N;
    rest /= blocks;
    const int super = static_cast<int>(rest % p.supers);
    rest /= p.supers;
#elif KEYS == KEYS_SHARED
    const long long rows = (long long)p.batch * p.kv_heads;  // the longest-lived keys of all of them first
    t.first = static_cast<int>(rest / rows) * BLOCK_N;
    rest %= rows;
#else
    const int blocks = (p.key_length + BLOCK_N - 1) / BLOCK_N;
    t.first = static_cast<int>(rest % blocks) * BLOCK_N;
    rest /= blocks;
#endif
    t.group = static_cast<int>(rest % p.kv_heads);
    t.batch = static_cast<int>(rest / p.kv_heads);
#if SEQUENCES
    find_in_sequences(t, p, block, t.group);
#elif BITS
    const long long list = ((long long)t.batch * p.list_batch + t.group * p.list_group) * p.super_entries;
    t.entry = block * BLOCK_N;
    const int4 found = p.super_blocks[(list + t.entry) / LIST_KEYS];
    t.list = p.super_list + list + t.entry;
    t.count = min(BLOCK_N, found.z - t.entry % LIST_KEYS);
    if (BLOCK_N > LIST_KEYS) t.count = found.z + p.super_blocks[(list + t.entry) / LIST_KEYS + 1].z;
    t.first_query = found.x;
    t.end_query = found.y;
#elif KEYS == KEYS_LISTED
    const long long mask_row = (long long)t.batch * p.mask_batch + t.group * p.mask_group;
    const long long list = mask_row * p.supers + super;
    t.list = p.super_list + list * p.super_capacity;
    t.count = min(BLOCK_N, p.super_lengths[list] - t.first);
    t.first_query = super * p.super_queries;
    t.end_query = min(t.first_query + p.super_queries, p.query_length);
    t.partial = (rest * p.supers + super) * p.super_capacity + t.first;
#else
#if KEYS == KEYS_SHARED
    t.list = p.list + ((long long)t.batch * p.mask_batch + t.group * p.mask_group) * p.key_length;
#endif
    t.count = min(BLOCK_N, p.key_length - t.first);
    t.end_query = p.query_length;
#endif
#if !SEQUENCES
    t.shift = p.key_length - p.query_length;
#endif
#if DELAY
    t.bias_delay = p.bias_delay;
#if SEQUENCES
    t.bias_delay += t.shift - (p.bounds[3 * p.sequences + t.sequence] - p.bounds[p.sequences + t.sequence]);
#endif
#endif
    return t;
}

// Queries that see any of a tile's keys: begin <= query < end; those in [full_begin, full_end) see all of them.
struct QueryRange {
    int begin, end, full_begin, full_end;
};

// From the intervals of BLOCK_N keys, computed by a whole warp.
__device__ __forceinline__ QueryRange find_queries(const int* starts, const int* stops, const KeyTile& t) {
    int lowest_start = NEVER, highest_start = INT_LOWEST, lowest_stop = NEVER, highest_stop = INT_LOWEST;
    for (int i = threadIdx.x & 31; i < BLOCK_N; i += 32) {
        const int start = starts[i], stop = stops[i];
        highest_start = max(highest_start, start);
        lowest_stop = min(lowest_stop, stop);
        if (start >= stop) continue;
        lowest_start = min(lowest_start, start);
        highest_stop = max(highest_stop, stop);
    }
    auto query_at = [&](int position) {
        const long long query = static_cast<long long>(position) - t.shift;
        return static_cast<int>(min(max(query, static_cast<long long>(t.first_query)), static_cast<long long>(t.end_query)));
    };
    return {query_at(__reduce_min_sync(ALL_LANES, lowest_start)), query_at(__reduce_max_sync(ALL_LANES, highest_stop)),
            query_at(__reduce_max_sync(ALL_LANES, highest_start)), query_at(__reduce_min_sync(ALL_LANES, lowest_stop))};
}
