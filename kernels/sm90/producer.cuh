// The producer of the Hopper forward: a warpgroup that gathers one block of keys after the other, of one tile after the
// other, into shared memory.
//
// Warp w knows the block's keys w * WARP_KEYS and following, a lane one of them. It copies ROWS rows at a time, ROW_LANES lanes
// a row; such a group of lanes copies GROUP_KEYS keys that follow each other, in runs whose places in shared memory are
// constants apart.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/tile.cuh"

constexpr int ROWS = 32 / ROW_LANES;
constexpr int GROUP_KEYS = WARP_KEYS / ROWS;
constexpr int RUN = GROUP_KEYS < 8 ? GROUP_KEYS : 8;
static_assert(RUN % 4 == 0, "keys are read in vectors of four");

__device__ __forceinline__ int own_place() { return threadIdx.x / 32 * WARP_KEYS + (threadIdx.x & 31); }

struct Step {
    int tile;     // negative: there are no more
    int count;    // keys from the block's first on
    int key;      // row of this lane's key
    bool masked;
    int opens;    // it is its tile's first block: 1 + which of the warp's planned tiles that is; else 0
#if KEYS == KEYS_CONTIGUOUS
    int first;  // row of the block's first key
#endif
#if BIAS == BIAS_DENSE
    int first_key, last_key;
#endif
};

// The tile that this block takes in its round `round`, negative if there is none. Under causality alone tiles differ in their
// work: within `section` sets of heads, whose keys fit into the second cache, the longest come first, and every other
// round goes through the blocks backwards.
__device__ __forceinline__ int scheduled(const AttentionParams& p, int round) {
    int place = blockIdx.x;
#if CAUSAL && KEYS == KEYS_CONTIGUOUS
    if (round % 2) place = gridDim.x - 1 - blockIdx.x;
#endif
    place += round * gridDim.x;
    if (place >= all_tiles(p)) return -1;
#if CAUSAL && KEYS == KEYS_CONTIGUOUS
    const int first = place / (p.section * p.tiles) * p.section, rest = place - first * p.tiles;
    const int sets = min(p.section, all_tiles(p) / p.tiles - first);
    return (first + rest % sets) * p.tiles + rest / sets;
#else
    return place;
#endif
}

struct Steps {
    const AttentionParams& p;
    Tile (&planned)[2];  // this warp's: the tile at hand and the next one
    KeyBlocks blocks;
    int tile, following, round;  // the tile at hand, the next one, and the next one's round
    bool fresh;   // nothing of this tile has come yet
    bool looked;  // the next tile is known
    int at_hand;  // which of `planned`; the other is the next one
#if KEYS == KEYS_LISTED
    int2 lengths;  // of the next tile's list, fetched ahead
#endif

    __device__ __forceinline__ Steps(const AttentionParams& p, Shared& shared)
        : p(p), planned(shared.planned[threadIdx.x / 32]), blocks(KeySource{}, 0, 0), round(-1), fresh(true), looked(false),
          at_hand(0) {
        open();
    }

    // Finding a tile takes several divisions: it is done once, while there is time.
    __device__ __forceinline__ void look_ahead() {
        looked = true;
        Tile t;
        do {
            following = scheduled(p, ++round);
            if (following < 0) return;
            t = find_tile(p, following);
        } while (!t.exists());
#if KEYS == KEYS_LISTED
        lengths = *reinterpret_cast<const int2*>(p.list_lengths + 2 * list_of(p, t));
#endif
        __syncwarp();  // nobody reads the tile before the one at hand
        if ((threadIdx.x & 31) == 0) planned[at_hand ^ 1] = t;
        __syncwarp();  // it can be read
    }

    __device__ __forceinline__ void open() {
        if (!looked) look_ahead();
        looked = false;
        tile = following;
        at_hand ^= 1;
        if (tile < 0) return;
        const Tile& t = planned[at_hand];
        KeySource source = locate_keys(p, t);
#if KEYS == KEYS_LISTED
        source.full = lengths.x;
        source.length = lengths.y;
#endif
        blocks = KeyBlocks(source, t.first_position, t.last_position);
    }

