// Attention forward on Hopper: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // BIAS_OF_KEYS: (1|B, 1|Hkv|H, 1|Lk) f32; BIAS_DENSE: (1|B, 1|Hkv|H, Lq, 1|Lk) BIAS_ELEMENT; natural-log units
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// The same tiles of queries and the same keys as the portable sm80/forward.cu. A block stays for many tiles (tile n * gridDim + its
// own number; of the last ones, if these are few, for a part of one) and splits its warps: one warpgroup gathers rows into
// shared memory, the others multiply, 64 tile rows each. Blocks of keys pass through STAGES stages and their values through
// VALUE_STAGES, whatever tile they belong to; each has barriers that say when it has come and when it may be overwritten. The
// products of the next block's logits, which may belong to the next tile, are issued together with the output products of the
// current one, so the tensor cores work while the softmax is computed. Outputs go through shared memory, and from there
// through the TMA where it can write them (OUT_TMA).
//
// A value that is not finite reaches rows that do not see its key, for 0 * inf is NaN. To look at all values costs 1 to 2 %; so
// a block that finds such an output when it is through does everything once more, and only then keeps such values apart.
//
// Prelude: ELEMENT, HEAD_DIM, HEADS, BLOCK_M, BLOCK_N, STAGES, VALUE_STAGES, QUERY_STAGES, PING_PONG (warpgroups take turns in
// issuing products), KEYS, CAUSAL, BITS, BIAS, BIAS_ELEMENT (16 bit where BIAS_DENSE), SOFTCAP, SEQUENCES (with neither BITS
// nor BIAS_DENSE), KV_TMA (KEYS_CONTIGUOUS, no BIAS_DENSE: rows of keys and values come through the TMA), QUERY_TMA
// (so do queries; HEADS divides BLOCK_M), RUNS (neither KV_TMA nor SEQUENCES; rows of keys that follow each other come through
// the TMA), SPLIT (neither SEQUENCES nor BITS; parts of tiles as in sm90/split_kv.cuh).
#include "sm90/consumer.cuh"
#include "sm90/producer.cuh"

// The products of a whole block's values and of the keys behind it, of which `next` tells.
__device__ __forceinline__ void start_mmas(Consumer& c, BlockInfo& next) {
    const PipelineState<STAGES> keys = c.key_state;
    c.key_state.advance();
    c.meet_keys(c.key_state);
    c.enter_ping_pong();
    c.start_qk(c.key_state, c.query_state);
    next = c.read_block_info(c.key_state);
    c.meet_values();
    c.start_pv(BlockInfo(0), keys, false);
    c.ping_pong_arrive();
    c.fetch_bias();
    c.lacks_max = c.softmax.lacks_max();
}

// What is left of a block whose exponentials are there, while the products of the one before end.
__device__ __forceinline__ void finish_block(Consumer& c, const BlockInfo& block) {
    c.commit_block(block);
    c.wait_output();
    c.release_values();
    c.look_ahead(c.key_state.next());
    c.round_probabilities();
}

