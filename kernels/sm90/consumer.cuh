// A consumer of the Hopper forward: a warp of a warpgroup that multiplies 64 rows of the tile, and what it does with a block of
// keys. In which order it does that is said in sm90/forward.cu.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/logits.cuh"

using Queries = unsigned[QUERIES_KEPT ? DIM_FRAGMENTS : 1][4];  // of a warp, as operands

// s = rows . k, or s += rows . k, of queries in registers or in shared memory
__device__ __forceinline__ void begin_logits(Fragment (&s)[KEY_FRAGMENTS], Queries& kept, const ELEMENT* query,
                                             const ELEMENT* key) {
    const unsigned a = matrix_descriptor(query, 0), b = matrix_descriptor(key, 0);
    pin(s);
    if (QUERIES_KEPT) pin(kept);
    products_begin();
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        const int chunk = d / 4, step = d % 4 * 32;
        const unsigned keys = moved(b, chunk * BLOCK_N * CHUNK_ROW_BYTES + step);
        const bool add = d > 0 || BIAS_FIRST;
        if (QUERIES_KEPT)
            Wgmma<KEY_FRAGMENTS>::multiply_queries(s, kept[QUERIES_KEPT ? d : 0], keys, add);
        else
            Wgmma<KEY_FRAGMENTS>::multiply_shared(s, moved(a, chunk * BLOCK_M * CHUNK_ROW_BYTES + step), keys, add);
    }
    products_commit();
}

// o += p . values of 16 keys, in pieces of at most 128 columns; or without `add` o = these.
template <int first>
__device__ __forceinline__ void add_columns(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&a)[4], unsigned value, bool add) {
    if constexpr (first < DIM_FRAGMENTS) {
        constexpr int REST = DIM_FRAGMENTS - first;
        constexpr int SIZE = REST >= 8 ? 8 : REST == 6 ? 6 : REST >= 4 ? 4 : REST >= 2 ? 2 : 1;
        Wgmma<SIZE>::multiply_registers(&o[first], a,
                                        moved(value, first / 4 * BLOCK_N * CHUNK_ROW_BYTES + first % 4 * 32), add);
        add_columns<first + SIZE>(o, a, value, add);
    }
}

// The same of the block's first fragments: one group of products.
template <int fragments>
__device__ __forceinline__ void add_products(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&probability)[KEY_FRAGMENTS][4],
                                             unsigned value, bool add) {
    products_begin();
#pragma unroll
    for (int n = 0; n < fragments; ++n)
        add_columns<0>(o, probability[n], moved(value, n * 16 * CHUNK_ROW_BYTES), n > 0 || add);
    products_commit();
}

// A group with a branch inside would be waited for like several.
__device__ __forceinline__ void begin_output(Fragment (&o)[DIM_FRAGMENTS], unsigned (&probability)[KEY_FRAGMENTS][4],
                                             const ELEMENT* value, bool few, bool add) {
    const unsigned b = matrix_descriptor(value, BLOCK_N * CHUNK_ROW_BYTES);
    pin(o);
    pin(probability);
    if (FEW && few)
        add_products<FEW_FRAGMENTS>(o, probability, b, add);
    else
        add_products<KEY_FRAGMENTS>(o, probability, b, add);
}

// What is compared with the visibility of keys: the position of the query of row `row`, or with BITS its bit.
__device__ __forceinline__ int position_of(const Tile& t, int row) {
    const int query = row / HEADS;
    return BITS ? static_cast<int>(1u << ((t.first_query + query) & 31)) : t.first_position + query;
}

// Of a block's values those that are not finite become zero; by all consumers together.
__device__ __forceinline__ void clear_nonfinite(ELEMENT* value, int keys) {
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // everybody has read the values that are about to be cleared
    for (int i = thread_now() - PRODUCER_THREADS; i < keys * HEAD_DIM_PADDED; i += CONSUMER_THREADS) {
        const int column = i % HEAD_DIM_PADDED;
        ELEMENT& x = piece_of<BLOCK_N>(value, i / HEAD_DIM_PADDED, column / 8)[column % 8];
        if (!isfinite(to_float(x))) from_float(x, 0.0f);
    }
    shared_write_fence();
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // the block is finite
}

