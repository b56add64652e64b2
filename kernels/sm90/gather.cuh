// Gathering into shared memory: the rows of a block's keys and values, their biases and visibility, and a tile's
// queries.
//
// Each warp gathers WARP_KEYS keys of the block (`key_of`). It copies ROWS rows at a time, with ROW_LANES lanes per
// row; such a group of lanes copies GROUP_KEYS consecutive keys of the warp, in runs whose shared-memory addresses are
// constant distances apart.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/smem.cuh"

constexpr int ROWS = 32 / ROW_LANES;
constexpr int GROUP_KEYS = WARP_KEYS / ROWS;
constexpr int RUN = GROUP_KEYS < 8 ? GROUP_KEYS : 8;
static_assert(RUN % 2 == 0 && GROUP_KEYS % RUN == 0, "rows are copied in pairs");
// How many warps have rows of a short block.
constexpr int SHORT_BLOCK_WARPS = BY_EIGHTS                      ? PRODUCER_WARPS
                                  : SHORT_BLOCK_KEYS > WARP_KEYS ? SHORT_BLOCK_KEYS / WARP_KEYS
                                                                 : 1;

// Rows of keys or values, and the stage that they go to.
struct Rows {
    ELEMENT* matrix;
    const ELEMENT* source;
    int stride;
    const int* listed;  // key indices of this warp, if keys are not consecutive
};

// List entries that are read together.
template <int count> struct Entries;
template <> struct Entries<4> { using Type = int4; };
template <> struct Entries<2> { using Type = int2; };

// A lane's pieces of a run of rows, starting at the warp's key `begin`.
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

    // Copies the pieces of the block's first `count` keys; `filled`: of all.
    template <bool filled>
    __device__ __forceinline__ void copy(int piece, int warp, int begin, int count) const {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool exists = (filled || key_of(warp, begin, k) < count) &&
                                (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // Swizzle: in the next row the piece lies in the neighbouring slot, eight rows further in the same slot
            // again.
            const unsigned turned = k % 2 ? (to ^ 16) + CHUNK_ROW_BYTES : to;
            copy_async_16(turned + k / 2 * 8 * CHUNK_ROW_BYTES, from[k], exists ? 16 : 0);
        }
    }
};

// This warp's rows of a block; of a lane's runs those from `from` on. Keys without a list are consecutive from `first`
// on.
template <bool filled, int from = 0>
__device__ __forceinline__ void gather_rows(const Rows& rows, int warp, int first, int count) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll
    for (int run = from; run < GROUP_KEYS; run += RUN) {
        if (SHORT_BLOCK && BY_EIGHTS && key_of(warp, group + run) >= SHORT_BLOCK_KEYS && count <= SHORT_BLOCK_KEYS) return;
        RunOfRows(rows, piece, warp, group + run, first).copy<filled>(piece, warp, group + run, count);
    }
}

// The same for a full block of keys and one of values; the keys arrive on `full`. All addresses of both first runs are
// computed first, so that no copy waits for the next one's address.
__device__ __forceinline__ void gather_both(const Rows& keys, const Rows& values, int warp, Barrier* full) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, group = lane / ROW_LANES * GROUP_KEYS;
    const bool exists = ROW_PIECES == ROW_LANES || piece < ROW_PIECES;
    const RunOfRows first_keys(keys, piece, warp, group, 0), first_values(values, piece, warp, group, 0);
    if (exists) first_keys.copy<true>(piece, warp, group, BLOCK_N);
    gather_rows<true, RUN>(keys, warp, 0, BLOCK_N);
    barrier_arrive_after_copies(full);
    if (exists) first_values.copy<true>(piece, warp, group, BLOCK_N);
    gather_rows<true, RUN>(values, warp, 0, BLOCK_N);
}

// Where the rows of a block's keys or values are.
struct RowSource {
#if KV_TMA
    int group, batch;
#else
    const ELEMENT* rows;
#endif
    int first;  // index of the first key, if they are consecutive
    int count;  // number of keys
    const int* listed;  // key indices of this warp, if they are not
    bool filled;  // every slot of the block is filled, those without a key by another row (PAD_BY_BIAS)
#if RUNS
    int run;  // as in Block
#endif
};

// Gathers keys or values. With KV_TMA, and with RUNS if the keys are consecutive, one thread issues TMA loads, whose
// bytes `full` then counts too.
template <bool values>
__device__ __forceinline__ void gather(ELEMENT* matrix, const RowSource& source, const ForwardParams& launch, int warp,
                                       Barrier* full) {
    const int row_stride = values ? launch.attention.value_row : launch.attention.key_row;
#if KV_TMA || RUNS
    const TensorMap* map = values ? &launch.value : &launch.key;
#endif
#if KV_TMA
    if (threadIdx.x != 0) return;
    barrier_expect(full, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        tma_load(matrix + chunk * BLOCK_N * CHUNK_COLUMNS, map, full, chunk * CHUNK_COLUMNS, source.first,
                 source.group, source.batch);
#else
#if RUNS
    if (source.run >= 0) {
        if (threadIdx.x != 0) return;
        barrier_expect(full, CHUNKS * BLOCK_N * CHUNK_ROW_BYTES);
        const int head = static_cast<int>((source.rows - (values ? launch.attention.value : launch.attention.key)) / 8);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int key = 0; key < BLOCK_N; key += RUN_KEYS)
                tma_load(matrix + (chunk * BLOCK_N + key) * CHUNK_COLUMNS, map, full, chunk * CHUNK_COLUMNS, 0,
                         (source.run + key) / RUN_STEP, 0, head);
        return;
    }
#endif
    if (SHORT_BLOCK && source.count <= SHORT_BLOCK_KEYS && warp >= SHORT_BLOCK_WARPS) return;
    if (source.filled)
        gather_rows<true>({matrix, source.rows, row_stride, source.listed}, warp, source.first, source.count);
    else
        gather_rows<false>({matrix, source.rows, row_stride, source.listed}, warp, source.first, source.count);
#endif
}

