// A consumer of the Hopper query gradient: MMAs, probabilities and their gradients, dq to memory.
//
// Prelude: as sm90/backward_dq.cu.
#pragma once
#include "sm90/backward_dq_tiles.cuh"

struct True { static constexpr bool value = true; };
struct False { static constexpr bool value = false; };

// A consumer warp: 16 of its warpgroup's 64 rows, two of them a lane's.
struct Consumer {
    Shared& shared;
    const AttentionParams& p;
    const int lane, first_row;
    const LogitScale logit;
    PipelineState<STAGES> keys;  // of the current block
    unsigned phase = 0;          // of the queries
    // of the current tile
    unsigned query[DIM_FRAGMENTS][4], dout[DIM_FRAGMENTS][4];
    float lse[2], delta[2];  // lse in log 2 units
    int position[2];
    Fragment s[KEY_FRAGMENTS], dp[KEY_FRAGMENTS];  // of the current block: S, later P; dP, later dS
    Fragment dq[OUT_FRAGMENTS];

    __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& p)
        : shared(shared), p(p), lane(threadIdx.x & 31), first_row((threadIdx.x - PRODUCER_THREADS) / 32 * 16),
          logit(p.scale, p.softcap) {}

    __device__ __forceinline__ int row(int r) const { return first_row + lane / 4 + 8 * r; }

    // This warp's 16 rows of a matrix, 16 columns of them, as a left operand.
    __device__ __forceinline__ void load_rows(unsigned (&a)[4], ELEMENT* rows, int d) const {
        load_matrices(a, shared_address(piece_of<BLOCK_M>(rows, first_row + lane % 16, 2 * d + lane / 16)));
    }

    // Rows of the tile, which have arrived, to registers; delta = dout . out - dlse, also to memory.
    __device__ __forceinline__ void begin_tile(const Tile& t) {
        delta[0] = delta[1] = 0.0f;
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d) {
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
            lse[r] = own * LOG2_E;
            position[r] = t.first_position + row(r) / HEADS;
        }
        shared_write_fence();  // TMA may overwrite these rows
        barrier_arrive(&shared.query_empty);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = t.first_query + row(r) / HEADS, head = t.first_head + row(r) % HEADS;
            if ((lane & 3) == 0 && i < t.end_query)
                p.delta[((long long)t.batch * p.heads + head) * p.query_length + i] = delta[r];
        }
