// The producer of the Hopper key gradients: keys of the next tile, queries and their statistics of the next steps.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#include "sm90/backward_dkv_tiles.cuh"

// ---- the producer: keys ----
#if BITS
// Which steps of a head see any of the tile's keys, by a warp; how many.
__device__ __forceinline__ int find_steps(KeyTileMeta& meta, const AttentionParams& p, const KeyTile& t) {
    const int lane = threadIdx.x & 31, lists = t.count > LIST_KEYS ? 2 : 1;
    const unsigned short* states =
        p.super_states + (mask_row_of(p, t, 0) * (p.super_entries / LIST_KEYS) + t.entry / LIST_KEYS) * p.query_words;
    int steps = 0;
    for (int group = 0; t.count > 0 && t.first_query + 32 * group * BLOCK_Q < t.end_query; ++group) {
        const int query = t.first_query + (32 * group + lane) * BLOCK_Q;
        unsigned any = 0, all = 3;
        for (int i = 0; query < t.end_query && i < lists * WORDS; ++i) {
            const unsigned state = states[i / WORDS * p.query_words + query / 32 + i % WORDS];
            any |= state;
            all &= state;
        }
        const unsigned live = __ballot_sync(ALL_LANES, any != 0), masked = __ballot_sync(ALL_LANES, all != 3);
        if (lane == 0) {
            meta.live[group] = live;
            meta.masked[group] = masked;
        }
        steps += __popc(live);
    }
    return steps;
}
#endif

// The keys of one split of a tile by a warp, and what is known of them; how many steps it has.
__device__ __forceinline__ int load_meta(KeyTileMeta& meta, const BackwardDkvParams& launch, const KeyTile& t, int split) {
    const AttentionParams& p = launch.attention;
    const int lane = threadIdx.x & 31;
    int last_far_from = INT_LOWEST;
    for (int i = lane; i < BLOCK_N; i += 32) {
        const bool exists = i < t.count;
        int key = 0, start = NEVER, stop = INT_LOWEST;  // no such key: an empty run
        float bias = 0.0f;
#if DELAY
        int far_from = INT_LOWEST;
#endif
        if (exists) {
            key = KEYS == KEYS_CONTIGUOUS ? t.first + i : t.list[t.first + i];
            start = CAUSAL ? key : INT_LOWEST;
            stop = NEVER;
#if INTERVALS
            const long long row = mask_row_of(p, t, 0), head = row % p.mask_heads, batch = row / p.mask_heads;
            start = max(start, p.start[batch * p.start_batch + head * p.start_head + key]);
            stop = p.stop[batch * p.stop_batch + head * p.stop_head + key];
#endif
#if BIAS == BIAS_OF_KEYS
            bias = log2_units(p.bias[t.batch * p.bias_batch + t.group * p.bias_group + key * p.bias_key]);
#endif
#if DELAY
            far_from = key + t.bias_delay;
            last_far_from = max(last_far_from, far_from);
            if (far_from >= t.end_position()) bias = 0.0f;  // it applies to no query
            if (bias == -infinity()) {                      // nobody sees the key from there on
                stop = min(stop, far_from);
                bias = 0.0f;
            }
#endif
#if INTERVALS || DELAY
            const bool is_ahead = stop <= t.first_query + t.shift;  // of all queries
            if ((KEYS != KEYS_LISTED || DELAY) && (is_ahead || start >= t.end_position())) {  // super-tiles have no such key
                start = NEVER;
                stop = INT_LOWEST;
            }
#endif
        }
        meta.index[i] = key;
        meta.start[i] = start;
        meta.stop[i] = stop;
        meta.bias[i] = bias;
#if DELAY
        meta.far_from[i] = far_from;
#endif
    }
    __syncwarp();
#if BITS
    QueryRange queries = {t.first_query, t.end_query, t.first_query, t.end_query};
    const int steps = find_steps(meta, p, t);
#else
    QueryRange queries = find_queries(meta.start, meta.stop, t);
    if (DQUERY || STORED) queries.begin -= (queries.begin - t.first_query) % UNIT_QUERIES;  // before steps are counted from it
    const int steps = max(0, (queries.end - queries.begin + BLOCK_Q - 1) / BLOCK_Q);
#endif
    int first_step = 0, all_steps = steps * (p.heads / p.kv_heads);
    if (launch.is_split()) {
        first_step = split * launch.steps_per_split;
        all_steps = max(0, min(all_steps - first_step, launch.steps_per_split));
    }
#if KEYS == KEYS_SHARED
    first_step = meta.ticket.first_step;
    all_steps = max(0, min(all_steps - first_step, meta.ticket.steps));
#endif
#if DELAY
    last_far_from = __reduce_max_sync(ALL_LANES, last_far_from);
    if (lane == 0) meta.last_far_from = last_far_from;
#endif
    if (lane == 0) {
        meta.tile = t;
#if KEYS == KEYS_SHARED
        if (meta.ticket.slot >= 0) meta.tile.first = ~(meta.ticket.slot * BLOCK_N);
#endif
        meta.queries = queries;
        meta.steps = steps;
        meta.split = split;
        meta.first_step = first_step;
        meta.all_steps = all_steps;
        meta.first_unit = unit_of(t.first_query, t.sequence) + (queries.begin - t.first_query) / UNIT_QUERIES;
    }
    return all_steps;
}