// A value that is not finite must not reach a row that does not see its key, and 0 * inf is NaN: such values are added
// to the rows that see them, and are zero for the product. By all consumers together.
__device__ __forceinline__ void isolate_nonfinite(Fragment (&o)[DIM_FRAGMENTS], ELEMENT* value,
                                                  const Shared& shared, int stage, int keys, const Tile& t, int first_row) {
    const int row_of_lane = first_row + lane_now() / 4;
    const int position[2] = {position_of(t, row_of_lane), position_of(t, row_of_lane + 8)};
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
        const int row = row_of_key(key), piece = lane_now() % ROW_PIECES;
        const unsigned found = nonfinite(*reinterpret_cast<const uint4*>(piece_of<BLOCK_N>(value, row, piece)), value);
        if (!__any_sync(ALL_LANES, (found & sign_bits(sizeof(ELEMENT))) != 0)) continue;
        const auto seen = visibility(shared, stage, key);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int column = 16 * d + 2 * (lane_now() & 3) + fragment_column(i);
                const float v = to_float(piece_of<BLOCK_N>(value, row, column / 8)[column % 8]);
                if (!isfinite(v) && visible(position[fragment_row(i)], seen)) o[d].x[i] += v;
            }
    }
    clear_nonfinite(value, keys);
}

#if OUT_BULK
// This warp's 16 rows of out, which are complete, on their way.
__device__ __forceinline__ void copy_rows(const ForwardParams& launch, const Output& t, const ELEMENT* staging, int first_row) {
    shared_write_fence();
    __syncwarp();
    if (lane_now() != 0) return;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        store_box(&launch.out, staging + (chunk * BLOCK_M + first_row) * CHUNK_COLUMNS, chunk * CHUNK_COLUMNS, t.first_head,
                  t.first_query + first_row / HEADS, t.batch);
    stores_commit();
}
#else
// Row `row` of a tile's output, whose first one is at `first`: query by query, in each head by head.
__device__ __forceinline__ ELEMENT* row_of_output(ELEMENT* first, int row, int query_bytes) {
    const void* place = row_address(first + row % HEADS * HEAD_DIM, row / HEADS, query_bytes);
    return const_cast<ELEMENT*>(static_cast<const ELEMENT*>(place));
}

// This warp's rows of out, which are complete.
__device__ __forceinline__ void copy_rows(const ForwardParams& launch, const Output& t, ELEMENT* staging, int first_row) {
    const AttentionParams& p = launch.attention;
    const int lane = lane_now();
    __syncwarp();  // the warp's rows are complete
    constexpr int STEP = 32 / ROW_LANES, COPIES = 16 / STEP;
    constexpr bool REGULAR = 16 % HEADS == 0;  // a lane's rows lie the same distances apart in all lanes and warps
    const int piece = lane % ROW_LANES, own = lane / ROW_LANES;
    ELEMENT* target =
        p.out + (((long long)t.batch * p.query_length + t.first_query) * p.heads + t.first_head) * HEAD_DIM + piece * 8;
    const int query_bytes = p.heads * HEAD_DIM * static_cast<int>(sizeof(ELEMENT));
    if (REGULAR) target = row_of_output(target, first_row + own, query_bytes);
    // Lanes that have no piece read the last one: behind it another tile's rows may be on their way.
    const unsigned first_piece = shared_address(piece_of<BLOCK_M>(staging, first_row + own, min(piece, ROW_PIECES - 1)));
    uint4 pieces[COPIES];
#pragma unroll
    for (int k = 0; k < COPIES; ++k)
        pieces[k] = load_shared_16((first_piece ^ k * STEP % 8 * 16) + k * STEP * CHUNK_ROW_BYTES);
#pragma unroll
    for (int k = 0; k < COPIES; ++k) {
        ELEMENT* place = row_of_output(target, REGULAR ? k * STEP : first_row + k * STEP + own, query_bytes);
        if (piece * 8 < HEAD_DIM && first_row + k * STEP + own < t.rows) __stcg(reinterpret_cast<uint4*>(place), pieces[k]);
    }
}
#endif

