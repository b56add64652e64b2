// The attention of new tokens for a cache of kept keys (decode/cache_state.cuh), and the cache with them.
//
// query      // (n, L, H, HEAD_DIM) ELEMENT       out      // (n, L, H, VALUE_DIM), contiguous     lse // (n, H, L) f32
//
// One launch. The R slots of one (sequence, kv head, set of HEADS query heads) are split among `num_splits` blocks,
// which only read the state: `lowest`, its score and `free`, found by the previous launch, tell every block which key
// leaves the top and which slot the token takes; in shared memory the token's rows replace that slot's. A block writes
// its results to `partial`: outputs, and for set 0 the lowest key of the top and a free slot of its split. The block
// with the last ticket of a (sequence, kv head) combines the splits in order and alone changes the state, which no
// block reads any more by then. `lengths` is shared by all kv heads of a sequence: the last of these changes it (a
// second ticket).
//
// PLANNED: the launch attends from up to TOKENS tokens of the call, from `token` on: row t * HEADS + h of a tile is query
// head h of the t-th. decode/plan.cu has found what each of the call's tokens changes, as if they came one by one. A
// tile's row of a token sees the slots as they are after it. In most steps of a warp that is the same for all rows; where
// it is not, the rows of each `turn`, from one change to the next, have logits and products of their own. So every row
// takes the same steps, in the same order, as in a launch for its token alone: bits are equal. With `commits`, the launch
// with a sequence's last token changes its state.
//
// CLUSTER > 1 (sm_90 and later): the splits, CLUSTER of them and a single set, are a cluster of blocks. They write
// their results to the first block's shared memory, which continues when all have arrived: no partial results in global
// memory and no ticket.
//
// RAGGED: each (sequence, kv head) has a segment of flat arrays (rows, HEAD_DIM), with a number of slots of its own, and as
// many splits as these fill. For each split of all, `segments` says what it belongs to.
//
// A warp loads its first rows before it is known which are needed, because that takes as long to find out as the rows
// take to arrive; of the others it loads only those that are needed. counts: sequences with fewer than `token` + 1
// tokens take no step.
//
// Prelude: that of decode/cache_state.cuh, ROWS = HEADS * TOKENS, MIN_BLOCKS, ATTEND (0: there are no queries), CLUSTER,
// TOKENS, PLANNED (0: TOKENS is 1; 1: ATTEND is), STORAGE.
#include "decode/cache_state.cuh"
#if PLANNED
#include "decode/planned.cuh"
#endif

constexpr int HEADS = ROWS / TOKENS;

// Of a row of the tile: its token of the launch, and its query head of the set.
__device__ __forceinline__ int token_of(int row) { return TOKENS > 1 ? row / HEADS : 0; }
__device__ __forceinline__ int head_of(int row) { return TOKENS > 1 ? row % HEADS : row; }

constexpr int KEY_PIECES = 4 * KEY_CHUNKS, VALUE_PIECES = 8 * VALUE_CHUNKS, PIECES = KEY_PIECES + VALUE_PIECES;
static_assert(PIECES <= THREADS, "a piece a thread");

struct StepShared {
    SplitShared split;
    Stored token[PLANNED ? MAX_TOKENS : 1][PIECES];  // of each token its key, then its value
    float scale[PLANNED ? MAX_TOKENS : 1][2];        // likewise, with STORAGE
#if PLANNED
    Change changes[MAX_TOKENS];
#endif
#if CLUSTER > 1
    struct {
        alignas(16) float o[CLUSTER][ROWS][VALUE_DIM];
        SplitState state[CLUSTER][ROWS];
        Candidate candidates[CLUSTER];
    } splits;  // of the first block: the results of all
#endif
    Candidate candidates[WARPS];
    int last;
};

// The logits of a step under the mask `seen` of its 16 slots, their biases in lanes 0 to 15.
__device__ __forceinline__ void mask_logits(Logits& s, const Products& products, const LogitScale& logit, unsigned seen,
                                            float score) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int key = value_key(k);
        const float bias = log2_units(__shfl_sync(ALL_LANES, score, key));
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const int i = k % 2 + 2 * r + k / 2 * 4;
            s.x[i] = seen >> key & 1 ? logit(products[i], bias) : -infinity();
        }
    }
}

// The state after the token, except its rows. One thread.
__device__ void change_state(const StepParams& p, const Head& head, const Change& change, Candidate lowest) {
    change_slots(p, head, change);
    const Found found(p.lowest[head.pair], change.enters, lowest);  // read again: a register less in the loop
    p.lowest[head.pair] = found.lowest;
    p.lowest_score[head.pair] = found.lowest_score;
    p.free[head.pair] = found.free;
}

