// The producer of the Hopper forward: a warpgroup that gathers one block of keys after the other, of one tile after the
// other, into shared memory.
//
// A warp copies ROWS rows at a time, ROW_LANES lanes a row. Its rows of a block are the same modulo 8 wherever ROWS allows,
// so that a lane's places in shared memory are constants apart.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/tile.cuh"

constexpr int ROWS = 32 / ROW_LANES;

// Column of the block's key that lane `mine` of this warp knows: the warp's rows mine, mine + 1, ...
__device__ __forceinline__ int column_of(int mine) {
    return mine / ROWS * (PRODUCER_WARPS * ROWS) + threadIdx.x / 32 * ROWS + mine % ROWS;
}

// Which key of a block stands in row `column` of its matrices: a lane's columns of two accumulator fragments (2t, 2t + 1,
// 2t + 8, ...) are eight keys that follow each other, so that it reads what is known of them in whole vectors.
__device__ __forceinline__ constexpr int key_of_row(int column) {
    return column / 32 * 32 + column % 8 / 2 * 8 + column / 8 % 4 * 2 + column % 2;
}

struct Step {
    int tile;     // negative: there are no more
    int count;    // keys from the block's first on
    int key;      // row of this lane's key
    bool masked;
    bool opens;
#if BIAS == BIAS_DENSE
    int first_key, last_key;
#endif
};

struct Steps {
    const AttentionParams& p;
    KeyBlocks blocks;
    int tile;
    bool fresh;  // nothing of this tile has come yet
#if KEYS == KEYS_LISTED
    int2 lengths;  // of the next tile's list, fetched ahead
#endif

    __device__ __forceinline__ Steps(const AttentionParams& p)
        : p(p), blocks(KeySource{}, 0, 0), tile(blockIdx.x), fresh(true) {
        fetch_lengths(tile);
        open();
    }

    __device__ __forceinline__ void fetch_lengths(int of) {
#if KEYS == KEYS_LISTED
        if (of < all_tiles(p)) lengths = *reinterpret_cast<const int2*>(p.list_lengths + 2 * list_of(p, find_tile(p, of)));
#endif
    }

    __device__ __forceinline__ void open() {
        if (tile >= all_tiles(p)) return;
        const Tile t = find_tile(p, tile);
        KeySource source = locate_keys(p, t);
#if KEYS == KEYS_LISTED
        source.full = lengths.x;
        source.length = lengths.y;
        fetch_lengths(tile + gridDim.x);
#endif
        blocks = KeyBlocks(source, t.first_position, t.last_position);
    }

    // A tile that meets no keys has one block without keys, so that its output is written.
    __device__ __forceinline__ Step next() {
        Step step = {-1, 0, 0, false, fresh};
        if (tile >= all_tiles(p)) return step;
        KeyBlock block = blocks.next();
        if (block.first < 0 && !fresh) {
            tile += gridDim.x;
            open();
            step.opens = true;
            if (tile >= all_tiles(p)) return step;
            block = blocks.next();
        }
        if (block.first < 0) block = {blocks.source.length, true};
        step.tile = tile;
        step.count = blocks.source.length - block.first;
        step.masked = block.masked;
        fresh = false;
        const int lane = threadIdx.x & 31, place = key_of_row(column_of(lane));
        bool exists;
        if (lane < WARP_KEYS && place < step.count) {
#if KEYS == KEYS_CONTIGUOUS
            step.key = block.first + place;
#else
            step.key = *blocks.entry(block.first + place, exists);
#endif
        }
#if BIAS == BIAS_DENSE
        step.first_key = 0;
        step.last_key = -1;
#if KEYS == KEYS_CONTIGUOUS
        step.first_key = block.first;
        step.last_key = block.first + BLOCK_N - 1;
#else
        // Lists are in order but for the step from full keys to partial ones.
        if (step.count >= BLOCK_N && (block.first >= blocks.source.full || block.first + BLOCK_N <= blocks.source.full)) {
            step.first_key = *blocks.entry(block.first, exists);
            step.last_key = *blocks.entry(block.first + BLOCK_N - 1, exists);
        }
#endif
        if (step.count < BLOCK_N) step.last_key = -1;
#endif
        return step;
    }
};

// This warp's rows of a block, from the key rows that its lanes know.
template <bool whole>
__device__ __forceinline__ void gather_rows(ELEMENT* matrix, const ELEMENT* source, int row_stride, const Step& step) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, first = column_of(lane / ROW_LANES);
    const unsigned place = shared_address(piece_of<BLOCK_N>(matrix, first, piece));
    const int stride = row_stride * static_cast<int>(sizeof(ELEMENT));
    constexpr int DISTANCE = PRODUCER_WARPS * ROWS;  // rows from one copy of the warp to its next
    constexpr int COPIES = WARP_KEYS / ROWS, BATCH = COPIES < 8 ? COPIES : 8;
    source += piece * 8;
#pragma unroll
    for (int begin = 0; begin < COPIES; begin += BATCH) {
        int key[BATCH];  // all shuffles of a batch first: a copy would wait for its own
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            key[k] = __shfl_sync(ALL_LANES, step.key, (begin + k) * ROWS + lane / ROW_LANES);
        if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) continue;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int rows = (begin + k) * DISTANCE;
            const bool exists = (whole || key_of_row(first + rows) < step.count) && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // Four rows further the piece stands four places away, eight rows further at the same place again.
            const unsigned turned = rows % 8 == 4 ? place ^ 64 : place;
            copy_async_16(turned + rows * CHUNK_ROW_BYTES, row_address(source, key[k], stride), exists ? 16 : 0);
        }
    }
}

