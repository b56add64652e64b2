// What the consumers of the Hopper key gradients have in common (sm90/backward_dkv_narrow.cuh and _wide.cuh): S and dP,
// probabilities and their gradients, results to memory, and how they go from tile to tile.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#include "sm90/backward_dkv_tiles.cuh"

// Whether a bias hides keys from all queries of a step. WIDE: the warpgroup that makes P would not notice a NaN; 128 queries
// in two passes: 2000 bytes more would be spilled.
constexpr bool KEYS_HIDDEN = BIAS != BIAS_NONE && !BITS && !WIDE && (DQUERY || BLOCK_Q == 64);

// Whether the accumulators of dP begin with -delta, which saves a subtraction a pair; narrow head dims would spill.
constexpr bool FROM_DELTA = HEAD_DIM > 64;

// A consumer warp: 16 of its warpgroup's 64 keys, two of them a lane's.
struct ConsumerBase {
    Shared& shared;
    const BackwardDkvParams& launch;
    const AttentionParams& p;
    const int half, lane, first_row;  // of the tile
    const BackwardLogits logit;
    PipelineState<STAGES> queries;  // of the current step
    // of the current tile
    unsigned keys, values;  // descriptors of this warpgroup's rows
    QueryRange range;
    int shift, steps, split;
    int key_stage;
#if BITS
    int key[2];  // rows
#endif
    // of the current step
    int step;
    // accumulators
    Fragment s[QUERY_FRAGMENTS], dp[QUERY_FRAGMENTS];  // S^T, later P^T; dP^T (FROM_DELTA: less delta), later dS^T
    float dbias[2];

    __device__ __forceinline__ ConsumerBase(Shared& shared, const BackwardDkvParams& launch)
        : shared(shared), launch(launch), p(launch.attention), half(uniform(threadIdx.x / 128 - 1)), lane(threadIdx.x & 31),
          first_row((WIDE ? 0 : half * 64) + threadIdx.x / 32 % 4 * 16), logit(launch.attention.scale, launch.attention.softcap) {}

    __device__ __forceinline__ int row(int r) const { return first_row + lane / 4 + 8 * r; }

    __device__ __forceinline__ void begin_tile(int stage, const KeyTileMeta& meta) {
        const int own_rows = WIDE ? 0 : half * 64 * CHUNK_COLUMNS;
        keys = matrix_descriptor(shared.key[stage] + own_rows, 0);
        values = matrix_descriptor(shared.value[stage] + own_rows, 0);
        range = meta.queries;
        shift = meta.tile.shift;
        steps = meta.steps;
        split = meta.split;
        step = meta.first_of_head();
        key_stage = stage;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dbias[r] = 0.0f;
#if BITS
            key[r] = meta.index[row(r)];
#endif
        }
    }

    // What is known of this lane's keys. It is read in each step: there are no registers to keep it.
    __device__ __forceinline__ void load_biases(float (&bias)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) bias[r] = BIAS == BIAS_NONE ? 0.0f : shared.meta[key_stage].bias[row(r)];
    }

    // Position of the step's first query.
    __device__ __forceinline__ int first_position() const { return range.begin + step * BLOCK_Q + shift; }

#if DELAY
    // To which queries of a step the biases of this lane's keys apply.
    struct Delay {
        int far_from[2];
        bool mixed;  // only to some, for a key of the warp
    };

    // Biases that apply to no query of the step become 0.
    __device__ __forceinline__ Delay delay_biases(float (&bias)[2]) const {
        const KeyTileMeta& meta = shared.meta[key_stage];
        Delay delay = {{INT_LOWEST, INT_LOWEST}, false};
        const int first = first_position(), last = first + BLOCK_Q - 1;
        if (is_far(meta.last_far_from, first)) return delay;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            delay.far_from[r] = meta.far_from[row(r)];
            delay.mixed |= is_mixed(delay.far_from[r], first, last);
            if (is_near(delay.far_from[r], last)) bias[r] = 0.0f;
        }
        delay.mixed = __any_sync(ALL_LANES, delay.mixed);
        return delay;
    }

    // Whether the bias applies to the pair of element i of fragment n.
    __device__ __forceinline__ bool applies(const Delay& delay, int n, int i) const {
        return is_far(delay.far_from[fragment_row(i)], first_position() + 2 * (lane & 3) + 16 * n + fragment_column(i));
    }
