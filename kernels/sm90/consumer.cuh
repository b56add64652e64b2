// A consumer of the Hopper forward: a warp of a warpgroup that multiplies 64 rows of the tile, and what it does with a block
// of keys. In which order it does that is said in sm90/forward.cu.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/logits.cuh"
#include "sm90/mma.cuh"
#include "sm90/nonfinite.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/softmax.cuh"

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
