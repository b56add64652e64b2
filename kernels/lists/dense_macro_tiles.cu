// Key lists of super-tiles of queries, from the bits of a dense mask (lists/dense_mask.cu), for the gradients of keys
// and values (sm80/backward_dkv.cu).
//
// A super-tile has R consecutive queries, and its list holds the keys that any of them sees under any head of the kv
// head, in order. R is chosen here, per list row: the first of U, 2 U, 4 U, ... for which the lists of all super-tiles,
// each starting at a multiple of TILE_KEYS, fit into `entries` together. The last choice is one super-tile of all
// queries, which always fits. So sparse keys are gathered for few queries at a time, and if everything is visible every
// key is listed once.
//
//   seen_keys    seen // (list rows, units, key_stride / 32) u32: bit j % 32 of word j / 32 = one of these U queries
//                sees key j
//   count_keys   counts // (list rows, nodes): keys in each list of each choice, those of U first
//   super_keys   list // (list rows, entries): the lists
//                blocks // (list rows, entries / BLOCK_KEYS) int4: first query and end of the super-tile of these entries,
//                how many of them are keys (0: none), 0
//                slots // (list rows, units, key_length): a key's entry in the list of a super-tile, or -1
//                super_counts // (list rows): super-tiles
//   list_states  states // (mask rows, entries / BLOCK_KEYS, query_words) u16: as in lists/dense_mask.cu, of these keys
//                and the words of their super-tile's queries; entries without a key are ignored
//
// A list row is a kv head of a batch entry (or all heads, all batch entries); `share` mask rows belong to it. Every
// kernel reads its input once: seen_keys and list_states the words, the others much less.
//
// Prelude: none.
#include "common/arch.cuh"
#include "common/block_select.cuh"

struct SuperParams {
    const unsigned* columns;  // (mask rows, query_words, key_stride): see lists/dense_mask.cu
    unsigned* seen;
    int* counts;
    int* list;
    int4* blocks;
    int* slots;
    int* super_counts;
    unsigned short* states;
    int query_length, key_length, query_words, key_stride, key_chunks;
    int unit_queries, units;  // U, a multiple of 64, and how many of them there are
    int nodes;                // number of lists of all choices
    int entries, share;
};

constexpr int THREADS = 256;
constexpr int OWN = 4;  // consecutive keys of a thread
constexpr int BLOCK_KEYS = 64;
constexpr int TILE_KEYS = 128;  // the most keys of a list that a kernel reads at once

// Super-tiles of 2^level units each.
__device__ __forceinline__ int supers_of(const SuperParams& p, int level) {
    return (p.units + (1 << level) - 1) >> level;
}

// A word of `seen` for a super-tile.
__device__ __forceinline__ unsigned seen_by(const SuperParams& p, long long row, int super, int level, int word) {
    const int words = p.key_stride / 32, end = min((super + 1) << level, p.units);
    const unsigned* seen = p.seen + (row * p.units + (super << level)) * words + word;
    unsigned any = 0;
#pragma unroll 4
    for (int unit = super << level; unit < end; ++unit, seen += words) any |= *seen;
    return any;
}

extern "C" __global__ void __launch_bounds__(THREADS) seen_keys(const SuperParams p) {
    wait_for_earlier_kernels();
    long long rest = blockIdx.x;
    const int key = (static_cast<int>(rest % p.key_chunks) * THREADS + threadIdx.x) * OWN;
    rest /= p.key_chunks;
    const int unit = static_cast<int>(rest % p.units), first_word = unit * (p.unit_queries / 32);
    const int words = min(p.unit_queries / 32, p.query_words - first_word);
    const long long row = rest / p.units;

    uint4 any = make_uint4(0, 0, 0, 0);
    if (key < p.key_stride)
        for (int head = 0; head < p.share; ++head) {
            const unsigned* columns =
                p.columns + ((row * p.share + head) * p.query_words + first_word) * p.key_stride + key;
#pragma unroll 8
            for (int w = 0; w < words; ++w) {
                const uint4 x = *reinterpret_cast<const uint4*>(columns + static_cast<long long>(w) * p.key_stride);
                any = make_uint4(any.x | x.x, any.y | x.y, any.z | x.z, any.w | x.w);
            }
        }
    unsigned bits = ((any.x != 0) | (any.y != 0) << 1 | (any.z != 0) << 2 | (any.w != 0) << 3) << (threadIdx.x % 8 * OWN);
#pragma unroll
    for (int distance = 1; distance < 32 / OWN; distance <<= 1) bits |= __shfl_xor_sync(ALL_LANES, bits, distance);
    if (key < p.key_stride && threadIdx.x % (32 / OWN) == 0)
        p.seen[(row * p.units + unit) * (p.key_stride / 32) + key / 32] = bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) count_keys(const SuperParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32];
    const long long row = blockIdx.x / p.nodes;
    int super = blockIdx.x % p.nodes, level = 0, count = 0, total;
    while (super >= supers_of(p, level)) super -= supers_of(p, level++);
    for (int word = threadIdx.x; word < p.key_stride / 32; word += THREADS)
        count += __popc(seen_by(p, row, super, level, word));
    exclusive_sum<THREADS>(count, total, warp_values);
    if (threadIdx.x == 0) p.counts[blockIdx.x] = total;
}

