// Which keys a tile of queries visits, in which order, and which of them each query sees.
//
// A tile holds consecutive positions first_position .. last_position. Its keys come in blocks of BLOCK_N; the three
// sources of blocks have one interface (a closed set, chosen by the prelude's KEYS):
//   KEYS_CONTIGUOUS  keys in their own order: no mask, or plain causal (CAUSAL)
//   KEYS_LISTED      the tile's own list: its `full` keys (seen by the whole tile) ahead of its partial ones
//   KEYS_SHARED      one list for all tiles of a mask row, with a summary per block; blocks no query sees are skipped
// A block is `masked` when some key of it needs a test for some query of the tile: start <= position < stop, or with BITS
// the query's bit of the key's word (lists/dense_mask.cu).
//
// Prelude: KEYS, BLOCK_N, CAUSAL (a query never sees later keys, whatever the mask says), BITS.
#pragma once
#include "common/arch.cuh"

#define KEYS_CONTIGUOUS 0
#define KEYS_LISTED 1
#define KEYS_SHARED 2

// The keys of one mask row; with KEYS_LISTED of one tile of it.
struct KeySource {
    const unsigned* columns;  // BITS: (WORDS, key_stride), from the word of the tile's first query on
    const int* start;       // (key_length) first position that sees a key       (neither KEYS_CONTIGUOUS nor BITS)
    const int* stop;        // (key_length) first position that no longer sees it
    const int* list;        // KEYS_LISTED: (capacity) full keys from the front, partial keys from the back
                            // KEYS_SHARED: (key_length) keys that some query sees, in order
    const int4* summaries;  // KEYS_SHARED: per BLOCK_N list entries: lowest and highest start, lowest and highest stop
    int first;  // index in the list where a tile begins, if not 0 (sequences)
    int length;  // number of keys in the list, or the index where a tile ends; KEYS_CONTIGUOUS: key_length
    int full;               // KEYS_LISTED: how many of them are full
    int capacity;           // KEYS_LISTED
};

struct KeyBlock {
    int first;  // index of its first key in the list; negative: there are no more blocks
    bool masked;
};

__device__ __forceinline__ bool visible(int position, int start, int stop) {
    return start <= position && position < stop;
}

__device__ __forceinline__ bool visible(int position, int2 interval) {
    return visible(position, interval.x, interval.y);
}

// BITS: a query's bit in a word, and a key's word.
__device__ __forceinline__ bool visible(int bit, int word) { return (word & bit) != 0; }

// The blocks of one tile, in order. All threads of a block step through them together and see the same.
struct KeyBlocks {
    KeySource source;
    int first_position, last_position;
    int next_key;  // index in the list of the next block's first key; KEYS_SHARED: next block
    unsigned pending, pending_masked;  // KEYS_SHARED: blocks of the current 32 still to come
    int group;  // KEYS_SHARED: index of the first of the current 32 blocks

    __device__ KeyBlocks(const KeySource& source, int first_position, int last_position)
        : source(source), first_position(first_position), last_position(last_position),
          next_key(KEYS == KEYS_SHARED ? source.first / BLOCK_N : source.first), pending(0),
          pending_masked(0), group(0) {}

    __device__ __forceinline__ KeyBlock next() {
        KeyBlock block = {-1, false};
#if KEYS == KEYS_SHARED
        // A warp looks at 32 summaries at once; every warp does so for itself, so no barrier is needed.
        const int blocks = (source.length + BLOCK_N - 1) / BLOCK_N;
        while (pending == 0 && next_key < blocks) {
            group = next_key;
            const int mine = group + (threadIdx.x & 31);
            bool seen = false, partial = false;
            if (mine < blocks) {
                const int4 s = source.summaries[mine];
                seen = s.x <= last_position && s.w > first_position;
                partial = s.y > first_position || s.z <= last_position || (mine + 1) * BLOCK_N > source.length;
            }
            pending = __ballot_sync(ALL_LANES, seen);
            pending_masked = __ballot_sync(ALL_LANES, partial);
            next_key += 32;
        }
        if (pending != 0) {
            const int bit = __ffs(pending) - 1;
            pending &= pending - 1;
            block.first = (group + bit) * BLOCK_N;
            block.masked = (pending_masked >> bit) & 1;
        }
#else
#if KEYS == KEYS_LISTED
        const int end = source.length, unmasked = source.full;
#elif CAUSAL
        const int end = min(source.length, last_position + 1), unmasked = min(source.length, first_position + 1);
#else
        const int end = source.length, unmasked = source.length;
#endif
        if (next_key < end) {
            block.first = next_key;
            block.masked = next_key + BLOCK_N > unmasked;
            next_key += BLOCK_N;
        }
#endif
        return block;
    }

    // Address of the list entry `index`, and whether there is one.
    __device__ __forceinline__ const int* entry(int index, bool& exists) const {
        exists = index < source.length;
#if KEYS == KEYS_LISTED
        return source.list + (index < source.full ? index : source.capacity - 1 - (index - source.full));
#else
        return source.list + index;
#endif
    }
};