// Queries of a tile, zeros for rows past the last query.
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

// The bias of a lane's key; with DELAY it applies to queries at or after far_from, and is 0 if it applies to none.
struct KeyBias {
    float value = 0.0f;
    int far_from = INT_LOWEST;
};

// Starts loading the bias of this lane's key of a block with `count` keys.
__device__ __forceinline__ KeyBias fetch_bias(const AttentionParams& p, const Plan& plan, int warp, const int* listed,
                                              int first, int count) {
    KeyBias bias;
#if BIAS == BIAS_OF_KEYS
    const int lane = threadIdx.x & 31, index = key_of(warp, lane);
    if (lane >= WARP_KEYS || index >= count) {
        bias.value = PAD_BY_BIAS ? -infinity() : 0.0f;
        return bias;
    }
    const int key = KEYS == KEYS_CONTIGUOUS ? first + index : listed[lane];
#if DELAY
    bias.far_from = key + plan.tile.bias_delay;
    if (is_near(bias.far_from, plan.tile.last_position)) return bias;
#endif
    bias.value = __ldg(static_cast<const float*>(row_address(plan.bias, key, static_cast<int>(p.bias_key) * 4)));
#endif
    return bias;
}

// A bias in units of Q K^T, or of log 2, that p = 2^(unit * s - m) can represent: if m cannot hold a product, half its
// last place is left as an exponent. So below -FAR, biases are rounded to powers of 2, whose products are exact; towards
// 0, because a lower lse would make probabilities of the backward pass infinite. q . k makes no difference there.
// Rounding towards zero makes no new infinity.
__device__ __forceinline__ float bearable_bias(float bias, float inverse_unit) {
    constexpr float FAR = 134217728.0f;
    const float x = __fmul_rz(log2_units(bias), inverse_unit);
    return x < -FAR * power_of_2_below(inverse_unit) ? power_of_2_below(x) : x;
}

// Stores it to the stage.
__device__ __forceinline__ void keep_bias(Shared& shared, const Plan& plan, int warp, int stage, const KeyBias& bias,
                                          float unit) {
    const int lane = threadIdx.x & 31;
#if DELAY
    const bool mixed = is_mixed(bias.far_from, plan.tile.first_position, plan.tile.last_position);
    const bool any = __any_sync(ALL_LANES, lane < WARP_KEYS && mixed);
    if (lane == 0) reinterpret_cast<int*>(shared.mixed + stage)[warp] = any;
    if (lane < WARP_KEYS) shared.far_from[stage][key_of(warp, lane)] = bias.far_from;
#endif
    if (BIAS != BIAS_OF_KEYS || lane >= WARP_KEYS) return;
    shared.bias[stage][key_of(warp, lane)] = bearable_bias(bias.value, unit);
}

// Loads the other data of each key (index, visibility). All queries see the block's first `unmasked` keys.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Plan& plan, int warp,
                                             const RowSource& keys, int unmasked, int stage) {
    const int lane = threadIdx.x & 31, index = key_of(warp, lane);
#if BITS && RUNS
    if (keys.run >= 0 && unmasked < BLOCK_N) {
        constexpr int PIECES = BLOCK_N / 4;
#pragma unroll
        for (int i = threadIdx.x; i < WORDS * PIECES; i += PRODUCER_THREADS)
            copy_async_16(&shared.words[stage][i / PIECES][i % PIECES * 4],
                          plan.source.columns + (long long)(i / PIECES) * p.key_stride + keys.run + i % PIECES * 4, 16);
    }
#endif
    if (lane >= WARP_KEYS) return;
    const bool exists = index < keys.count;
#if KEYS == KEYS_CONTIGUOUS
    const int key = exists ? keys.first + index : 0;
#else
    const int key = keys.listed[lane];
#endif
#if KEYS_KNOWN
    shared.key[stage][index] = key;
#endif
    if (unmasked == BLOCK_N) return;
#if BITS
#if RUNS
    if (keys.run >= 0) return;  // the copies above load its words
#endif
#pragma unroll
    for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
        copy_async_4(&shared.words[stage][w][index], plan.source.columns + (long long)w * p.key_stride + key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
    shared.start[stage][index] = CAUSAL ? key : INT_LOWEST;
    shared.stop[stage][index] = exists ? NEVER : INT_LOWEST;
#else
    copy_async_4(&shared.start[stage][index], plan.source.start + key, exists ? 4 : 0);
    copy_async_4(&shared.stop[stage][index], plan.source.stop + key, exists ? 4 : 0);  // 0, 0 if there is no key
#endif
}
