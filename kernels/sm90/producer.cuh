// The producer of the Hopper forward: a warpgroup that gathers one block of keys after the other, of one tile after the
// other, into shared memory.
//
// Each warp gathers WARP_KEYS of the block's keys (`key_of`). It copies ROWS rows at a time, ROW_LANES lanes a row; such a
// group of lanes copies GROUP_KEYS of the warp's keys that follow each other, in runs whose places in shared memory are
// constants apart.
// A warp of the producer has a scheduler's issue slots to share with consumers that multiply, and waits for each of its own
// instructions: what counts in the loop over blocks is how many there are.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"

constexpr int ROWS = 32 / ROW_LANES;
constexpr int GROUP_KEYS = WARP_KEYS / ROWS;
constexpr int RUN = GROUP_KEYS < 8 ? GROUP_KEYS : 8;
static_assert(RUN % 2 == 0 && GROUP_KEYS % RUN == 0, "rows come in pairs");
// So many warps have rows of few keys.
constexpr int FEW_WARPS = BY_EIGHTS ? PRODUCER_WARPS : FEW_KEYS > WARP_KEYS ? FEW_KEYS / WARP_KEYS : 1;
// Of the last warps, which mostly have no rows of a block of few keys: they see to the tile's queries, and to orders.
constexpr int QUERY_THREAD = 96, ORDER_THREAD = 64;

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

// A block of keys.
struct Block {
    int first;  // place of its first key in the list; negative: there is none
    int end;    // place behind its last one, or behind that of its list
    int clear;  // as in Order
#if ORDERED
    int first_key, last_key;  // 0 and -1 if the block is not full, or full and partial keys meet in it

    // The first key, if the block's keys follow each other from a multiple of RUN_STEP on, else -1.
    __device__ __forceinline__ int run() const {
        return last_key - first_key == BLOCK_N - 1 && first_key % RUN_STEP == 0 ? first_key : -1;
    }
#endif

    __device__ __forceinline__ int count() const { return end - first; }
    __device__ __forceinline__ bool few() const { return FEW && count() <= FEW_KEYS; }
};

// The rows of the keys of block `number` that warp `warp` gathers.
__device__ __forceinline__ int* listed_rows(Shared& shared, unsigned number, int warp) {
#if KEYS == KEYS_CONTIGUOUS
    return nullptr;
#else
    return shared.listed[number % LISTS] + warp * WARP_KEYS;
#endif
}

// From `entry`, this lane's, to there. Complete when the block's turn has come.
__device__ __forceinline__ void list_entries(Shared& shared, unsigned number, int warp, const int* entry, bool exists = true) {
    const int lane = threadIdx.x & 31;
    if (lane < WARP_KEYS) copy_async_4(listed_rows(shared, number, warp) + lane, entry, exists ? 4 : 0);
    copy_async_commit();
}

// Whether full and partial keys in blocks of their own make no block more than together: then only the latter are masked.
__device__ __forceinline__ bool apart(unsigned full, unsigned partial) {
    constexpr unsigned LAST = BLOCK_N - 1;
    return (full + LAST) / BLOCK_N + (partial + LAST) / BLOCK_N == (full + partial + LAST) / BLOCK_N;
}

// The next block, the one with number `number`. What the list says of its keys is under way then.
__device__ __forceinline__ Block next_block(Shared& shared, KeyBlocks& blocks, int warp, unsigned number) {
    const KeySource& source = blocks.source;
    const KeyBlock next = blocks.next();
    Block block = {next.first, source.length, BLOCK_N};
    if (next.first < 0) return block;
    if (next.masked) block.clear = KEYS == KEYS_LISTED ? max(source.full - next.first, 0) : 0;
#if HOLES
    if (next.masked && next.first < source.full && apart(source.full - FIRST(source), source.length - source.full)) {
        block.end = blocks.place = source.full;
        block.clear = BLOCK_N;
    }
#endif
#if KEYS != KEYS_CONTIGUOUS
    const int place = next.first + key_of(warp, threadIdx.x & 31);
    bool exists;
    const int* entry = blocks.entry(HOLES ? min(place, block.end - 1) : place, exists);
    list_entries(shared, number, warp, exists ? entry : source.list, exists);
#endif
#if ORDERED
    block.first_key = 0;
    block.last_key = -1;
#if KEYS == KEYS_CONTIGUOUS
    const bool in_order = true;
#else  // but for the step from full keys to partial ones
    const bool in_order = next.first >= source.full || next.first + BLOCK_N <= source.full;
#endif
    if (in_order && next.first + BLOCK_N <= source.length) {
        bool exists;
        const int last = next.first + BLOCK_N - 1;
        block.first_key = KEYS == KEYS_CONTIGUOUS ? next.first : __ldg(blocks.entry(next.first, exists));
        block.last_key = KEYS == KEYS_CONTIGUOUS ? last : __ldg(blocks.entry(last, exists));
    }
#endif
    return block;
}