#endif

    __device__ __forceinline__ void load_intervals(int (&start)[2], int (&stop)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            start[r] = shared.meta[key_stage].start[row(r)];
            stop[r] = shared.meta[key_stage].stop[row(r)];
        }
    }

    // The step's S and dP.
    __device__ __forceinline__ void start_logits() {
        barrier_wait(&shared.ready[queries.stage], queries.phase);
        barrier_wait(&shared.query_landed[queries.stage], queries.phase);
        multiply_rows<BLOCK_N, BLOCK_Q>(s, keys, shared.query[queries.stage]);
    }

    __device__ __forceinline__ void start_dp() {
        if (WIDE) barrier_wait(&shared.ready[queries.stage], queries.phase);
        barrier_wait(&shared.dout_landed[queries.stage], queries.phase);
        if constexpr (FROM_DELTA) {
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    float delta[2];  // loaded for each of the lane's keys: straight into the accumulator
                    load_pair(delta, shared.delta[queries.stage], n, i / 4);
                    dp[n].x[i] = delta[0];
                    dp[n].x[i + 1] = delta[1];
                }
            add_rows<BLOCK_N, BLOCK_Q>(dp, values, shared.dout[queries.stage]);
        } else {
            multiply_rows<BLOCK_N, BLOCK_Q>(dp, values, shared.dout[queries.stage]);
        }
    }

    // A pair of neighbouring queries' statistics: those of this lane in fragment n, k = 0 or 1.
    __device__ __forceinline__ void load_pair(float (&x)[2], const float* statistics, int n, int k) const {
        load_shared_pair(x[0], x[1], shared_address(statistics + 16 * n + 8 * k + 2 * (lane & 3)));
    }

    // Row of the key and value `r` of this lane.
    __device__ __forceinline__ int key_row(const KeyTile& t, int r) const {
#if BITS
        return key[r];
#elif KEYS == KEYS_SHARED
        return t.list[t.first + row(r)];
#else
        return t.first + row(r);
#endif
    }

    // Whether some pair of the step may be hidden.
    __device__ __forceinline__ bool is_masked() const {
#if BITS
        return shared.masked[queries.stage] != 0;
#else
        const int query = range.begin + step * BLOCK_Q;
        return query < range.full_begin || query + BLOCK_Q > range.full_end;
#endif
    }

    // Most keys are seen by all queries of a step, or by none. Keys that none sees are hidden by their bias (KEYS_HIDDEN).
    // Whether there are others among the warp's, whose pairs must be tested.
    __device__ __forceinline__ bool hide_keys(float (&bias)[2]) const {
        if (!is_masked()) return false;
#if BITS
        return true;
#else
        const int begin = first_position(), end = begin + BLOCK_Q;
        bool partial = false;
        int start[2], stop[2];
        load_intervals(start, stop);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool all = start[r] <= begin && stop[r] >= end, none = start[r] >= end || stop[r] <= begin;
            if (KEYS_HIDDEN && none) bias[r] = -infinity();
            partial |= !all && !(KEYS_HIDDEN && none);
        }
        return __any_sync(ALL_LANES, partial);
#endif
    }

    // Sets those of hidden pairs to 0.
    __device__ __forceinline__ void hide(Fragment (&x)[QUERY_FRAGMENTS]) const {
#if BITS
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const unsigned word = shared.words[queries.stage][w][row(r)] >> 2 * (lane & 3);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (fragment_row(i % 8) != r) continue;
                    if ((word >> (i / 8 * 16 + fragment_column(i % 8)) & 1) == 0) x[2 * w + i / 8].x[i % 8] = 0.0f;
                }
            }
