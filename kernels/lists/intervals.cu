// Key lists: which keys a tile of queries must gather, from the intervals of a mask row.
//
// start, stop // (1|B, 1|Hkv|H, Lk) int32, last axis contiguous. CAUSAL also hides a key from positions before its own.
//
// Five kernels; a row is one (batch, head) of the mask:
//   count_seen    per chunk of CHUNK keys: how many are visible to any query, lowest start, highest stop
//   compact_seen  those keys in order: index, interval (CAUSAL applied); where each chunk's begin
//   tile_lists    per tile of `queries` positions: its full keys in order from the front of its list, its partial
//                 keys in order from the back, and the two counts (for a mask with few keys per tile). If there is a
//                 single chunk, it reads all keys and needs neither kernel above (`seen` null)
//   super_lists   per super-tile of `super_queries` positions: first the keys whose lifetime ends within it, by their
//                 stop, then those seen by all of it, then those that start within it; and for each key its slots
//                 in the lists of its super-tiles (backward pass; count_seen and compact_seen then count these slots
//                 too)
//   summarize     per BLOCK_N compacted keys: lowest and highest start and stop (for sequences without a bound, or if
//                 the bound is at least the number of keys; lists/lifetimes.cu handles other masks)
//
// With SEQUENCES start and stop are rows of query (lists/varlen.cu), tiles and super-tiles do not cross sequences, and
// `super` counts the super-tiles of a sequence.
//
// Prelude: CAUSAL, BLOCK_N, SEQUENCES.
#include "common/arch.cuh"
#include "common/block_select.cuh"
#include "common/varlen.cuh"
#include "lists/key_intervals.cuh"

struct ListParams {
    const int* start;
    const int* stop;
    int4* chunk_info;   // (rows, chunks): keys, lowest start, highest stop, keys of earlier chunks
    int* seen;          // (rows, key_length): compacted indices, followed by those of the other keys
    int2* interval;     // (rows, key_length): their start and stop
    int* seen_count;    // (rows)
    int* list;          // (rows, tiles, capacity)
    int* list_lengths;  // (rows, tiles, 2): full, all
    int4* summaries;    // (rows, ceil(key_length / BLOCK_N)): lowest start, highest start, lowest stop, highest stop
    int* span_sum;  // (rows, chunks): slots of the chunk's keys, if super_queries > 0
    int* span_offset;  // (rows, key_length): of a compacted key, where its slots begin
    int* super_list;     // (rows, supers, super_capacity)
    int* super_lengths;  // (rows, supers)
    int* slots;         // (rows, supers * super_capacity)
    const int* bounds;   // SEQUENCES (4, sequences)
    long long start_batch, start_head, stop_batch, stop_head;  // strides, in elements; 0 where an axis broadcasts
    int heads;  // of the mask: row = batch * heads + head
    int key_length, query_length, chunks, queries, tiles, capacity, summary_blocks;
    int short_tiles, missing_queries;  // the first `short_tiles` tiles have `missing_queries` fewer queries
    int tile_warps;  // warps per list in tile_lists: 1, 2 or 4
    int super_queries, supers, super_capacity, sequences;
    long long super_entries;  // SEQUENCES: instead of supers * super_capacity
};

// Super-tiles that a key of such an interval meets: the first, and how many.
__device__ __forceinline__ int2 span_of(const ListParams& p, int2 interval) {
    if (p.super_queries == 0 || interval.x >= interval.y) return make_int2(0, 0);
#if SEQUENCES
    const int first_row = p.bounds[sequence_of_row(p.bounds, p.sequences, interval.x)];
    const int first_super = (interval.x - first_row) / p.super_queries;
    return make_int2(first_super, (interval.y - 1 - first_row) / p.super_queries - first_super + 1);
#else
    const int first_position = p.key_length - p.query_length, super = (interval.x - first_position) / p.super_queries;
    return make_int2(super, (interval.y - 1 - first_position) / p.super_queries - super + 1);
#endif
}

__device__ __forceinline__ int block_min(int value, int (&warp_values)[32]) {
    const int lane = threadIdx.x & 31;
    value = __reduce_min_sync(ALL_LANES, value);
    __syncthreads();  // the values of an earlier call have been read
    if (lane == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();  // every warp's value is in place
    return __reduce_min_sync(ALL_LANES, warp_values[lane % WARPS]);
}

extern "C" __global__ void __launch_bounds__(THREADS) count_seen(const ListParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32];
    const int row = blockIdx.x / p.chunks, first = (blockIdx.x - row * p.chunks) * CHUNK + threadIdx.x;
    const Intervals intervals(p, row);
    int2 own[OWN];
    int count = 0, lowest_start = NEVER, highest_stop = INT_LOWEST, total;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int2 v = own[k] = intervals[first + k * THREADS];
        if (v.x >= v.y) continue;
        ++count;
        lowest_start = min(lowest_start, v.x);
        highest_stop = max(highest_stop, v.y);
    }
    exclusive_sum<THREADS>(count, total, warp_values);
    lowest_start = block_min(lowest_start, warp_values);
    highest_stop = ~block_min(~highest_stop, warp_values);  // ~x reverses the order without overflow
    if (threadIdx.x == 0) p.chunk_info[blockIdx.x] = make_int4(total, lowest_start, highest_stop, 0);
    if (p.super_queries == 0) return;
    int spans = 0;
