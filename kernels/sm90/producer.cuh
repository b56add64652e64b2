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

__device__ __forceinline__ int own_place(int warp) { return warp * WARP_KEYS + (threadIdx.x & 31); }

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

// The tiles of this block, one after the other. Finding a tile takes several divisions and a load.
struct Tiles {
    const AttentionParams& p;
    Plan (&plans)[2];  // this warp's
    int tile, round;   // the tile found last, negative if there are no more
#if KEYS == KEYS_LISTED
    int2 lengths;      // of its list
#endif

    __device__ __forceinline__ Tiles(const AttentionParams& p, Plan (&plans)[2]) : p(p), plans(plans), round(-1) {}

    // Finds the next tile, and plans it.
    __device__ __forceinline__ void find(int plan) {
        Tile t;
        do {
            tile = scheduled(p, ++round);
            if (tile < 0) return;
            t = find_tile(p, tile);
        } while (SEQUENCES && !uniform(t.exists()));
#if KEYS == KEYS_LISTED
        lengths = *reinterpret_cast<const int2*>(p.list_lengths + 2 * list_of(p, t));
#endif
        __syncwarp();  // nobody reads what was planned there before
        if ((threadIdx.x & 31) == 0) plans[plan] = Plan(p, t);
        __syncwarp();  // it can be read
    }

    // The keys of the tile found last. What comes from memory is made known to be the same in all lanes.
    __device__ __forceinline__ KeyBlocks keys(const Tile& t) const {
        KeySource source = locate_keys(p, t);
#if KEYS == KEYS_LISTED
        source.full = lengths.x;
        source.length = lengths.y;
#endif
        source.first = uniform(source.first);
        source.length = uniform(source.length);
        source.full = uniform(source.full);
        return KeyBlocks(source, uniform(t.first_position), uniform(t.last_position));
    }
};

// A block of keys; what comes from the list is loaded ahead of its use.
struct Block {
    int first;    // place of its first key in the list; negative: there is none
    bool masked;
    int key;      // row of this lane's key
#if BIAS == BIAS_DENSE
    int first_key, last_key;
#endif
};

__device__ __forceinline__ Block next_block(KeyBlocks& blocks, int warp) {
    const KeyBlock next = blocks.next();
    Block block = {next.first, next.masked, 0};
    if (next.first < 0) return block;
    const int place = next.first + own_place(warp);
    bool exists;
#if KEYS == KEYS_CONTIGUOUS
    if (place < blocks.source.length) block.key = place;
#else
    if ((threadIdx.x & 31) < WARP_KEYS && place < blocks.source.length) block.key = *blocks.entry(place, exists);
#endif
#if BIAS == BIAS_DENSE
    block.first_key = 0;
    block.last_key = -1;
#if KEYS == KEYS_CONTIGUOUS
    const bool in_order = true;
#else  // but for the step from full keys to partial ones
    const bool in_order = next.first >= blocks.source.full || next.first + BLOCK_N <= blocks.source.full;
#endif
    if (in_order && next.first + BLOCK_N <= blocks.source.length) {
        block.first_key = KEYS == KEYS_CONTIGUOUS ? next.first : *blocks.entry(next.first, exists);
        block.last_key = KEYS == KEYS_CONTIGUOUS ? next.first + BLOCK_N - 1 : *blocks.entry(next.first + BLOCK_N - 1, exists);
    }
#endif
    return block;
}

// This warp's rows of a block. `listed` holds the rows of the warp's keys, if they do not follow each other from `first` on.
template <bool whole>
__device__ __forceinline__ void gather_rows(ELEMENT* matrix, const ELEMENT* source, int row_stride, const int* listed,
                                            int warp, int first, int count) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
    const int stride = row_stride * static_cast<int>(sizeof(ELEMENT));
    source += piece * 8;
#pragma unroll
    for (int run = 0; run < GROUP_KEYS; run += RUN) {
        const int begin = warp * WARP_KEYS + group + run;
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
        const void* rows[RUN];  // all addresses first, so that no copy waits for the next one's
#pragma unroll
        for (int k = 0; k < RUN; ++k) rows[k] = row_address(source, key[k], stride);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool exists = (whole || begin + k < count) && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // One row further the piece stands at the neighbouring place, eight rows further at the same again.
            const unsigned turned = k % 2 ? (place ^ 16) + CHUNK_ROW_BYTES : place;
            copy_async_16(turned + k / 2 * 8 * CHUNK_ROW_BYTES, rows[k], exists ? 16 : 0);
        }
    }
}

