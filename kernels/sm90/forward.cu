// Attention forward on Hopper: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // BIAS_OF_KEYS: (1|B, 1|Hkv|H, 1|Lk) f32; BIAS_DENSE: (1|B, 1|Hkv|H, Lq, 1|Lk) BIAS_ELEMENT; natural-log units
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// The same tiles of queries and the same keys as the portable forward.cu. A block stays for many tiles (tile n * gridDim + its
// own number) and splits its warps: one warpgroup gathers rows into shared memory, the others multiply, 64 tile rows
// each. Blocks of keys pass through STAGES stages, whatever tile they belong to; each has barriers that say when its
// keys and values have arrived and when they may be overwritten. The products of the next block's logits, which may belong
// to the next tile, are issued together with the output products of the current one, so the tensor cores work while the
// softmax is computed.
//
// Prelude: ELEMENT, HEAD_DIM, HEADS, BLOCK_M, BLOCK_N, STAGES, QUERY_STAGES, TURNS (warpgroups take turns in issuing products),
// KEYS, CAUSAL, BITS, BIAS, BIAS_ELEMENT (16 bit where BIAS_DENSE), SOFTCAP, SEQUENCES (with neither BITS nor BIAS_DENSE), BULK
// (KEYS_CONTIGUOUS, no BIAS_DENSE: rows of keys and values come through the copy engine), QUERY_BULK (so do queries; HEADS
// divides BLOCK_M), RUNS (neither BULK nor SEQUENCES; rows of keys that follow each other come through the copy engine).
#include "sm90/logits.cuh"
#include "sm90/producer.cuh"
#include "sm90/tile.cuh"

// ---- the consumers: 64 rows of the tile each ----
// s = rows . k, or s += rows . k
__device__ __forceinline__ void begin_logits(Fragment (&s)[KEY_FRAGMENTS], const ELEMENT* query, const ELEMENT* key) {
    const unsigned a = matrix_descriptor(query, 0), b = matrix_descriptor(key, 0);
    pin(s);
    products_begin();
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        const int chunk = d / 4, step = d % 4 * 32;
        Wgmma<KEY_FRAGMENTS>::multiply_shared(s, moved(a, chunk * BLOCK_M * CHUNK_ROW_BYTES + step),
                                              moved(b, chunk * BLOCK_N * CHUNK_ROW_BYTES + step), d > 0 || BIAS_FIRST);
    }
    products_commit();
}

// o += p . values of 16 keys, in pieces of at most 128 columns
template <int first>
__device__ __forceinline__ void add_columns(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&a)[4],
                                            unsigned value) {
    if constexpr (first < DIM_FRAGMENTS) {
        constexpr int REST = DIM_FRAGMENTS - first;
        constexpr int SIZE = REST >= 8 ? 8 : REST == 6 ? 6 : REST >= 4 ? 4 : REST >= 2 ? 2 : 1;
        Wgmma<SIZE>::multiply_registers(&o[first], a,
                                        moved(value, first / 4 * BLOCK_N * CHUNK_ROW_BYTES + first % 4 * 32));
        add_columns<first + SIZE>(o, a, value);
    }
}

// o += p . values of the block's first fragments: one group of products.
template <int fragments>
__device__ __forceinline__ void add_products(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&probability)[KEY_FRAGMENTS][4],
                                             unsigned value) {
    products_begin();
#pragma unroll
    for (int n = 0; n < fragments; ++n) add_columns<0>(o, probability[n], moved(value, n * 16 * CHUNK_ROW_BYTES));
    products_commit();
}

// A group with a branch inside would be waited for like several.
__device__ __forceinline__ void begin_output(Fragment (&o)[DIM_FRAGMENTS], unsigned (&probability)[KEY_FRAGMENTS][4],
                                             const ELEMENT* value, bool few) {
    const unsigned b = matrix_descriptor(value, BLOCK_N * CHUNK_ROW_BYTES);
    pin(o);
    pin(probability);
    if (FEW && few)
        add_products<FEW_FRAGMENTS>(o, probability, b);
    else
        add_products<KEY_FRAGMENTS>(o, probability, b);
}