#else
        const int position = first_position() + 2 * (lane & 3);
        int start[2], stop[2];
        load_intervals(start, stop);
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!visible(position + 16 * n + fragment_column(i), start[fragment_row(i)], stop[fragment_row(i)]))
                    x[n].x[i] = 0.0f;
#endif
    }

    // Waits for S, issued before the last group of MMAs (WIDE: in it); it becomes P, of hidden pairs 0 (KEYS_HIDDEN: or
    // NaN, where S or the row's lse is not finite).
    __device__ __forceinline__ void exponentiate() {
        float bias[2];
        load_biases(bias);
#if DELAY
        Delay delay = delay_biases(bias);
#endif
        const bool partial = hide_keys(bias);
        wgmma_wait<WIDE ? 0 : 1>();
        pin(s);
#if DELAY
        if (delay.mixed) {
#pragma unroll
            for (int r = 0; r < 2; ++r)  // hidden from all queries
                if (bias[r] == -infinity()) delay.far_from[r] = INT_LOWEST;
            make_probabilities([&](int n, int i) { return applies(delay, n, i) ? bias[fragment_row(i)] : 0.0f; });
        } else
#endif
            make_probabilities([&](int, int i) { return bias[fragment_row(i)]; });
        if (partial) hide(s);
    }

    // bias_of(n, i): of element i of fragment n.
    template <typename BiasOf>
    __device__ __forceinline__ void make_probabilities(const BiasOf& bias_of) {
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            float lse[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_pair(lse[k], shared.lse[queries.stage], n, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float lower = lse[i >> 2][i & 1], own = bias_of(n, i);
                s[n].x[i] = exp2_fast(SOFTCAP ? logit(s[n].x[i], own) + lower : logit(s[n].x[i], lower + own));
            }
        }
    }

    __device__ __forceinline__ void wait_dp() {
        wgmma_wait<0>();
        pin(dp);
    }

    // Adds dp of the step's queries.
    __device__ __forceinline__ void add_to(float (&sums)[2]) const {
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[fragment_row(i)] += dp[n].x[i];
    }

    // dp becomes the gradient of q . k / scale; dbias grows. What is not finite reaches no hidden pair: dS of these is set to
    // 0. KEYS_HIDDEN: it is 0, as P is, or NaN, and then so are the sums. The logit that the softcap's derivative needs
    // comes from P.
    __device__ __forceinline__ void differentiate() {
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            float delta[2][2] = {};
#pragma unroll
            for (int k = 0; k < 2 && !FROM_DELTA; ++k) load_pair(delta[k], shared.delta[queries.stage], n, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) dp[n].x[i] = s[n].x[i] * (dp[n].x[i] + delta[i >> 2][i & 1]);
        }
        if constexpr (KEYS_HIDDEN) {
            float sums[2] = {0.0f, 0.0f};
            add_to(sums);
            if (__any_sync(ALL_LANES, !(fabsf(sums[0] + sums[1]) < infinity())) && is_masked()) {
                hide(s);
                hide(dp);
                sums[0] = sums[1] = 0.0f;
                add_to(sums);
            }
            add_far(sums);
        } else {
            float own[2] = {0.0f, 0.0f};
            float(&sums)[2] = DELAY ? own : dbias;
            if (is_masked()) hide(dp);
            add_to(sums);
            if (DELAY) add_far(sums);
        }
#if SOFTCAP
        float bias[2];
        load_biases(bias);
#if DELAY
        const Delay delay = delay_biases(bias);
#endif
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            float lse[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_pair(lse[k], shared.lse[queries.stage], n, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float own = bias[fragment_row(i)];
#if DELAY
                if (delay.mixed && !applies(delay, n, i)) own = 0.0f;
#endif
                const float capped = log2_fast(s[n].x[i]) - lse[i >> 2][i & 1] - own;
                dp[n].x[i] = s[n].x[i] == 0.0f ? 0.0f : dp[n].x[i] * softcap_slope(capped, logit.cap);
            }
        }