// Whether a value of this warp's keys, from the block's key `clear` on, is not finite. `first`, `listed`: as for gather_rows;
// the copy engine brings rows behind the block's last key as well.
__device__ __forceinline__ bool any_nonfinite(const AttentionParams& p, const ELEMENT* source, const int* listed, int warp,
                                              int first, int count, int clear) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    const int begin = warp * WARP_KEYS + group, stride = p.value_row * static_cast<int>(sizeof(ELEMENT));
    unsigned found = 0;
    if (piece * 8 < HEAD_DIM) {
#pragma unroll 4
        for (int k = 0; k < GROUP_KEYS; ++k) {
            if (begin + k < clear || begin + k >= (BULK ? p.key_length - first : count)) continue;
            const int key = KEYS == KEYS_CONTIGUOUS ? first + begin + k : listed[group + k];
            const uint4 x = __ldg(static_cast<const uint4*>(row_address(source + piece * 8, key, stride)));
            found |= nonfinite(x.x, source) | nonfinite(x.y, source) | nonfinite(x.z, source) | nonfinite(x.w, source);
        }
    }
    return __any_sync(ALL_LANES, (found & sign_bits(sizeof(ELEMENT))) != 0);
}

// Where the rows of a block's keys or values are: of a tile, and in it of a block.
struct RowSource {
#if BULK
    const TensorMap* map;
    int group, batch;
#else
    const ELEMENT* rows;
#endif
    int first;          // row of the first one, where they follow each other
    int count;          // how many there are, from the first on
    const int* listed;  // their rows, of this warp's, where they do not
};