// The rows of `tokens` tokens on their way to shared memory, a piece per thread and token.
template <int tokens>
struct TokenRows {
    Stored piece[tokens];
    float scale;  // with STORAGE, of token threadIdx.x / 2

    __device__ __forceinline__ TokenRows(const Head& head, int count) {
        const int i = threadIdx.x;
#pragma unroll
        for (int k = 0; k < tokens; ++k) {
            const bool exists = tokens == 1 || k < count;
            const int token = tokens == 1 ? head.p.token : exists ? k : 0;
            piece[k] = i < KEY_PIECES ? load_row<HEAD_DIM>(head.new_key(token), i, exists)
                                      : load_row<VALUE_DIM>(head.new_value(token), i - KEY_PIECES, exists && i < PIECES);
        }
        if (STORAGE && i < 2 * tokens && (tokens == 1 || i / 2 < count)) {
            const long long row = head.new_row(tokens == 1 ? head.p.token : i / 2);
            scale = i % 2 == 0 ? head.p.new_key_scale[row] : head.p.new_value_scale[row];
        }
    }

    // Complete after the next barrier.
    __device__ __forceinline__ void store(StepShared& shared) const {
#pragma unroll
        for (int k = 0; k < tokens; ++k)
            if (threadIdx.x < PIECES) shared.token[k][threadIdx.x] = piece[k];
        if (STORAGE && threadIdx.x < 2 * tokens) shared.scale[threadIdx.x / 2][threadIdx.x % 2] = scale;
    }
};

// From shared memory to a token's slot.
__device__ __forceinline__ void store_token(const StepShared& shared, int token, const Head& head, int slot) {
    const int i = threadIdx.x;
    if (i < KEY_PIECES)
        store_row<HEAD_DIM>(head.key_of(slot), i, shared.token[token][i]);
    else if (i < PIECES)
        store_row<VALUE_DIM>(head.value_of(slot), i - KEY_PIECES, shared.token[token][i]);
    if (STORAGE && i < 2) (i == 0 ? head.p.key_scale : head.p.value_scale)[head.row(slot)] = shared.scale[token][i];
}

// A token's rows replace those of key `number` of a step.
__device__ __forceinline__ void take_key(Keys& keys, const StepShared& shared, int token, int number) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 2; ++n)
        if (8 * n + lane / 4 == number) {
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) keys.piece[n][c] = shared.token[token][4 * c + lane % 4];
            if (STORAGE) keys.scale[n] = shared.scale[token][0];
        }
}

__device__ __forceinline__ void take_value(Values& values, const StepShared& shared, int token, int number) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (value_key(k) == number) {
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c) values.piece[c][k] = shared.token[token][KEY_PIECES + 8 * c + lane / 4];
            if (STORAGE) values.scale[k] = shared.scale[token][1];
        }
}