// What is compared with the visibility of keys: the position of the query of row `row`, or with BITS its bit.
__device__ __forceinline__ int position_of(const Tile& t, int row) {
    const int query = row / HEADS;
    return BITS ? static_cast<int>(1u << ((t.first_query + query) & 31)) : t.first_position + query;
}

// A value that is not finite must not reach a row that does not see its key, and 0 * inf is NaN: such values are added
// to the rows that see them, and are zero for the product.
__device__ __forceinline__ void isolate_nonfinite(Fragment (&o)[DIM_FRAGMENTS], ELEMENT* value,
                                                  const Shared& shared, int stage, int keys, const Tile& t, int first_row) {
    const int row_of_lane = first_row + lane_now() / 4;
    const int position[2] = {position_of(t, row_of_lane), position_of(t, row_of_lane + 8)};
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
        const auto seen = visibility(shared, stage, key);
        const int row = row_of_key(key);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int column = 16 * d + 2 * (threadIdx.x & 3) + fragment_column(i);
                const float v = to_float(piece_of<BLOCK_N>(value, row, column / 8)[column % 8]);
                if (!isfinite(v) && visible(position[fragment_row(i)], seen)) o[d].x[i] += v;
            }
    }
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // everybody has read the values that are about to be cleared
    for (int i = threadIdx.x - PRODUCER_THREADS; i < keys * HEAD_DIM_PADDED; i += CONSUMER_THREADS) {
        const int column = i % HEAD_DIM_PADDED;
        ELEMENT& x = piece_of<BLOCK_N>(value, i / HEAD_DIM_PADDED, column / 8)[column % 8];
        if (!isfinite(to_float(x))) from_float(x, 0.0f);
    }
    shared_write_fence();
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // the block is finite
}

// Row `row` of a tile's output, whose first one is at `first`: query by query, in each head by head.
__device__ __forceinline__ ELEMENT* row_of_output(ELEMENT* first, int row, int query_bytes) {
    const void* place = row_address(first + row % HEADS * HEAD_DIM, row / HEADS, query_bytes);
    return const_cast<ELEMENT*>(static_cast<const ELEMENT*>(place));
}

// Writes this warp's 16 rows of out and lse, through the tile's own query rows, which nobody needs any more and which are
// then free. In few instructions: they run once a tile, so each of them is fetched anew.
__device__ __forceinline__ void write_tile(const AttentionParams& p, const Tile& t, ELEMENT* staging, int first_row,
                                           const Fragment (&o)[DIM_FRAGMENTS], LazyRowState& state, Barrier* free) {
    const int lane = lane_now();
    state.finish();
    const float factor[2] = {state.inverse_sum(0), state.inverse_sum(1)};
    const unsigned corner = shared_address(piece_of<BLOCK_M>(staging, first_row + lane % 16, lane / 16));
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float f = factor[fragment_row(i)];
            words[i / 2] = pack_pair(o[d].x[i] * f, o[d].x[i + 1] * f);
        }
        store_matrices((corner ^ 2 * d % 8 * 16) + d / 4 * BLOCK_M * CHUNK_ROW_BYTES, words);
    }
    __syncwarp();  // the warp's rows are complete
    constexpr int STEP = 32 / ROW_LANES, COPIES = 16 / STEP;
    constexpr bool REGULAR = 16 % HEADS == 0;  // a lane's rows lie the same distances apart in all lanes and warps
    const int piece = lane % ROW_LANES, own = lane / ROW_LANES;
    const int existing = min((t.end_query - t.first_query) * HEADS, QUERIES * HEADS) - first_row;
    ELEMENT* target =
        p.out + (((long long)t.batch * p.query_length + t.first_query) * p.heads + t.first_head) * HEAD_DIM + piece * 8;
    float* lse = p.lse + ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query;
    const int query_bytes = p.heads * HEAD_DIM * static_cast<int>(sizeof(ELEMENT));
    if (REGULAR) target = row_of_output(target, first_row + own, query_bytes);
    const unsigned first_piece = shared_address(piece_of<BLOCK_M>(staging, first_row + own, piece));
    uint4 pieces[COPIES];