// Writes this warp's 16 rows of out and lse, through the tile's own query rows, which nobody needs any more. In few
// instructions: they run once a tile, so each of them is fetched anew. `spoiled` becomes 1 if a value of the tile's keys is
// not finite: 0 times it is not either, so each row has such an output in its column, and one of a lane's two rows tells. Where
// exponentials may be large a single row may overflow, too.
__device__ __forceinline__ void write_tile(const ForwardParams& launch, const Output& output, ELEMENT* staging, int first_row,
                                           const Fragment (&o)[DIM_FRAGMENTS], RowSums& state, int& spoiled) {
    const Output t = output;  // all of it now, for nothing is read ahead of the stores that follow
    const int lane = lane_now();
    state.finish();
    const float factor[2] = {state.inverse_sum(0), state.inverse_sum(1)};
    const unsigned corner = shared_address(piece_of<BLOCK_M>(staging, first_row + lane % 16, lane / 16));
    unsigned nothing = 0;
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float f = factor[fragment_row(i)];
            words[i / 2] = pack_pair(o[d].x[i] * f, o[d].x[i + 1] * f);
        }
        store_matrices((corner ^ 2 * d % 8 * 16) + d / 4 * BLOCK_M * CHUNK_ROW_BYTES, words);
        nothing = add_nothing(add_nothing(nothing, words[0]), words[2]);
        if (RowSums::LARGE) nothing = add_nothing(add_nothing(nothing, words[1]), words[3]);
    }
    if (nothing != 0) raise(spoiled);
    copy_rows(launch, t, staging, first_row);
    const int r = lane & 3, row = first_row + lane / 4 + 8 * r;  // two of four lanes write one each
    if (r < 2 && row < t.rows)
        __stcg(t.lse + (long long)(row % HEADS) * launch.attention.query_length + row / HEADS, state.lse(r));
}

// A consumer warp's registers and turns.
struct Consumer {
    Shared& shared;
    const ForwardParams& launch;
    const AttentionParams& p;
    const Logits logits;
    const int lane, group_row, first_row;  // rows of the warpgroup and of this warp in the tile
    const unsigned bias_place;             // of this lane, in stage 0
    Turn<STAGES> turn;                       // of the keys whose logits become exponentials
    Turn<VALUE_STAGES> value_turn;           // of the values that come next
    Turn<QUERY_STAGES> queries, query_turn;  // of these logits, and of the tile whose output comes next
    Fragment s[KEY_FRAGMENTS], o[DIM_FRAGMENTS];
    unsigned probability[KEY_FRAGMENTS][4];
    Queries query;  // at `queries`
    bool incomplete;                // before the block at `turn`
    int polynomials;                // SOFTCAP: how many hold for the products of the tile, as far as these are known
    bool keys_there, values_there;  // of the products that come next: seen to have come
    LaneBias bias;
    float sum[2];  // of the exponentials at hand
    RowSums state, complete;  // of the tile at hand, and of the one before until its output is written

    __device__ __forceinline__ Consumer(Shared& shared, const ForwardParams& launch)
        : shared(shared), launch(launch), p(launch.attention), logits(p.scale, p.softcap), lane(thread_now() & 31),
          group_row(uniform((thread_now() - PRODUCER_THREADS) / 128) * 64),
          first_row(uniform((thread_now() - PRODUCER_THREADS) / 32) * 16),
          bias_place(kept(shared_address(&shared.bias[0][place_of(0, 0)]))) {}

