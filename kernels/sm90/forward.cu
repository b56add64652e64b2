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
// through the copy engine where it can write them (OUT_BULK).
//
// A value that is not finite reaches rows that do not see its key, for 0 * inf is NaN. To look at all values costs 1 to 2 %; so
// a block that finds such an output when it is through does everything once more, and only then keeps such values apart.
//
// Prelude: ELEMENT, HEAD_DIM, HEADS, BLOCK_M, BLOCK_N, STAGES, VALUE_STAGES, QUERY_STAGES, TURNS (warpgroups take turns in
// issuing products), KEYS, CAUSAL, BITS, BIAS, BIAS_ELEMENT (16 bit where BIAS_DENSE), SOFTCAP, SEQUENCES (with neither BITS
// nor BIAS_DENSE), BULK (KEYS_CONTIGUOUS, no BIAS_DENSE: rows of keys and values come through the copy engine), QUERY_BULK
// (so do queries; HEADS divides BLOCK_M), RUNS (neither BULK nor SEQUENCES; rows of keys that follow each other come through
// the copy engine), SPLIT (neither SEQUENCES nor BITS; parts of tiles as in sm90/split_kv.cuh).
#include "sm90/consumer.cuh"
#include "sm90/producer.cuh"

// The products of a whole block's values and of the keys behind it, of which `next` tells.
__device__ __forceinline__ void start_products(Consumer& c, Order& next) {
    const Turn<STAGES> keys = c.turn;
    c.turn.advance();
    c.meet_keys(c.turn);
    c.begin_turn();
    c.start_logits(c.turn, c.queries);
    next = c.read_order(c.turn);
    c.meet_values();
    c.start_output(Order(0), keys, false);
    c.pass_turn();
    c.fetch_bias();
    c.incomplete = c.state.incomplete();
}

// What is left of a block whose exponentials are there, while the products of the one before end.
__device__ __forceinline__ void finish_block(Consumer& c, const Order& order) {
    c.settle(order);
    c.finish_output();
    c.release_values();
    c.look_ahead(c.turn.next());
    c.round_probabilities();
}

__device__ __forceinline__ void consume(Consumer& c) {
    c.begin_sums(c.turn);
    c.start_logits(c.turn, c.queries);
    c.open_tile();
    Order current = c.read_order(c.turn);
    c.fetch_bias();
    c.incomplete = true;
    c.clear_output();
    c.finish_products<0>();
    c.exponentiate(current);
    // A dense bias leaves no registers for that, so its blocks take the maxima of all keys.
    if (BIAS != BIAS_DENSE && c.strained()) c.relieve(current, false);
    c.settle(current);
    c.round_probabilities();
    c.look_ahead(c.turn.next());
    if (c.number() == CONSUMERS - 1) c.pass_turn();
    for (;;) {
        Order next;
        while (STRAIGHT && current.state == 0) {
            start_products(c, next);
            c.finish_products<1>();
            if (!next.whole()) goto finished;
            c.exponentiate(next);
            if (c.strained()) c.relieve(next, true);
            finish_block(c, next);
            current = next;
        }
        if (!STRAIGHT && PLAIN && current.state == 0) {
            start_products(c, next);
        } else {
            const Turn<STAGES> keys = c.turn;  // of the current block
            if (current.ends(c.number())) break;
            const bool opens = current.unwritten();  // or is the first of all
            bool unwritten = opens;
            c.turn.advance();
            if (current.closes()) {
                if (unwritten) {  // the coming queries need its place
                    c.close_tile(c.complete);
                    c.release_queries();
                }
                unwritten = false;
                c.queries.advance();
                c.meet_queries();
                c.open_tile();
            }
            c.meet_keys(c.turn);
            c.begin_turn();
            c.start_logits(c.turn, c.queries);
            next = c.read_order(c.turn);
            c.meet_values();
            // What comes before the output products takes long, or waits for all consumers.
            const bool delayed = unwritten || current.held();
            if (delayed) c.pass_turn();
            if (unwritten) c.close_tile(c.complete);
            c.start_output(current, keys, opens);
            if (!delayed) c.pass_turn();
            if (unwritten) c.release_queries();
            c.fetch_bias();
            c.incomplete = c.state.incomplete();
        }
        // Never; but the assembler would wait for the bias ahead of the output products, and moves nothing across a branch.
        if (BIAS == BIAS_DENSE && next.following < -1) __nanosleep(0);
        c.finish_products<1>();
    finished:
        c.exponentiate(next);
        if (c.strained()) c.relieve(next, BIAS == BIAS_DENSE || !current.closes());
        finish_block(c, next);
        if (current.closes()) next.state |= Order::UNWRITTEN;
        current = next;
    }
    if (current.unwritten()) {
        c.close_tile(c.complete);
        c.release_queries();
    }
    barrier_wait(&c.shared.value_arrived[c.value_turn.stage], c.value_turn.phase);
    c.start_output(current, c.turn, current.unwritten());
    c.finish_output();
    c.close_last_tile();
    c.release_queries();  // shared memory lasts until then
    if (!CUT || current.ends()) return;
    c.release_values();
    c.turn.advance();
    c.stand_by(false);
}