__device__ __forceinline__ void gather(ELEMENT* matrix, const ELEMENT* source, int row_stride, const Step& step) {
    if (step.count < BLOCK_N)
        gather_rows<false>(matrix, source, row_stride, step);
    else
        gather_rows<true>(matrix, source, row_stride, step);
}

__device__ __forceinline__ void gather_queries(ELEMENT* matrix, const AttentionParams& p, const Tile& t) {
    const int piece = threadIdx.x % ROW_LANES;
    const ELEMENT* source = p.query + t.batch * p.query_batch + t.first_head * p.query_head;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll 4
    for (int row = threadIdx.x / ROW_LANES; row < BLOCK_M; row += PRODUCER_THREADS / ROW_LANES) {
        const int query = t.first_query + row / HEADS;
        const bool exists = row < QUERIES * HEADS && query < p.query_length;
        copy_async_16(piece_of<BLOCK_M>(matrix, row, piece),
                      source + (exists ? query : 0) * p.query_row + row % HEADS * p.query_head + piece * 8,
                      exists && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM) ? 16 : 0);
    }
}

// Where a tile's keys and what is known of them lie.
struct Sources {
    const ELEMENT *keys, *values;
    const float* bias;
    const int *start, *stop;
    const unsigned* columns;

    __device__ __forceinline__ Sources() {}

    __device__ __forceinline__ Sources(const AttentionParams& p, const Tile& t)
        : keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head) {
        const KeySource source = locate_keys(p, t);
        start = source.start;
        stop = source.stop;
        columns = source.columns;
    }
};

// What is known per key, by the lane that knows the key.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Sources& sources,
                                             const Step& step, int stage) {
    const int lane = threadIdx.x & 31, place = key_of_row(column_of(lane));
    if (lane >= WARP_KEYS) return;
    const bool exists = place < step.count;
#if BIAS == BIAS_OF_KEYS
    copy_async_4(&shared.bias[stage][place], sources.bias + (long long)step.key * p.bias_key, exists ? 4 : 0);
#endif
#if KEYS_KNOWN
    shared.key[stage][place] = step.key;
#endif
    if (!step.masked) return;
#if BITS
#pragma unroll
    for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
        copy_async_4(&shared.words[stage][w][place], sources.columns + (long long)w * p.key_stride + step.key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
    shared.start[stage][place] = CAUSAL ? step.key : INT_LOWEST;
    shared.stop[stage][place] = exists ? NEVER : INT_LOWEST;
#else
    copy_async_4(&shared.start[stage][place], sources.start + step.key, exists ? 4 : 0);
    copy_async_4(&shared.stop[stage][place], sources.stop + step.key, exists ? 4 : 0);  // 0, 0 where there is no key
#endif
}

// Keys run one block ahead of values, the order in which they are used.
__device__ __forceinline__ void produce(Shared& shared, const AttentionParams& p) {
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Steps steps(p);
    Step step = steps.next(), before = {-1, 0, 0, false, false};
    Sources sources;
    const ELEMENT* values_before = nullptr;
#if BIAS == BIAS_DENSE
    static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
    const BIAS_ELEMENT* bias = nullptr;
#endif
    while (true) {
        const Step following = steps.next();  // its list entries are under way while this block is copied
        barrier_wait(&shared.key_free[turn.stage], turn.phase ^ 1);
        int following_keys = -1;
#if BIAS == BIAS_DENSE
        if (p.bias_aligned && step.last_key - step.first_key == BLOCK_N - 1 && step.first_key % BIAS_WIDTH == 0)
            following_keys = step.first_key;
#endif
        if (threadIdx.x == 0) shared.order[turn.stage] = {step.tile, step.opens, step.masked, following_keys};
        values_before = sources.values;
        if (step.opens && step.tile >= 0) {
            const Tile t = find_tile(p, step.tile);
            sources = Sources(p, t);
#if BIAS == BIAS_DENSE
            bias = bias_row(p, t, threadIdx.x);
#endif
            barrier_wait(&shared.query_free[query_turn.stage], query_turn.phase ^ 1);
            if (threadIdx.x == 0) shared.tile[query_turn.stage] = t;
            gather_queries(shared.query[query_turn.stage], p, t);
            barrier_arrive_after_copies(&shared.query_arrived[query_turn.stage]);
            barrier_arrive(&shared.query_arrived[query_turn.stage]);
            query_turn.advance();
        }
        if (step.tile >= 0) {
#if BIAS == BIAS_DENSE
            if (following_keys >= 0)  // the consumers read it when its turn has come, from the second cache
                for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + following_keys + i);
#endif
            gather_facts(shared, p, sources, step, turn.stage);
            gather(shared.keys[turn.stage], sources.keys, p.key_row, step);
        }
        barrier_arrive_after_copies(&shared.key_arrived[turn.stage]);
        barrier_arrive(&shared.key_arrived[turn.stage]);
        turn.advance();
        if (before.tile >= 0) {
            barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
            gather(shared.values[value_turn.stage], values_before, p.value_row, before);
            barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
            value_turn.advance();
        }
        if (step.tile < 0) break;
        before = step;
        step = following;
    }
}