    // Of the warpgroup among those that multiply.
    __device__ __forceinline__ int number() const { return group_row / 64; }

    // The softmax goes on to the tile whose queries are at `queries`.
    __device__ __forceinline__ void open_tile() {
        complete = state;
        state = RowSums();
#if BIAS == BIAS_DENSE
        const Tile& t = shared.tile[queries.stage];
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

    // Waits for the queries at `queries`.
    __device__ __forceinline__ void meet_queries() {
        barrier_wait(&shared.query_arrived[queries.stage], queries.phase);
        if (!QUERIES_KEPT) return;
        ELEMENT* rows = shared.query[queries.stage];
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
            load_matrices(query[QUERIES_KEPT ? d : 0],
                          shared_address(piece_of<BLOCK_M>(rows, first_row + lane % 16, 2 * d + lane / 16)));
    }

    // Asks whether the keys at `keys` have come, for the answer takes its time.
    __device__ __forceinline__ void look_ahead(const Turn<STAGES>& keys) {
        keys_there = barrier_test(&shared.key_arrived[keys.stage], keys.phase);
    }

    // Waits for these keys, and asks whether the values at `value_turn` have come.
    __device__ __forceinline__ void meet_keys(const Turn<STAGES>& keys) {
        if (!keys_there) barrier_wait(&shared.key_arrived[keys.stage], keys.phase);
        values_there = barrier_test(&shared.value_arrived[value_turn.stage], value_turn.phase);
    }

    __device__ __forceinline__ void meet_values() const {
        if (!values_there) barrier_wait(&shared.value_arrived[value_turn.stage], value_turn.phase);
    }

    // The sums of the block with these keys, which have come.
    __device__ __forceinline__ void begin_sums(const Turn<STAGES>& keys) {
#if BIAS_FIRST
        begin_with_bias(s, bias_place, keys.stage);
        pin(s);  // not behind the wait for a turn
#endif
    }

    __device__ __forceinline__ void start_logits(const Turn<STAGES>& keys, const Turn<QUERY_STAGES>& queries) {
        begin_logits(s, query, shared.query[queries.stage] + group_row * CHUNK_COLUMNS, shared.keys[keys.stage]);
    }

    // The logits that were started last; later products may be under way.
    template <int later>
    __device__ __forceinline__ void finish_products() {
        products_wait<later>();
        pin(s);
        if (QUERIES_KEPT) pin(query);
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
    __device__ __forceinline__ void close_tile(RowSums& result) {
        write_tile(launch, shared.output[query_turn.stage], shared.query[query_turn.stage], first_row, o, result,
                   shared.spoiled);
        query_turn.advance();
    }

    // The block's last tile, or a part of it (SPLIT).
    __device__ __forceinline__ void close_last_tile() {
#if SPLIT
        if (blockIdx.x < launch.parts.blocks) {
            write_part(launch.parts, shared.output[query_turn.stage].rows, first_row, o, state, shared.spoiled);
            shared_write_fence();  // if everything is done once more, the copy engine overwrites these queries
            query_turn.advance();
            return;
        }
#endif
        close_tile(state);
    }

    // When it has been read, other queries may come to its place. Better once the products that follow are under way, so that
    // nobody waits for it; a tile of one block calls it at once, because the next queries need its place.
    __device__ __forceinline__ void release_queries() const {
#if OUT_BULK
        stores_wait_read();
        __syncwarp();
#elif QUERY_BULK
        shared_write_fence();  // the copy engine may overwrite these rows
#endif
        barrier_arrive(&shared.query_free[query_turn.stage_before()]);
    }

    // What is known of the block with these keys, which have come. A dense bias of it is on its way then.
    __device__ __forceinline__ Order read_order(const Turn<STAGES>& keys) {
        const Order order = shared.order[keys.stage];
#if BIAS == BIAS_DENSE
        bias.fetch(p, shared, keys.stage, order);
#endif
        return order;
    }

    // What is left when all tiles have been written: the turn that nobody has taken, and writing.
    __device__ __forceinline__ void forget() const {
        if (number() == 0) take_turn();
#if OUT_BULK
        stores_wait();
#endif
    }

    // Between these two a warpgroup issues products, and no other does (but for delayed ones).
    __device__ __forceinline__ void take_turn() const {
        if (TURNS) named_barrier(TURN_BARRIER + number(), 256);
    }

    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) named_barrier_arrive(TURN_BARRIER + (number() + 1) % CONSUMERS, 256);
    }

