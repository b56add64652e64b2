// A consumer of the Hopper query gradient: MMAs, probabilities and their gradients, dq to memory.
//
// Prelude: as sm90/backward_dq.cu.
#pragma once
#include "sm90/backward_dq_tiles.cuh"

// A consumer warp: 16 of its warpgroup's 64 rows, two of them a lane's.
struct Consumer {
    Shared& shared;
    const AttentionParams& p;
    const int lane, first_row;
    const BackwardLogits logit;
    PipelineState<STAGES> keys;  // of the current block
    unsigned phase = 0;          // of the queries
    // of the current tile
#if WIDE
    unsigned query, dout;  // descriptors of this warpgroup's rows
#else
    unsigned query[ROW_STEPS][4], dout[ROW_STEPS][4];
#endif
    float lse[2], delta[2];  // lse in log 2 units
    int position[2];  // BITS: the query's bit in a word
    Fragment s[KEY_FRAGMENTS], dp[KEY_FRAGMENTS];  // of the current block: S, later P; dP, later dS
    Fragment dq[OUT_FRAGMENTS];

    __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& p)
        : shared(shared), p(p), lane(threadIdx.x & 31), first_row((threadIdx.x - PRODUCER_THREADS) / 32 * 16),
          logit(p.scale, p.softcap) {}

    __device__ __forceinline__ int row(int r) const { return first_row + lane / 4 + 8 * r; }

#if WIDE
    // The tile's rows have arrived.
    __device__ __forceinline__ void begin_tile(const Tile& t) {
        const int own_rows = (threadIdx.x / 128 - 1) * 64 * CHUNK_COLUMNS;
        query = matrix_descriptor(shared.query + own_rows, 0);
        dout = matrix_descriptor(shared.dout + own_rows, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lse[r] = log2_lse(shared.lse[row(r)]);
            delta[r] = shared.dlse[row(r)];
            position[r] = position_of(t, row(r));
        }
        clear(dq);
    }