#pragma unroll
    for (int k = 0; k < COPIES; ++k)
        pieces[k] = load_shared_16((first_piece ^ k * STEP % 8 * 16) + k * STEP * CHUNK_ROW_BYTES);
#if QUERY_BULK
    shared_write_fence();  // the copy engine may overwrite these rows; ahead of the stores, for it waits for those too
#endif
    barrier_arrive(free);  // and `t` may change
#pragma unroll
    for (int k = 0; k < COPIES; ++k) {
        ELEMENT* place = row_of_output(target, REGULAR ? k * STEP : first_row + k * STEP + own, query_bytes);
        if (piece * 8 < HEAD_DIM && k * STEP + own < existing) __stcg(reinterpret_cast<uint4*>(place), pieces[k]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        if ((lane & 3) == 0 && row < existing)
            lse[(long long)((first_row + row) % HEADS) * p.query_length + (first_row + row) / HEADS] = state.lse(r);
    }
}

// A consumer warp's registers and turns.
struct Consumer {
    Shared& shared;
    const AttentionParams& p;
    const Logits logits;
    const float inverse_scale, slack;
    const int lane, group_row, first_row;  // rows of the warpgroup and of this warp in the tile
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Fragment s[KEY_FRAGMENTS], o[DIM_FRAGMENTS];
    unsigned probability[KEY_FRAGMENTS][4];
    bool keys_there, values_there;  // of the block whose logits come next, and of the one before it: seen to have come
    LaneBias bias;
    LazyRowState state, complete;  // of the tile at hand, and of the one before until its output is written
    int position[2];

