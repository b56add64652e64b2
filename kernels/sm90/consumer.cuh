// A consumer of the Hopper forward: a warp of a warpgroup that computes 64 rows of the tile, and its operations on a
// block of keys. sm90/forward.cu has their order.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/logits.cuh"
#include "sm90/mma.cuh"
#include "sm90/nonfinite.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/softmax.cuh"

// A consumer warp's registers and pipeline states.
struct Consumer {
    Shared& shared;
    const ForwardParams& launch;
    const AttentionParams& p;
    const Logits logits;
    const int lane, group_row, first_row;  // rows of the warpgroup and of this warp in the tile
    const unsigned bias_address;           // of this lane, in stage 0
    PipelineState<STAGES> key_state;           // of the block whose logits are turned into exponentials
    PipelineState<VALUE_STAGES> value_state;   // of the values needed next
    PipelineState<QUERY_STAGES> query_state;   // of the queries of these logits
    PipelineState<QUERY_STAGES> output_state;  // of the tile whose output is written next
    Fragment s[KEY_FRAGMENTS], o[DIM_FRAGMENTS];
    unsigned probability[KEY_FRAGMENTS][4];
    Queries query;                  // those at `query_state`
    bool lacks_max;                 // some row has no running max before the block at `key_state`
    int polynomials;                // SOFTCAP: how many hold for the tile's blocks so far
    bool keys_ready, values_ready;  // the next MMAs' operands are known to have arrived
    LaneBias bias;
    float sum[2];  // of the current exponentials
    OnlineSoftmax softmax, previous_softmax;  // of the current tile, and of the one before until its output is written

    __device__ __forceinline__ Consumer(Shared& shared, const ForwardParams& launch)
        : shared(shared), launch(launch), p(launch.attention), logits(p.scale, p.softcap), lane(thread_now() & 31),
          group_row(uniform((thread_now() - PRODUCER_THREADS) / 128) * 64),
          first_row(uniform((thread_now() - PRODUCER_THREADS) / 32) * 16),
          bias_address(kept(shared_address(&shared.bias[0][fragment_key(0, 0)]))) {}

    // Index among the consumer warpgroups.
    __device__ __forceinline__ int warpgroup() const { return group_row / 64; }

    // Starts the softmax of the tile whose queries are at `query_state`.
    __device__ __forceinline__ void open_tile() {
        previous_softmax = softmax;
        softmax = OnlineSoftmax();
#if BIAS == BIAS_DENSE
        const Tile& t = shared.tile[query_state.stage];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            bias.row[r] = bias_row(p, t, first_row + lane / 4 + 8 * r);
#endif
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) o[d].x[i] = 0.0f;
    }

    // Waits for the queries at `query_state`.
    __device__ __forceinline__ void wait_queries() {
        barrier_wait(&shared.query_full[query_state.stage], query_state.phase);
        if (!QUERIES_KEPT) return;
        ELEMENT* rows = shared.query[query_state.stage];
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
            load_matrices(query[QUERIES_KEPT ? d : 0],
                          shared_address(piece_of<BLOCK_M>(rows, first_row + lane % 16, 2 * d + lane / 16)));
    }

    // Polls early whether the keys at `keys` have arrived, because the answer has a latency.
    __device__ __forceinline__ void look_ahead(const PipelineState<STAGES>& keys) {
        keys_ready = barrier_test(&shared.key_full[keys.stage], keys.phase);
    }

    // Waits for these keys, and polls whether the values at `value_state` have arrived.
    __device__ __forceinline__ void wait_keys(const PipelineState<STAGES>& keys) {
        if (!keys_ready) barrier_wait(&shared.key_full[keys.stage], keys.phase);
        values_ready = barrier_test(&shared.value_full[value_state.stage], value_state.phase);
    }

    __device__ __forceinline__ void wait_values() const {
        if (!values_ready) barrier_wait(&shared.value_full[value_state.stage], value_state.phase);
    }

    // Initialises the accumulators for the block with these keys, which have arrived.
    __device__ __forceinline__ void init_accumulators(const PipelineState<STAGES>& keys) {
#if BIAS_FIRST
        init_with_own_bias(keys.stage);
        pin(s);  // before the ping-pong barrier
#endif
    }

#if BIAS_FIRST
    // With the biases of the block in this stage, whose queries are at `query_state`.
    __device__ __forceinline__ void init_with_own_bias(int stage) {
        init_with_bias(s, bias_address, stage);
#if DELAY
        if (!has_mixed(shared, stage)) return;
        int position[2];
        find_positions(position);
        clear_near(s, shared, stage, position);
#endif
    }
