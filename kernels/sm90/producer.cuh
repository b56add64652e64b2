// The producer of the Hopper forward: a warpgroup that gathers one block of keys after the other, of one tile after the
// other, into shared memory.
//
// Producer warps share a scheduler's issue slots with the consumers and wait for each of their own instructions, so the
// number of instructions in the loop over blocks is what matters.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/gather.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

// The threads that load the tile's queries and write BlockInfo: in the last warps, which rarely have rows of a short
// block.
constexpr int QUERY_THREAD = 96, BLOCK_INFO_THREAD = 64;

// A block of keys.
struct Block {
    int first;  // index of its first key in the list; negative: there is no block
    int end;  // index one past its last key, or past the end of its list
    int unmasked;  // as in BlockInfo
#if ORDERED
    int first_key, last_key;  // 0 and -1 if the block is not filled, or has both full and partial keys

    // The first key, if the keys are consecutive from a multiple of RUN_STEP on, else -1.
    __device__ __forceinline__ int run() const {
        return last_key - first_key == BLOCK_N - 1 && first_key % RUN_STEP == 0 ? first_key : -1;
    }
#endif

    __device__ __forceinline__ int count() const { return end - first; }
    __device__ __forceinline__ bool is_short() const { return SHORT_BLOCK && count() <= SHORT_BLOCK_KEYS; }
};

// The key indices of block `block_index` that warp `warp` gathers.
__device__ __forceinline__ int* listed_rows(Shared& shared, unsigned block_index, int warp) {
#if KEYS == KEYS_CONTIGUOUS
    return nullptr;
#else
    return shared.listed[block_index % LISTS] + warp * WARP_KEYS;
#endif
}

// Copies this lane's list entry `entry` there, asynchronously.
__device__ __forceinline__ void list_entries(Shared& shared, unsigned block_index, int warp, const int* entry,
                                             bool exists = true) {
    const int lane = threadIdx.x & 31;
    if (lane < WARP_KEYS) copy_async_4(listed_rows(shared, block_index, warp) + lane, entry, exists ? 4 : 0);
    copy_async_commit();
}

// Whether separate blocks for full and partial keys take no more blocks than mixed ones: then only the partial ones are
// masked.
__device__ __forceinline__ bool apart(unsigned full, unsigned partial) {
    constexpr unsigned LAST = BLOCK_N - 1;
    return (full + LAST) / BLOCK_N + (partial + LAST) / BLOCK_N == (full + partial + LAST) / BLOCK_N;
}