#pragma unroll
    for (int k = 0; k < OWN; ++k) spans += span_of(p, own[k]).y;
    exclusive_sum<THREADS>(spans, total, warp_values);
    if (threadIdx.x == 0) p.span_sum[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) compact_seen(const ListParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32];
    const int row = blockIdx.x / p.chunks, c = blockIdx.x - row * p.chunks, first = c * CHUNK + threadIdx.x * OWN;
    const Intervals intervals(p, row);
    int earlier = 0, offset, total;
    for (int i = threadIdx.x; i < c; i += THREADS) earlier += p.chunk_info[row * p.chunks + i].x;

    int2 own[OWN];
    int count = 0;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        own[k] = intervals[first + k];
        count += own[k].x < own[k].y;
    }
    exclusive_sum<THREADS>(earlier, offset, warp_values);
    const int before = exclusive_sum<THREADS>(count, total, warp_values);
    long long index = (long long)row * p.key_length + offset + before;
#pragma unroll
    for (int k = 0; k < OWN; ++k)
        if (own[k].x < own[k].y) {
            p.seen[index] = first + k;
            p.interval[index++] = own[k];
        } else if (first + k < p.key_length) {  // from the end of the row: those that no query sees
            const long long end = (row + 1ll) * p.key_length, rank = index - (end - p.key_length);
            p.seen[end - 1 - (first + k - rank)] = first + k;
        }
    if (threadIdx.x == 0) {
        p.chunk_info[blockIdx.x].w = offset;
        if (c == p.chunks - 1) p.seen_count[row] = offset + total;
    }
    if (p.super_queries == 0) return;
    int earlier_spans = 0, span, spans = 0, own_spans[OWN];
    for (int i = threadIdx.x; i < c; i += THREADS) earlier_spans += p.span_sum[row * p.chunks + i];
    exclusive_sum<THREADS>(earlier_spans, span, warp_values);
#pragma unroll
    for (int k = 0; k < OWN; ++k) spans += own_spans[k] = span_of(p, own[k]).y;
    span += exclusive_sum<THREADS>(spans, total, warp_values);
    index -= count;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        if (own[k].x >= own[k].y) continue;
        p.span_offset[index++] = span;
        span += own_spans[k];
    }
}

// A range of compacted keys that contains all keys that meet positions first .. last: without the chunks before the
// first and after the last chunk that meets them.
__device__ __forceinline__ int2 find_range(const ListParams& p, long long row, int first, int last,
                                           int (&warp_values)[32]) {
    int first_chunk = NEVER, last_chunk = -1;
    for (int c = threadIdx.x; c < p.chunks; c += THREADS) {
        const int4 info = p.chunk_info[row * p.chunks + c];
        if (info.x == 0 || info.y > last || info.z <= first) continue;
        first_chunk = min(first_chunk, c);
        last_chunk = c;
    }
    first_chunk = block_min(first_chunk, warp_values);
    last_chunk = ~block_min(~last_chunk, warp_values);
    if (first_chunk > last_chunk) return make_int2(0, 0);
    const int4 info = p.chunk_info[row * p.chunks + last_chunk];
    return make_int2(p.chunk_info[row * p.chunks + first_chunk].w, info.w + info.x);
}

// SEQUENCES have tiles of one size.
__device__ __forceinline__ int first_query_of(const ListParams& p, int tile) {
    return tile * p.queries - min(tile, p.short_tiles) * p.missing_queries;
}