    // A tile that meets no keys has one block without keys, so that its output is written.
    __device__ __forceinline__ Step next() {
        Step step = {-1, 0, 0, false, 0};
        if (tile < 0) return step;
        KeyBlock block = blocks.next();
        if (block.first < 0 && !fresh) {
            open();
            fresh = true;
            if (tile < 0) return step;
            block = blocks.next();
        }
        if (block.first < 0) block = {blocks.source.length, true};
        if (fresh)
            step.opens = 1 + at_hand;
        else if (!looked)
            look_ahead();
        step.tile = tile;
        step.count = blocks.source.length - block.first;
        step.masked = block.masked;
        fresh = false;
        const int place = own_place();
        bool exists;
#if KEYS == KEYS_CONTIGUOUS
        step.first = block.first;
        if (place < step.count) step.key = block.first + place;
#else
        if ((threadIdx.x & 31) < WARP_KEYS && place < step.count) step.key = *blocks.entry(block.first + place, exists);
#endif
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

// This warp's rows of a block. `listed` holds the rows of the warp's keys, if they do not follow each other from `first` on.
template <bool whole>
__device__ __forceinline__ void gather_rows(ELEMENT* matrix, const ELEMENT* source, int row_stride, const int* listed,
                                            int first, int count) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
    const int stride = row_stride * static_cast<int>(sizeof(ELEMENT));
    source += piece * 8;
#pragma unroll
    for (int run = 0; run < GROUP_KEYS; run += RUN) {
        const int begin = threadIdx.x / 32 * WARP_KEYS + group + run;
        int key[RUN];
#pragma unroll
        for (int k = 0; k < RUN; k += 4) {
#if KEYS == KEYS_CONTIGUOUS
#pragma unroll
            for (int i = 0; i < 4; ++i) key[k + i] = first + begin + k + i;
#else
            *reinterpret_cast<int4*>(key + k) = *reinterpret_cast<const int4*>(listed + group + run + k);
#endif
        }
        const unsigned place = shared_address(piece_of<BLOCK_N>(matrix, row_of_key(begin), piece));
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool exists = (whole || begin + k < count) && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // One row further the piece stands at the neighbouring place, eight rows further at the same again.
            const unsigned turned = k % 2 ? (place ^ 16) + CHUNK_ROW_BYTES : place;
            copy_async_16(turned + k / 2 * 8 * CHUNK_ROW_BYTES, row_address(source, key[k], stride), exists ? 16 : 0);
        }
    }
}

// Where the rows of a tile's keys or values lie.
struct RowSource {
#if BULK
    const TensorMap* map;
    int group, batch;
#else
    const ELEMENT* first;
#endif
};

// The block that `step` describes; of a block without keys the rows may be anything. With BULK its rows follow each other,
// and one thread asks the copy engine for them; `arrived` then counts their bytes too.
__device__ __forceinline__ void gather(ELEMENT* matrix, const RowSource& source, int row_stride, const int* listed,
                                       const Step& step, Barrier* arrived) {
#if BULK
    if (threadIdx.x != 0) return;
    barrier_expect(arrived, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        copy_box(matrix + chunk * BLOCK_N * CHUNK_COLUMNS, source.map, arrived, chunk * CHUNK_COLUMNS, step.first,
                 source.group, source.batch);
#else
#if KEYS == KEYS_CONTIGUOUS
    const int first = step.first;
#else
    const int first = 0;
#endif
    if (step.count < BLOCK_N)
        gather_rows<false>(matrix, source.first, row_stride, listed, first, step.count);
    else
        gather_rows<true>(matrix, source.first, row_stride, listed, first, step.count);
#endif
}

__device__ __forceinline__ void gather_queries(ELEMENT* matrix, const AttentionParams& p, const Tile& t) {
    constexpr int STEP = PRODUCER_THREADS / ROW_LANES;
    const int piece = threadIdx.x % ROW_LANES, first = threadIdx.x / ROW_LANES;
    const ELEMENT* source = p.query + t.batch * p.query_batch + t.first_head * p.query_head + piece * 8;
    const int existing = min((t.end_query - t.first_query) * HEADS, QUERIES * HEADS);
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll 4
    for (int row = first; row < BLOCK_M; row += STEP) {
        const bool exists = row < existing;
        const ELEMENT* from = source + (exists ? t.first_query + row / HEADS : 0) * p.query_row + row % HEADS * p.query_head;
        copy_async_16(piece_of<BLOCK_M>(matrix, row, piece), from,
                      exists && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM) ? 16 : 0);
    }
}