    // Begins the sums of the block at `turn` and takes a turn. Where the products are long, the others wait for those alone.
    __device__ __forceinline__ void begin_turn() {
        if (HEAD_DIM > 64) begin_sums(turn);
        take_turn();
        if (HEAD_DIM <= 64) begin_sums(turn);
    }

    // What else is added to the logits of the block at `turn`; to be called while their products are under way.
    __device__ __forceinline__ void fetch_bias() {
#if BIAS != BIAS_DENSE
        bias.fetch(bias_place + turn.stage * BLOCK_N * 4);
#endif
    }

    __device__ __forceinline__ void release_keys(const Turn<STAGES>& turn) const {
        barrier_arrive(&shared.key_free[turn.stage]);
    }

    // Softcap and bias, where products are to become logits.
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
        if (incomplete) polynomials = found;
        if (found > 0) {
            const SoftcapPolynomial& p = launch.softcap[0];
            change([&](float x, float bias) { return p.template logit<true>(x, p.distance(x), bias); });
            return;
        }
#endif
        change(logits);
    }

    // These and masks.
    template <int fragments>
    __device__ __forceinline__ void finish_logits(const Order& order) {
        make_logits<fragments>();
        if (order.clear() == BLOCK_N) return;
        const Tile& t = shared.tile[queries.stage];
        const int position[2] = {position_of(t, first_row + lane / 4), position_of(t, first_row + lane / 4 + 8)};
        apply_mask<fragments>(s, shared, turn.stage, order.clear(), position);
    }

    // References come from the first `asked` fragments. Those of rows that may see few keys are their maxima: p is exact then
    // where a row sees one. So they are if an output was not finite, as values near the largest float32 need it.
    template <int fragments, int asked = fragments>
    __device__ __forceinline__ void exponentiate(const Order& order) {
        if (incomplete) {
            state.template refer<asked>(s, logits.unit, order.whole() && !shared.careful);
            if (!state.plain()) polynomials = 0;
        }
        state.template exponentiate<fragments>(s, logits.unit, sum);
    }

#if SOFTCAP && BIAS != BIAS_DENSE
    // The same of a whole block by the last polynomial that is known to hold for the tile, or not; then the block has its
    // products again.
    template <bool high>
    __device__ __forceinline__ bool approximate() {
        if (state.template exponentiate<high>(s, bias, launch.softcap[!high], sum)) return true;
        finish_output();
        repeat_products();
        --polynomials;
        return false;
    }