// List entries that `keys` keys take.
__device__ __forceinline__ int entries_of(int keys) { return (keys + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS; }

// A block makes the list of one super-tile, if the chosen size has that many.
extern "C" __global__ void __launch_bounds__(THREADS) super_keys(const SuperParams p) {
    wait_for_earlier_kernels();
    __shared__ int warp_values[32];
    const long long row = blockIdx.x / p.units;
    const int super = blockIdx.x % p.units, lane = threadIdx.x & 31;

    const int* counts = p.counts + row * p.nodes;
    int level = 0, supers, all, first;  // entries of all lists of the choice, and of those before this one
    for (;; ++level, counts += supers) {
        supers = supers_of(p, level);
        int own_all = 0, own_first = 0;
        for (int s = threadIdx.x; s < supers; s += THREADS) {
            own_all += entries_of(counts[s]);
            if (s < super) own_first += entries_of(counts[s]);
        }
        exclusive_sum<THREADS>(own_all, all, warp_values);
        exclusive_sum<THREADS>(own_first, first, warp_values);
        if (supers == 1 || all <= p.entries) break;
    }
    if (super == 0 && threadIdx.x == 0) p.super_counts[row] = supers;
    if (super >= supers) return;

    const int queries = p.unit_queries << level, first_query = super * queries, count = counts[super];
    int4* blocks = p.blocks + row * (p.entries / BLOCK_KEYS);
    for (int b = threadIdx.x; b * BLOCK_KEYS < entries_of(count); b += THREADS)
        blocks[first / BLOCK_KEYS + b] = make_int4(first_query, min(first_query + queries, p.query_length),
                                                   min(max(count - b * BLOCK_KEYS, 0), BLOCK_KEYS), 0);
    if (super == supers - 1)  // after the last list
        for (int b = all / BLOCK_KEYS + threadIdx.x; b < p.entries / BLOCK_KEYS; b += THREADS)
            blocks[b] = make_int4(0, 0, 0, 0);

    int* list = p.list + row * p.entries;
    int* slots = p.slots + (row * p.units + super) * p.key_length;
    for (int at = 0; at < p.key_stride / 32; at += THREADS) {
        const int word = at + threadIdx.x;
        const unsigned bits = word < p.key_stride / 32 ? seen_by(p, row, super, level, word) : 0;
        int total;
        const int slot = first + exclusive_sum<THREADS>(__popc(bits), total, warp_values);
        first += total;
        for (int i = 0; i < 32; ++i) {  // a warp writes the keys of a word together
            const unsigned theirs = __shfl_sync(ALL_LANES, bits, i);
            const int key = (word - lane + i) * 32 + lane;
            const int mine = __shfl_sync(ALL_LANES, slot, i) + __popc(theirs & ((1u << lane) - 1));
            const bool seen = (theirs >> lane & 1) != 0;
            if (seen) list[mine] = key;
            if (key < p.key_length) slots[key] = seen ? mine : -1;
        }
    }
}

// A block has BLOCK_KEYS entries of one mask row; a warp takes WORDS words at a time, a lane two keys.
extern "C" __global__ void __launch_bounds__(THREADS) list_states(const SuperParams p) {
    wait_for_earlier_kernels();
    constexpr int WORDS = 4;
    const int blocks = p.entries / BLOCK_KEYS, block = blockIdx.x % blocks, lane = threadIdx.x & 31;
    const long long mask_row = blockIdx.x / blocks, row = mask_row / p.share;
    const int4 found = p.blocks[row * blocks + block];
    if (found.z == 0) return;

    const int* list = p.list + row * p.entries + block * BLOCK_KEYS;
    const bool exists[2] = {lane < found.z, lane + 32 < found.z};
    const int key[2] = {exists[0] ? list[lane] : 0, exists[1] ? list[lane + 32] : 0};
    const unsigned* columns = p.columns + mask_row * p.query_words * p.key_stride;
    unsigned short* states = p.states + static_cast<long long>(blockIdx.x) * p.query_words;
    const int end_word = (found.y + 63) / 64 * 2;  // steps of 64 queries read both words
    for (int at = found.x / 32 + threadIdx.x / 32 * WORDS; at < end_word; at += THREADS / 32 * WORDS) {
        unsigned any[WORDS] = {}, all[WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            all[w] = ALL_LANES;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (!exists[k] || at + w >= end_word) continue;
                const unsigned x = columns[static_cast<long long>(at + w) * p.key_stride + key[k]];
                any[w] |= x;
                all[w] &= x;
            }
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            if (at + w >= end_word) continue;
            const int queries = found.y - (at + w) * 32;
            const unsigned existing = queries <= 0 ? 0 : queries >= 32 ? ALL_LANES : ALL_LANES >> (32 - queries);
            const unsigned some = __reduce_or_sync(ALL_LANES, any[w]), whole = __reduce_and_sync(ALL_LANES, all[w]);
            if (lane == 0) states[at + w] = some == 0 ? 0 : (whole & existing) == existing ? 3 : 1;
        }
    }
}
