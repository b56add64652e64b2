// The tile scheduler: which tiles a persistent CTA computes, one after the other, and which of their keys.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/work.cuh"

__device__ __forceinline__ int all_sets(const AttentionParams& p) { return p.batch * (p.heads / HEADS); }

// Tile `place` of set `set`, or a part of it: `count` times the rows of a consumer from the `first`-th on.
struct Share {
    bool exists;  // or a later round has one
    int set, place, first, count;  // count 0: this round has none
#if SPLIT
    int part;  // and of its keys; negative: all
#endif
};

// What this block takes in its round `round`. Under causality alone tiles differ in their work: within `section` sets of
// heads, whose keys fit into the second cache, the longest come first, and every other round goes through the blocks
// backwards. So a block has as much to do as any other when a section ends, if each begins with a round of its own; the
// last one of a section has none for some blocks, where it would have had one of the shortest. Of tiles that are split up
// there is one round.
__device__ __forceinline__ Share scheduled(const ForwardParams& launch, int round) {
    const AttentionParams& p = launch.attention;
    const int all = all_sets(p) * p.tiles;
    const unsigned grid = gridDim.x, block = blockIdx.x;
#if CAUSAL && KEYS == KEYS_CONTIGUOUS && !SPLIT
    const int own = round % 2 ? grid - 1 - block : block;
#if SEQUENCES  // whose tiles are not in the order of their work
    const int number = round * grid + own;
    const int first = number / (p.section * p.tiles) * p.section, rest = number - first * p.tiles;
    const bool exists = number < all;
#else
    const int rounds = (p.section * p.tiles + grid - 1) / grid, sections = round / rounds;
    const int first = sections * p.section, rest = (round - sections * rounds) * grid + own;
    const bool exists = first < all_sets(p);
#endif
    const int sets = max(1, min(p.section, all_sets(p) - first));
    return {exists, first + rest % sets, rest / sets, 0, rest < sets * p.tiles ? CONSUMERS : 0};
#elif SPLIT
    const unsigned before = round * grid, parts = launch.parts.count;
    const bool split = before >= launch.parts.first;
    const int number = before + (split ? block / parts : block);
    const Dealt tile = dealt(number, all_sets(p), p.tiles, p.shorter);
    return {number < all, tile.set, tile.place, 0, CONSUMERS, split ? static_cast<int>(block % parts) : -1};
#else
    const int before = round * grid;
    // Of the last tiles, if there are fewer than blocks, the first ones (`thirds`) are cut up into a part for each consumer, and
    // the others in two if there are few. Without branches, for each would wait for instructions at a kernel's beginning.
    const unsigned rest = max(all - before, 0);
    const bool lower = CUT && p.lower > 0;  // then these are the tiles with fewer rows, and nothing is cut up
    const bool few = CUT && !lower && 2 * rest <= grid;
    const unsigned spare = rest < grid ? grid - rest : 0;
    const unsigned thirds = !CUT || lower ? 0 : !few ? spare / (CONSUMERS - 1) : CONSUMERS > 2 ? min(rest, spare - rest) : rest;
    const unsigned other = block - CONSUMERS * thirds;
    const bool third = block < CONSUMERS * thirds, second = !third && few && other % 2 != 0;
    const unsigned number = third ? block / CONSUMERS : thirds + (few ? other / 2 : other);
    const Dealt tile = dealt(before + number, all_sets(p), p.tiles, SEQUENCES ? 0 : p.shorter);
    const int part = block % CONSUMERS;
    return {number < rest, tile.set, tile.place, third ? part : second ? CONSUMERS - 1 : 0,
            third || second ? 1 : few || (lower && rest <= grid) ? CONSUMERS - 1 : CONSUMERS};
#endif
}

// Place of a tile's first key in its own list. No function: it would change the code where it is 0.
#if SPLIT
#define FIRST(source) (source).first
#else
#define FIRST(source) 0
#endif

#if SPLIT
// Of a tile's keys those of part `part`. Its `parts` have as many blocks each, or one more; of a short list some have none.
__device__ __forceinline__ void keep_part(KeySource& source, unsigned part, unsigned parts) {
    const unsigned blocks = (source.length + BLOCK_N - 1) / BLOCK_N;
    source.first = blocks * part / parts * BLOCK_N;
    source.length = min(source.length, static_cast<int>(blocks * (part + 1) / parts * BLOCK_N));
    source.full = min(source.full, source.length);
}
#endif

// The tiles of this block, one after the other. Finding a tile takes several divisions and a load.
struct Tiles {
    const ForwardParams& launch;
    const AttentionParams& p;
    Plan (&plans)[2];  // this warp's
    int round;
    int staying;  // how many consumers have a part in the tile found last; none: there are no more

    __device__ __forceinline__ Tiles(const ForwardParams& launch, Plan (&plans)[2])
        : launch(launch), p(launch.attention), plans(plans), round(-1), staying(0) {}

    // Finds the next tile, and plans it.
    __device__ __forceinline__ void find(int plan) {
        Tile t;
        Share share;
        for (;;) {
            share = scheduled(launch, ++round);
            staying = share.exists ? share.count : 0;
            if (!share.exists) return;
            if (staying == 0) continue;
            t = find_tile(p, share.set, share.place);
            if (CUT) {
                t.first_query += share.first * PART_QUERIES;
                t.first_position += share.first * PART_QUERIES;
                t.end_query = min(t.end_query, t.first_query + share.count * PART_QUERIES);
                t.last_position = t.first_position + t.end_query - t.first_query - 1;
            }
            if (CUT && !SEQUENCES && t.first_query >= t.end_query) staying = 0;  // a part without queries, in the last round
            if (staying == 0) return;
            if (!SEQUENCES || uniform(t.exists())) break;
        }
        __syncwarp();  // nobody reads what was planned there before
        if ((threadIdx.x & 31) == 0) {
            plans[plan] = Plan(p, t);
#if SPLIT
            plans[plan].part = share.part;
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
        const int part = uniform(plans[plan].part);
        if (part >= 0) keep_part(source, part, launch.parts.count);
#endif
        return KeyBlocks(source, uniform(t.first_position), uniform(t.last_position));
    }
};
