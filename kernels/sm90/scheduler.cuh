// The tile scheduler: which tiles a persistent CTA computes, one after the other, and which of their keys.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/work.cuh"

__device__ __forceinline__ int num_sets(const AttentionParams& p) { return p.batch * (p.heads / HEADS); }

// Tile `index` of set `set`, or a part of it: `count` times the rows of a consumer from the `first`-th on.
struct WorkTile {
    bool exists;  // or a later round has one
    int set, index, first, count;  // count 0: this round has none
#if SPLIT
    int split;  // and of its keys; negative: all
#endif
};

// What this block takes in its round `wave`. Under causality alone tiles differ in their work: within `swizzle_group` sets of
// heads, whose keys fit into the L2, the longest come first, and every other round goes through the blocks
// backwards. So a block has as much to do as any other when a section ends, if each begins with a round of its own; the
// last one of a section has none for some blocks, where it would have had one of the shortest. Of tiles that are split up
// there is one round.
__device__ __forceinline__ WorkTile schedule(const ForwardParams& launch, int wave) {
    const AttentionParams& p = launch.attention;
    const int all = num_sets(p) * p.tiles;
    const unsigned grid = gridDim.x, block = blockIdx.x;
#if CAUSAL && KEYS == KEYS_CONTIGUOUS && !SPLIT
    const int own = wave % 2 ? grid - 1 - block : block;
#if SEQUENCES  // whose tiles are not in the order of their work
    const int index = wave * grid + own;
    const int first = index / (p.swizzle_group * p.tiles) * p.swizzle_group, rest = index - first * p.tiles;
    const bool exists = index < all;
#else
    const int waves = (p.swizzle_group * p.tiles + grid - 1) / grid, groups = wave / waves;
    const int first = groups * p.swizzle_group, rest = (wave - groups * waves) * grid + own;
    const bool exists = first < num_sets(p);
#endif
    const int sets = max(1, min(p.swizzle_group, num_sets(p) - first));
    return {exists, first + rest % sets, rest / sets, 0, rest < sets * p.tiles ? CONSUMERS : 0};
#elif SPLIT
    const unsigned before = wave * grid, num_splits = launch.splits.count;
    const bool is_split = before >= launch.splits.first;
    const int index = before + (is_split ? block / num_splits : block);
    const TileIndex tile = tile_at(index, num_sets(p), p.tiles, p.tail_tiles);
    return {index < all, tile.set, tile.index, 0, CONSUMERS, is_split ? static_cast<int>(block % num_splits) : -1};
#else
    const int before = wave * grid;
    // Of the last tiles, if there are fewer than blocks, the first ones (`cut_tiles`) are cut up into a part for each consumer, and
    // the others in two if there are few. Without branches, for each would wait for instructions at a kernel's beginning.
    const unsigned rest = max(all - before, 0);
    const bool short_tail = ROW_CUT && p.short_tiles > 0;  // then these are the tiles with fewer rows, and nothing is cut up
    const bool halved = ROW_CUT && !short_tail && 2 * rest <= grid;
    const unsigned spare = rest < grid ? grid - rest : 0;
    const unsigned cut_tiles = !ROW_CUT || short_tail ? 0 : !halved ? spare / (CONSUMERS - 1) : CONSUMERS > 2 ? min(rest, spare - rest) : rest;
    const unsigned other = block - CONSUMERS * cut_tiles;
    const bool is_cut = block < CONSUMERS * cut_tiles, is_second_half = !is_cut && halved && other % 2 != 0;
    const unsigned index = is_cut ? block / CONSUMERS : cut_tiles + (halved ? other / 2 : other);
    const TileIndex tile = tile_at(before + index, num_sets(p), p.tiles, SEQUENCES ? 0 : p.tail_tiles);
    const int slice = block % CONSUMERS;
    return {index < rest, tile.set, tile.index, is_cut ? slice : is_second_half ? CONSUMERS - 1 : 0,
            is_cut || is_second_half ? 1 : halved || (short_tail && rest <= grid) ? CONSUMERS - 1 : CONSUMERS};
#endif
}

// Place of a tile's first key in its own list. No function: it would change the code where it is 0.
#if SPLIT
#define FIRST(source) (source).first
#else
#define FIRST(source) 0
#endif

#if SPLIT
// Of a tile's keys those of part `is_split`. Its `num_splits` have as many blocks each, or one more; of a short list some have none.
__device__ __forceinline__ void keep_split(KeySource& source, unsigned split, unsigned num_splits) {
    const unsigned blocks = (source.length + BLOCK_N - 1) / BLOCK_N;
    source.first = blocks * split / num_splits * BLOCK_N;
    source.length = min(source.length, static_cast<int>(blocks * (split + 1) / num_splits * BLOCK_N));
    source.full = min(source.full, source.length);
}
#endif

// The tiles of this block, one after the other. Finding a tile takes several divisions and a load.
struct TileScheduler {
    const ForwardParams& launch;
    const AttentionParams& p;
    Plan (&plans)[2];  // this warp's
    int wave;
    int active_consumers;  // how many consumers have a part in the tile found last; none: there are no more

    __device__ __forceinline__ TileScheduler(const ForwardParams& launch, Plan (&plans)[2])
        : launch(launch), p(launch.attention), plans(plans), wave(-1), active_consumers(0) {}

    // Finds the next tile, and plans it.
    __device__ __forceinline__ void find(int plan) {
        Tile t;
        WorkTile work;
        for (;;) {
            work = schedule(launch, ++wave);
            active_consumers = work.exists ? work.count : 0;
            if (!work.exists) return;
            if (active_consumers == 0) continue;
            t = find_tile(p, work.set, work.index);
            if (ROW_CUT) {
                t.first_query += work.first * CUT_QUERIES;
                t.first_position += work.first * CUT_QUERIES;
                t.end_query = min(t.end_query, t.first_query + work.count * CUT_QUERIES);
                t.last_position = t.first_position + t.end_query - t.first_query - 1;
            }
            if (ROW_CUT && !SEQUENCES && t.first_query >= t.end_query) active_consumers = 0;  // a part without queries, in the last round
            if (active_consumers == 0) return;
            if (!SEQUENCES || uniform(t.exists())) break;
        }
        __syncwarp();  // nobody reads what was planned there before
        if ((threadIdx.x & 31) == 0) {
            plans[plan] = Plan(p, t);
#if SPLIT
            plans[plan].split = work.split;
#endif
#if KEYS == KEYS_LISTED
            const int* lengths = p.list_lengths + 2 * list_of(p, t);
            copy_async_4(&plans[plan].source.full, lengths, 4);
            copy_async_4(&plans[plan].source.length, lengths + 1, 4);
#endif
        }
        copy_async_commit();
        __syncwarp();  // it can be read
    }

    // The keys of a tile. What comes from memory is made known to be the same in all lanes.
    __device__ __forceinline__ KeyBlocks keys(int plan) const {
#if KEYS == KEYS_LISTED
        copy_async_wait<0>();
        __syncwarp();  // the lengths are there
#endif
        const Tile& t = plans[plan].tile;
        KeySource source = plans[plan].source;
        source.first = uniform(source.first);
        source.length = uniform(source.length);
        source.full = uniform(source.full);
#if SPLIT
        const int split = uniform(plans[plan].split);
        if (split >= 0) keep_split(source, split, launch.splits.count);
#endif
        return KeyBlocks(source, uniform(t.first_position), uniform(t.last_position));
    }
};