#endif

    // Of this lane's two queries at `query_state`.
    __device__ __forceinline__ void find_positions(int (&position)[2]) const {
        const Tile& t = shared.tile[query_state.stage];
#pragma unroll
        for (int r = 0; r < 2; ++r) position[r] = t.first_position + (first_row + lane / 4 + 8 * r) / HEADS;
    }

    __device__ __forceinline__ void start_qk(const PipelineState<STAGES>& keys,
                                             const PipelineState<QUERY_STAGES>& query_state) {
        mma_qk(s, query, shared.query[query_state.stage] + group_row * CHUNK_COLUMNS, shared.keys[keys.stage]);
    }

    // Waits for the logits started last; `later` groups of MMAs issued after them may be in flight.
    template <int later>
    __device__ __forceinline__ void wait_logits() {
        wgmma_wait<later>();
        pin(s);
        if (QUERIES_KEPT) pin(query);
    }

    __device__ __forceinline__ void wait_output() {
        wgmma_wait<0>();
        pin(o);
        pin(probability);
    }

    __device__ __forceinline__ void release_values() {
        barrier_arrive(&shared.value_empty[value_state.stage]);
        value_state.advance();
    }

    // Writes the output of the tile whose queries were at `output_state`.
    __device__ __forceinline__ void run_epilogue(OnlineSoftmax& result) {
        epilogue(launch, shared.output[output_state.stage], shared.query[output_state.stage], first_row, o, result,
                 shared.nonfinite_seen);
        output_state.advance();
    }

    // The CTA's last tile, or a split of it (SPLIT).
    __device__ __forceinline__ void run_last_epilogue() {
#if SPLIT
        if (blockIdx.x < launch.splits.blocks) {
            write_split(launch.splits, shared.output[output_state.stage].rows, first_row, o, softmax,
                        shared.nonfinite_seen);
            shared_write_fence();  // in a second pass TMA overwrites these queries
            output_state.advance();
            return;
        }
#endif
        run_epilogue(softmax);
    }

    // Lets other queries replace the staged output once it has been read. Best called while the next MMAs are in
    // flight, so that nothing waits for it; after a tile of one block it is called at once, because the next queries
    // need the stage.
    __device__ __forceinline__ void release_queries() const {
#if OUT_TMA
        bulk_wait_read();  // in the lane that started the stores; the barrier counts its arrival, too
#elif QUERY_TMA
        shared_write_fence();  // TMA may overwrite these rows
#endif
        barrier_arrive(&shared.query_empty[output_state.stage_before()]);
    }

    // The BlockInfo of the block with these keys, which have arrived. Starts loading its dense bias.
    __device__ __forceinline__ BlockInfo read_block_info(const PipelineState<STAGES>& keys) {
        const BlockInfo block = shared.block_info[keys.stage];
#if BIAS == BIAS_DENSE
        bias.fetch(p, shared, keys.stage, block);
#endif
        return block;
    }

    // After all tiles have been written: consumes the remaining ping-pong arrival and waits for the stores.
    __device__ __forceinline__ void drain() const {
        if (warpgroup() == 0) ping_pong_wait();
#if OUT_TMA
        bulk_wait();
#endif
    }

    // Ping-pong: between these two calls only this warpgroup issues MMAs (except for delayed ones).
    __device__ __forceinline__ void ping_pong_wait() const {
        if (PING_PONG) named_barrier(PING_PONG_BARRIER + warpgroup(), 256);
    }

    __device__ __forceinline__ void ping_pong_arrive() const {
        if (PING_PONG) named_barrier_arrive(PING_PONG_BARRIER + (warpgroup() + 1) % CONSUMERS, 256);
    }

    // Initialises the accumulators of the block at `key_state` and waits for this warpgroup to be allowed to issue.
    // Where MMAs are long (large head dims), the initialisation is kept out of the exclusive section.
    __device__ __forceinline__ void enter_ping_pong() {
        if (HEAD_DIM > 64) init_accumulators(key_state);
        ping_pong_wait();
        if (HEAD_DIM <= 64) init_accumulators(key_state);
    }

    // The biases added to the logits of the block at `key_state`; called while its MMAs are in flight.
    __device__ __forceinline__ void fetch_bias() {
#if BIAS != BIAS_DENSE
        bias.fetch(bias_address + key_state.stage * BLOCK_N * 4);
#endif
#if DELAY && SOFTCAP
        bias.shared = &shared;
        bias.stage = key_state.stage;
        bias.mixed = has_mixed(shared, key_state.stage);
        find_positions(bias.position);
#endif
    }

    __device__ __forceinline__ void release_keys(const PipelineState<STAGES>& key_state) const {
        barrier_arrive(&shared.key_empty[key_state.stage]);
    }

    // Softcap and bias, if q . k needs them to become logits.
    template <int fragments>
    __device__ __forceinline__ void make_logits() {
        if (!Logits::CHANGED) return;
        const auto change = [&](const auto& logit) {
#pragma unroll
            for (int n = 0; n < fragments; ++n) {
                const auto of_fragment = bias.of(n);
#pragma unroll
                for (int i = 0; i < 8; ++i) s[n].x[i] = logit(s[n].x[i], of_fragment(i));
            }
        };
#if SOFTCAP
        const int found = polynomials_for<fragments>(s, launch.softcap);
        if (lacks_max) polynomials = found;
        if (found > 0) {
            const SoftcapPolynomial& p = launch.softcap[0];
            change([&](float x, float bias) { return p.template logit<true>(x, p.distance(x), bias); });
            return;
        }
#endif
        change(logits);
    }

    // Softcap, bias and mask.
    template <int fragments>
    __device__ __forceinline__ void finish_logits(const BlockInfo& block) {
        make_logits<fragments>();
        if (block.unmasked() == BLOCK_N) return;
        const Tile& t = shared.tile[query_state.stage];
        const int position[2] = {position_of(t, first_row + lane / 4), position_of(t, first_row + lane / 4 + 8)};
        apply_mask<fragments>(s, shared, key_state.stage, block.unmasked(), position);
    }

    // The running max is initialised from the first `asked` fragments. For rows that may see few keys that is all of
    // them, so m is their maximum and p exact for a row that sees one key.
    template <int fragments, int asked = fragments>
    __device__ __forceinline__ void exponentiate(const BlockInfo& block) {
        if (lacks_max) {
            softmax.template init_max<asked>(s, logits.unit, block.is_full());
            if (!softmax.max_is_zero()) polynomials = 0;
        }
        softmax.template exponentiate<fragments>(s, logits.unit, sum);
    }