#endif
    }

    // Adds the step's dS to dbias: `sums`, which are over all its queries, or sums over those to which the bias applies.
    __device__ __forceinline__ void add_far(float (&sums)[2]) {
#if DELAY
        float whole[2] = {1.0f, 1.0f};
        const Delay delay = delay_biases(whole);
        if (delay.mixed) {
            sums[0] = sums[1] = 0.0f;
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (applies(delay, n, i)) sums[fragment_row(i)] += dp[n].x[i];
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (whole[r] == 0.0f) sums[r] = 0.0f;
        }
#endif
#pragma unroll
        for (int r = 0; r < 2; ++r) dbias[r] += sums[r];
    }

    // dbias of one head, if it is wanted; it begins anew. (It is summed in any case: where this branch is missing, the
    // assembler mixes what comes before and after it and spills.)
    __device__ __forceinline__ void write_bias(const KeyTile& t, int h) {
        float* results = is_partial(t) ? p.partial_bias : p.dbias;
        if (launch.is_split() && results != nullptr) results += (long long)split * p.batch * p.heads * p.key_length;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = row_sum(dbias[r]);
            dbias[r] = 0.0f;
            if ((lane & 3) != 0 || row(r) >= t.count || results == nullptr) continue;
            const int group_heads = p.heads / p.kv_heads;
            if (has_partial_rows(t))
                results[partial_row(t, row(r)) * group_heads + h] = sum;
            else
                results[((long long)t.batch * p.heads + t.group * group_heads + h) * p.key_length + key_row(t, r)] = sum;
        }
    }

    // Whether the tile's sums are partial ones.
    __device__ __forceinline__ bool is_partial(const KeyTile& t) const { return has_partial_rows(t) || launch.is_split(); }

    __device__ __forceinline__ bool has_partial_rows(const KeyTile& t) const {
        return KEYS == KEYS_SHARED ? t.first < 0 : t.is_partial(p);
    }

    __device__ __forceinline__ long long partial_row(const KeyTile& t, int row) const {
        return KEYS == KEYS_SHARED ? ~t.first + row : t.partial_row(p, row);
    }

    // A gradient, if it is wanted.
    __device__ __forceinline__ void write(const KeyTile& t, const Fragment (&x)[OUT_FRAGMENTS], ELEMENT* result,
                                          float* partial, float factor) {
        if (result == nullptr) return;
        const long long rows = launch.is_split() ? (long long)split * p.batch * p.key_length * p.kv_heads : 0;  // before
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row(r) >= t.count) continue;
            const long long at = has_partial_rows(t)
                                     ? partial_row(t, row(r))
                                     : rows + ((long long)t.batch * p.key_length + key_row(t, r)) * p.kv_heads + t.group;
            for_each_pair(x, r, factor, [&](int column, float low, float high) {
                if (is_partial(t))
                    *reinterpret_cast<float2*>(partial + at * HEAD_DIM + column) = make_float2(low, high);
                else
                    *reinterpret_cast<unsigned*>(result + at * HEAD_DIM + column) = pack_pair(low, high);
            });
        }
    }

    __device__ __forceinline__ void release(int key_stage) const {
        if (key_stage >= 0) barrier_arrive(&shared.key_empty[key_stage]);
    }
};

// Tile after tile: run_tile(stage, meta, stale). `stale`: the stage of the tile before, which is still to be given back; -1:
// none.
template <typename Consumer>
__device__ __forceinline__ void run_tiles(Consumer& consumer) {
    Shared& shared = consumer.shared;
    int stale = -1;
    for (KeyRing ring;;) {
        barrier_wait(&shared.key_full[ring.stage], ring.phase());
        if (shared.meta[ring.stage].steps == END) {
            consumer.release(stale);
            stale = -1;
            if (ring.end()) return;
            continue;
        }
        consumer.run_tile(ring.stage, shared.meta[ring.stage], stale);
        if (KEY_STAGES > 1) stale = ring.stage;
        ring.advance();
    }
}