#endif

    // Whether the values of the block at `turn` must be looked at.
    __device__ __forceinline__ bool holds(const Order& order) const {
        return order.clear() < BLOCK_N && shared.careful;
    }

    // The products of the block at `turn` become exponentials; where its values must be looked at, its keys are held.
    __device__ __forceinline__ void exponentiate(Order& order) {
        if (PLAIN && order.whole()) {
#if SOFTCAP && BIAS != BIAS_DENSE
            if (!incomplete) {
                if (polynomials == 2 && approximate<false>()) return;
                if (polynomials == 1 && approximate<true>()) return;
            }
#endif
            make_logits<KEY_FRAGMENTS>();
            exponentiate<KEY_FRAGMENTS, BIAS == BIAS_DENSE ? KEY_FRAGMENTS : 2>(order);
            return;
        }
        if (holds(order)) order.state |= Order::HELD;
        if (!order.few()) {
            finish_logits<KEY_FRAGMENTS>(order);
            exponentiate<KEY_FRAGMENTS>(order);
        } else {
            finish_logits<FEW_FRAGMENTS>(order);
            exponentiate<FEW_FRAGMENTS>(order);
            fill_rest(0.0f);  // or the assembler would let the products wait for each other
        }
    }

    // Of a block of few keys.
    __device__ __forceinline__ void fill_rest(float x) {
#pragma unroll
        for (int n = FEW_FRAGMENTS; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] = x;
    }

    // The products of the block at `turn` once more, by each warp for itself.
    __device__ __forceinline__ void repeat_products() {
#if BIAS_FIRST
        begin_with_bias(s, bias_place, turn.stage);
#else
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] = 0.0f;
#endif
        ELEMENT *rows = shared.query[queries.stage], *keys = shared.keys[turn.stage];
        // Of 16 x 16 numbers, as load_matrices wants them.
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

    // After `exponentiate`, while its exponentials are in no sum and no product yet: whether some are too large. The assembler
    // would move them behind the wait for the output products, but moves nothing across a branch that depends on them.
    __device__ __forceinline__ bool strained() const {
        return __any_sync(ALL_LANES, fmaxf(sum[0], sum[1]) > RowSums::LARGEST);
    }

    // References follow, and so do the outputs so far, if they are of the same tile.
    __device__ __forceinline__ void relieve(const Order& order, bool same_tile) {
        finish_output();
        float factor[2];
        if (__any_sync(ALL_LANES, fmaxf(sum[0], sum[1]) == infinity())) {
            repeat_products();
            if (BIAS == BIAS_DENSE) read_order(turn);  // for the bias, which is not kept in registers for this
            finish_logits<KEY_FRAGMENTS>(order);
            if (order.few()) fill_rest(-infinity());
            state.leap(s, logits.unit, factor);
            state.template exponentiate<KEY_FRAGMENTS>(s, logits.unit, sum);
        } else {
            state.follow(s, sum, factor);
        }
        if (!state.plain()) polynomials = 0;
        if (!same_tile) return;
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) o[d].x[i] *= factor[fragment_row(i)];
    }

    // The block's exponentials count, and its keys have been used.
    __device__ __forceinline__ void settle(const Order& order) {
        state.l[0] += sum[0];
        state.l[1] += sum[1];
        if (!order.held()) release_keys(turn);
    }

    // Exponentials become the operand of the output product.
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[n][i] = pack_pair(s[n].x[2 * i], s[n].x[2 * i + 1]);
    }

    // The output products of the block at `value_turn`, whose values have come and whose keys were at `keys`; `opens`: it is
    // its tile's first.
    __device__ __forceinline__ void start_output(const Order& order, const Turn<STAGES>& keys, bool opens) {
        ELEMENT* value = shared.values[value_turn.stage];
        if (order.held()) {
            if (opens) clear_output();
            opens = false;
            isolate_nonfinite(o, value, shared, keys.stage, order.few() ? FEW_KEYS : BLOCK_N,
                              shared.tile[query_turn.stage], first_row);
            release_keys(keys);
        }
        begin_output(o, probability, value, order.few(), !opens);
    }

    // From the block at `turn` on others multiply what is left, without rows of this consumer's: its part in their barriers.
    // `first`: of all blocks, which needs no turn.
    __device__ __forceinline__ void stand_by(bool first) {
        for (Order order(0); !order.closes(); turn.advance()) {
            barrier_wait(&shared.key_arrived[turn.stage], turn.phase);
            order = shared.order[turn.stage];
            if (!first) take_turn();
            if (!first || number() == CONSUMERS - 1) pass_turn();
            first = false;
            barrier_wait(&shared.value_arrived[value_turn.stage], value_turn.phase);
            if (holds(order)) clear_nonfinite(shared.values[value_turn.stage], order.few() ? FEW_KEYS : BLOCK_N);
            release_keys(turn);
            release_values();
        }
    }
};
