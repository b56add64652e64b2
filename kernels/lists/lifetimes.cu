// One order of a mask row's keys for all tiles, for masks without a bound on the keys of a tile: keys of similar
// lifetimes together, each group in its own order. A block then holds keys that the same queries see, and its summary
// is nearly exact: recent keys that die soon are separate from old ones that live on.
//
//   count_kinds     per chunk of CHUNK keys: how many of each kind
//   order_keys      merges kinds into groups and places the keys: the longest-lived group first, each in the opposite
//                   direction of the previous one, so that a block of two groups has keys from one end of the sequence;
//                   at the end the keys that no query sees
//   summarize_keys  per block of 16, 32, 64, 96 and 128 keys in that order: lowest and highest start and stop
//
// The kind of a key is how many queries see it: at least 32 << kind, or fewer for kind 0; EVER: all from its first to
// the last; UNSEEN. Kinds so sparse that a block would hold several of them anyway are one group.
//
// With SEQUENCES (start and stop are rows of query, lists/varlen.cu) keys are ordered segment by segment. A segment is
// the chunks whose first keys belong to one sequence: a long sequence is one, and so is a chunk of short sequences. A
// tile visits the segments that its sequence meets (chunk_info); no row of the tile sees other sequences' keys in them.
//
// Prelude: CAUSAL, SEQUENCES.
#include "common/arch.cuh"
#include "common/block_select.cuh"
#include "common/varlen.cuh"
#include "lists/key_intervals.cuh"

struct LifetimeParams {
    const int* start;
    const int* stop;
    int* kind_count;   // (rows, chunks, KINDS)
    int* order;        // (rows, key_length): keys
    int2* interval;    // (rows, key_length): of the keys in that order
    int* seen_count;   // (rows)
    int4* chunk_info;  // SEQUENCES (rows, chunks): seen keys of the chunk's segment, 0, 0, and where they begin in the order
    const int* bounds;  // SEQUENCES (4, sequences)
    int4* summaries;   // per block size (rows, blocks of a row): lowest start, highest start, lowest and highest stop
    long long start_batch, start_head, stop_batch, stop_head;  // strides, in elements; 0 where an axis broadcasts
    int heads;  // of the mask: row = batch * heads + head
    int rows, key_length, query_length, chunks, sequences;
};

constexpr int SHORTEST = 32;  // queries that see a key of kind 0: fewer than twice this
constexpr int EVER = 17, UNSEEN = 18, KINDS = 19;
constexpr int BLOCK = 96;  // keys of a block; a group must have more than this alive at a time

__device__ __forceinline__ int kind_of(int2 interval, int key_length) {
    if (interval.x >= interval.y) return UNSEEN;
#if !SEQUENCES
    if (interval.y >= key_length) return EVER;
#endif
    return min(max(26 - __clz(interval.y - interval.x), 0), EVER - 1);  // log2 of lifetime / 32
}

extern "C" __global__ void __launch_bounds__(THREADS) count_kinds(const LifetimeParams p) {
    wait_for_earlier_kernels();
    __shared__ int counts[KINDS];
    const int row = blockIdx.x / p.chunks, first = (blockIdx.x - row * p.chunks) * CHUNK + threadIdx.x;
    const Intervals intervals(p, row);
    if (threadIdx.x < KINDS) counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int key = first + k * THREADS;
        if (key < p.key_length) atomicAdd(&counts[kind_of(intervals[key], p.key_length)], 1);
    }
    __syncthreads();
    if (threadIdx.x < KINDS) p.kind_count[(long long)blockIdx.x * KINDS + threadIdx.x] = counts[threadIdx.x];
}

struct Groups {
    int of_kind[KINDS];
    int count;                                      // the last one has the unseen keys
    int begin[KINDS], size[KINDS], earlier[KINDS];  // in the order; keys; those of chunks before this one
    bool backward[KINDS];
};

// The first and end of the chunks that are ordered together with this one.
__device__ __forceinline__ int2 segment_of(const LifetimeParams& p, int chunk) {
#if SEQUENCES
    const int *key_first = p.bounds + 2 * p.sequences, *key_end = key_first + p.sequences;
    const int key = chunk * CHUNK, b = sequence_of_row(key_first, p.sequences, key);
    if (key >= key_end[b]) return make_int2(chunk, chunk + 1);
    return make_int2((key_first[b] + CHUNK - 1) / CHUNK, (key_end[b] + CHUNK - 1) / CHUNK);
#else
    return make_int2(0, p.chunks);
#endif
}

