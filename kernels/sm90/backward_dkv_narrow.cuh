// A consumer of the Hopper key gradients up to HEAD_DIM 128: dk and dv of its warpgroup's keys, with DQUERY half of dq of
// each step, with STORED its dS.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#include "sm90/backward_dkv_consumer.cuh"

struct Consumer : ConsumerBase {
    Fragment dk[OUT_FRAGMENTS], dv[OUT_FRAGMENTS];
#if DQUERY
    PipelineState<2> ds;
#endif

    using ConsumerBase::ConsumerBase;

#if STORED
    // Stores dS of step `number` of the tile. Its place is computed anew: there are no registers to keep it.
    __device__ __forceinline__ void store(const unsigned (&gradient)[QUERY_FRAGMENTS][4], int number) const {
        const StoredDs& stored = launch.stored;
        const int thread = thread_now() - 128, own_row = thread / 32 * 16 + thread % 32 / 4;
        const int at = shared.meta[key_stage].stored_tile * stored.tile_steps + number;
        store_ds(stored.ds + (long long)at * (BLOCK_N * STEP_QUERIES) + own_row * STEP_QUERIES + thread % 4 * 8, gradient);
    }
#endif

#if DQUERY
    __device__ __forceinline__ void begin_sums(const KeyTileMeta& meta) {
        const KeyTile& t = meta.tile;
        const long long head = (long long)t.batch * p.heads + t.group * (p.heads / p.kv_heads) + meta.first_head();
        if (threadIdx.x % 128 == 0)
            shared.sums[half] = launch.dquery_sums + (head * launch.query_units + meta.first_unit) * DQ_UNIT +
                                half * DQ_HALF + step * 2 * DQ_HALF;
    }

    // Shares dS with the other warpgroup. Both are done with what this stage held two steps ago: this one has waited for
    // the other's dS of the step before, which that one stored after its dQ of two steps ago.
    __device__ __forceinline__ void share(const unsigned (&gradient)[QUERY_FRAGMENTS][4]) {
#pragma unroll
        for (int c = 0; c < BLOCK_Q / 64; ++c) {
            const unsigned corner = shared_address(piece_of<BLOCK_N>(
                shared.ds[ds.stage] + c * BLOCK_N * CHUNK_COLUMNS, first_row + lane % 16, lane / 16));
#pragma unroll
            for (int n = 0; n < 4; ++n) store_matrices(corner ^ 32 * n, gradient[4 * c + n]);
        }
        shared_write_fence();
        barrier_arrive(&shared.ds_full[ds.stage]);
    }

    // Issues this warpgroup's half of dS^T K.
    __device__ __forceinline__ void start_dq(Fragment (&dq)[DQ_FRAGMENTS]) {
        constexpr int A_BYTES = DQ_BY_ROWS ? BLOCK_N * CHUNK_ROW_BYTES : 0;
        constexpr int B_BYTES = DQ_BY_ROWS ? 0 : CHUNKS == 2 ? BLOCK_N * CHUNK_ROW_BYTES : 32 * DQ_FRAGMENTS;
        const unsigned a = moved(matrix_descriptor(shared.ds[ds.stage], 0), half * A_BYTES);
        const unsigned b = moved(matrix_descriptor(shared.key[key_stage], 0), half * B_BYTES);
        clear(dq);
        pin(dq);
        barrier_wait(&shared.ds_full[ds.stage], ds.phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; ++k)
            Wgmma<DQ_FRAGMENTS>::template multiply<Major::MN, Major::MN>(dq, moved(a, k * 16 * CHUNK_ROW_BYTES),
                                                                         moved(b, k * 16 * CHUNK_ROW_BYTES), k > 0);
        wgmma_commit();
    }