// A block makes the lists of consecutive tiles. All its threads search for keys that any of these tiles sees, a step at
// a time, and pass them through shared memory; `tile_warps` warps per tile then make its list. Keys that all tiles see
// in full, nearly all of them, are copied; each of the tile's warps sorts the others for itself.
extern "C" __global__ void __launch_bounds__(THREADS) tile_lists(const ListParams p) {
    wait_for_earlier_kernels();
    constexpr int STEP = 4;  // consecutive compacted keys that a thread reads
    __shared__ int warp_values[32];
    __shared__ int common_key[THREADS * STEP], found_key[THREADS * STEP];
    __shared__ int2 found_interval[THREADS * STEP];
    const int tile_lanes = p.tile_warps * 32, group = THREADS / tile_lanes, groups = (p.tiles + group - 1) / group;
    const int row = blockIdx.x / groups, first_tile = (blockIdx.x - row * groups) * group;
    const int own_tile = threadIdx.x / tile_lanes, tile_lane = threadIdx.x - own_tile * tile_lanes;
    const int tile = first_tile + own_tile, lane = threadIdx.x & 31;
#if SEQUENCES
    const RowTile rows = row_tile(p.bounds, p.bounds + p.sequences, p.sequences, p.queries, tile);
    const bool exists = tile < p.tiles && rows.first < rows.end;
    const int first_position = rows.first, last_position = rows.end - 1;
    const int group_first = block_min(exists ? first_position : NEVER, warp_values);
    const int group_last = ~block_min(exists ? ~last_position : NEVER, warp_values);
#else
    const bool exists = tile < p.tiles;
    const int shift = p.key_length - p.query_length;
    const int group_first = first_query_of(p, first_tile) + shift;
    const int group_last = min(first_query_of(p, first_tile + group), p.query_length) - 1 + shift;
    const int first_position = first_query_of(p, tile) + shift;
    const int last_position = min(first_query_of(p, tile + 1), p.query_length) - 1 + shift;
#endif

    const bool compacted = p.seen != nullptr;
    const Intervals intervals(p, row);
    const int2 range = compacted ? find_range(p, row, group_first, group_last, warp_values) : make_int2(0, p.key_length);
    const int begin = range.x, end = range.y;

    int* list = p.list + ((long long)row * p.tiles + tile) * p.capacity;
    const long long base = (long long)row * p.key_length;
    int full = 0, partial = 0;  // keys in the tile's list
    for (int at = begin; at < end; at += THREADS * STEP) {
        int2 own[STEP];
        int key[STEP];
        int kind[STEP];  // 0: seen by no tile, 1: by all positions of all tiles, 1 << 16: by some
        int counts = 0, totals;
#pragma unroll
        for (int k = 0; k < STEP; ++k) {
            const int i = at + threadIdx.x * STEP + k;
            own[k] = i >= end ? make_int2(0, 0) : compacted ? p.interval[base + i] : intervals[i];
            key[k] = i < end && compacted ? p.seen[base + i] : i;
            const bool seen = own[k].x < own[k].y && own[k].x <= group_last && own[k].y > group_first;
            kind[k] = !seen ? 0 : own[k].x <= group_first && own[k].y > group_last ? 1 : 1 << 16;
            counts += kind[k];
        }
        counts = exclusive_sum<THREADS>(counts, totals, warp_values);  // its barriers: the keys before have been sorted
        int common_index = counts & 0xffff, index = counts >> 16;
#pragma unroll
        for (int k = 0; k < STEP; ++k) {
            if (kind[k] == 1) common_key[common_index++] = key[k];
            if (kind[k] > 1) {
                found_key[index] = key[k];
                found_interval[index++] = own[k];
            }
        }
        __syncthreads();  // all keys of this step are in shared memory
        if (exists) {
            const int common = totals & 0xffff, total = totals >> 16;
#pragma unroll 1
            for (int i = tile_lane; i < common; i += tile_lanes)
                if (full + i < p.capacity) list[full + i] = common_key[i];
            full += common;
#pragma unroll 1
            for (int i = lane; i - lane < total; i += 32) {
                const int2 v = i < total ? found_interval[i] : make_int2(0, 0);
                const bool any = v.x < v.y && v.x <= last_position && v.y > first_position;
                const bool all = any && v.x <= first_position && v.y > last_position;
                const unsigned is_full = __ballot_sync(ALL_LANES, all), is_seen = __ballot_sync(ALL_LANES, any);
                const unsigned earlier = (1u << lane) - 1, is_partial = is_seen & ~is_full;
                const int slot = all ? full + __popc(is_full & earlier)
                                     : p.capacity - 1 - (partial + __popc(is_partial & earlier));
                if (any && lane == tile_lane && slot >= 0 && slot < p.capacity) list[slot] = found_key[i];
                full += __popc(is_full);
                partial += __popc(is_partial);
            }
        }
    }
    if (tile_lane == 0 && exists) {
        int* lengths = p.list_lengths + 2 * ((long long)row * p.tiles + tile);
        lengths[0] = full;
        lengths[1] = full + partial;
    }
}

// Kinds of a super-tile's keys, in the order of its list: those that end within it, in BINS bins by their stop, so that
// tiles of them need few of the queries; those seen by all of it; those that start within it.
constexpr int BINS = 30, SEES_ALL = BINS, COMES = BINS + 1, KINDS = 32;