// With BULK one thread asks the copy engine for the rows; `arrived` then counts their bytes too.
__device__ __forceinline__ void gather(ELEMENT* matrix, const RowSource& source, int row_stride, int warp, Barrier* arrived) {
#if BULK
    if (threadIdx.x != 0) return;
    barrier_expect(arrived, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        copy_box(matrix + chunk * BLOCK_N * CHUNK_COLUMNS, source.map, arrived, chunk * CHUNK_COLUMNS, source.first,
                 source.group, source.batch);
#else
    if (source.count < BLOCK_N)
        gather_rows<false>(matrix, source.rows, row_stride, source.listed, warp, source.first, source.count);
    else
        gather_rows<true>(matrix, source.rows, row_stride, source.listed, warp, source.first, source.count);
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

// The rows of this warp's keys, from its lanes to all of them.
__device__ __forceinline__ void list_rows(Shared& shared, int side, int warp, int key) {
#if KEYS != KEYS_CONTIGUOUS
    __syncwarp();  // nobody reads what was listed there before
    if ((threadIdx.x & 31) < WARP_KEYS) shared.listed[side][own_place(warp)] = key;
    __syncwarp();  // the list is complete
#endif
}

__device__ __forceinline__ const int* listed_rows(const Shared& shared, int side, int warp) {
#if KEYS == KEYS_CONTIGUOUS
    return nullptr;
#else
    return shared.listed[side] + warp * WARP_KEYS;
#endif
}

// What is known per key, by the lane that knows the key. All queries see the first `clear` of `count` keys.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Plan& plan, int warp, int key,
                                             int count, int clear, int stage) {
    const int place = own_place(warp);
    if ((threadIdx.x & 31) >= WARP_KEYS) return;
    const bool exists = place < count;
#if BIAS == BIAS_OF_KEYS
    copy_async_4(&shared.bias[stage][place], row_address(plan.bias, key, static_cast<int>(p.bias_key) * 4), exists ? 4 : 0);
#endif
#if KEYS_KNOWN
    shared.key[stage][place] = key;
#endif
    if (clear == BLOCK_N) return;
#if BITS
#pragma unroll
    for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
        copy_async_4(&shared.words[stage][w][place], plan.columns + (long long)w * p.key_stride + key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
    shared.start[stage][place] = CAUSAL ? key : INT_LOWEST;
    shared.stop[stage][place] = exists ? NEVER : INT_LOWEST;
#else
    copy_async_4(&shared.start[stage][place], plan.start + key, exists ? 4 : 0);
    copy_async_4(&shared.stop[stage][place], plan.stop + key, exists ? 4 : 0);  // 0, 0 where there is no key
#endif
}

// The queries of the tile that `plan` describes.
__device__ __forceinline__ void open_tile(Shared& shared, const ForwardParams& launch, const Plan& plan, int stage,
                                          unsigned phase) {
    Barrier *arrived = &shared.query_arrived[stage], *free = &shared.query_free[stage];
    ELEMENT* queries = shared.query[stage];
#if QUERY_BULK
    if (threadIdx.x != 0) return;
    barrier_wait(free, phase);
    shared.tile[stage] = plan.tile;
    barrier_expect(arrived, CHUNKS * BLOCK_M * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        copy_box(queries + chunk * BLOCK_M * CHUNK_COLUMNS, &launch.query, arrived, chunk * CHUNK_COLUMNS,
                 plan.tile.first_head, plan.tile.first_query, plan.tile.batch);
#else
    barrier_wait(free, phase);
    if (threadIdx.x == 0) shared.tile[stage] = plan.tile;
    gather_queries(queries, launch.attention, plan.tile);
    barrier_arrive_after_copies(arrived);
#endif
    barrier_arrive(arrived);
}

// Keys run one block ahead of values, the order in which they are used.
__device__ __forceinline__ void produce(Shared& shared, const ForwardParams& launch) {
    const AttentionParams& p = launch.attention;
    const int warp = uniform(threadIdx.x / 32);
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Tiles tiles(p, shared.plans[warp]);
    int at_hand = 0;  // which plan is the tile's
    int side = 0;     // of `listed`
    bool begun = false;
    RowSource values = {};  // of the block before
    tiles.find(at_hand);
#if SEQUENCES
    if (tiles.tile < 0) {
        if (threadIdx.x == 0) shared.order[0].ends = -1;
        barrier_arrive_after_copies(&shared.key_arrived[0]);
        barrier_arrive(&shared.key_arrived[0]);
        return;
    }
#endif
    while (tiles.tile >= 0) {
        const Plan& plan = shared.plans[warp][at_hand];
        open_tile(shared, launch, plan, query_turn.stage, query_turn.phase ^ 1);
        query_turn.advance();
#if BIAS == BIAS_DENSE
        static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
        const BIAS_ELEMENT* bias = bias_row(p, plan.tile, threadIdx.x);
#endif
        KeyBlocks blocks = tiles.keys(plan.tile);
        const bool finite = p.nonfinite != nullptr && p.nonfinite[plan.tile.batch * p.kv_heads + plan.tile.group] == 0;
        const int length = blocks.source.length, full = blocks.source.full;
        Block block = next_block(blocks, warp);
        if (block.first < 0) {  // a tile that meets no keys has one block without keys, so that its output is written
            block.first = length;
            block.masked = true;
        }
        for (bool opens = true; block.first >= 0; opens = false) {
            const int count = length - block.first;
            const int clear = !block.masked ? BLOCK_N : KEYS == KEYS_LISTED ? max(full - block.first, 0) : 0;
            list_rows(shared, side, warp, block.key);
            const Block following = next_block(blocks, warp);  // its list entries are under way while this block is copied
            barrier_wait(&shared.key_free[turn.stage], turn.phase ^ 1);
            gather_facts(shared, p, plan, warp, block.key, count, clear, turn.stage);
#if BULK
            const RowSource keys = {&launch.key, plan.tile.group, plan.tile.batch, block.first, count, nullptr};
#else
            const RowSource keys = {plan.keys, block.first, count, listed_rows(shared, side, warp)};
#endif
            gather(shared.keys[turn.stage], keys, p.key_row, warp, &shared.key_arrived[turn.stage]);
            if (clear < BLOCK_N) {
                const bool found = !finite && any_nonfinite(p, plan.values, listed_rows(shared, side, warp), warp, block.first,
                                                            count, clear);
                if ((threadIdx.x & 31) == 0) shared.nonfinite[turn.stage][warp] = found;
            }
            if (opens) tiles.find(at_hand ^ 1);
            int following_keys = -1;
#if BIAS == BIAS_DENSE
            if (p.bias_aligned && block.last_key - block.first_key == BLOCK_N - 1 && block.first_key % BIAS_WIDTH == 0) {
                following_keys = block.first_key;  // the consumers read it when its turn has come, from the second cache
                for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + following_keys + i);
            }
#endif
            const bool closes = following.first < 0;
            if (threadIdx.x == 0) shared.order[turn.stage] = {clear, closes, closes && tiles.tile < 0, following_keys};
            barrier_arrive_after_copies(&shared.key_arrived[turn.stage]);
            barrier_arrive(&shared.key_arrived[turn.stage]);
            turn.advance();
            if (begun) {

                barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
                gather(shared.values[value_turn.stage], values, p.value_row, warp, &shared.value_arrived[value_turn.stage]);
                barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
                value_turn.advance();
            }
            begun = true;
            values = keys;
#if BULK
            values.map = &launch.value;
#else
            values.rows = plan.values;
#endif
            block = following;
            side ^= 1;
        }
        at_hand ^= 1;
    }
    barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
    gather(shared.values[value_turn.stage], values, p.value_row, warp, &shared.value_arrived[value_turn.stage]);
    barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
}