__device__ __forceinline__ void consume(Consumer& c) {
    c.init_accumulators(c.key_state);
    c.start_qk(c.key_state, c.query_state);
    c.open_tile();
    BlockInfo current = c.read_block_info(c.key_state);
    c.fetch_bias();
    c.lacks_max = true;
    c.clear_output();
    c.wait_logits<0>();
    c.exponentiate(current);
    // A dense bias leaves no registers for that, so its blocks take the maxima of all keys.
    if (BIAS != BIAS_DENSE && c.needs_rescale()) c.rescale(current, false);
    c.commit_block(current);
    c.round_probabilities();
    c.look_ahead(c.key_state.next());
    if (c.warpgroup() == CONSUMERS - 1) c.ping_pong_arrive();
    for (;;) {
        BlockInfo next;
        while (FULL_BLOCK_LOOP && current.flags == 0) {
            start_mmas(c, next);
            c.wait_logits<1>();
            if (!next.whole()) goto finished;
            c.exponentiate(next);
            if (c.needs_rescale()) c.rescale(next, true);
            finish_block(c, next);
            current = next;
        }
        if (!FULL_BLOCK_LOOP && PLAIN && current.flags == 0) {
            start_mmas(c, next);
        } else {
            const PipelineState<STAGES> keys = c.key_state;  // of the current block
            if (current.ends_work(c.warpgroup())) break;
            const bool begins_tile = current.unwritten();  // or is the first of all
            bool unwritten = begins_tile;
            c.key_state.advance();
            if (current.ends_tile()) {
                if (unwritten) {  // the coming queries need its place
                    c.run_epilogue(c.previous_softmax);
                    c.release_queries();
                }
                unwritten = false;
                c.query_state.advance();
                c.meet_queries();
                c.open_tile();
            }
            c.meet_keys(c.key_state);
            c.enter_ping_pong();
            c.start_qk(c.key_state, c.query_state);
            next = c.read_block_info(c.key_state);
            c.meet_values();
            // What comes before the output products takes long, or waits for all consumers.
            const bool delayed = unwritten || current.held();
            if (delayed) c.ping_pong_arrive();
            if (unwritten) c.run_epilogue(c.previous_softmax);
            c.start_pv(current, keys, begins_tile);
            if (!delayed) c.ping_pong_arrive();
            if (unwritten) c.release_queries();
            c.fetch_bias();
            c.lacks_max = c.softmax.lacks_max();
        }
        // Never; but the assembler would wait for the bias ahead of the output products, and moves nothing across a branch.
        if (BIAS == BIAS_DENSE && next.run < -1) __nanosleep(0);
        c.wait_logits<1>();
    finished:
        c.exponentiate(next);
        if (c.needs_rescale()) c.rescale(next, BIAS == BIAS_DENSE || !current.ends_tile());
        finish_block(c, next);
        if (current.ends_tile()) next.flags |= BlockInfo::UNWRITTEN;
        current = next;
    }
    if (current.unwritten()) {
        c.run_epilogue(c.previous_softmax);
        c.release_queries();
    }
    barrier_wait(&c.shared.value_full[c.value_state.stage], c.value_state.phase);
    c.start_pv(current, c.key_state, current.unwritten());
    c.wait_output();
    c.run_last_epilogue();
    c.release_queries();  // shared memory lasts until then
    if (!ROW_CUT || current.ends_work()) return;
    c.release_values();
    c.key_state.advance();
    c.stand_by(false);
}

// By one thread, before anything else of a round.
__device__ __forceinline__ void init_barriers(Shared& shared, bool isolate_nonfinite) {
    shared.isolate_nonfinite = isolate_nonfinite;
    for (int i = 0; i < QUERY_STAGES; ++i) {
        barrier_init(&shared.query_full[i], QUERY_TMA ? 1 : 2 * PRODUCER_THREADS);
        barrier_init(&shared.query_empty[i], CONSUMER_THREADS);
    }
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&shared.key_full[i], 2 * PRODUCER_THREADS);
        barrier_init(&shared.key_empty[i], CONSUMER_THREADS);
    }
    for (int i = 0; i < VALUE_STAGES; ++i) {
        barrier_init(&shared.value_full[i], PRODUCER_THREADS);
        barrier_init(&shared.value_empty[i], CONSUMER_THREADS);
    }
    barrier_init_fence();
}

// At the end of a round: whether this block must do everything once more, carefully, for an output is not finite.
__device__ __forceinline__ bool needs_second_pass(Shared& shared) {
    if (shared.isolate_nonfinite) return false;
    barrier_arrive(&shared.all_written);
    barrier_wait(&shared.all_written, 0);  // all tiles have been written
    return shared.nonfinite_seen != 0;
}

// When nobody leaves anything behind.
__device__ __forceinline__ void restart(Shared& shared) {
    if (thread_now() == 0) {
        for (Barrier* b = shared.query_full; b < shared.value_empty + VALUE_STAGES; ++b) barrier_end(b);
        init_barriers(shared, true);
    }
    named_barrier(ALL_BARRIER, THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    const __grid_constant__ ForwardParams launch) {
    extern __shared__ unsigned char shared_memory[];
    // The swizzle counts rows from 1024-byte boundaries.
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        shared.nonfinite_seen = 0;
        barrier_init(&shared.all_written, THREADS);
        init_barriers(shared, false);
    }
    __syncthreads();  // the barriers are in place
    wait_for_earlier_kernels();
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        for (;;) {
            produce(shared, launch);
            if (!needs_second_pass(shared)) return;
            restart(shared);
        }
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        // A loop with two entrances is none to the compiler, which would keep what each round begins with in registers.
        if (zero_now() != 0) goto begins;
    again:
        code_anchor();
    begins:
        barrier_wait(&shared.query_full[0], 0);
        Consumer c(shared, launch);
        if (GAPS && shared.active_consumers == 0) {
            // none of this block's numbers has a tile
        } else if (ROW_CUT && c.warpgroup() >= shared.active_consumers) {
            c.stand_by(true);
        } else {
            c.meet_queries();
            barrier_wait(&shared.key_full[0], 0);
            consume(c);
        }
        if (needs_second_pass(shared)) {
            c.drain();
            restart(shared);
            goto again;
        }
    }
}