    __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& p)
        : shared(shared), p(p), logits(p.scale, p.softcap), inverse_scale(1.0f / p.scale), slack(SLACK / logits.unit),
          lane(threadIdx.x & 31),
          group_row(uniform((threadIdx.x - PRODUCER_THREADS) / 128) * 64),
          first_row(uniform((threadIdx.x - PRODUCER_THREADS) / 32) * 16) {}

    // The softmax goes on to the tile whose queries are at `queries`.
    __device__ __forceinline__ void open_tile(const Turn<QUERY_STAGES>& queries) {
        const Tile& t = shared.tile[queries.stage];
        complete = state;
        state = LazyRowState();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + lane / 4 + 8 * r;
            position[r] = position_of(t, row);
#if BIAS == BIAS_DENSE
            bias.row[r] = bias_row(p, t, row);
#endif
        }
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) o[d].x[i] = 0.0f;
    }

    // Asks whether the keys at `keys` have come, for the answer takes its time.
    __device__ __forceinline__ void look_ahead(const Turn<STAGES>& keys) {
        keys_there = barrier_test(&shared.key_arrived[keys.stage], keys.phase);
    }

    // Waits for the keys at `turn`, and asks whether the values of the block before have come.
    __device__ __forceinline__ void meet_keys() {
        if (!keys_there) barrier_wait(&shared.key_arrived[turn.stage], turn.phase);
        values_there = barrier_test(&shared.value_arrived[value_turn.stage], value_turn.phase);
    }

    __device__ __forceinline__ void meet_values() const {
        if (!values_there) barrier_wait(&shared.value_arrived[value_turn.stage], value_turn.phase);
    }

    // The sums of the block at `turn`, whose keys have come.
    __device__ __forceinline__ void begin_sums() {
#if BIAS_FIRST
        begin_with_bias(s, shared, turn.stage, inverse_scale);
        pin(s);  // not behind the wait for a turn
#endif
    }

    // Logits of the block at `turn`, of the tile whose queries are at `queries`.
    __device__ __forceinline__ void start_logits(const Turn<QUERY_STAGES>& queries) {
        begin_logits(s, shared.query[queries.stage] + group_row * CHUNK_COLUMNS, shared.keys[turn.stage]);
    }

    __device__ __forceinline__ void finish_output() {
        products_wait<0>();
        pin(o);
        pin(probability);
    }

    __device__ __forceinline__ void release_values() {
        barrier_arrive(&shared.value_free[value_turn.stage]);
        value_turn.advance();
    }

    // Writes the tile whose queries were at `query_turn`.
    __device__ __forceinline__ void close_tile(LazyRowState& result) {
        result.m[0] *= logits.unit;
        result.m[1] *= logits.unit;
        write_tile(p, shared.tile[query_turn.stage], shared.query[query_turn.stage], first_row, o, result,
                   &shared.query_free[query_turn.stage]);
        query_turn.advance();
        clear_output();
    }

    // What is known of the block at `turn`, whose keys have come. A dense bias of it is on its way then.
    __device__ __forceinline__ Order read_order() {
        const Order order = shared.order[turn.stage];
        if (BIAS == BIAS_DENSE) bias.fetch(p, shared, turn.stage, order.following);
        return order;
    }

    // Between these two a warpgroup issues products, and no other does (but for delayed ones).
    __device__ __forceinline__ void take_turn() const {
        if (TURNS) named_barrier(TURN_BARRIER + group_row / 64, 256);
    }

    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) named_barrier_arrive(TURN_BARRIER + (group_row / 64 + 1) % CONSUMERS, 256);
    }

    // Begins the sums of the block at `turn` and takes a turn. Where the products are long, the others wait for those alone.
    __device__ __forceinline__ void begin_turn() {
        if (HEAD_DIM > 64) begin_sums();
        take_turn();
        if (HEAD_DIM <= 64) begin_sums();
    }

    // What else is added to the logits of the block at `turn`; to be called while their products are under way.
    __device__ __forceinline__ void fetch_bias() {
        if (BIAS != BIAS_DENSE) bias.fetch(p, shared, turn.stage, -1);
    }

    __device__ __forceinline__ void release_keys(const Turn<STAGES>& turn) const {
        barrier_arrive(&shared.key_free[turn.stage]);
    }

    // Logits of the block at `turn` become exponentials. Returns whether outputs so far must be multiplied by `rescale`.
    template <int fragments>
    __device__ __forceinline__ bool update(float (&rescale)[2]) {
        const bool moved = state.update<fragments>(s, logits.unit, slack, rescale);
        // The exponentials are to be computed while the output products are under way. The assembler would move them
        // behind the wait for these products, but moves nothing across a branch that depends on them.
        if (__any_sync(ALL_LANES, state.l[0] + state.l[1] < 0.0f)) __nanosleep(0);
        return moved;
    }

    // The same from the products on, of a block that is not whole. `held`: its keys are not released yet, for its values must
    // be looked at.
    template <int fragments>
    __device__ __forceinline__ bool exponentiate_part(int clear, bool& held, float (&rescale)[2]) {
        logits.template finish<fragments>(s, bias);
        if (clear < BLOCK_N) {
            const int4 found = *reinterpret_cast<const int4*>(shared.nonfinite[turn.stage]);
            held = (found.x | found.y | found.z | found.w) != 0;
            apply_mask<fragments>(s, shared, turn.stage, clear, position);
        }
        if (!held) release_keys(turn);
        return update<fragments>(rescale);
    }

    __device__ __forceinline__ bool exponentiate(const Order& order, bool& held, float (&rescale)[2]) {
        held = false;
        if (PLAIN && order.whole()) {
            logits.template finish<KEY_FRAGMENTS>(s, bias);
            release_keys(turn);
            return update<KEY_FRAGMENTS>(rescale);
        }
        if (!order.few()) return exponentiate_part<KEY_FRAGMENTS>(order.clear(), held, rescale);
        const bool moved = exponentiate_part<FEW_FRAGMENTS>(order.clear(), held, rescale);
#pragma unroll
        for (int n = FEW_FRAGMENTS; n < KEY_FRAGMENTS; ++n)  // or the assembler would let the products wait for each other
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] = 0.0f;
        return moved;
    }

    // Exponentials become the operand of the output product.
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[n][i] = pack_pair(s[n].x[2 * i], s[n].x[2 * i + 1]);
    }

    // The output products of the block at `value_turn`, whose values have come and whose keys were at `keys`.
    __device__ __forceinline__ void start_output(bool few, bool held, const Turn<STAGES>& keys) {
        ELEMENT* value = shared.values[value_turn.stage];
        if (held) {
            isolate_nonfinite(o, value, shared, keys.stage, FEW && few ? FEW_KEYS : BLOCK_N,
                              shared.tile[query_turn.stage], first_row);
            release_keys(keys);
        }
        begin_output(o, probability, value, few);
    }
};