// Whether a key has a row; if not, nobody sees it or its bias hides it.
__device__ __forceinline__ bool has_row(const KeyTileMeta& meta, int row) {
    const bool hidden = BIAS == BIAS_OF_KEYS && meta.bias[row] == -infinity();
    return meta.start[row] < meta.stop[row] && !hidden;
}

#if STORED
// Tells the query pass of a tile, by a warp.
__device__ __forceinline__ void store_meta(const StoredDs& stored, KeyTileMeta& meta, const KeyTile& t) {
    const int tile = static_cast<int>(t.partial / BLOCK_N) - stored.first_tile, lane = threadIdx.x & 31;
    for (int i = lane; i < BLOCK_N; i += 32) stored.keys[tile * BLOCK_N + i] = has_row(meta, i) ? meta.index[i] : -1;
    if (lane != 0) return;
    const int first = (meta.queries.begin - t.first_query) / STEP_QUERIES;
    stored.steps[tile] = make_int2(first, first + meta.steps);
    meta.stored_tile = tile;
}
#endif

// Rows of keys and values; zeros for a key that nobody sees or that its bias hides, whatever it holds.
__device__ __forceinline__ void load_rows(Shared& shared, int stage, const AttentionParams& p, const KeyTile& t) {
    constexpr int PIECES = 2 * ROW_STEPS;  // 16 bytes each
    const KeyTileMeta& meta = shared.meta[stage];
    const ELEMENT* keys = p.key + t.batch * p.key_batch + t.group * p.key_head;
    const ELEMENT* values = p.value + t.batch * p.value_batch + t.group * p.value_head;
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < BLOCK_N * PIECES; i += 32) {
        const int row = i / PIECES, piece = i % PIECES;
        const bool exists = has_row(meta, row) && piece * 8 < HEAD_DIM;
        const long long key = meta.index[row], column = exists ? piece * 8 : 0;
        copy_async_16(piece_of<BLOCK_N>(shared.key[stage], row, piece), keys + key * p.key_row + column, exists ? 16 : 0);
        copy_async_16(piece_of<BLOCK_N>(shared.value[stage], row, piece), values + key * p.value_row + column,
                      exists ? 16 : 0);
    }
    copy_async_commit();
    copy_async_wait<0>();
    shared_write_fence();
}