#if SOFTCAP && BIAS != BIAS_DENSE
    // The same for a full block, with the last polynomial known to hold for the tile. Returns false if it does not
    // hold; the accumulators then contain q . k again.
    template <bool high>
    __device__ __forceinline__ bool approximate() {
        if (softmax.template exponentiate<high>(s, bias, launch.softcap[!high], sum)) return true;
        wait_output();
        recompute_logits();
        --polynomials;
        return false;
    }
#endif

    // Whether the values of the block at `key_state` must be checked for NaN and infinity.
    __device__ __forceinline__ bool must_check_nonfinite(const BlockInfo& block) const {
        return block.unmasked() < BLOCK_N && shared.isolate_nonfinite;
    }

    // Turns the accumulators of the block at `key_state` into exponentials; if its values must be checked, its keys are
    // not released yet.
    __device__ __forceinline__ void exponentiate(BlockInfo& block) {
        if (FULL_BLOCK_PATH && block.is_full()) {
#if SOFTCAP && BIAS != BIAS_DENSE
            if (!lacks_max) {
                if (polynomials == 2 && approximate<false>()) return;
                if (polynomials == 1 && approximate<true>()) return;
            }
#endif
            make_logits<KEY_FRAGMENTS>();
            exponentiate<KEY_FRAGMENTS, BIAS == BIAS_DENSE ? KEY_FRAGMENTS : 2>(block);
            return;
        }
        if (must_check_nonfinite(block)) block.flags |= BlockInfo::CHECK_NONFINITE;
        if (!block.is_short()) {
            finish_logits<KEY_FRAGMENTS>(block);
            exponentiate<KEY_FRAGMENTS>(block);
        } else {
            finish_logits<SHORT_BLOCK_FRAGMENTS>(block);
            exponentiate<SHORT_BLOCK_FRAGMENTS>(block);
            fill_rest(0.0f);  // otherwise the assembler serialises the MMAs
        }
    }

    // Beyond the keys of a short block.
    __device__ __forceinline__ void fill_rest(float x) {
#pragma unroll
        for (int n = SHORT_BLOCK_FRAGMENTS; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] = x;
    }

    // Recomputes q . k of the block at `key_state`, in each warp separately.
    __device__ __forceinline__ void recompute_logits() {
#if BIAS_FIRST
        init_with_own_bias(key_state.stage);
#else
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] = 0.0f;
#endif
        ELEMENT *rows = shared.query[query_state.stage], *keys = shared.keys[key_state.stage];
        // Of 16 x 16 elements, as load_matrices expects.
        const int row = first_row + lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll 1
        for (int d = 0; d < DIM_FRAGMENTS; ++d) {
            unsigned a[4], b[4];
            load_matrices(a, shared_address(piece_of<BLOCK_M>(rows, row, 2 * d + lane / 16)));
#pragma unroll
            for (int n = 0; n < KEY_FRAGMENTS; ++n) {
                load_matrices(b, shared_address(piece_of<BLOCK_N>(keys, 16 * n + key, 2 * d + lane / 8 % 2)));
                multiply_warp(s[n], a, b);
            }
        }
    }

    // After `exponentiate`, before its exponentials are used: whether some are too large. The branch that depends on it
    // also keeps the assembler from moving them past the wait for the output MMAs.
    __device__ __forceinline__ bool needs_rescale() const {
        return __any_sync(ALL_LANES, fmaxf(sum[0], sum[1]) > largest_sum());
    }

    // In the second pass, products with large values must not overflow.
    __device__ __forceinline__ float largest_sum() const {
        return OnlineSoftmax::LARGE && shared.isolate_nonfinite ? OnlineSoftmax::SMALL : OnlineSoftmax::LARGEST;
    }

    // Raises the running max, and rescales the output so far if it belongs to the same tile.
    __device__ __forceinline__ void rescale(const BlockInfo& block, bool same_tile) {
        wait_output();
        float factor[2];
        if (__any_sync(ALL_LANES, fmaxf(sum[0], sum[1]) == infinity())) {
            recompute_logits();
            if (BIAS == BIAS_DENSE) read_block_info(key_state);  // for the bias, which registers do not hold until here
            finish_logits<KEY_FRAGMENTS>(block);
            if (block.is_short()) fill_rest(-infinity());
            softmax.rescale_to_max(s, logits.unit, largest_sum(), factor);
            softmax.template exponentiate<KEY_FRAGMENTS>(s, logits.unit, sum);
        } else {
            softmax.rescale_by_power_of_2(s, sum, largest_sum(), factor);
        }
        if (!softmax.max_is_zero()) polynomials = 0;
        if (!same_tile) return;
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) o[d].x[i] *= factor[fragment_row(i)];
    }

    // Adds the block's exponentials to l and releases its keys.
    __device__ __forceinline__ void commit_block(const BlockInfo& block) {
        softmax.l[0] += sum[0];
        softmax.l[1] += sum[1];
        if (!block.checks_nonfinite()) release_keys(key_state);
    }

    // Rounds exponentials to the operand of the output MMAs.
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[n][i] = pack_pair(s[n].x[2 * i], s[n].x[2 * i + 1]);
    }

    // Issues the output MMAs of the block at `value_state`, whose values have arrived and whose keys were at `keys`.
    // `begins_tile`: it is the first block of its tile.
    __device__ __forceinline__ void start_pv(const BlockInfo& block, const PipelineState<STAGES>& keys, bool begins_tile) {
        ELEMENT* value = shared.values[value_state.stage];
        if (block.checks_nonfinite()) {
            if (begins_tile) clear_output();
            begins_tile = false;
            isolate_nonfinite(o, value, shared, keys.stage, block.is_short() ? SHORT_BLOCK_KEYS : BLOCK_N,
                              shared.tile[output_state.stage], first_row);
            release_keys(keys);
        }
        mma_pv(o, probability, value, block.is_short(), !begins_tile);
    }

    // From the block at `key_state` on this consumer has no rows; it only takes part in the barriers of the others'
    // blocks. `first`: the CTA begins with them, and the first one needs no ping-pong wait.
    __device__ __forceinline__ void stand_by(bool first) {
        for (BlockInfo block(0); !block.ends_tile(); key_state.advance()) {
            barrier_wait(&shared.key_full[key_state.stage], key_state.phase);
            block = shared.block_info[key_state.stage];
            if (!first) ping_pong_wait();
            if (!first || warpgroup() == CONSUMERS - 1) ping_pong_arrive();
            first = false;
            barrier_wait(&shared.value_full[value_state.stage], value_state.phase);
            if (must_check_nonfinite(block))
                clear_nonfinite(shared.values[value_state.stage], block.is_short() ? SHORT_BLOCK_KEYS : BLOCK_N);
            release_keys(key_state);
            release_values();
        }
    }
};