// From the number of keys of each kind in all chunks of the segment and in those before this one, by one thread. `at`,
// `unseen_at`: where the segment's keys begin in the order, and its unseen keys.
__device__ __forceinline__ void find_groups(Groups& groups, const int (&all)[KINDS], const int (&before)[KINDS],
                                            int query_length, int at, int unseen_at) {
    // From the shortest-lived kind up: kinds in one group have its first kind in common.
    int first[KINDS], keys = 0, group = 0;
    long long longest = 2 * SHORTEST;
    for (int kind = 0; kind < EVER; ++kind) {
        const long long own = (2ll * SHORTEST) << kind;  // the longest lifetime of this kind
        if (all[kind] > 0 && keys * (own - longest) >= (long long)BLOCK * query_length) {
            group = kind;
            keys = 0;
        }
        first[kind] = group;
        if (all[kind] > 0) longest = own;
        keys += all[kind];
    }
    int count = 0;
    auto add = [&](int from, int to) {  // a group of these kinds
        int size = 0, earlier = 0;
        for (int kind = from; kind <= to; ++kind) {
            groups.of_kind[kind] = count;
            size += all[kind];
            earlier += before[kind];
        }
        groups.begin[count] = from < UNSEEN ? at : unseen_at;
        groups.size[count] = size;
        groups.earlier[count] = earlier;
        groups.backward[count] = from < UNSEEN && count % 2 == 1;
        at += size;
        count += size > 0 || from == UNSEEN;
    };
    add(EVER, EVER);
    for (int last = EVER - 1; last >= 0; last = first[last] - 1) add(first[last], last);
    add(UNSEEN, UNSEEN);
    groups.count = count;
}

extern "C" __global__ void __launch_bounds__(THREADS) order_keys(const LifetimeParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32], all[KINDS], before[KINDS], unseen, unseen_ahead;  // of the row; ahead of the segment
    __shared__ Groups groups;
    const int row = blockIdx.x / p.chunks, chunk = blockIdx.x - row * p.chunks;
    const int first = chunk * CHUNK + threadIdx.x * OWN, lane = threadIdx.x & 31;
    const int2 segment = segment_of(p, chunk);
    for (int kind = threadIdx.x / 32; kind < KINDS; kind += WARPS) {
        const int* counts = p.kind_count + (long long)row * p.chunks * KINDS + kind;
        int sum = 0, earlier = 0, row_sum = 0, ahead = 0;
        const bool whole = SEQUENCES && kind == UNSEEN;
        for (int c = (whole ? 0 : segment.x) + lane; c < (whole ? p.chunks : segment.y); c += 32) {
            const int own = counts[(long long)c * KINDS];
            row_sum += own;
            if (c < segment.x) ahead += own;
            if (c < segment.x || c >= segment.y) continue;
            sum += own;
            if (c < chunk) earlier += own;
        }
        if (kind == UNSEEN) {
            row_sum = __reduce_add_sync(ALL_LANES, row_sum);
            ahead = __reduce_add_sync(ALL_LANES, ahead);
            if (lane == 0) {
                unseen = row_sum;
                unseen_ahead = ahead;
            }
        }
        sum = __reduce_add_sync(ALL_LANES, sum);
        earlier = __reduce_add_sync(ALL_LANES, earlier);
        if (lane == 0) {
            all[kind] = sum;
            before[kind] = earlier;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int keys = min(segment.y * CHUNK, p.key_length) - segment.x * CHUNK, at = segment.x * CHUNK - unseen_ahead;
        find_groups(groups, all, before, SEQUENCES ? min(keys, p.query_length) : p.query_length, at,
                    p.key_length - unseen + unseen_ahead);
        if (chunk == 0) p.seen_count[row] = p.key_length - unseen;
        if (SEQUENCES) p.chunk_info[blockIdx.x] = make_int4(keys - all[UNSEEN], 0, 0, at);
    }
    __syncthreads();

    const Intervals intervals(p, row);
    int2 own[OWN];
    int group_of[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        own[k] = intervals[first + k];
        group_of[k] = first + k < p.key_length ? groups.of_kind[kind_of(own[k], p.key_length)] : -1;
    }
    const long long base = (long long)row * p.key_length;
    for (int group = 0; group < groups.count; ++group) {
        int count = 0, total;
#pragma unroll
        for (int k = 0; k < OWN; ++k) count += group_of[k] == group;
        int rank = exclusive_sum<THREADS>(count, total, warp_values) + groups.earlier[group];
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (group_of[k] != group) continue;
            const int place = groups.begin[group] + (groups.backward[group] ? groups.size[group] - 1 - rank : rank);
            p.order[base + place] = first + k;
            p.interval[base + place] = own[k];
            ++rank;
        }
    }
}

// One block of one size per warp.
extern "C" __global__ void __launch_bounds__(THREADS) summarize_keys(const LifetimeParams p) {
    wait_for_earlier_kernels();
    constexpr int SIZES[] = {16, 32, 64, 96, 128};
    long long block = (long long)blockIdx.x * WARPS + threadIdx.x / 32, first_block = 0;
    int size = 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        if (size != 0) continue;
        const long long blocks = (long long)p.rows * ((p.key_length + SIZES[i] - 1) / SIZES[i]);
        if (block < blocks) {
            size = SIZES[i];
        } else {
            block -= blocks;
            first_block += blocks;
        }
    }
    if (size == 0) return;
    const int row_blocks = (p.key_length + size - 1) / size, row = static_cast<int>(block / row_blocks);
    const int begin = static_cast<int>(block - (long long)row * row_blocks) * size;
    const int4 s = summary_of(p.interval + (long long)row * p.key_length, begin, min(p.seen_count[row], begin + size));
    if ((threadIdx.x & 31) == 0) p.summaries[first_block + block] = s;
}
