// The producer of the Hopper query gradient: rows of a tile by TMA, keys and values by cp.async.
//
// Prelude: as sm90/backward_dq.cu.
#pragma once
#include "sm90/backward_dq_tiles.cuh"

// Query, dout and out of a tile, with lse and its gradient of its rows; -inf where there is no row. WIDE: without out, and
// with delta.
__device__ __forceinline__ void produce_rows(Shared& shared, const BackwardDqParams& launch, const Tile& t, int index,
                                             unsigned phase) {
    constexpr int BYTES = CHUNKS * BLOCK_M * CHUNK_ROW_BYTES;
    const AttentionParams& p = launch.attention;
    barrier_wait(&shared.query_empty, phase ^ 1);
    if (threadIdx.x == 0) {
        shared.tile = index;
        barrier_expect(&shared.query_full, (WIDE ? 2 : 3) * BYTES);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int at = c * BLOCK_M * CHUNK_COLUMNS, column = c * CHUNK_COLUMNS;
            tma_load(shared.query + at, &launch.query, &shared.query_full, column, t.first_head, t.first_query, t.batch);
            tma_load(shared.dout + at, &launch.dout, &shared.query_full, column, t.first_head, t.first_query, t.batch);
#if !WIDE
            tma_load(shared.out + at, &launch.out, &shared.query_full, column, t.first_head, t.first_query, t.batch);
#endif
        }
        barrier_arrive(&shared.query_full);
    }
    const int row = threadIdx.x, query = t.first_query + row / HEADS;  // there are as many threads as rows
    const bool exists = query < t.end_query;
    const long long at = ((long long)t.batch * p.heads + t.first_head + row % HEADS) * p.query_length + query;
    shared.lse[row] = exists ? p.lse[at] : -infinity();
    const float* further = WIDE ? p.delta : p.dlse;
    shared.dlse[row] = exists && further != nullptr ? further[at] : 0.0f;
    barrier_arrive(&shared.query_full);
}

// The bias of a lane's key, natural-log units; 0 if there is no such key, or it applies to no row of the tile.
__device__ __forceinline__ float bias_of(const AttentionParams& p, const Tile& t, int key, bool exists) {
    if (BIAS != BIAS_OF_KEYS || !exists) return 0.0f;
#if DELAY
    if (is_near(key + t.bias_delay, t.last_position)) return 0.0f;
#endif
    return p.bias[t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head + key * p.bias_key];
}

