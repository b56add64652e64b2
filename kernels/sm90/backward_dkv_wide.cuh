// A consumer of the Hopper key gradients above HEAD_DIM 128 (WIDE). Both warpgroups have the same 64 keys: the first makes S,
// P and dV, the second dP, dS and dK, with P from the first.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#include "sm90/backward_dkv_consumer.cuh"

struct Consumer : ConsumerBase {
    Fragment dk[OUT_FRAGMENTS], dv[OUT_FRAGMENTS];  // one of them
    unsigned p_phase = 0;                           // of the barriers of P

    using ConsumerBase::ConsumerBase;

    // Hands P to the other warpgroup.
    __device__ __forceinline__ void publish_p() {
        barrier_wait(&shared.probability_empty, p_phase ^ 1);
#pragma unroll
        for (int i = 0; i < 2 * QUERY_FRAGMENTS; ++i) {
            const float* x = s[i / 2].x + i % 2 * 4;
            shared.probability[i][threadIdx.x & 127] = make_float4(x[0], x[1], x[2], x[3]);
        }
        barrier_arrive(&shared.probability_full);
        p_phase ^= 1;
    }

    __device__ __forceinline__ void read_p() {
        barrier_wait(&shared.probability_full, p_phase);
#pragma unroll
        for (int i = 0; i < 2 * QUERY_FRAGMENTS; ++i) {
            float* x = s[i / 2].x + i % 2 * 4;
            const float4 found = shared.probability[i][threadIdx.x & 127];
            x[0] = found.x, x[1] = found.y, x[2] = found.z, x[3] = found.w;
        }
        barrier_arrive(&shared.probability_empty);
        p_phase ^= 1;
    }

    // A step of the first warpgroup, whose P is there, as in `advance`.
    template <bool more>
    __device__ __forceinline__ void advance_values() {
        unsigned probability[QUERY_FRAGMENTS][4];
        publish_p();
        round(probability, s);
        if (++step == steps) step = 0;
        const int stage = queries.stage;
        barrier_wait(&shared.dout_landed[stage], queries.phase);
        accumulate(dv, probability, shared.dout[stage]);
        queries.advance();
        if constexpr (more) start_logits();
        wgmma_wait<more ? 1 : 0>();
        pin(dv);
        pin(probability);
        barrier_arrive(&shared.query_empty[stage]);
        if constexpr (more) exponentiate();
    }

    // A step of the second one, whose dP is there.
    template <bool more>
    __device__ __forceinline__ void advance_keys(const KeyTile& t, int h) {
        unsigned gradient[QUERY_FRAGMENTS][4];
        const int stage = queries.stage;
        read_p();  // so the queries, of which they were made, have landed
        differentiate();
        round(gradient, dp);
        if (++step == steps) {
            step = 0;
            write_bias(t, h);
        }
        accumulate(dk, gradient, shared.query[stage]);
        queries.advance();
        if constexpr (more) start_dp();
        wgmma_wait<more ? 1 : 0>();
        pin(dk);
        pin(gradient);
        barrier_arrive(&shared.query_empty[stage]);
        if constexpr (more) wait_dp();
    }

    __device__ __forceinline__ void run_values(int key_stage, const KeyTile& t, int total) {
        clear(dv);
        if (total > 0) {
            start_logits();
            exponentiate();
#pragma unroll 1
            for (int i = 1; i < total; ++i) advance_values<true>();
            advance_values<false>();
        }
        release(key_stage);
        write(t, dv, p.dvalue, p.partial_value, 1.0f);
    }

    __device__ __forceinline__ void run_keys(int key_stage, const KeyTile& t, int total, int h) {
        clear(dk);
        if (total > 0) {
            start_dp();
            wait_dp();
#pragma unroll 1
            for (int i = 1; i < total; ++i) {
                advance_keys<true>(t, h);
                h += step == 0;
            }
            advance_keys<false>(t, h);
            if (launch.has_parts() && step != 0) write_bias(t, h);  // the part ends within a head
        }
        release(key_stage);
        write(t, dk, p.dkey, p.partial_key, p.scale);
    }

    __device__ __forceinline__ void run_tile(int stage, const KeyTileMeta& meta, int) {
        begin_tile(stage, meta);
        const KeyTile t = meta.tile;
        if (half == 0) run_values(stage, t, meta.all_steps);
        else run_keys(stage, t, meta.all_steps, meta.first_head());
    }

    __device__ __forceinline__ void run() { run_tiles(*this); }
};