// The index of the tile (find_key_tile) that is number `number` in the order of tickets. Where the first keys have the
// most queries, kv heads are taken in groups of some WAVES tiles for each CTA, and of a group the long tiles of all heads
// first, in bands: the last tiles to be taken are short, so all SMs end nearly together. Each band streams the queries of
// its group through L2 once more, hence groups, and bands of two tiles and more.
__device__ __forceinline__ unsigned tile_of_number(const AttentionParams& p, unsigned number) {
    if (KEYS != KEYS_CONTIGUOUS || SEQUENCES || !(CAUSAL || INTERVALS)) return number;
    constexpr unsigned WAVES = 2, BANDS = 16;
    const unsigned all_rows = p.batch * p.kv_heads, tiles = (p.key_length + BLOCK_N - 1) / BLOCK_N;
    const unsigned full = WAVES * gridDim.x, groups = max(1u, (all_rows * tiles + full / 2) / full);
    const unsigned group_rows = (all_rows + groups - 1) / groups;
    const unsigned first_row = number / (group_rows * tiles) * group_rows, rows = min(group_rows, all_rows - first_row);
    const unsigned of_group = number - first_row * tiles;
    const unsigned size = max(2u, (tiles + BANDS - 1) / BANDS), first = of_group / (rows * size) * size;
    const unsigned own = min(size, tiles - first), rest = of_group - rows * first;
    return (first_row + rest / own) * tiles + first + rest % own;
}

// The next tile, by a warp, and which split of it (KEYS_SHARED: `meta.ticket`); false if there are no more. Lists have
// tiles without keys, which have no results either: they are passed over.
__device__ __forceinline__ bool take_ticket(KeyTileMeta& meta, const BackwardDkvParams& launch, KeyTile& t,
                                            int& split) {
    do {
        unsigned ticket = 0;
        if ((threadIdx.x & 31) == 0) ticket = atomicAdd(launch.tickets, 1u);
        ticket = __shfl_sync(ALL_LANES, ticket, 0);
#if KEYS == KEYS_SHARED
        if (ticket >= static_cast<unsigned>(launch.plan.counts[0])) return false;
        if ((threadIdx.x & 31) == 0) meta.ticket = launch.plan.tickets[ticket];
        __syncwarp();
        t = find_key_tile(launch.attention, meta.ticket.tile);
        split = 0;
#else
        if (ticket >= static_cast<unsigned>(launch.tiles)) return false;
        split = launch.is_split() ? ticket / launch.tiles_per_split : 0;
        unsigned number = ticket - split * launch.tiles_per_split;
#if STORED
        number += launch.stored.first_tile;
#endif
        t = find_key_tile(launch.attention, tile_of_number(launch.attention, number));
#endif
    } while (KEYS == KEYS_LISTED && t.count <= 0);
    return true;
}

// Fills one stage of keys, tile after tile.
__device__ __forceinline__ void produce_keys(Shared& shared, const BackwardDkvParams& launch, int stage) {
    const AttentionParams& p = launch.attention;
    for (unsigned phase = 1;; phase ^= 1) {
        barrier_wait(&shared.key_empty[stage], phase);
        KeyTile t;
        int split;
        const bool found = take_ticket(shared.meta[stage], launch, t, split);
        if (!found) {
            if ((threadIdx.x & 31) == 0) shared.meta[stage].steps = END;
        } else if (load_meta(shared.meta[stage], launch, t, split) > 0) {
            load_rows(shared, stage, p, t);
        }
#if STORED
        if (found) store_meta(launch.stored, shared.meta[stage], t);
#endif
        barrier_arrive(&shared.key_full[stage]);
        if (!found) return;
    }
}

// ---- the producer: queries ----
// Rows of query and dout, by one thread.
__device__ __forceinline__ void produce_queries(Shared& shared, const BackwardDkvParams& launch) {
    constexpr int BYTES = CHUNKS * BLOCK_Q * CHUNK_ROW_BYTES;
    const AttentionParams& p = launch.attention;
    const int group_heads = p.heads / p.kv_heads;
    PipelineState<STAGES> state;
    for_each_tile(shared, [&](int keys, const KeyTileMeta& meta) {
        const int batch = meta.tile.batch, head = meta.tile.group * group_heads;
        StepQueries queries(meta);
        if (!BITS) barrier_arrive(&shared.key_empty[keys]);
        for (; queries.more(); queries.advance(), state.advance()) {
            const int query = queries.first(), h = queries.h;
            const auto load = [&](ELEMENT* rows, const TensorMap* map, Barrier* landed) {
                barrier_expect(landed, BYTES);
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    tma_load(rows + c * BLOCK_Q * CHUNK_COLUMNS, map, landed, c * CHUNK_COLUMNS, head + h, query, batch);
                barrier_arrive(landed);
            };
            const int stage = state.stage;
            barrier_wait(&shared.query_empty[stage], state.phase ^ 1);
            load(shared.query[stage], &launch.query, &shared.query_landed[stage]);
            load(shared.dout[stage], &launch.dout, &shared.dout_landed[stage]);
        }
        if (BITS) barrier_arrive(&shared.key_empty[keys]);
    });
}