// The next block of the tile, number `block_index` of this CTA. Its list entries are being copied when this returns.
__device__ __forceinline__ Block next_block(Shared& shared, KeyBlocks& blocks, int warp, unsigned block_index) {
    const KeySource& source = blocks.source;
    const KeyBlock next = blocks.next();
    Block block = {next.first, source.length, BLOCK_N};
    if (next.first < 0) return block;
    if (next.masked) block.unmasked = KEYS == KEYS_LISTED ? max(source.full - next.first, 0) : 0;
#if PAD_BY_BIAS
    if (next.masked && next.first < source.full && apart(source.full - FIRST(source), source.length - source.full)) {
        block.end = blocks.next_key = source.full;
        block.unmasked = BLOCK_N;
    }
#endif
#if KEYS != KEYS_CONTIGUOUS
    const int index = next.first + key_of(warp, threadIdx.x & 31);
    bool exists;
    const int* entry = blocks.entry(PAD_BY_BIAS ? min(index, block.end - 1) : index, exists);
    list_entries(shared, block_index, warp, exists ? entry : source.list, exists);
#endif
#if ORDERED
    block.first_key = 0;
    block.last_key = -1;
#if KEYS == KEYS_CONTIGUOUS
    const bool in_order = true;
#else  // except at the step from full keys to partial ones
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

// The first block of a tile; a tile without visible keys gets an empty block, so that its output is written.
__device__ __forceinline__ Block first_block(Shared& shared, KeyBlocks& blocks, int warp, unsigned block_index) {
    Block block = next_block(shared, blocks, warp, block_index);
    if (block.first < 0) {
        block.first = block.end;
        block.unmasked = 0;
#if KEYS != KEYS_CONTIGUOUS
        list_entries(shared, block_index, warp, blocks.source.list, false);
#endif
    }
    return block;
}

// Loads the queries of the tile that `plan` describes.
__device__ __forceinline__ void open_tile(Shared& shared, const ForwardParams& launch, const Plan& plan, int stage,
                                          unsigned phase) {
    Barrier *full = &shared.query_full[stage], *empty = &shared.query_empty[stage];
    ELEMENT* queries = shared.query[stage];
#if QUERY_TMA
    if (threadIdx.x != QUERY_THREAD) return;
    barrier_wait(empty, phase);
    shared.tile[stage] = plan.tile;
    shared.output[stage] = plan.output;
    barrier_expect(full, CHUNKS * BLOCK_M * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        tma_load(queries + chunk * BLOCK_M * CHUNK_COLUMNS, &launch.query, full, chunk * CHUNK_COLUMNS,
                 plan.tile.first_head, plan.tile.first_query, plan.tile.batch);
#else
    barrier_wait(empty, phase);
    if (threadIdx.x == 0) {
        shared.tile[stage] = plan.tile;
        shared.output[stage] = plan.output;
    }
    gather_queries(queries, launch.attention, plan.tile);
    barrier_arrive_after_copies(full);
#endif
    barrier_arrive(full);
}

// How many blocks at the beginning of a tile are full; its last block never counts.
__device__ __forceinline__ int count_full_blocks(const KeySource& source) {
    return max(min(source.full, source.length - 1) - FIRST(source), 0) / BLOCK_N;
}

// Keys run one block ahead of values, the order in which the consumers need them, and lists one block ahead of keys.
__device__ __forceinline__ void produce(Shared& shared, const ForwardParams& launch) {
    const AttentionParams& p = launch.attention;
    const int warp = uniform(threadIdx.x / 32);
    const float bias_unit = BIAS_FIRST ? __frcp_rz(p.scale * LOG2_E) : 1.0f;
    PipelineState<STAGES> key_state;
    PipelineState<VALUE_STAGES> value_state;
    PipelineState<QUERY_STAGES> query_state;
    TileScheduler scheduler(launch, shared.plans[warp]);
    int current_plan = 0;  // index of the current tile's plan
    unsigned block_index = 0;  // of the current block, over all tiles
    RowSource values = {};  // of the block before
    KeyBias lane_bias;  // of this lane's key of the current block
    scheduler.find(current_plan);
#if GAPS
    if (threadIdx.x == QUERY_THREAD) shared.active_consumers = scheduler.active_consumers;
    if (scheduler.active_consumers == 0) {
        if (!QUERY_TMA) barrier_arrive(&shared.query_full[0]);
        if (!QUERY_TMA || threadIdx.x == QUERY_THREAD) barrier_arrive(&shared.query_full[0]);
        return;
    }
#endif
    // Waits for the list entries of the current block, which has `count` keys from `first` on.
    const auto wait_list = [&](const Plan& plan, int first, int count) {
#if KEYS != KEYS_CONTIGUOUS
        copy_async_wait<0>();
        __syncwarp();
#endif
        lane_bias = fetch_bias(p, plan, warp, listed_rows(shared, block_index, warp), first, count);
    };
    const auto gather_values = [&] {
        barrier_wait(&shared.value_empty[value_state.stage], value_state.phase ^ 1);
        gather<true>(shared.values[value_state.stage], values, launch, warp, &shared.value_full[value_state.stage]);
        barrier_arrive_after_copies(&shared.value_full[value_state.stage]);
        value_state.advance();
    };
    KeyBlocks blocks = scheduler.keys(current_plan);
    Block block = first_block(shared, blocks, warp, block_index);
    bool begins_tile = true, found = false;  // found: the next tile has been found
#if FULL_BLOCKS
    int full_blocks = count_full_blocks(blocks.source);  // that the tile begins with
#else
    constexpr int full_blocks = 0;
#endif
#if BIAS == BIAS_DENSE
    static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
    const BIAS_ELEMENT* bias;
#endif
    for (;;) {
        const Plan& plan = shared.plans[warp][current_plan];
        if (begins_tile) {
            open_tile(shared, launch, plan, query_state.stage, query_state.phase ^ 1);
            query_state.advance();
#if BIAS == BIAS_DENSE
            bias = bias_row(p, plan.tile, threadIdx.x);
#endif
        }
        wait_list(plan, block.first, block.count());
#if FULL_BLOCKS
        // After the tile's first block: gathers the keys of a full block together with the previous block's values,
        // because a warp waits for each of its steps.
        if (!begins_tile && full_blocks > 1) {
            const int* entry = plan.source.list + BLOCK_N + key_of(warp, threadIdx.x & 31) + FIRST(blocks.source);
            int left = full_blocks - 1;
            do {
                Barrier* key_empty = &shared.key_empty[key_state.stage];
                Barrier* value_empty = &shared.value_empty[value_state.stage];
                const bool key_ready = barrier_test(key_empty, key_state.phase ^ 1);
                const bool value_ready = barrier_test(value_empty, value_state.phase ^ 1);
                entry += BLOCK_N;
                --left;
                if (left > 0) {
                    list_entries(shared, block_index + 1, warp, entry);
                } else {
                    blocks = scheduler.keys(current_plan);  // again, because registers do not hold it
                    blocks.next_key = FIRST(blocks.source) + full_blocks * BLOCK_N;
                    block = next_block(shared, blocks, warp, block_index + 1);
                }
                if (!key_ready) barrier_wait(key_empty, key_state.phase ^ 1);
                keep_bias(shared, plan, warp, key_state.stage, lane_bias, bias_unit);
                if (threadIdx.x == BLOCK_INFO_THREAD) shared.block_info[key_state.stage] = BlockInfo(0);
                if (!value_ready) barrier_wait(value_empty, value_state.phase ^ 1);
                barrier_arrive(&shared.key_full[key_state.stage]);
                gather_both({shared.keys[key_state.stage], plan.keys, p.key_row, listed_rows(shared, block_index, warp)},
                            {shared.values[value_state.stage], plan.values, p.value_row,
                             listed_rows(shared, block_index - 1, warp)},
                            warp, &shared.key_full[key_state.stage]);
                barrier_arrive_after_copies(&shared.value_full[value_state.stage]);
                key_state.advance();
                value_state.advance();
                ++block_index;
                wait_list(plan, 0, left > 0 ? BLOCK_N : block.count());
            } while (left > 0);
            values = {plan.values, 0, BLOCK_N, listed_rows(shared, block_index - 1, warp), true};
            full_blocks = 0;
        }
#endif
        const int count = block.count();
        const Block next = next_block(shared, blocks, warp, block_index + 1);
        const bool ends_tile = next.first < 0;
        int run = -1;
#if BIAS == BIAS_DENSE
        if (p.bias_aligned && block.run() >= 0) {
            run = block.run();  // the consumers will read it, from L2
            for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + run + i);
        }
#endif
        const int* listed = listed_rows(shared, block_index, warp);
#if KV_TMA
        RowSource rows = {plan.tile.group, plan.tile.batch, block.first, count, nullptr, true};
#elif RUNS
        RowSource rows = {plan.keys, block.first, count, listed, PAD_BY_BIAS ? count > 0 : count >= BLOCK_N, block.run()};
#else
        RowSource rows = {plan.keys, block.first, count, listed, PAD_BY_BIAS ? count > 0 : count >= BLOCK_N};
#endif
        barrier_wait(&shared.key_empty[key_state.stage], key_state.phase ^ 1);
        gather_facts(shared, p, plan, warp, rows, block.unmasked, key_state.stage);
        gather<false>(shared.keys[key_state.stage], rows, launch, warp, &shared.key_full[key_state.stage]);
        keep_bias(shared, plan, warp, key_state.stage, lane_bias, bias_unit);
        if (!found && !(begins_tile && full_blocks > 1)) {  // slow, so done while these keys' copies are in flight
            scheduler.find(current_plan ^ 1);
            found = true;
        }
        if (threadIdx.x == BLOCK_INFO_THREAD) {
            shared.block_info[key_state.stage] = {block.unmasked, count <= SHORT_BLOCK_KEYS, ends_tile,
                                                  scheduler.active_consumers, run};
        }
        barrier_arrive_after_copies(&shared.key_full[key_state.stage]);
        barrier_arrive(&shared.key_full[key_state.stage]);
        key_state.advance();
        if (block_index > 0) gather_values();
        ++block_index;
        values = rows;
        values.filled = KV_TMA || count >= BLOCK_N;
#if !KV_TMA
        values.rows = plan.values;
#endif
        block = next;
        begins_tile = ends_tile;
        if (!ends_tile) continue;
        if (scheduler.active_consumers == 0) break;
        current_plan ^= 1;
        found = false;
        blocks = scheduler.keys(current_plan);
        block = first_block(shared, blocks, warp, block_index);
#if FULL_BLOCKS
        full_blocks = count_full_blocks(blocks.source);
#endif
    }
    gather_values();
}