// One block of keys, of which this lane knows one, or none: `key` of `exists`. A key with a bias of -inf for
// all rows gets zeros, whatever it holds.
__device__ __forceinline__ void produce_block(Shared& shared, int stage, const AttentionParams& p, const Tile& t,
                                              const KeySource& source, int key, bool exists, float bias) {
    constexpr int PIECES = 2 * ROW_STEPS;  // of a row, 16 bytes each
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * WARP_KEYS;
    const int slot = first + lane;
    int start = !exists ? NEVER : CAUSAL ? key : INT_LOWEST;
    if (lane < WARP_KEYS) {
#if BITS
#pragma unroll
        for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
            copy_async_4(&shared.words[stage][w][slot], source.columns + (long long)w * p.key_stride + key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
        shared.stop[stage][slot] = NEVER;
#else
        // Zeros: nobody sees it.
        if (!CAUSAL) copy_async_4(&shared.start[stage][slot], source.start + key, exists ? 4 : 0);
        copy_async_4(&shared.stop[stage][slot], source.stop + key, exists ? 4 : 0);
        if (CAUSAL && exists) start = max(key, source.start[key]);  // stored when the rows are under way
#endif
#if BIAS == BIAS_OF_KEYS
        shared.bias[stage][slot] = bias;
#endif
    }
    bool hidden = bias == -infinity();
#if DELAY
    const int far_from = key + t.bias_delay;
    const bool mixed = is_mixed(far_from, t.first_position, t.last_position);
    const bool any = __any_sync(ALL_LANES, exists && mixed);
    hidden = hidden && !mixed;
    if (lane == 0) reinterpret_cast<int*>(shared.mixed + stage)[threadIdx.x / 32] = any;
    if (lane < WARP_KEYS) shared.far_from[stage][slot] = far_from;
#endif
    const unsigned found = __ballot_sync(ALL_LANES, exists && !hidden);
    const ELEMENT* keys = p.key + t.batch * p.key_batch + t.group * p.key_head;
    const ELEMENT* values = p.value + t.batch * p.value_batch + t.group * p.value_head;
#pragma unroll
    for (int i = 0; i < (WARP_KEYS * PIECES + 31) / 32; ++i) {
        const int at = 32 * i + lane, row = at / PIECES, piece = at % PIECES;
        const long long from = __shfl_sync(ALL_LANES, key, row);
        if (WARP_KEYS * PIECES % 32 != 0 && at >= WARP_KEYS * PIECES) continue;
        const int valid = (found >> row & 1) != 0 && piece * 8 < HEAD_DIM ? 16 : 0, column = valid ? piece * 8 : 0;
        copy_async_16(piece_of<BLOCK_N>(shared.key[stage], first + row, piece), keys + from * p.key_row + column, valid);
        copy_async_16(piece_of<BLOCK_N>(shared.value[stage], first + row, piece), values + from * p.value_row + column, valid);
    }
#if !BITS
    if ((CAUSAL || KEYS == KEYS_CONTIGUOUS) && lane < WARP_KEYS) shared.start[stage][slot] = start;
#endif
    barrier_arrive_after_copies(&shared.key_full[stage]);
}

// The key of the block that this lane fetches: its index in `key`, 0 if there is none; whether there is one.
__device__ __forceinline__ bool key_of(const KeyBlocks& blocks, KeyBlock block, int& key) {
    const int lane = threadIdx.x & 31, slot = block.first + threadIdx.x / 32 * WARP_KEYS + lane;
    bool exists = block.first >= 0 && lane < WARP_KEYS;
#if KEYS == KEYS_CONTIGUOUS
    exists = exists && slot < blocks.source.length;
    key = exists ? slot : 0;
#else
    bool listed = false;
    const int* entry = blocks.entry(slot, listed);
    exists = exists && listed;
    key = exists ? *entry : 0;
#endif
    return exists;
}

// The keys of a tile, block by block: at least one, maybe without keys.
__device__ __forceinline__ void produce_keys(Shared& shared, const AttentionParams& p, const Tile& t,
                                             PipelineState<STAGES>& state) {
    KeyBlocks blocks(find_keys(p, t), t.first_position, t.last_position);
    KeyBlock block = blocks.next();
    int key = 0;
    bool exists = key_of(blocks, block, key);
    float bias = bias_of(p, t, key, exists);
    for (bool more = true; more; state.advance()) {
        const KeyBlock following = block.first < 0 ? block : blocks.next();
        int next_key = 0;
        const bool next_exists = key_of(blocks, following, next_key);
        more = following.first >= 0;
        barrier_wait(&shared.key_empty[state.stage], state.phase ^ 1);
        if (threadIdx.x == 0)
            shared.flags[state.stage] = (block.masked || block.first < 0 ? MASKED : 0) | (more ? 0 : LAST);
        produce_block(shared, state.stage, p, t, blocks.source, key, exists, bias);
        barrier_arrive(&shared.key_full[state.stage]);
        block = following;
        key = next_key;
        exists = next_exists;
        bias = bias_of(p, t, key, exists);  // it arrives while the consumers release a stage
    }
}

// Tile after tile: the CTA's number is its first ticket, the others come from a counter, each taken while the tile before
// is worked on.
__device__ __forceinline__ void produce(Shared& shared, const BackwardDqParams& launch) {
    const AttentionParams& p = launch.attention;
    PipelineState<STAGES> state;
    unsigned phase = 0;
    int index = blockIdx.x;
    for (int turn = 0; index < launch.tiles; turn ^= 1) {
        unsigned ticket = 0;
        if (threadIdx.x == 0) ticket = atomicAdd(launch.tickets, 1u);
        const Tile t = find_tile(p, index);
        if (t.exists()) {
            produce_rows(shared, launch, t, index, phase);
            phase ^= 1;
            if (p.dquery != nullptr) produce_keys(shared, p, t, state);
        }
        if (threadIdx.x == 0) shared.next[turn] = static_cast<int>(gridDim.x + ticket);
        named_barrier(PRODUCER_BARRIER, PRODUCER_THREADS);
        index = shared.next[turn];
    }
    barrier_wait(&shared.query_empty, phase ^ 1);
    if (threadIdx.x == 0) {
        shared.tile = END;
        barrier_arrive(&shared.query_full);
    }
    barrier_arrive(&shared.query_full);
}