#pragma unroll
        for (int d = 0; d < OUT_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) dq[d].x[i] = 0.0f;
    }

    // x = this warpgroup's rows . rows of a stage, as one group of MMAs.
    __device__ __forceinline__ void multiply_rows(Fragment (&x)[KEY_FRAGMENTS], unsigned (&a)[DIM_FRAGMENTS][4],
                                                  const ELEMENT* rows) {
        const unsigned b = matrix_descriptor(rows, 0);
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[n].x[i] = 0.0f;  // or what was there would be kept until now
        pin(x);
        pin(a);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
            Wgmma<KEY_FRAGMENTS>::template multiply<Major::K>(
                x, a[d], moved(b, d / 4 * BLOCK_N * CHUNK_ROW_BYTES + d % 4 * 32), d > 0);
        wgmma_commit();
    }

    // S of the block at `keys`, when it has arrived.
    __device__ __forceinline__ void start_logits() {
        barrier_wait(&shared.key_full[keys.stage], keys.phase);
        shared_write_fence();  // what cp.async wrote, before wgmma reads it
        multiply_rows(s, query, shared.key[keys.stage]);
    }

    __device__ __forceinline__ void start_dp() { multiply_rows(dp, dout, shared.value[keys.stage]); }

    // dq += dS K for the block at `stage`.
    __device__ __forceinline__ void start_dq(unsigned (&gradient)[KEY_FRAGMENTS][4], int stage) {
        const unsigned b = matrix_descriptor(shared.key[stage], BLOCK_N * CHUNK_ROW_BYTES);
        pin(dq);
        pin(gradient);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
            Wgmma<OUT_FRAGMENTS>::template multiply<Major::MN>(dq, gradient[n], moved(b, n * 16 * CHUNK_ROW_BYTES), true);
        wgmma_commit();
    }

    // The biases in log 2 units of this lane's two neighbouring keys in fragment n, k = 0 or 1.
    __device__ __forceinline__ void load_biases(float (&x)[2], int n, int k) const {
        x[0] = x[1] = 0.0f;
        if (BIAS != BIAS_OF_KEYS) return;
        load_shared_pair(x[0], x[1], shared_address(&shared.bias[keys.stage][16 * n + 8 * k + 2 * (lane & 3)]));
    }

    // Waits for S and dP; s becomes p, 0 where a row does not see the key, and so does dp there.
    __device__ __forceinline__ void exponentiate() {
        const bool masked = (shared.flags[keys.stage] & MASKED) != 0;
        wgmma_wait<1>();
        pin(s);
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            float bias[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_biases(bias[k], n, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float own = bias[i >> 2][i & 1], lower = lse[fragment_row(i)];
                s[n].x[i] = exp2_fast(SOFTCAP ? logit(s[n].x[i], own * LOG2_E) - lower
                                              : logit(s[n].x[i], fmaf(own, LOG2_E, -lower)));
            }
        }
        wgmma_wait<0>();
        pin(dp);
        if (masked) hide();
    }

    __device__ __forceinline__ void hide() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int slot = 16 * n + 2 * (lane & 3) + fragment_column(i), at = position[fragment_row(i)];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    bool seen = visible(at, shared.start[keys.stage][slot + k], shared.stop[keys.stage][slot + k]);
                    if (CAUSAL && KEYS != KEYS_CONTIGUOUS) seen = seen && shared.index[keys.stage][slot + k] <= at;
                    if (seen) continue;
                    s[n].x[i + k] = 0.0f;
                    dp[n].x[i + k] = 0.0f;
                }
            }
    }

    // The derivative of the softcap from what has become of the logit: 1 - tanh^2.
    __device__ __forceinline__ float slope(float probability, float bias, float lower) const {
        const float capped = (log2_fast(probability) + lower - bias * LOG2_E) * LN_2 / logit.cap;
        return 1.0f - capped * capped;
    }

    // dS of the block as an operand.
    __device__ __forceinline__ void differentiate(unsigned (&gradient)[KEY_FRAGMENTS][4]) {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            float bias[2][2];
            if (SOFTCAP) {
#pragma unroll
                for (int k = 0; k < 2; ++k) load_biases(bias[k], n, k);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i);
                float ds = s[n].x[i] * (dp[n].x[i] - delta[r]);
                if (SOFTCAP) ds = s[n].x[i] == 0.0f ? 0.0f : ds * slope(s[n].x[i], bias[i >> 2][i & 1], lse[r]);
                dp[n].x[i] = ds;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) gradient[n][i] = pack_pair(dp[n].x[2 * i], dp[n].x[2 * i + 1]);
        }
    }

    // A block, whose p and dP are there; `Next`: another one of the tile follows, whose p and dP are there afterwards. No
    // MMA is in flight between two calls, or the assembler would wait after each.
    template <typename Next>
    __device__ __forceinline__ void advance() {
        unsigned gradient[KEY_FRAGMENTS][4];
        const int stage = keys.stage;
        differentiate(gradient);
        start_dq(gradient, stage);
        keys.advance();
        if constexpr (Next::value) start_logits();
        wgmma_wait<Next::value ? 1 : 0>();
        pin(dq);
        pin(gradient);
        barrier_arrive(&shared.key_empty[stage]);
        if constexpr (Next::value) {
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
#pragma unroll
            for (int d = 0; d < OUT_FRAGMENTS; ++d)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int column = 16 * d + 8 * k + 2 * (lane & 3), at = 4 * k + 2 * r;
                    if (column >= HEAD_DIM) continue;
                    *reinterpret_cast<unsigned*>(result + column) =
                        sees ? pack_pair(dq[d].x[at] * p.scale, dq[d].x[at + 1] * p.scale) : 0u;
                }
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
            while ((shared.flags[keys.stage] & LAST) == 0) advance<True>();
            advance<False>();
            write(t);
        }
    }
};