__device__ __forceinline__ void consume(Shared& shared, const AttentionParams& p) {
#if SEQUENCES
    barrier_wait(&shared.key_arrived[0], 0);
    if (shared.order[0].state < 0) return;  // none of this block's numbers has a tile
#endif
    Consumer c(shared, p);
    float rescale[2];
    bool held;  // the current block's keys
    Turn<QUERY_STAGES> queries;  // of the block whose logits come next
    barrier_wait(&shared.query_arrived[queries.stage], queries.phase);
    barrier_wait(&shared.key_arrived[c.turn.stage], c.turn.phase);
    c.begin_sums();
    c.start_logits(queries);
    c.open_tile(queries);
    Order current = c.read_order();
    c.fetch_bias();
    c.clear_output();
    products_wait<0>();
    pin(c.s);
    c.exponentiate(current, held, rescale);
    c.round_probabilities();
    c.look_ahead(c.turn.next());
    if (c.group_row / 64 == CONSUMERS - 1) c.pass_turn();
    for (;;) {
        const Turn<STAGES> keys = c.turn;  // of the current block
        Order next;
        if (PLAIN && current.state == 0) {
            c.turn.advance();
            c.meet_keys();
            c.begin_turn();
            c.start_logits(queries);
            next = c.read_order();
            c.meet_values();
            c.start_output(false, false, keys);
            c.pass_turn();
        } else {
            if (current.ends()) break;
            bool unwritten = current.unwritten();
            c.turn.advance();
            if (current.closes()) {
                if (unwritten) c.close_tile(c.complete);  // the coming queries need its place
                unwritten = false;
                queries.advance();
                barrier_wait(&shared.query_arrived[queries.stage], queries.phase);
                c.open_tile(queries);
            }
            c.meet_keys();
            c.begin_turn();
            c.start_logits(queries);
            next = c.read_order();
            c.meet_values();
            const bool delayed = unwritten || held;  // what comes before the output products takes long, or waits for all consumers
            if (delayed) c.pass_turn();
            if (unwritten) c.close_tile(c.complete);
            c.start_output(current.few(), held, keys);
            if (!delayed) c.pass_turn();
        }
        c.fetch_bias();
        // Never; but the assembler would wait for the bias ahead of the output products, and moves nothing across a branch.
        if (BIAS == BIAS_DENSE && next.following < -1) __nanosleep(0);
        products_wait<1>();
        pin(c.s);
        const bool moved = c.exponentiate(next, held, rescale);
        c.finish_output();
        c.release_values();
        c.look_ahead(c.turn.next());
        c.round_probabilities();
        if (moved && !current.closes()) {
#pragma unroll
            for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
                for (int i = 0; i < 8; ++i) c.o[d].x[i] *= rescale[fragment_row(i)];
        }
        if (current.closes()) next.state |= Order::UNWRITTEN;
        current = next;
    }
    if (current.unwritten()) c.close_tile(c.complete);
    barrier_wait(&shared.value_arrived[c.value_turn.stage], c.value_turn.phase);
    c.start_output(current.few(), held, c.turn);
    c.finish_output();
    c.close_tile(c.state);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    const __grid_constant__ ForwardParams launch) {
    extern __shared__ unsigned char shared_memory[];
    // The swizzle counts rows from 1024-byte boundaries.
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERY_STAGES; ++i) {
            barrier_init(&shared.query_arrived[i], QUERY_BULK ? 1 : 2 * PRODUCER_THREADS);
            barrier_init(&shared.query_free[i], CONSUMER_THREADS);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.key_arrived[i], 2 * PRODUCER_THREADS);
            barrier_init(&shared.key_free[i], CONSUMER_THREADS);
            barrier_init(&shared.value_arrived[i], PRODUCER_THREADS);
            barrier_init(&shared.value_free[i], CONSUMER_THREADS);
        }
        barrier_init_fence();
    }
    __syncthreads();  // the barriers are in place
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(shared, launch);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        consume(shared, launch.attention);
    }
}
