// Attention forward on Hopper: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // BIAS_OF_KEYS: (1|B, 1|Hkv|H, 1|Lk) f32; BIAS_DENSE: (1|B, 1|Hkv|H, Lq, 1|Lk) BIAS_ELEMENT; natural-log units
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// The same tiles of queries and the same keys as the portable sm80/forward.cu. A persistent CTA computes many tiles
// (wave n gives it tile n * gridDim + blockIdx; sm90/scheduler.cuh) and is warp-specialised: one warpgroup, the
// producer, gathers rows into shared memory; the others, the consumers, multiply, 64 tile rows each. Blocks of keys
// pass through STAGES stages and their values through VALUE_STAGES, whichever tile they belong to; each stage has a
// full and an empty barrier. The QK MMAs of the next block, which may belong to the next tile, are issued together with
// the PV MMAs of the current one, so the tensor cores work while the softmax is computed. Outputs go through shared
// memory, and from there by TMA where it can write them (OUT_TMA).
//
// A NaN or infinite value reaches rows that do not see its key, because 0 * inf is NaN. Checking all values costs 1 to
// 2 %, so a CTA that finds such an output at the end computes all its tiles a second time and isolates those values
// only then.
//
// Prelude: ELEMENT, HEAD_DIM, HEADS, BLOCK_M, BLOCK_N, STAGES, VALUE_STAGES, QUERY_STAGES, PING_PONG (consumer
// warpgroups take turns in issuing MMAs), KEYS, CAUSAL, BITS, BIAS, BIAS_ELEMENT (16 bit where BIAS_DENSE), SOFTCAP,
// SEQUENCES (with neither BITS nor BIAS_DENSE), KV_TMA (KEYS_CONTIGUOUS, no BIAS_DENSE: TMA loads the rows of keys and
// values), QUERY_TMA (and the queries; HEADS divides BLOCK_M), RUNS (neither KV_TMA nor SEQUENCES: TMA loads the rows
// of consecutive keys), SPLIT (neither SEQUENCES nor BITS: split-KV as in sm90/split_kv.cuh).
#include "sm90/consumer.cuh"
#include "sm90/producer.cuh"

// Issues the MMAs of a full block's values and of the next keys, which `next` describes.
__device__ __forceinline__ void start_mmas(Consumer& c, BlockInfo& next) {
    const PipelineState<STAGES> keys = c.key_state;
    c.key_state.advance();
    c.wait_keys(c.key_state);
    c.enter_ping_pong();
    c.start_qk(c.key_state, c.query_state);
    next = c.read_block_info(c.key_state);
    c.wait_values();
    c.start_pv(BlockInfo(0), keys, false);
    c.ping_pong_arrive();
    c.fetch_bias();
    c.lacks_max = c.softmax.lacks_max();
}

// Finishes a block whose exponentials are computed, while the previous block's output MMAs end.
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
    // A dense bias leaves no registers for that, so its blocks use the maxima of all keys.
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
            if (!next.is_full()) goto finished;
            c.exponentiate(next);
            if (c.needs_rescale()) c.rescale(next, true);
            finish_block(c, next);
            current = next;
        }
        if (!FULL_BLOCK_LOOP && FULL_BLOCK_PATH && current.flags == 0) {
            start_mmas(c, next);
        } else {
            const PipelineState<STAGES> keys = c.key_state;  // those of the current block
            if (current.ends_work(c.warpgroup())) break;
            const bool begins_tile = current.unwritten();  // or is the first of all
            bool unwritten = begins_tile;
            c.key_state.advance();
            if (current.ends_tile()) {
                if (unwritten) {  // the next queries need its stage
                    c.run_epilogue(c.previous_softmax);
                    c.release_queries();
                }
                unwritten = false;
                c.query_state.advance();
                c.wait_queries();
                c.open_tile();
            }
            c.wait_keys(c.key_state);
            c.enter_ping_pong();
            c.start_qk(c.key_state, c.query_state);
            next = c.read_block_info(c.key_state);
            c.wait_values();
            // The work before the output MMAs is long, or waits for all consumers.
            const bool delayed = unwritten || current.checks_nonfinite();
            if (delayed) c.ping_pong_arrive();
            if (unwritten) c.run_epilogue(c.previous_softmax);
            c.start_pv(current, keys, begins_tile);
            if (!delayed) c.ping_pong_arrive();
            if (unwritten) c.release_queries();
            c.fetch_bias();
            c.lacks_max = c.softmax.lacks_max();
        }
        // Never true: the branch keeps the assembler from waiting for the bias before the output MMAs.
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
    c.release_queries();  // the CTA's shared memory must live until the output has been read
    if (!ROW_CUT || current.ends_work()) return;
    c.release_values();
    c.key_state.advance();
    c.stand_by(false);
}

// By one thread, at the beginning of a pass.
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

// At the end of a pass: whether this CTA must compute its tiles again and isolate non-finite values.
__device__ __forceinline__ bool needs_second_pass(Shared& shared) {
    if (shared.isolate_nonfinite) return false;
    barrier_arrive(&shared.all_written);
    barrier_wait(&shared.all_written, 0);  // all tiles have been written
    return shared.nonfinite_seen != 0;
}

// When no copy, store or barrier arrival is outstanding.
__device__ __forceinline__ void restart(Shared& shared) {
    if (thread_now() == 0) {
        for (Barrier* b = shared.query_full; b < shared.value_empty + VALUE_STAGES; ++b) barrier_end(b);
        init_barriers(shared, true);
    }
    named_barrier(ALL_BARRIER, THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    const __grid_constant__ ForwardParams launch) {
    static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ unsigned char shared_memory[];
    // The swizzle counts rows from 1024-byte boundaries.
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        shared.nonfinite_seen = 0;
        barrier_init(&shared.all_written, THREADS);
        init_barriers(shared, false);
    }
    __syncthreads();  // the barriers are initialised
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
        // The compiler does not treat a loop with two entries as a loop; in a loop it would keep the initial values of
        // each pass in registers.
        if (zero_now() != 0) goto begins;
    again:
        code_anchor();
    begins:
        barrier_wait(&shared.query_full[0], 0);
        Consumer c(shared, launch);
        if (GAPS && shared.active_consumers == 0) {
            // no tile for this CTA
        } else if (ROW_CUT && c.warpgroup() >= shared.active_consumers) {
            c.stand_by(true);
        } else {
            c.wait_queries();
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