// Fetches the rows of the warp's first step into L2.
__device__ __forceinline__ void prefetch_first_rows(const StepParams& p, long long pair, int split) {
    const int first = split * p.split_size + threadIdx.x / 32 * STEP;
    const int rows = min(STEP, min((split + 1) * p.split_size, p.slots) - first);
    const long long row = pair * p.slots + first;
    const auto prefetch = [&](const Row* source, int dim) {
        const int bytes = rows * dim * static_cast<int>(sizeof(Row));
        for (int at = 128 * (threadIdx.x & 31); at < bytes; at += 32 * 128)
            prefetch_line(reinterpret_cast<const unsigned char*>(source + row * dim) + at);
    };
    prefetch(p.key, HEAD_DIM);
    prefetch(p.value, VALUE_DIM);
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" CLUSTERED __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) decode_step(const StepParams p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    StepShared& shared = *reinterpret_cast<StepShared*>(shared_memory);
    float* weights = reinterpret_cast<float*>(shared_memory + sizeof(StepShared));  // (ROWS, max(num_splits, WARPS))
    const int sets = CLUSTER > 1 ? 1 : p.sets;
#if RAGGED
    wait_for_earlier_kernels();
    const int set = blockIdx.x / p.num_splits, of_all = blockIdx.x % p.num_splits;
    const Segment segment = p.segments[of_all];
    const int num_splits = (segment.slots + p.split_size - 1) / p.split_size, blocks = num_splits * sets;
    const int split = of_all - segment.first_split;
#else
    const int num_splits = CLUSTER > 1 ? CLUSTER : p.num_splits, blocks = num_splits * sets;
    const int split = blockIdx.x % num_splits, set = blockIdx.x / num_splits % sets, pair = blockIdx.x / blocks;
    const Segment segment = {0, 0, pair, pair * num_splits};
    if (ATTEND && !SLOTS) prefetch_first_rows(p, pair, split);
    wait_for_earlier_kernels();
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Served served = RAGGED ? Served::of_cache(p, segment.pair) : Served::of_call(p, segment.pair);
    if (served.is_idle()) {
        if (ATTEND && !PLANNED && split == 0)
            write_nothing(p, served.batch, p.token, served.group * p.group + set * HEADS,
                          min(HEADS, p.group - set * HEADS));
        return;
    }
    const Head head(p, served, SLOTS ? served.pair(p) : segment.pair, segment.start, segment.slots);
    const int heads = ATTEND ? min(HEADS, p.group - set * HEADS) : 0;  // query heads of this block
    const int first_head = head.group * p.group + set * HEADS;
    const int real = PLANNED ? served.tokens(p) : p.token + 1, count = min(real, p.token + TOKENS);
    if (PLANNED ? real <= p.token : p.counts != nullptr && p.counts[head.batch * p.count_words] <= p.token) {
        if (ATTEND && !PLANNED && split == 0) write_nothing(p, head.batch, p.token, first_head, heads);
        return;
    }
    const int rows = TOKENS > 1 ? (count - p.token) * HEADS : heads;
#if CLUSTER > 1
    cluster_arrive_running();  // its shared memory exists
#endif

    // ---- this block's split of the slots ----
    const int first = split * p.split_size + warp * STEP, end = min((split + 1) * p.split_size, head.end());
    constexpr int STRIDE = WARPS * STEP;  // from a warp's step to its next
    const TokenRows<PLANNED ? MAX_TOKENS : 1> token(head, count);
    Candidate candidate = NOTHING;
    Change change = {0, 0.0f, false, -1, -1};
    if constexpr (ATTEND) {
        const Query query(rows, [&](int row) {
            return p.query + head.batch * p.query_batch + (p.token + token_of(row)) * p.query_row +
                   (first_head + head_of(row)) * p.query_head;
        });
        const LogitScale logit(p.scale, p.softcap);
        WarpState state;
        Keys keys;
        Values values;
        int next_slot = first;  // of the step whose rows are loaded next
        // Its slots in bounds; at first all that exist.
        unsigned seen = next_slot < end ? ~0u >> (32 - min(STEP, end - next_slot)) : 0;
        const auto slot_to_read = [&](int i) { return min(next_slot + key_to_read(i, seen), end - 1); };
        const auto take_next_keys = [&](Keys& keys) {
            load_keys(keys, [&](int i) { return head.key_of(slot_to_read(i)); });
            load_scales(keys, [&](int i) { return p.key_scale[head.row(slot_to_read(i))]; });
        };
        const auto take_next_values = [&](Values& values) {
            load_values(values, [&](int i) { return head.value_of(slot_to_read(i)); });
            load_scales(values, [&](int i) { return p.value_scale[head.row(slot_to_read(i))]; });
        };
        const auto slot_at = [&](int base) { return Slot(head, base + lane, lane < STEP ? end : 0); };
        Slot slot = slot_at(first), following = slot_at(first + STRIDE);
        if (TOGETHER) {
            take_next_keys(keys);
            take_next_values(values);
        }
#if PLANNED
        const Planned planned(p, shared.changes, head, count);
        planned.store(shared.changes);
        query.store(shared.split);
        token.store(shared);
        __syncthreads();  // the plan, the queries and the tokens are in place
        Turns turns = planned.turns(slot, first, end);
        seen = turns.seen();
        for (int base = first; base < end; base += STRIDE) {
            const Turns now = turns;
            const unsigned changes = planned.at(base);
            Slot current = slot;
            const auto advance = [&] {
                slot = following;
                following = slot_at(base + 2 * STRIDE);
                next_slot = base + STRIDE;
                turns = planned.turns(slot, next_slot, end);
                seen = turns.seen();
            };
            const bool alike = TOKENS == 1 || now.begins == 0;
            if (TOGETHER) advance();
            else take_next_keys(keys);
            // Tokens before `until` come into the slots of this step.
            unsigned left = changes;
            const auto take_keys = [&](int until) {
                for (; left != 0 && __ffs(left) <= until; left &= left - 1) {
                    const int k = __ffs(left) - 1;
                    current.apply(shared.changes[k]);
                    take_key(keys, shared, k, shared.changes[k].target - base);
                }
            };
            take_keys(p.token + 1);
            Products products;
            Logits s;
            score_keys(products, shared.split, keys);
            const float score = current.bias(p, planned.position(0));
            if (!alike) mask_logits(s, products, logit, now.seen_by(0), score);
            for (unsigned begins = alike ? 0 : now.begins; begins != 0; begins &= begins - 1) {
                const int t = __ffs(begins) - 1;
                take_keys(p.token + t + 1);
                Logits other;
                score_keys(products, shared.split, keys);
                mask_logits(other, products, logit, now.seen_by(t), current.bias(p, planned.position(t)));
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (lane / 4 + 8 * fragment_row(i) >= t * HEADS) s.x[i] = other.x[i];
            }
            if (!TOGETHER) take_next_values(values);
            if (TOGETHER) take_next_keys(keys);
            else advance();
            if (alike) mask_logits(s, products, logit, now.seen_by(0), score);
            state.online_softmax(s);
            left = changes;
            const auto take_values = [&](int until) {
                for (; left != 0 && __ffs(left) <= until; left &= left - 1) {
                    const int k = __ffs(left) - 1;
                    take_value(values, shared, k, shared.changes[k].target - base);
                }
            };
            take_values(p.token + 1);
            only_seen(values, now.seen_by(0));
            if (alike) {
                state.add(s, values);
            } else {
                int t = 0;
                for (unsigned begins = now.begins;; begins &= begins - 1) {
                    const int next = begins != 0 ? __ffs(begins) - 1 : TOKENS;
                    state.add(s, values, RowRange{t * HEADS, next * HEADS});
                    if (begins == 0) break;
                    t = next;
                    take_values(p.token + t + 1);
                    only_seen(values, now.seen_by(t));
                }
            }
            if (TOGETHER) take_next_values(values);
        }
#else
        const auto arrive = [&](Slot& slot) {  // after the token's arrival: the mask of the step's slots
            slot.apply(change);
            const bool mine = lane < STEP && slot.number < end;
            if (mine && set == 0) consider(candidate, slot, change, p);
            const bool hidden = slot.bias(p, change.position) == -infinity();
            return __ballot_sync(ALL_LANES, mine && slot.needed(p, change.position) && !hidden);
        };
        change = head.change();
        seen = arrive(slot);
        query.store(shared.split);
        token.store(shared);
        __syncthreads();  // the query and the token are in place
        for (int base = first; base < end; base += STRIDE) {
            const unsigned now = seen;
            const float score = slot.bias(p, change.position);
            const int taken = change.target - base;  // the key whose slot the token takes
            const bool here = taken >= 0 && taken < STEP;
            // Which rows the next step needs is known before this step's keys have arrived. Its keys load while this step
            // waits for its values, and its values during its QK MMA.
            const auto advance = [&] {
                slot = following;
                following = slot_at(base + 2 * STRIDE);
                next_slot = base + STRIDE;
                seen = arrive(slot);
            };
            Products products;
            Logits s;
            if (TOGETHER) advance();
            else take_next_keys(keys);
            if (here) take_key(keys, shared, 0, taken);
            score_keys(products, shared.split, keys);
            if (!TOGETHER) take_next_values(values);
            if (here) take_value(values, shared, 0, taken);
            if (TOGETHER) take_next_keys(keys);
            else advance();
            mask_logits(s, products, logit, now, score);
            state.online_softmax(s);
            only_seen(values, now);
            state.add(s, values);
            if (TOGETHER) take_next_values(values);
        }
#endif
        state.leave(shared.split);
    } else {
        token.store(shared);
        change = head.change();
        for (int base = first; base < end; base += STRIDE) {
            Slot slot(head, base + lane, lane < STEP ? end : 0);
            slot.apply(change);
            if (lane < STEP && slot.number < end) consider(candidate, slot, change, p);
        }
    }
    if (!PLANNED) {
        candidate = merge_lanes(candidate);
        if (lane == 0) shared.candidates[warp] = candidate;
    }
    __syncthreads();  // the results of all warps are in place

    // ---- the last block of a (sequence, kv head), or the first of a cluster, continues ----
    const float* o = &shared.split.o[0][0][0];
    const SplitState* states = &shared.split.state[0][0];
    const Candidate* found = shared.candidates;
    int candidates = WARPS;
#if CLUSTER > 1
    auto& all = *first_of_cluster(&shared.splits);
    cluster_wait();  // the first block's memory exists
    float* split_o = &all.o[split][0][0];
    SplitState* split_state = all.state[split];
    Candidate* split_candidate = &all.candidates[split];
#else
    const long long own_split = blockIdx.x;
    float* split_o = p.partial + own_split * (ROWS * VALUE_DIM);
    SplitState* split_state = p.partial_state + own_split * ROWS;
    Candidate* split_candidate = p.candidates + segment.first_split + split;
#endif
    if (blocks > 1) {
        if (!PLANNED && set == 0 && warp == WARPS - 1) {
            candidate = merge_lanes(lane < WARPS ? shared.candidates[lane] : NOTHING);
            if (lane == 0) *split_candidate = candidate;
        }
        if (ATTEND)
            combine<false, HEADS>(o, states, WARPS, weights, shared.split, rows,
                           [&](int row, const SplitState& s) { split_state[row] = s; },
                           [&](int row, int d, float x, float) { split_o[row * VALUE_DIM + d] = x; });
#if CLUSTER > 1
        cluster_arrive();
        if (split != 0) return;
        cluster_wait();  // all blocks' results are there
        o = &shared.splits.o[0][0][0];
        states = &shared.splits.state[0][0];
        found = shared.splits.candidates;
#else
        __syncthreads();  // the block's results are written
        if (threadIdx.x == 0) shared.last = take_ticket(p.tickets + head.pair, blocks - 1) == blocks - 1;
        __syncthreads();  // all know whether the other blocks' results are there
        if (!shared.last) return;
        found = p.candidates + segment.first_split;
#endif
        candidates = num_splits;
    }

    // ---- no other block reads the state any more: change it ----
    const int pairs = RAGGED || SLOTS || PLANNED ? p.pairs : gridDim.x / blocks;
#if PLANNED
    if (p.commits && real == count) {
        if (threadIdx.x == 0) {
            const Plan& plan = p.plans[served.batch * p.kv_heads + served.group];
            for (int k = 0; k < count; ++k) change_slots(p, head, shared.changes[k]);
            p.lowest[head.pair] = plan.lowest;
            p.lowest_score[head.pair] = plan.lowest_score;
            p.free[head.pair] = plan.free;
            change_length(p, head, pairs, head.position + count);
        }
        for (int k = 0; k < count; ++k)
            if (shared.changes[k].target >= 0) store_token(shared, k, head, shared.changes[k].target);
    }
#else
    if (warp == WARPS - 1) {
        Candidate best = NOTHING;
        for (int i = lane; i < candidates; i += 32) merge(best, found[i]);
        best = merge_lanes(best);
        if (lane == 0) change_state(p, head, change, best);
    } else if (warp == WARPS - 2 && lane == 0) {
        change_length(p, head, pairs, change.position + 1);
    }
    if (change.target >= 0) store_token(shared, 0, head, change.target);
#endif
    if (!ATTEND) return;
    for (int s = 0; s < sets; ++s) {
        const int first_of_set = head.group * p.group + s * HEADS;
        const int rows_of_set = TOKENS > 1 ? rows : min(HEADS, p.group - s * HEADS);
        const auto write_lse = [&](int row, const SplitState& found) {
            const long long of_head = (long long)head.batch * p.kv_heads * p.group + first_of_set + head_of(row);
            if (p.lse != nullptr) p.lse[of_head * p.length + p.token + token_of(row)] = natural_lse(found);
        };
        const auto write_out = [&](int row, int d, float x, float l) {
            const long long of_token = (long long)head.batch * p.length + p.token + token_of(row);
            from_float(p.out[(of_token * p.kv_heads * p.group + first_of_set + head_of(row)) * VALUE_DIM + d],
                       l == 0.0f ? 0.0f : x / l);
        };
        if (CLUSTER > 1 || blocks == 1) {
            combine<false, HEADS>(o, states, CLUSTER > 1 ? CLUSTER : WARPS, weights, shared.split, rows_of_set, write_lse,
                                  write_out);
        } else {
            const long long of_pair = (long long)segment.pair * sets + s;
            const long long of_set = RAGGED ? s * p.num_splits + segment.first_split : of_pair * num_splits;
            combine<true, HEADS>(p.partial + of_set * (ROWS * VALUE_DIM), p.partial_state + of_set * ROWS, num_splits,
                                 weights, shared.split, rows_of_set, write_lse, write_out);
        }
        __syncthreads();  // weights and sums have been read
    }
}