    // Adds it to the sums of the step that has just ended.
    __device__ __forceinline__ void add_dq(const Fragment (&dq)[DQ_FRAGMENTS]) {
        const int thread = threadIdx.x & 127;
        if (thread == 0) bulk_wait_read();
        named_barrier(SUMS_BARRIER + half, 128);
#pragma unroll
        for (int n = 0; n < DQ_FRAGMENTS; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                reinterpret_cast<float4*>(shared.dq[half])[(2 * n + k) * 128 + thread] =
                    make_float4(dq[n].x[4 * k], dq[n].x[4 * k + 1], dq[n].x[4 * k + 2], dq[n].x[4 * k + 3]);
        shared_write_fence();
        named_barrier(SUMS_BARRIER + half, 128);
        if (thread == 0) {
            const bool last = step == 0;  // of its head; its upper half may belong to others
            float* const sums = shared.sums[half];
            if (!DQ_BY_ROWS || !last || half == 0 || (range.end - range.begin - 1) % BLOCK_Q >= 64) {
                bulk_reduce_add(sums, shared.dq[half], 4 * DQ_HALF);
                bulk_commit();
            }
            const long long units = launch.query_units - BLOCK_Q / UNIT_QUERIES * steps;  // to the next head's first
            shared.sums[half] = sums + 2 * DQ_HALF + (last ? units * DQ_UNIT : 0);
        }
    }
#endif

    // Ping-pong: one warpgroup issues the MMAs of a step while the other one computes on its accumulators. In one pass the
    // exchange of dS keeps both in step.
    __device__ __forceinline__ void wait_turn() const {
        if (!DQUERY) named_barrier(TURN_BARRIER + half, CONSUMER_THREADS);
    }

    __device__ __forceinline__ void pass_turn() const {
        if (!DQUERY) named_barrier_arrive(TURN_BARRIER + (half ^ 1), CONSUMER_THREADS);
    }

    // Processes a step whose P and dP are in registers; with `more`, leaves P and dP of the next step there. No MMA may
    // be in flight between two calls, or the assembler waits after each.
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
#if DQUERY
        share(gradient);
#elif STORED
        store(gradient, h * steps + (step == 0 ? steps : step) - 1);
#endif
        const int stage = queries.stage;
        wait_turn();
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
#if DQUERY
        Fragment dq[DQ_FRAGMENTS];
        start_dq(dq);
        if constexpr (more) exponentiate();
        wgmma_wait<0>();
        pin(dq);
        ds.advance();
        if constexpr (more) start_dp();
        add_dq(dq);
        if constexpr (more) wait_dp();
#else
        if constexpr (more) start_dp();
        pass_turn();
        if constexpr (more) {
            exponentiate();
            wait_dp();
        }
#endif
    }

    // One tile. The stage of the tile before it is given back LOOKAHEAD steps before the end.
    __device__ __forceinline__ void run_tile(int stage, const KeyTileMeta& meta, int stale) {
        begin_tile(stage, meta);
#if DQUERY
        begin_sums(meta);
#endif
        const KeyTile t = meta.tile;
        const int total = meta.all_steps;
        if (total <= LOOKAHEAD) release(stale);
        clear(dk);
        clear(dv);
        if (total > 0) {
            start_logits();
            start_dp();
            exponentiate();
            wait_dp();
            int h = meta.first_head();
#pragma unroll 1
            for (int i = 1; i < total; ++i) {
                advance<true>(t, h);
                h += step == 0;
                if (i == total - LOOKAHEAD) release(stale);
            }
            advance<false>(t, h);
            if (launch.has_parts() && step != 0) write_bias(t, h);  // the part ends within a head
        }  // else the host has set dbias to zeros
        if (KEY_STAGES == 1) release(stage);
        write(t, dv, p.dvalue, p.partial_value, 1.0f);
        write(t, dk, p.dkey, p.partial_key, p.scale);
    }

    __device__ __forceinline__ void run() {
        if (half == 1) pass_turn();  // the first warpgroup begins
        run_tiles(*this);
#if DQUERY
        if (threadIdx.x % 128 == 0) bulk_wait();
#endif
    }
};