// Where a tile's keys and what is known of them lie.
struct Sources {
    RowSource keys, values;
    const float* bias;
    const int *start, *stop;
    const unsigned* columns;

    __device__ __forceinline__ Sources() {}

    __device__ __forceinline__ Sources(const ForwardParams& launch, const Tile& t)
#if BULK
        : keys{&launch.key, t.group, t.batch}, values{&launch.value, t.group, t.batch} {
#else
        : keys{launch.attention.key + t.batch * launch.attention.key_batch + t.group * launch.attention.key_head},
          values{launch.attention.value + t.batch * launch.attention.value_batch + t.group * launch.attention.value_head} {
#endif
        const AttentionParams& p = launch.attention;
        bias = p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head;
        const KeySource source = locate_keys(p, t);
        start = source.start;
        stop = source.stop;
        columns = source.columns;
    }
};

// The rows of this warp's keys, from its lanes to all of them.
__device__ __forceinline__ void list_rows(Shared& shared, int side, const Step& step) {
#if KEYS != KEYS_CONTIGUOUS
    __syncwarp();  // nobody reads what was listed there before
    if ((threadIdx.x & 31) < WARP_KEYS) shared.listed[side][own_place()] = step.key;
    __syncwarp();  // the list is complete
#endif
}

__device__ __forceinline__ const int* listed_rows(const Shared& shared, int side) {
#if KEYS == KEYS_CONTIGUOUS
    return nullptr;
#else
    return shared.listed[side] + threadIdx.x / 32 * WARP_KEYS;
#endif
}

// What is known per key, by the lane that knows the key.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Sources& sources,
                                             const Step& step, int stage) {
    const int place = own_place();
    if ((threadIdx.x & 31) >= WARP_KEYS) return;
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
__device__ __forceinline__ void produce(Shared& shared, const ForwardParams& launch) {
    const AttentionParams& p = launch.attention;
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Steps steps(p, shared);
    Step step = steps.next(), before = {-1, 0, 0, false, 0};
    int side = 0;  // of `listed`
    Sources sources;
    RowSource values_before = {};
#if BIAS == BIAS_DENSE
    static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
    const BIAS_ELEMENT* bias = nullptr;
#endif
#if SEQUENCES
    if (step.tile < 0) {
        if (threadIdx.x == 0) shared.order[0].ends = -1;
        barrier_arrive_after_copies(&shared.key_arrived[0]);
        barrier_arrive(&shared.key_arrived[0]);
        return;
    }
#endif
    while (step.tile >= 0) {
        const Step following = steps.next();  // its list entries are under way while this block is copied
        barrier_wait(&shared.key_free[turn.stage], turn.phase ^ 1);
        int following_keys = -1;
#if BIAS == BIAS_DENSE
        if (p.bias_aligned && step.last_key - step.first_key == BLOCK_N - 1 && step.first_key % BIAS_WIDTH == 0)
            following_keys = step.first_key;
#endif
        if (threadIdx.x == 0)
            shared.order[turn.stage] = {step.masked, following.opens != 0 || following.tile < 0, following.tile < 0, following_keys};
        values_before = sources.values;
        if (step.opens) {
            const Tile t = shared.planned[threadIdx.x / 32][step.opens - 1];
            sources = Sources(launch, t);
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
#if BIAS == BIAS_DENSE
        if (following_keys >= 0)  // the consumers read it when its turn has come, from the second cache
            for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + following_keys + i);
#endif
        gather_facts(shared, p, sources, step, turn.stage);
        list_rows(shared, side, step);
        gather(shared.keys[turn.stage], sources.keys, p.key_row, listed_rows(shared, side), step,
               &shared.key_arrived[turn.stage]);
        barrier_arrive_after_copies(&shared.key_arrived[turn.stage]);
        barrier_arrive(&shared.key_arrived[turn.stage]);
        turn.advance();
        if (before.tile >= 0) {
            barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
            gather(shared.values[value_turn.stage], values_before, p.value_row, listed_rows(shared, side ^ 1), before,
                   &shared.value_arrived[value_turn.stage]);
            barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
            value_turn.advance();
        }
        before = step;
        step = following;
        side ^= 1;
    }
    barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
    gather(shared.values[value_turn.stage], sources.values, p.value_row, listed_rows(shared, side ^ 1), before,
           &shared.value_arrived[value_turn.stage]);
    barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
}