// The lanes of this warp whose kind equals this lane's.
__device__ __forceinline__ unsigned lanes_of_kind(int kind) {
    unsigned lanes = ALL_LANES;
#pragma unroll
    for (int bit = 1; bit <= KINDS; bit *= 2) {
        const unsigned ones = __ballot_sync(ALL_LANES, (kind & bit) != 0);
        lanes &= (kind & bit) != 0 ? ones : ~ones;
    }
    return lanes;
}

// One super-tile per block: a first pass counts the keys of each kind, a second one writes them in their order.
extern "C" __global__ void __launch_bounds__(THREADS) super_lists(const ListParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32];
    const long long row = blockIdx.x / p.supers;
#if SEQUENCES
    const RowTile rows = row_tile(p.bounds, p.bounds + p.sequences, p.sequences, p.super_queries, blockIdx.x % p.supers);
    if (rows.first >= rows.end) return;
    const int first = rows.first, last = rows.end - 1, super = (first - p.bounds[rows.sequence]) / p.super_queries;
    const long long entries = p.super_entries, index = row * entries +
        super_offset(p.bounds, p.sequences, p.key_length, p.super_queries, p.super_capacity, rows.sequence, super);
#else
    const int super = blockIdx.x % p.supers, shift = p.key_length - p.query_length;
    const int first = super * p.super_queries + shift;
    const int last = min((super + 1) * p.super_queries, p.query_length) - 1 + shift;
    const long long entries = (long long)p.supers * p.super_capacity, index = (long long)blockIdx.x * p.super_capacity;
#endif
    const int2 range = find_range(p, row, first, last, warp_values);
    const long long base = row * p.key_length;

    const float bins = static_cast<float>(BINS) / max(last - first, 1);  // a position
    auto kind_of = [&](int i) {  // KINDS: not seen
        const int2 v = i < range.y ? p.interval[base + i] : make_int2(0, 0);
        if (v.x >= v.y || v.x > last || v.y <= first) return KINDS;
        if (v.y <= last) return min(static_cast<int>((v.y - 1 - first) * bins), BINS - 1);
        return v.x <= first ? SEES_ALL : COMES;
    };
    __shared__ int next[KINDS], of_warp[WARPS][KINDS];  // where the next key of a kind goes; a warp's keys of a kind
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    if (warp == 0) next[lane] = 0;
    __syncthreads();
    for (int i = range.x + threadIdx.x; i < range.y; i += THREADS) {
        const int kind = kind_of(i);
        if (kind < KINDS) atomicAdd(&next[kind], 1);
    }
    __syncthreads();
    int total;
    const int begin = exclusive_sum<THREADS>(threadIdx.x < KINDS ? next[threadIdx.x] : 0, total, warp_values);
    if (threadIdx.x < KINDS) next[threadIdx.x] = begin;
    if (threadIdx.x == 0) p.super_lengths[blockIdx.x] = min(total, p.super_capacity);

    int* list = p.super_list + index;
    int* slots = p.slots + row * entries;
    for (int at = range.x; at < range.y; at += THREADS) {
        const int i = at + threadIdx.x, kind = kind_of(i);
        const unsigned alike = lanes_of_kind(kind), before = alike & ((1u << lane) - 1);
        of_warp[warp][lane] = 0;
        __syncwarp();
        if (kind < KINDS && before == 0) of_warp[warp][kind] = __popc(alike);
        __syncthreads();
        int mine = 0;
        if (kind < KINDS) {
            mine = next[kind] + __popc(before);
            for (int w = 0; w < warp; ++w) mine += of_warp[w][kind];
        }
        __syncthreads();
        if (warp == 0)
            for (int w = 0; w < WARPS; ++w) next[lane] += of_warp[w][lane];
        __syncthreads();
        if (kind == KINDS || mine >= p.super_capacity) continue;
        list[mine] = p.seen[base + i];
        slots[p.span_offset[base + i] + super - span_of(p, p.interval[base + i]).x] = mine;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) summarize(const ListParams p) {
    wait_for_earlier_kernels();
    const int row_blocks = (p.summary_blocks + WARPS - 1) / WARPS;  // a warp takes one block of keys
    const long long row = blockIdx.x / row_blocks;
    const int block = blockIdx.x % row_blocks * WARPS + threadIdx.x / 32;
    if (block >= p.summary_blocks) return;
    const int4 s = summary_of(p.interval + row * p.key_length, block * BLOCK_N,
                              min(p.seen_count[row], (block + 1) * BLOCK_N));
    if ((threadIdx.x & 31) == 0) p.summaries[row * p.summary_blocks + block] = s;
}
