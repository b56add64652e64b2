// A consumer of the Hopper key gradients: MMAs, probabilities and their gradients, results to memory.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#include "sm90/backward_dkv_tiles.cuh"

// A consumer warp: 16 of its warpgroup's 64 keys, two of them a lane's.
struct Consumer {
    Shared& shared;
    const AttentionParams& p;
    const int half, lane, first_row;  // of the tile
    const BackwardLogits logit;
    PipelineState<STAGES> queries;  // of the current step
    // of the current tile
    unsigned keys, values;  // descriptors of this warpgroup's rows
    QueryRange range;
    int shift, steps;
    int start[2], stop[2];
    float bias[2];
    // of the current step
    int step;
    // accumulators
    Fragment s[QUERY_FRAGMENTS], dp[QUERY_FRAGMENTS];  // S^T, later P^T; dP^T, later dS^T
    Fragment dk[OUT_FRAGMENTS], dv[OUT_FRAGMENTS];
    float dbias[2];

    __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& p)
        : shared(shared), p(p), half(threadIdx.x / 128 - 1), lane(threadIdx.x & 31),
          first_row(half * 64 + threadIdx.x / 32 % 4 * 16), logit(p.scale, p.softcap) {}

    __device__ __forceinline__ int row(int r) const { return first_row + lane / 4 + 8 * r; }

    __device__ __forceinline__ void begin_tile(int stage, const KeyFacts& facts) {
        keys = matrix_descriptor(shared.key[stage] + half * 64 * CHUNK_COLUMNS, 0);
        values = matrix_descriptor(shared.value[stage] + half * 64 * CHUNK_COLUMNS, 0);
        range = facts.queries;
        shift = facts.tile.shift;
        steps = facts.steps;
        step = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            start[r] = facts.start[row(r)];
            stop[r] = facts.stop[row(r)];
            bias[r] = facts.bias[row(r)];
            dbias[r] = 0.0f;
        }
        clear(dk);
        clear(dv);
    }

    // The step's S and dP.
    __device__ __forceinline__ void start_logits() {
        barrier_wait(&shared.ready[queries.stage], queries.phase);
        barrier_wait(&shared.query_landed[queries.stage], queries.phase);
        multiply_rows<BLOCK_N, BLOCK_Q>(s, keys, shared.query[queries.stage]);
    }

    __device__ __forceinline__ void start_dp() {
        barrier_wait(&shared.dout_landed[queries.stage], queries.phase);
        multiply_rows<BLOCK_N, BLOCK_Q>(dp, values, shared.dout[queries.stage]);
    }

    // A pair of neighbouring queries' statistics: those of this lane in fragment n, k = 0 or 1.
    __device__ __forceinline__ void load_pair(float (&x)[2], const float* statistics, int n, int k) const {
        load_shared_pair(x[0], x[1], shared_address(statistics + 16 * n + 8 * k + 2 * (lane & 3)));
    }

    // Waits for both; s becomes p.
    __device__ __forceinline__ void exponentiate() {
        const int query = range.begin + step * BLOCK_Q;
        const bool masked = query < range.full_begin || query + BLOCK_Q > range.full_end;
        wgmma_wait<1>();
        pin(s);
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            float lse[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_pair(lse[k], shared.lse[queries.stage], n, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float lower = lse[i >> 2][i & 1], own = BIAS == BIAS_NONE ? 0.0f : bias[fragment_row(i)];
                s[n].x[i] = exp2_fast(SOFTCAP ? logit(s[n].x[i], own) + lower : logit(s[n].x[i], lower + own));
            }
        }
        if (masked) {
            const int position = query + shift + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!visible(position + 16 * n + fragment_column(i), start[fragment_row(i)], stop[fragment_row(i)]))
                        s[n].x[i] = 0.0f;
        }
        wgmma_wait<0>();
        pin(dp);
    }

    // dp becomes the gradient of q . k / scale; dbias grows. The logit that the softcap's derivative needs comes from p.
    __device__ __forceinline__ void differentiate() {
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            float delta[2][2], lse[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                load_pair(delta[k], shared.delta[queries.stage], n, k);
                if (SOFTCAP) load_pair(lse[k], shared.lse[queries.stage], n, k);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i);
                const float probability = s[n].x[i], ds = probability * (dp[n].x[i] - delta[i >> 2][i & 1]);
                dbias[r] += ds;
                dp[n].x[i] = ds;
                if (SOFTCAP) {
                    const float capped = log2_fast(probability) - lse[i >> 2][i & 1] - bias[r];
                    dp[n].x[i] = probability == 0.0f ? 0.0f : ds * softcap_slope(capped, logit.cap);
                }
            }
        }
    }

    // A step, whose p and dP are there; `more`: another one follows, whose p and dP are there afterwards. No MMA is in
    // flight between two calls, or the assembler would wait after each.
    template <bool more>
    __device__ __forceinline__ void advance(const KeyTile& t, int h) {
        unsigned probability[QUERY_FRAGMENTS][4], gradient[QUERY_FRAGMENTS][4];
        differentiate();
        round(gradient, dp);
        round(probability, s);
        if (++step == steps) {
            step = 0;
            write_bias(t, h);
        }
        const int stage = queries.stage;
        accumulate(dv, probability, shared.dout[stage]);
        accumulate(dk, gradient, shared.query[stage]);
        queries.advance();
        if constexpr (more) start_logits();
        wgmma_wait<more ? 1 : 0>();
        pin(dv);
        pin(dk);
        pin(probability);
        pin(gradient);
        barrier_arrive(&shared.query_empty[stage]);
        if constexpr (more) {
            start_dp();
            exponentiate();
        }
    }

    // dbias of one head, if it is wanted; it begins anew. (It is summed in any case: where this branch is missing, the
    // assembler mixes what comes before and after it and spills.)
    __device__ __forceinline__ void write_bias(const KeyTile& t, int h) {
        float* const results = t.is_partial(p) ? p.partial_bias : p.dbias;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = row_sum(dbias[r]);
            dbias[r] = 0.0f;
            if ((lane & 3) != 0 || row(r) >= t.count || results == nullptr) continue;
            const int group_heads = p.heads / p.kv_heads;
            if (t.is_partial(p))
                results[t.partial_row(p, row(r)) * group_heads + h] = sum;
            else
                results[((long long)t.batch * p.heads + t.group * group_heads + h) * p.key_length + t.first + row(r)] = sum;
        }
    }

    // A gradient, if it is wanted.
    __device__ __forceinline__ void write(const KeyTile& t, const Fragment (&x)[OUT_FRAGMENTS], ELEMENT* result,
                                          float* partial, float factor) {
        if (result == nullptr) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row(r) >= t.count) continue;
            const long long at = t.is_partial(p)
                                     ? t.partial_row(p, row(r))
                                     : ((long long)t.batch * p.key_length + t.first + row(r)) * p.kv_heads + t.group;
            for_each_pair(x, r, factor, [&](int column, float low, float high) {
                if (t.is_partial(p))
                    *reinterpret_cast<float2*>(partial + at * HEAD_DIM + column) = make_float2(low, high);
                else
                    *reinterpret_cast<unsigned*>(result + at * HEAD_DIM + column) = pack_pair(low, high);
            });
        }
    }

    // One tile. `stale`: the stage of the tile before it, which is given back LOOKAHEAD steps before the end; -1: none.
    __device__ __forceinline__ void run_tile(int stage, const KeyFacts& facts, int stale) {
        begin_tile(stage, facts);
        const KeyTile t = facts.tile;
        const int group_heads = p.heads / p.kv_heads, total = steps * group_heads;
        if (total <= LOOKAHEAD) release(stale);
        if (total > 0) {
            start_logits();
            start_dp();
            exponentiate();
            int h = 0;
#pragma unroll 1
            for (int i = 1; i < total; ++i) {
                advance<true>(t, h);
                h += step == 0;
                if (i == total - LOOKAHEAD) release(stale);
            }
            advance<false>(t, h);
        }  // else the host has set dbias to zeros
        write(t, dv, p.dvalue, p.partial_value, 1.0f);
        write(t, dk, p.dkey, p.partial_key, p.scale);
    }

    __device__ __forceinline__ void release(int key_stage) const {
        if (key_stage >= 0) barrier_arrive(&shared.key_empty[key_stage]);
    }

    __device__ __forceinline__ void run() {
        int stale = -1;
        for (KeyRing ring;;) {
            barrier_wait(&shared.key_full[ring.stage], ring.phase());
            if (shared.facts[ring.stage].steps == END) {
                release(stale);
                stale = -1;
                if (ring.end()) return;
                continue;
            }
            run_tile(ring.stage, shared.facts[ring.stage], stale);
            stale = ring.stage;
            ring.advance();
        }
    }
};
