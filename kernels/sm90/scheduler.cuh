// The tile scheduler of persistent CTAs: which tiles a CTA computes, in which order, and which of their keys.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/work.cuh"

__device__ __forceinline__ int num_sets(const AttentionParams& p) { return p.batch * (p.heads / HEADS); }

// Tile `index` of set `set`, or a slice of its rows: `count` times the 64 rows of a consumer, starting with the
// `first`-th.
struct WorkTile {
    bool exists;  // in this wave or a later one
    int set, index, first, count;  // count 0: none in this wave
#if SPLIT
    int split;  // and of its keys; negative: all
#endif
};

// The tile of this CTA in wave `wave`.
//
// Under causality alone tiles differ in their work. Within an L2 swizzle group (`swizzle_group` sets of heads whose
// keys fit into L2) the longest tiles come first, and every other wave assigns them to the CTAs in reverse. All CTAs
// then finish a group with equal work, provided each group begins with a wave of its own; in the last wave of a group
// some CTAs get nothing in place of one of the shortest tiles. Tiles that are split along their keys take a single
// wave.
//
// Lists also differ, in the same way in every set. So from one full wave to the next each CTA moves on by `rotation`
// places; otherwise it would get the same tile of every set if the grid is a multiple of the tiles of a set.
__device__ __forceinline__ WorkTile schedule(const ForwardParams& launch, int wave) {
    const AttentionParams& p = launch.attention;
    const int all = num_sets(p) * p.tiles;
    const unsigned grid = gridDim.x, block = blockIdx.x;
#if CAUSAL && KEYS == KEYS_CONTIGUOUS && !SPLIT
    const int own = wave % 2 ? grid - 1 - block : block;
#if SEQUENCES  // their tiles are not ordered by work
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
    const int index = before + (is_split ? block / num_splits : (block + wave * p.rotation) % grid);
    const TileIndex tile = tile_at(index, num_sets(p), p.tiles, p.tail_tiles);
    return {index < all, tile.set, tile.index, 0, CONSUMERS, is_split ? static_cast<int>(block % num_splits) : -1};
#else
    const int before = wave * grid;
    // If the last wave has fewer tiles than CTAs, the first ones (`cut_tiles`) are cut into a slice per consumer, and
    // the others into two if they are few (`halved`). No branches: at the start of a kernel each would wait for
    // instructions.
    const unsigned rest = max(all - before, 0);
    const bool short_tail = ROW_CUT && p.short_tiles > 0;  // the last wave has short tiles, none of them cut
    const bool halved = ROW_CUT && !short_tail && 2 * rest <= grid;
    const unsigned own = rest < grid ? block : (block + wave * p.rotation) % grid;
    const unsigned spare = rest < grid ? grid - rest : 0;
    const unsigned cut_tiles = !ROW_CUT || short_tail ? 0
                               : !halved              ? spare / (CONSUMERS - 1)
                               : CONSUMERS > 2        ? min(rest, spare - rest)
                                                      : rest;
    const unsigned other = own - CONSUMERS * cut_tiles;
    const bool is_cut = own < CONSUMERS * cut_tiles, is_second_half = !is_cut && halved && other % 2 != 0;
    const unsigned index = is_cut ? own / CONSUMERS : cut_tiles + (halved ? other / 2 : other);
    const TileIndex tile = tile_at(before + index, num_sets(p), p.tiles, SEQUENCES ? 0 : p.tail_tiles);
    const int slice = own % CONSUMERS;
    return {index < rest, tile.set, tile.index, is_cut ? slice : is_second_half ? CONSUMERS - 1 : 0,
            is_cut || is_second_half ? 1 : halved || (short_tail && rest <= grid) ? CONSUMERS - 1 : CONSUMERS};
#endif
}

// Index of a tile's first key in its own list. A macro, because a function would change the code if it is 0.
#if SPLIT
#define FIRST(source) (source).first
#else
#define FIRST(source) 0
#endif

#if SPLIT
// Restricts the keys of a tile to split `split` of `num_splits`, whose lengths differ by at most one block; some splits
// of a short list are empty.
__device__ __forceinline__ void keep_split(KeySource& source, unsigned split, unsigned num_splits) {
    const unsigned blocks = (source.length + BLOCK_N - 1) / BLOCK_N;
    source.first = blocks * split / num_splits * BLOCK_N;
    source.length = min(source.length, static_cast<int>(blocks * (split + 1) / num_splits * BLOCK_N));
    source.full = min(source.full, source.length);
}
#endif

// The tiles of this CTA, in order. Finding a tile takes several divisions and a load.
struct TileScheduler {
    const ForwardParams& launch;
    const AttentionParams& p;
    Plan (&plans)[2];  // of this warp
    int wave;
    int active_consumers;  // how many consumers have rows of the last tile found; 0: there are no more tiles

    __device__ __forceinline__ TileScheduler(const ForwardParams& launch, Plan (&plans)[2])
        : launch(launch), p(launch.attention), plans(plans), wave(-1), active_consumers(0) {}

    // Finds the next tile and fills its plan.
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
            // A slice without queries, which only the last wave has.
            if (ROW_CUT && !SEQUENCES && t.first_query >= t.end_query) active_consumers = 0;
            if (active_consumers == 0) return;
            if (!SEQUENCES || uniform(t.exists())) break;
        }
        __syncwarp();  // no lane reads the plan that was there before
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
        __syncwarp();  // the plan can be read
    }

    // The keys of a tile. Values loaded from memory are made warp-uniform for the compiler.
    __device__ __forceinline__ KeyBlocks keys(int plan) const {
#if KEYS == KEYS_LISTED
        copy_async_wait<0>();
        __syncwarp();  // the lengths have arrived
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