#else
    // This warp's 16 rows of a matrix, 16 columns of them, as a left operand.
    __device__ __forceinline__ void load_rows(unsigned (&a)[4], ELEMENT* rows, int d) const {
        load_matrices(a, shared_address(piece_of<BLOCK_M>(rows, first_row + lane % 16, 2 * d + lane / 16)));
    }

    // Rows of the tile, which have arrived, to registers; delta = dout . out - dlse, also to memory.
    __device__ __forceinline__ void begin_tile(const Tile& t) {
        delta[0] = delta[1] = 0.0f;
#pragma unroll
        for (int d = 0; d < ROW_STEPS; ++d) {
            unsigned out[4];
            load_rows(query[d], shared.query, d);
            load_rows(dout[d], shared.dout, d);
            load_rows(out, shared.out, d);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    delta[i & 1] = fmaf(half_of(dout[d][i], side, static_cast<const ELEMENT*>(nullptr)),
                                        half_of(out[i], side, static_cast<const ELEMENT*>(nullptr)), delta[i & 1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = shared.lse[row(r)], sum = row_sum(delta[r]) - shared.dlse[row(r)];
            delta[r] = own == -infinity() ? 0.0f : sum;
            lse[r] = log2_lse(own);
            position[r] = position_of(t, row(r));
        }
        shared_write_fence();  // TMA may overwrite these rows
        barrier_arrive(&shared.query_empty);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = t.first_query + row(r) / HEADS, head = t.first_head + row(r) % HEADS;
            if ((lane & 3) == 0 && i < t.end_query)
                p.delta[((long long)t.batch * p.heads + head) * p.query_length + i] = delta[r];
        }
        clear(dq);
    }
#endif

    // 64 rows of this warpgroup, in shared memory (WIDE) or in registers, times rows of keys or values.
    template <typename Rows>
    __device__ __forceinline__ static void multiply(Fragment (&x)[KEY_FRAGMENTS], Rows& a, const ELEMENT* rows) {
#if WIDE
        multiply_rows<BLOCK_M, BLOCK_N>(x, a, rows);
#else
        multiply_rows<BLOCK_N>(x, a, rows);
#endif
    }

    // S of the block at `keys`, when it has arrived.
    __device__ __forceinline__ void start_logits() {
        barrier_wait(&shared.key_full[keys.stage], keys.phase);
        shared_write_fence();  // what cp.async wrote, before wgmma reads it
        multiply(s, query, shared.key[keys.stage]);
    }

    __device__ __forceinline__ void start_dp() { multiply(dp, dout, shared.value[keys.stage]); }

    // The biases of this lane's elements in fragment n; `mixed`: some of the block apply to only some rows.
    template <bool mixed>
    __device__ __forceinline__ void load_biases(float (&x)[8], int n) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int slot = 16 * n + 8 * k + 2 * (lane & 3);
            float pair[2] = {0.0f, 0.0f};
            if (BIAS == BIAS_OF_KEYS) load_shared_pair(pair[0], pair[1], shared_address(&shared.bias[keys.stage][slot]));
#pragma unroll
            for (int i = 4 * k; i < 4 * k + 4; ++i) {
                x[i] = pair[i & 1];
#if DELAY
                if (mixed && is_near(shared.far_from[keys.stage][slot + (i & 1)], position[fragment_row(i)])) x[i] = 0.0f;
#endif
            }
        }
    }

    // Whether some bias of the block at `keys` applies to only some rows.
    __device__ __forceinline__ bool is_mixed_block() const {
#if DELAY
        const int4 mixed = shared.mixed[keys.stage];
        return (mixed.x | mixed.y | mixed.z | mixed.w) != 0;
#else
        return false;
#endif
    }

    // Waits for S and dP; s becomes p, 0 where a row does not see the key, and so does dp there.
    __device__ __forceinline__ void exponentiate() {
        const bool masked = (shared.flags[keys.stage] & MASKED) != 0;
        wgmma_wait<1>();
        pin(s);
        if (is_mixed_block())
            make_probabilities<true>();
        else
            make_probabilities<false>();
        wgmma_wait<0>();
        pin(dp);
        if (masked) hide();
    }

    template <bool mixed>
    __device__ __forceinline__ void make_probabilities() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            float bias[8];
            load_biases<mixed>(bias, n);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float lower = lse[fragment_row(i)];
                s[n].x[i] = exp2_fast(SOFTCAP ? logit(s[n].x[i], log2_units(bias[i])) - lower
                                              : logit(s[n].x[i], fmaf(bias[i], LOG2_E, -lower)));
            }
        }
    }

    // Whether a row at `at` sees the block's key `slot`.
    __device__ __forceinline__ bool row_sees(int at, int slot) const {
#if BITS
        return visible(at, static_cast<int>(shared.words[keys.stage][first_row / HEADS / 32][slot]));
#else
        return visible(at, shared.start[keys.stage][slot], shared.stop[keys.stage][slot]);
#endif
    }

    __device__ __forceinline__ void hide() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int slot = 16 * n + 2 * (lane & 3) + fragment_column(i), at = position[fragment_row(i)];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    if (row_sees(at, slot + k)) continue;
                    s[n].x[i + k] = 0.0f;
                    dp[n].x[i + k] = 0.0f;
                }
            }
    }

    // dS of the block as an operand. The logit that the softcap's derivative needs comes from p.
    __device__ __forceinline__ void differentiate(unsigned (&gradient)[KEY_FRAGMENTS][4]) {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            float bias[8] = {};
            if (SOFTCAP) load_biases<DELAY>(bias, n);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i);
                const float probability = s[n].x[i];
                float ds = probability * (dp[n].x[i] - delta[r]);
                if (SOFTCAP) {
                    const float capped = log2_fast(probability) + lse[r] - bias[i] * LOG2_E;
                    ds = probability == 0.0f ? 0.0f : ds * softcap_slope(capped, logit.cap);
                }
                dp[n].x[i] = ds;
            }
        }
        round(gradient, dp);
    }

    // Processes a block whose P and dP are in registers; with `more`, leaves P and dP of the tile's next block there. No
    // MMA may be in flight between two calls, or the assembler waits after each.
    template <bool more>
    __device__ __forceinline__ void advance() {
        unsigned gradient[KEY_FRAGMENTS][4];
        const int stage = keys.stage;
        differentiate(gradient);
        accumulate(dq, gradient, shared.key[stage]);
        keys.advance();
        if constexpr (more) start_logits();
        wgmma_wait<more ? 1 : 0>();
        pin(dq);
        pin(gradient);
        barrier_arrive(&shared.key_empty[stage]);
        if constexpr (more) {
            start_dp();  // not earlier: dS, S and dP together are too many registers
            exponentiate();
        }
    }

    // Zeros for a row that sees nothing, whatever it holds.
    __device__ __forceinline__ void write(const Tile& t) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = t.first_query + row(r) / HEADS, head = t.first_head + row(r) % HEADS;
            if (i >= t.end_query) continue;
            ELEMENT* result = p.dquery + (((long long)t.batch * p.query_length + i) * p.heads + head) * HEAD_DIM;
            const bool sees = lse[r] != -infinity();
            for_each_pair(dq, r, p.scale, [&](int column, float low, float high) {
                *reinterpret_cast<unsigned*>(result + column) = sees ? pack_pair(low, high) : 0u;
            });
        }
    }

    __device__ __forceinline__ void run() {
        for (;; phase ^= 1) {
            barrier_wait(&shared.query_full, phase);
            if (shared.tile == END) return;
            const Tile t = find_tile(p, shared.tile);
            begin_tile(t);
            if (p.dquery == nullptr) continue;
            start_logits();
            start_dp();
            exponentiate();
#pragma unroll 1
            while ((shared.flags[keys.stage] & LAST) == 0) advance<true>();
            advance<false>();
            if (WIDE) barrier_arrive(&shared.query_empty);
            write(t);
        }
    }
};