// The first block of a tile; a tile that meets no keys has one without keys, so that its output is written.
__device__ __forceinline__ Block first_block(Shared& shared, KeyBlocks& blocks, int warp, unsigned number) {
    Block block = next_block(shared, blocks, warp, number);
    if (block.first < 0) {
        block.first = block.end;
        block.clear = 0;
#if KEYS != KEYS_CONTIGUOUS
        list_entries(shared, number, warp, blocks.source.list, false);
#endif
    }
    return block;
}

// Rows of keys or of values, and where in a stage they go to.
struct Rows {
    ELEMENT* matrix;
    const ELEMENT* source;
    int stride;
    const int* listed;  // rows of the warp's keys, if they do not follow each other
};

// Entries of a list that are read together.
template <int count> struct Entries;
template <> struct Entries<4> { using Type = int4; };
template <> struct Entries<2> { using Type = int2; };

// A lane's pieces of a run of rows: of the warp's keys those from `begin` on.
struct RunOfRows {
    const void* from[RUN];
    unsigned to;  // of the first one

    __device__ __forceinline__ RunOfRows(const Rows& rows, int piece, int warp, int begin, int first) {
        constexpr int STEP = RUN % 4 == 0 ? 4 : 2;
        using Keys = Entries<STEP>::Type;
        int key[RUN];
#pragma unroll
        for (int k = 0; k < RUN; k += STEP) {
#if KEYS == KEYS_CONTIGUOUS
#pragma unroll
            for (int i = 0; i < STEP; ++i) key[k + i] = first + key_of(warp, begin, k + i);
#else
            *reinterpret_cast<Keys*>(key + k) = *reinterpret_cast<const Keys*>(rows.listed + begin + k);
#endif
        }
#pragma unroll
        for (int k = 0; k < RUN; ++k)
            from[k] = row_address(rows.source + piece * 8, key[k], rows.stride * static_cast<int>(sizeof(ELEMENT)));
        to = shared_address(piece_of<BLOCK_N>(rows.matrix, row_of_key(key_of(warp, begin)), piece));
    }

    // Of the block's first `count` keys.
    template <bool whole>
    __device__ __forceinline__ void copy(int piece, int warp, int begin, int count) const {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool exists = (whole || key_of(warp, begin, k) < count) &&
                                (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // One row further the piece stands at the neighbouring place, eight rows further at the same again.
            const unsigned turned = k % 2 ? (to ^ 16) + CHUNK_ROW_BYTES : to;
            copy_async_16(turned + k / 2 * 8 * CHUNK_ROW_BYTES, from[k], exists ? 16 : 0);
        }
    }
};

// This warp's rows of a block, of a lane's those from `from` on. Keys that are not listed follow each other from `first` on.
template <bool whole, int from = 0>
__device__ __forceinline__ void gather_rows(const Rows& rows, int warp, int first, int count) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll
    for (int run = from; run < GROUP_KEYS; run += RUN) {
        if (FEW && BY_EIGHTS && key_of(warp, group + run) >= FEW_KEYS && count <= FEW_KEYS) return;
        RunOfRows(rows, piece, warp, group + run, first).copy<whole>(piece, warp, group + run, count);
    }
}

// The same of a whole block of keys and of one of values; `arrived` is told of the keys. Of the first run of both all
// addresses come first, so that no copy waits for the next one's.
__device__ __forceinline__ void gather_both(const Rows& keys, const Rows& values, int warp, Barrier* arrived) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    const bool exists = ROW_PIECES == ROW_LANES || piece < ROW_PIECES;
    const RunOfRows first_keys(keys, piece, warp, group, 0), first_values(values, piece, warp, group, 0);
    if (exists) first_keys.copy<true>(piece, warp, group, BLOCK_N);
    gather_rows<true, RUN>(keys, warp, 0, BLOCK_N);
    barrier_arrive_after_copies(arrived);
    if (exists) first_values.copy<true>(piece, warp, group, BLOCK_N);
    gather_rows<true, RUN>(values, warp, 0, BLOCK_N);
}