// Sets a row to zeros; by a warp together.
__device__ __forceinline__ void clear_row(ELEMENT* rows, int row) {
    const int piece = threadIdx.x & 31;
    if (piece < CHUNKS * 8) *reinterpret_cast<uint4*>(piece_of<BLOCK_Q>(rows, row, piece)) = make_uint4(0, 0, 0, 0);
}

// lse and delta of a step's queries, by a warp. Rows that see nothing, and those of the next sequence or super-tile, count
// for nothing, whatever they hold: they become zeros.
__device__ __forceinline__ void produce_statistics(Shared& shared, const BackwardDkvParams& launch) {
    const AttentionParams& p = launch.attention;
    const int lane = threadIdx.x & 31, group_heads = p.heads / p.kv_heads;
    PipelineState<STAGES> state;
    for_each_tile(shared, [&](int keys, const KeyTileMeta& meta) {
        const int end = meta.tile.end_query;
        const long long head = (long long)meta.tile.batch * p.heads + meta.tile.group * group_heads;
        StepQueries queries(meta);
#if BITS
        const unsigned* columns = p.columns + mask_row_of(p, meta.tile, 0) * p.query_words * p.key_stride;
#else
        barrier_arrive(&shared.key_empty[keys]);
#endif
        for (; queries.more(); queries.advance(), state.advance()) {
            const int first = queries.first(), h = queries.h, stage = state.stage;
            float lse[BLOCK_Q / 32], delta[BLOCK_Q / 32];
#pragma unroll
            for (int k = 0; k < BLOCK_Q / 32; ++k) {
                const int query = first + 32 * k + lane;
                const long long row = (head + h) * p.query_length + query;
                lse[k] = query < end ? p.lse[row] : -infinity();
                delta[k] = query < end ? p.delta[row] : 0.0f;
            }
#if BITS
            unsigned words[WORDS * BLOCK_N / 32];
            if (queries.masked()) {
#pragma unroll
                for (int k = 0; k < WORDS * BLOCK_N / 32; ++k)
                    words[k] = columns[(long long)(first / 32 + 32 * k / BLOCK_N) * p.key_stride +
                                       meta.index[32 * k % BLOCK_N + lane]];
            }
#endif
            barrier_wait(&shared.query_empty[stage], state.phase ^ 1);
#if BITS
            if (queries.masked()) {
#pragma unroll
                for (int k = 0; k < WORDS * BLOCK_N / 32; ++k)
                    shared.words[stage][32 * k / BLOCK_N][32 * k % BLOCK_N + lane] = words[k];
            }
            if (lane == 0) shared.masked[stage] = queries.masked();
#endif
#pragma unroll
            for (int k = 0; k < BLOCK_Q / 32; ++k) {
                const bool sees = lse[k] != -infinity();
                shared.lse[stage][32 * k + lane] = sees ? -log2_lse(lse[k]) : -infinity();
                shared.delta[stage][32 * k + lane] = -delta[k];  // 0 for a row that sees nothing
                // Behind the last query of all there are zeros already.
                unsigned blank = __ballot_sync(ALL_LANES, !sees && first + 32 * k + lane < p.query_length);
                if (blank == 0) continue;
                barrier_wait(&shared.query_landed[stage], state.phase);
                barrier_wait(&shared.dout_landed[stage], state.phase);
                for (; blank != 0; blank &= blank - 1) {
                    clear_row(shared.query[stage], 32 * k + __ffs(blank) - 1);
                    clear_row(shared.dout[stage], 32 * k + __ffs(blank) - 1);
                }
                shared_write_fence();
            }
            barrier_arrive(&shared.ready[stage]);
        }
        if (BITS) barrier_arrive(&shared.key_empty[keys]);
    });
}