// By one thread, before anything else of a round.
__device__ __forceinline__ void begin(Shared& shared, bool careful) {
    shared.careful = careful;
    for (int i = 0; i < QUERY_STAGES; ++i) {
        barrier_init(&shared.query_arrived[i], QUERY_BULK ? 1 : 2 * PRODUCER_THREADS);
        barrier_init(&shared.query_free[i], CONSUMER_THREADS);
    }
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&shared.key_arrived[i], 2 * PRODUCER_THREADS);
        barrier_init(&shared.key_free[i], CONSUMER_THREADS);
    }
    for (int i = 0; i < VALUE_STAGES; ++i) {
        barrier_init(&shared.value_arrived[i], PRODUCER_THREADS);
        barrier_init(&shared.value_free[i], CONSUMER_THREADS);
    }
    barrier_init_fence();
}

// At the end of a round: whether this block must do everything once more, carefully, for an output is not finite.
__device__ __forceinline__ bool is_spoiled(Shared& shared) {
    if (shared.careful) return false;
    barrier_arrive(&shared.everybody);
    barrier_wait(&shared.everybody, 0);  // all tiles have been written
    return shared.spoiled != 0;
}

// When nobody leaves anything behind.
__device__ __forceinline__ void begin_again(Shared& shared) {
    if (thread_now() == 0) {
        for (Barrier* b = shared.query_arrived; b < shared.value_free + VALUE_STAGES; ++b) barrier_end(b);
        begin(shared, true);
    }
    named_barrier(ALL_BARRIER, THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    const __grid_constant__ ForwardParams launch) {
    extern __shared__ unsigned char shared_memory[];
    // The swizzle counts rows from 1024-byte boundaries.
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        shared.spoiled = 0;
        barrier_init(&shared.everybody, THREADS);
        begin(shared, false);
    }
    __syncthreads();  // the barriers are in place
    wait_for_earlier_kernels();
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        for (;;) {
            produce(shared, launch);
            if (!is_spoiled(shared)) return;
            begin_again(shared);
        }
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        // A loop with two entrances is none to the compiler, which would keep what each round begins with in registers.
        if (zero_now() != 0) goto begins;
    again:
        place_in_code();
    begins:
        barrier_wait(&shared.query_arrived[0], 0);
        Consumer c(shared, launch);
        if (GAPS && shared.staying == 0) {
            // none of this block's numbers has a tile
        } else if (CUT && c.number() >= shared.staying) {
            c.stand_by(true);
        } else {
            c.meet_queries();
            barrier_wait(&shared.key_arrived[0], 0);
            consume(c);
        }
        if (is_spoiled(shared)) {
            c.forget();
            begin_again(shared);
            goto again;
        }
    }
}