// Where the rows of a block's keys or values are: of a tile, and in it of a block.
struct RowSource {
#if BULK
    int group, batch;
#else
    const ELEMENT* rows;
#endif
    int first;          // row of the first one, where they follow each other
    int count;          // how many there are, from the first on
    const int* listed;  // their rows, of this warp's, where they do not
    bool whole;         // every place of the block is filled; where there is no key, with another one's row (HOLES)
#if RUNS
    int run;  // as in Block
#endif
};

// Keys, or values. With BULK, and with RUNS where keys follow each other, one thread asks the copy engine for the rows;
// `arrived` then counts their bytes too.
template <bool values>
__device__ __forceinline__ void gather(ELEMENT* matrix, const RowSource& source, const ForwardParams& launch, int warp,
                                       Barrier* arrived) {
    const int row_stride = values ? launch.attention.value_row : launch.attention.key_row;
#if BULK || RUNS
    const TensorMap* map = values ? &launch.value : &launch.key;
#endif
#if BULK
    if (threadIdx.x != 0) return;
    barrier_expect(arrived, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        copy_box(matrix + chunk * BLOCK_N * CHUNK_COLUMNS, map, arrived, chunk * CHUNK_COLUMNS, source.first,
                 source.group, source.batch);
#else
#if RUNS
    if (source.run >= 0) {
        if (threadIdx.x != 0) return;
        barrier_expect(arrived, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
        const int head = static_cast<int>((source.rows - (values ? launch.attention.value : launch.attention.key)) / 8);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int key = 0; key < BLOCK_N; key += RUN_KEYS)
                copy_box(matrix + (chunk * BLOCK_N + key) * CHUNK_COLUMNS, map, arrived, chunk * CHUNK_COLUMNS, 0,
                         (source.run + key) / RUN_STEP, 0, head);
        return;
    }
#endif
    if (FEW && source.count <= FEW_KEYS && warp >= FEW_WARPS) return;
    if (source.whole)
        gather_rows<true>({matrix, source.rows, row_stride, source.listed}, warp, source.first, source.count);
    else
        gather_rows<false>({matrix, source.rows, row_stride, source.listed}, warp, source.first, source.count);
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

// The bias of this lane's key of a block with `count` keys, on its way.
__device__ __forceinline__ float fetch_bias(const AttentionParams& p, const Plan& plan, int warp, const int* listed,
                                            int first, int count) {
#if BIAS == BIAS_OF_KEYS
    const int lane = threadIdx.x & 31, place = key_of(warp, lane);
    if (lane >= WARP_KEYS || place >= count) return HOLES ? -infinity() : 0.0f;
    const int key = KEYS == KEYS_CONTIGUOUS ? first + place : listed[lane];
    return __ldg(static_cast<const float*>(row_address(plan.bias, key, static_cast<int>(p.bias_key) * 4)));
#else
    return 0.0f;
#endif
}

// It has come. Rounded towards zero a finite bias stays finite.
__device__ __forceinline__ void keep_bias(Shared& shared, int warp, int stage, float bias, float unit) {
    const int lane = threadIdx.x & 31;
    if (BIAS != BIAS_OF_KEYS || lane >= WARP_KEYS) return;
    shared.bias[stage][key_of(warp, lane)] = __fmul_rz(bias, unit);
}

// What else is known per key. All queries see the block's first `clear` keys.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Plan& plan, int warp,
                                             const RowSource& keys, int clear, int stage) {
    const int lane = threadIdx.x & 31, place = key_of(warp, lane);
#if BITS && RUNS
    if (keys.run >= 0 && clear < BLOCK_N) {
        constexpr int PIECES = BLOCK_N / 4;
#pragma unroll
        for (int i = threadIdx.x; i < WORDS * PIECES; i += PRODUCER_THREADS)
            copy_async_16(&shared.words[stage][i / PIECES][i % PIECES * 4],
                          plan.source.columns + (long long)(i / PIECES) * p.key_stride + keys.run + i % PIECES * 4, 16);
    }
#endif
    if (lane >= WARP_KEYS) return;
    const bool exists = place < keys.count;
#if KEYS == KEYS_CONTIGUOUS
    const int key = exists ? keys.first + place : 0;
#else
    const int key = keys.listed[lane];
#endif
#if KEYS_KNOWN
    shared.key[stage][place] = key;
#endif
    if (clear == BLOCK_N) return;
#if BITS
#if RUNS
    if (keys.run >= 0) return;  // its words are on their way
#endif
#pragma unroll
    for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
        copy_async_4(&shared.words[stage][w][place], plan.source.columns + (long long)w * p.key_stride + key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
    shared.start[stage][place] = CAUSAL ? key : INT_LOWEST;
    shared.stop[stage][place] = exists ? NEVER : INT_LOWEST;
#else
    copy_async_4(&shared.start[stage][place], plan.source.start + key, exists ? 4 : 0);
    copy_async_4(&shared.stop[stage][place], plan.source.stop + key, exists ? 4 : 0);  // 0, 0 where there is no key
#endif
}

// The queries of the tile that `plan` describes.
__device__ __forceinline__ void open_tile(Shared& shared, const ForwardParams& launch, const Plan& plan, int stage,
                                          unsigned phase) {
    Barrier *arrived = &shared.query_arrived[stage], *free = &shared.query_free[stage];
    ELEMENT* queries = shared.query[stage];
#if QUERY_BULK
    if (threadIdx.x != QUERY_THREAD) return;
    barrier_wait(free, phase);
    shared.tile[stage] = plan.tile;
    shared.output[stage] = plan.output;
    barrier_expect(arrived, CHUNKS * BLOCK_M * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        copy_box(queries + chunk * BLOCK_M * CHUNK_COLUMNS, &launch.query, arrived, chunk * CHUNK_COLUMNS,
                 plan.tile.first_head, plan.tile.first_query, plan.tile.batch);
#else
    barrier_wait(free, phase);
    if (threadIdx.x == 0) {
        shared.tile[stage] = plan.tile;
        shared.output[stage] = plan.output;
    }
    gather_queries(queries, launch.attention, plan.tile);
    barrier_arrive_after_copies(arrived);
#endif
    barrier_arrive(arrived);
}

// How many blocks at the beginning of a tile are full of keys that all queries see; its last block is not among them.
__device__ __forceinline__ int whole_blocks(const KeySource& source) {
    return max(min(source.full, source.length - 1) - FIRST(source), 0) / BLOCK_N;
}

// Keys run one block ahead of values, the order in which they are used, and lists one block ahead of keys.
__device__ __forceinline__ void produce(Shared& shared, const ForwardParams& launch) {
    const AttentionParams& p = launch.attention;
    const int warp = uniform(threadIdx.x / 32);
    const float bias_unit = BIAS_FIRST ? 1.0f / p.scale : LOG2_E;
    Turn<STAGES> turn;
    Turn<VALUE_STAGES> value_turn;
    Turn<QUERY_STAGES> query_turn;
    Tiles tiles(launch, shared.plans[warp]);
    int at_hand = 0;         // which plan is the tile's
    unsigned number = 0;     // of the block
    RowSource values = {};   // of the block before
    float lane_bias = 0.0f;  // of this lane's key of the block at hand, asked for when the block before has been gathered
    tiles.find(at_hand);
#if GAPS
    if (threadIdx.x == QUERY_THREAD) shared.staying = tiles.staying;
    if (tiles.staying == 0) {
        if (!QUERY_BULK) barrier_arrive(&shared.query_arrived[0]);
        if (!QUERY_BULK || threadIdx.x == QUERY_THREAD) barrier_arrive(&shared.query_arrived[0]);
        return;
    }
#endif
    // The list of the block at hand, which has `count` keys from `first` on, is complete.
    const auto meet_list = [&](const Plan& plan, int first, int count) {
#if KEYS != KEYS_CONTIGUOUS
        copy_async_wait<0>();
        __syncwarp();
#endif
        lane_bias = fetch_bias(p, plan, warp, listed_rows(shared, number, warp), first, count);
    };
    const auto gather_values = [&] {
        barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
        gather<true>(shared.values[value_turn.stage], values, launch, warp, &shared.value_arrived[value_turn.stage]);
        barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
        value_turn.advance();
    };
    KeyBlocks blocks = tiles.keys(at_hand);
    Block block = first_block(shared, blocks, warp, number);
    bool opens = true, found = false;  // the block is its tile's first; the next tile has been found
#if WHOLE_BLOCKS
    int whole = whole_blocks(blocks.source);  // that the tile begins with
#else
    constexpr int whole = 0;
#endif
#if BIAS == BIAS_DENSE
    static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
    const BIAS_ELEMENT* bias;
#endif
    for (;;) {
        const Plan& plan = shared.plans[warp][at_hand];
        if (opens) {
            open_tile(shared, launch, plan, query_turn.stage, query_turn.phase ^ 1);
            query_turn.advance();
#if BIAS == BIAS_DENSE
            bias = bias_row(p, plan.tile, threadIdx.x);
#endif
        }
        meet_list(plan, block.first, block.count());
#if WHOLE_BLOCKS
        // Behind the tile's first block: keys of whole ones and values of those before them, side by side, for a warp waits
        // for each of its steps.
        if (!opens && whole > 1) {
            const int* entry = plan.source.list + BLOCK_N + key_of(warp, threadIdx.x & 31) + FIRST(blocks.source);
            int left = whole - 1;
            do {
                Barrier *key_free = &shared.key_free[turn.stage], *value_free = &shared.value_free[value_turn.stage];
                const bool key_goes = barrier_test(key_free, turn.phase ^ 1);
                const bool value_goes = barrier_test(value_free, value_turn.phase ^ 1);
                entry += BLOCK_N;
                --left;
                if (left > 0) {
                    list_entries(shared, number + 1, warp, entry);
                } else {
                    blocks = tiles.keys(at_hand);  // again, for it is not kept in registers
                    blocks.place = FIRST(blocks.source) + whole * BLOCK_N;
                    block = next_block(shared, blocks, warp, number + 1);
                }
                if (!key_goes) barrier_wait(key_free, turn.phase ^ 1);
                keep_bias(shared, warp, turn.stage, lane_bias, bias_unit);
                if (threadIdx.x == ORDER_THREAD) shared.order[turn.stage] = Order(0);
                if (!value_goes) barrier_wait(value_free, value_turn.phase ^ 1);
                barrier_arrive(&shared.key_arrived[turn.stage]);
                gather_both({shared.keys[turn.stage], plan.keys, p.key_row, listed_rows(shared, number, warp)},
                            {shared.values[value_turn.stage], plan.values, p.value_row, listed_rows(shared, number - 1, warp)},
                            warp, &shared.key_arrived[turn.stage]);
                barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
                turn.advance();
                value_turn.advance();
                ++number;
                meet_list(plan, 0, left > 0 ? BLOCK_N : block.count());
            } while (left > 0);
            values = {plan.values, 0, BLOCK_N, listed_rows(shared, number - 1, warp), true};
            whole = 0;
        }
#endif
        const int count = block.count();
        const Block following = next_block(shared, blocks, warp, number + 1);
        const bool closes = following.first < 0;
        int following_keys = -1;
#if BIAS == BIAS_DENSE
        if (p.bias_aligned && block.run() >= 0) {
            following_keys = block.run();  // the consumers read it when its turn has come, from the second cache
            for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + following_keys + i);
        }
#endif
        const int* listed = listed_rows(shared, number, warp);
#if BULK
        RowSource rows = {plan.tile.group, plan.tile.batch, block.first, count, nullptr, true};
#elif RUNS
        RowSource rows = {plan.keys, block.first, count, listed, HOLES ? count > 0 : count >= BLOCK_N, block.run()};
#else
        RowSource rows = {plan.keys, block.first, count, listed, HOLES ? count > 0 : count >= BLOCK_N};
#endif
        barrier_wait(&shared.key_free[turn.stage], turn.phase ^ 1);
        gather_facts(shared, p, plan, warp, rows, block.clear, turn.stage);
        gather<false>(shared.keys[turn.stage], rows, launch, warp, &shared.key_arrived[turn.stage]);
        keep_bias(shared, warp, turn.stage, lane_bias, bias_unit);
        if (!found && !(opens && whole > 1)) {  // it takes long, and these keys are on their way meanwhile
            tiles.find(at_hand ^ 1);
            found = true;
        }
        if (threadIdx.x == ORDER_THREAD) {
            shared.order[turn.stage] = {block.clear, count <= FEW_KEYS, closes, tiles.staying, following_keys};
        }
        barrier_arrive_after_copies(&shared.key_arrived[turn.stage]);
        barrier_arrive(&shared.key_arrived[turn.stage]);
        turn.advance();
        if (number > 0) gather_values();
        ++number;
        values = rows;
        values.whole = BULK || count >= BLOCK_N;
#if !BULK
        values.rows = plan.values;
#endif
        block = following;
        opens = closes;
        if (!closes) continue;
        if (tiles.staying == 0) break;
        at_hand ^= 1;
        found = false;
        blocks = tiles.keys(at_hand);
        block = first_block(shared, blocks, warp, number);
#if WHOLE_BLOCKS
        whole = whole_blocks(blocks.source);
#endif
    }
    gather_values();
}
