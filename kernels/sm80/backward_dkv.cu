// Gradients of keys, values and key bias, key-stationary:
//     dv_j = sum over i of p_ij dout_i,  dk_j = scale * sum over i of dx_ij q_i,  dbias_j = sum over i of ds_ij
// with p, ds and dx as in sm80/backward_dq.cu; i runs over the queries of all heads of the key's group.
//
// A block owns BLOCK_N keys of one kv head and visits the queries that may see them, BLOCK_Q at a time. The tensor
// cores produce transposed logits (key rows, query columns) in the layout of the next MMA's left operand, so
// probabilities and their gradients stay in registers. A warp owns 16 keys, whose dk, dv and dbias are in its
// registers.
//   KEYS_CONTIGUOUS  keys in their own order, every query: dkey, dvalue, dbias are written directly (INTERVALS: with
//                    the intervals of a mask; else CAUSAL or none)
//   KEYS_SHARED      likewise, keys in the order of their lifetimes (lists/lifetimes.cu); without SEQUENCES
//   KEYS_LISTED      keys of the list of a super-tile of consecutive queries, which few keys outlive: sums over these
//                    queries are written as rows of float32, which sm80/backward_reduce.cu adds up in the order of the
//                    super-tiles. BITS: the lists are those of lists/dense_macro_tiles.cu, steps without a visible pair
//                    are skipped, and sums over all queries (a single super-tile) are written directly
// With SEQUENCES no block of keys or queries crosses a sequence (common/varlen.cuh).
// Every result has one writer and a fixed order of additions: every run gives the same bits.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR, BLOCK_N, BLOCK_Q, WARPS, MIN_BLOCKS, KEYS, INTERVALS, BITS, CAUSAL, BIAS,
// BIAS_ELEMENT, SOFTCAP, DIM_SLICES (head dims above 128: a block computes one slice of the columns of dk and dv),
// DKEY, DVALUE, DBIAS (the requested results; DBIAS with BIAS_OF_KEYS only), SEQUENCES (with neither BITS nor
// BIAS_DENSE). BITS: KEYS_LISTED.
#include "common/arch.cuh"
#include "common/bias.cuh"
#include "common/key_tile.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/varlen.cuh"
#include "common/softmax.cuh"
#include "common/smem_rows.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int QUERY_FRAGMENTS = BLOCK_Q / 16;
constexpr int WORDS = (BLOCK_Q + 31) / 32;  // BITS: of a key in a step
static_assert(BLOCK_N == WARPS * 16, "a warp owns 16 keys");
static_assert(!BITS || (KEYS == KEYS_LISTED && LIST_KEYS % BLOCK_N == 0), "dense masks have lists");

struct Shared {
    ELEMENT key[BLOCK_N * ROW_STRIDE];
    ELEMENT value[BLOCK_N * ROW_STRIDE];
    ELEMENT query[2][BLOCK_Q * ROW_STRIDE];
    ELEMENT dout[2][BLOCK_Q * ROW_STRIDE];
    float lse[3][BLOCK_Q], delta[3][BLOCK_Q];  // of the current, the next and the steps after
    int index[BLOCK_N];
    int start[BLOCK_N], stop[BLOCK_N];
    float bias[BLOCK_N];
#if DELAY
    int far_from[BLOCK_N];
#endif
#if BITS
    unsigned words[2][WORDS][BLOCK_N];
#endif
#if BIAS == BIAS_DENSE
    BiasTile<BLOCK_Q, BLOCK_N> bias_rows[2];
#endif
};

// Key and value rows, once for a block.
__device__ __forceinline__ void load_keys(Shared& shared, const AttentionParams& p, const KeyTile& t) {
    if (threadIdx.x < BLOCK_N) {
        const int index = t.first + threadIdx.x;
#if KEYS != KEYS_CONTIGUOUS
        shared.index[threadIdx.x] = static_cast<int>(threadIdx.x) < t.count ? t.list[index] : 0;
#else
        shared.index[threadIdx.x] = min(index, p.key_length - 1);
#endif
    }
    __syncthreads();  // indices are in place
    const ELEMENT* keys = p.key + t.batch * p.key_batch + t.group * p.key_head;
    const ELEMENT* values = p.value + t.batch * p.value_batch + t.group * p.value_head;
    for_each_piece<BLOCK_N, THREADS>([&](int row, int piece) {
        const long long key = shared.index[row];
        copy_piece(shared.key + row * ROW_STRIDE, keys + key * p.key_row, piece, row < t.count);
        copy_piece(shared.value + row * ROW_STRIDE, values + key * p.value_row, piece, row < t.count);
    });
}

// Interval and bias of every key for one head.
__device__ __forceinline__ void load_key_facts(Shared& shared, const AttentionParams& p, const KeyTile& t, int head) {
    if (threadIdx.x >= BLOCK_N) return;
    const bool exists = static_cast<int>(threadIdx.x) < t.count;
    const int key = shared.index[threadIdx.x];
    int start = CAUSAL ? key : INT_LOWEST, stop = NEVER;
#if INTERVALS
    const long long row = mask_row_of(p, t, head);
    const long long mask_head = row % p.mask_heads, mask_batch = row / p.mask_heads;
    start = max(start, p.start[mask_batch * p.start_batch + mask_head * p.start_head + key]);
    stop = p.stop[mask_batch * p.stop_batch + mask_head * p.stop_head + key];
#endif
    float bias = 0.0f;
#if BIAS == BIAS_OF_KEYS
    if (exists)
        bias = log2_units(
            p.bias[t.batch * p.bias_batch + t.group * p.bias_group + head * p.bias_head + key * p.bias_key]);
#endif
#if DELAY
    const int far_from = key + t.bias_delay;
    shared.far_from[threadIdx.x] = far_from;
    if (far_from >= t.end_position()) bias = 0.0f;  // it applies to no query
    if (!BITS && bias == -infinity()) {             // nobody sees the key from there on
        stop = min(stop, far_from);
        bias = 0.0f;
    }
#endif
    shared.bias[threadIdx.x] = bias;
    const bool seen = exists && start < t.end_position() && (DELAY || bias != -infinity());
    shared.start[threadIdx.x] = seen ? start : NEVER;  // an empty run
    shared.stop[threadIdx.x] = seen ? stop : INT_LOWEST;
}

// The steps of BLOCK_Q queries of one head that the block visits, in order. All threads of a block iterate together and
// see the same.
struct QueryStep {
    int first;  // its first query; at or past `end` of the steps: there are no more
#if BITS
    bool masked;  // some pair is not visible
#endif
};

struct QuerySteps {
    int next_query, end;
#if BITS
    const unsigned short* states;  // of these keys
    int group;
    unsigned pending, pending_masked;  // steps of the current 32 still to come

    __device__ __forceinline__ QuerySteps(const AttentionParams& p, const KeyTile& t, int head)
        : next_query(t.first_query), end(t.end_query), group(0), pending(0), pending_masked(0) {
        const long long blocks = p.super_entries / LIST_KEYS;
        states = p.super_states + (mask_row_of(p, t, head) * blocks + t.entry / LIST_KEYS) * p.query_words;
    }

    __device__ __forceinline__ QueryStep next() {
        // Each warp reads the states of 32 steps at once for itself, so no barrier is needed.
        while (pending == 0 && next_query < end) {
            group = next_query;
            const int mine = group + (threadIdx.x & 31) * BLOCK_Q;
            unsigned any = 0, all = 3;
            if (mine < end) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    const unsigned state = states[mine / 32 + w];
                    any |= state;
                    all &= state;
                }
            }
            pending = __ballot_sync(ALL_LANES, any != 0);
            pending_masked = __ballot_sync(ALL_LANES, all != 3);
            next_query = group + 32 * BLOCK_Q;
        }
        if (pending == 0) return {end, false};
        const int bit = __ffs(pending) - 1;
        pending &= pending - 1;
        return {group + bit * BLOCK_Q, ((pending_masked >> bit) & 1) != 0};
    }

    __device__ __forceinline__ bool masked(QueryStep step) const { return step.masked; }
#else
    int full_begin, full_end;

    __device__ __forceinline__ QuerySteps(const QueryRange& range, const KeyTile& t)
        : next_query(range.begin < range.end ? t.first_query + (range.begin - t.first_query) / BLOCK_Q * BLOCK_Q
                                             : range.end),
          end(range.end), full_begin(range.full_begin), full_end(range.full_end) {}

    __device__ __forceinline__ QueryStep next() {
        const int query = next_query;
        next_query += BLOCK_Q;
        return {query};
    }

    __device__ __forceinline__ bool masked(QueryStep step) const {
        return step.first < full_begin || step.first + BLOCK_Q > full_end;
    }
#endif
};

// lse and delta of a step's queries, one step ahead of their rows; past the range -inf, as for a row that saw nothing.
__device__ __forceinline__ void fetch_statistics(Shared& shared, const AttentionParams& p, long long head_row, int query,
                                                 int end, int slot) {
    if (threadIdx.x >= BLOCK_Q) return;
    const int i = query + threadIdx.x;
    if (i < end) {
        copy_async_4(&shared.lse[slot][threadIdx.x], p.lse + head_row * p.query_length + i, 4);
        copy_async_4(&shared.delta[slot][threadIdx.x], p.delta + head_row * p.query_length + i, 4);
    } else {
        shared.lse[slot][threadIdx.x] = -infinity();
        shared.delta[slot][threadIdx.x] = 0.0f;
    }
}

// After a thread's copies have landed, before the barrier: lse in log 2 units.
__device__ __forceinline__ void finish_statistics(Shared& shared, int slot) {
    if (threadIdx.x < BLOCK_Q) shared.lse[slot][threadIdx.x] = log2_lse(shared.lse[slot][threadIdx.x]);
}

// Rows of query and dout; zeros for rows that see nothing, even if they contain NaN.
__device__ __forceinline__ void load_queries(Shared& shared, const AttentionParams& p, const KeyTile& t, int head,
                                             int query, int slot, int stage) {
    const ELEMENT* queries = p.query + t.batch * p.query_batch + head * p.query_head;
    const ELEMENT* douts = p.dout + t.batch * p.dout_batch + head * p.dout_head;
    for_each_piece<BLOCK_Q, THREADS>([&](int row, int piece) {
        const bool exists = shared.lse[slot][row] != -infinity();
        const long long i = exists ? query + row : 0;
        copy_piece(shared.query[stage] + row * ROW_STRIDE, queries + i * p.query_row, piece, exists);
        copy_piece(shared.dout[stage] + row * ROW_STRIDE, douts + i * p.dout_row, piece, exists);
    });
}

// The words of a step in which not all pairs are visible.
__device__ __forceinline__ void fetch_words(Shared& shared, const AttentionParams& p, const KeyTile& t, int head,
                                            QueryStep step, int stage) {
#if BITS
    if (!step.masked) return;
    const long long row = mask_row_of(p, t, head);
    const unsigned* columns = p.columns + (row * p.query_words + step.first / 32) * p.key_stride;
    for (int i = threadIdx.x; i < WORDS * BLOCK_N; i += THREADS)  // rows past the last key are never used
        copy_async_4(&shared.words[stage][i / BLOCK_N][i % BLOCK_N],
                     columns + (long long)(i / BLOCK_N) * p.key_stride + shared.index[i % BLOCK_N], 4);
#endif
}

// The biases of a step's queries.
__device__ __forceinline__ void fetch_biases(Shared& shared, const AttentionParams& p, const KeyTile& t, int head,
                                             int query, int stage) {
#if BIAS == BIAS_DENSE
    const int first = shared.index[0];
    const bool in_order = BITS || KEYS == KEYS_CONTIGUOUS;  // lists of intervals are not
    const bool following = in_order && shared.index[BLOCK_N - 1] - first == BLOCK_N - 1 && first % BIAS_WIDTH == 0;
    load_bias<BLOCK_Q, BLOCK_N, THREADS>(
        shared.bias_rows[stage], BiasRows(p, t.batch, t.group, head, query), following ? first : -1,
        [&](int column) { return column < t.count ? shared.index[column] : -1; });
#endif
}

// s = this warp's key (or value) rows . query (or dout) rows
__device__ __forceinline__ void transposed_mma(Accumulator (&s)[QUERY_FRAGMENTS], const ELEMENT* keys,
                                                    const ELEMENT* queries) {
#pragma unroll
    for (int n = 0; n < QUERY_FRAGMENTS; ++n) clear(s[n]);
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        FragmentA a;
        load_fragment(a, keys + d * 16, ROW_STRIDE);
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            FragmentBT b;
            load_fragment(b, queries + n * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
            multiply_add(s[n], a, b);
        }
    }
}

// A lane's data of its two keys.
struct LaneKeys {
    int start[2], stop[2];
    float bias[2], dbias[2];
    int far_from[2];

    // Whether the bias of any of the warp's keys applies to only some of the step's queries, the first at first_position.
    __device__ __forceinline__ bool are_mixed(int first_position) const {
        if (!DELAY) return false;
        const int last = first_position + BLOCK_Q - 1;
        return __any_sync(ALL_LANES, is_mixed(far_from[0], first_position, last) || is_mixed(far_from[1], first_position, last));
    }
};

// s becomes p, dp becomes dx.
__device__ __forceinline__ void gradients(Accumulator (&s)[QUERY_FRAGMENTS], Accumulator (&dp)[QUERY_FRAGMENTS],
                                          LaneKeys& keys, const float* lse, const float* delta, const LogitScale& logit,
                                          int first_position, bool masked, const Shared& shared, int stage,
                                          int first_query) {
    const bool mixed = keys.are_mixed(first_position);
    bool far[2] = {true, true};
#pragma unroll
    for (int r = 0; DELAY && r < 2; ++r) far[r] = is_far(keys.far_from[r], first_position);
#pragma unroll
    for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
#if BITS || BIAS == BIAS_DENSE
        const int first_row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;  // of this lane
#endif
#if BITS
        unsigned words[2] = {ALL_LANES, ALL_LANES};  // bit 0: of query 16 n + 2 * (lane % 4) of the step
        if (masked) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                words[r] = shared.words[stage][n / 2][first_row + 8 * r] >>
                           ((first_query + 16 * n & 31) + 2 * (threadIdx.x & 3));
        }
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i), r = fragment_row(i);
            const float x = s[n].x[i], own_lse = lse[column];
            const float row_lse = own_lse == -infinity() ? infinity() : own_lse;
#if BIAS == BIAS_DENSE
            constexpr bool applies = true;
            const float bias = log2_units(to_float(
                shared.bias_rows[stage].x[column * BiasTile<BLOCK_Q, BLOCK_N>::STRIDE + first_row + 8 * r]));
#else
            const bool applies = far[r] || mixed && is_far(keys.far_from[r], first_position + column);
            const float bias = applies ? keys.bias[r] : 0.0f;
#endif
            float probability = exp2_fast(logit(x, bias) - row_lse);
            float ds = probability * (dp[n].x[i] - delta[column]), dx = ds * logit.slope(x);
#if BITS
            bool hidden = (words[r] >> fragment_column(i) & 1) == 0;
#else
            bool hidden = masked && !visible(first_position + column, keys.start[r], keys.stop[r]);
#endif
            // Without bits, a key hidden by its own bias has an empty run (load_key_facts). Missing queries have no
            // bias, but no lse either.
            if (BIAS == BIAS_DENSE || (BITS && BIAS == BIAS_OF_KEYS)) hidden |= bias == -infinity() || own_lse == -infinity();
            if (hidden) probability = ds = dx = 0.0f;
            if (!DELAY || applies) keys.dbias[r] += ds;
            s[n].x[i] = probability;
            dp[n].x[i] = dx;
        }
    }
}

// accumulators += s . rows for this warp's keys (s rounded to the type of an operand) and this block's columns
__device__ __forceinline__ void accumulate(Accumulator (&accumulators)[SLICE_FRAGMENTS],
                                           const Accumulator (&s)[QUERY_FRAGMENTS],
                                             const ELEMENT* rows, int first_fragment) {
#pragma unroll
    for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
        FragmentA a;
        round_to_operand(a, s[n]);
#pragma unroll
        for (int d = 0; d < SLICE_FRAGMENTS; ++d) {
            if (DIM_SLICES > 1 && first_fragment + d >= DIM_FRAGMENTS) continue;
            FragmentB b;
            load_fragment(b, rows + n * 16 * ROW_STRIDE + (first_fragment + d) * 16, ROW_STRIDE);
            multiply_add(accumulators[d], a, b);
        }
    }
}

// Calls write(row, column, number) for the numbers of this warp's 16 rows of dkey or dvalue.
template <typename Write>
__device__ __forceinline__ void for_each_accumulator(const Accumulator (&accumulators)[SLICE_FRAGMENTS], const KeyTile& t,
                                             const Write& write) {
    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int d = 0; d < SLICE_FRAGMENTS; ++d)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = first_row + lane / 4 + 8 * fragment_row(i);
            const int column = 16 * (t.first_fragment + d) + 2 * (lane & 3) + fragment_column(i);
            if (row < t.count && column < HEAD_DIM) write(row, column, accumulators[d].x[i]);
        }
}

__device__ __forceinline__ void write_accumulators(const Accumulator (&accumulators)[SLICE_FRAGMENTS], const Shared& shared,
                                           const AttentionParams& p, const KeyTile& t, ELEMENT* result, float* partial,
                                           float factor) {
    if (t.is_partial(p)) {
        for_each_accumulator(accumulators, t, [&](int row, int column, float x) {
            partial[t.partial_row(p, row) * HEAD_DIM + column] = x * factor;
        });
        return;
    }
    for_each_accumulator(accumulators, t, [&](int row, int column, float x) {
        const long long key = (long long)t.batch * p.key_length + shared.index[row];
        from_float(result[(key * p.kv_heads + t.group) * HEAD_DIM + column], x * factor);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_dkv(const AttentionParams p) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const KeyTile t = find_key_tile(p, blockIdx.x);
    if (t.count <= 0) return;
    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16, group_heads = p.heads / p.kv_heads;
    load_keys(shared, p, t);
    copy_async_commit();
    round_rows<BLOCK_N, THREADS>(shared.key);
    round_rows<BLOCK_N, THREADS>(shared.value);

    const LogitScale logit(p.scale, p.softcap);
    Accumulator dk[SLICE_FRAGMENTS], dv[SLICE_FRAGMENTS];
#pragma unroll
    for (int d = 0; d < SLICE_FRAGMENTS; ++d) {
        clear(dk[d]);
        clear(dv[d]);
    }
    for (int h = 0; h < group_heads; ++h) {
        const int head = t.group * group_heads + h;
        const long long head_row = (long long)t.batch * p.heads + head;
        __syncthreads();  // all threads are done with the head before
        load_key_facts(shared, p, t, head);
        __syncthreads();  // intervals and biases are in place
#if BITS
        QuerySteps steps(p, t, head);
#else
        QuerySteps steps(find_queries(shared.start, shared.stop, t), t);
#endif
        QueryStep current = steps.next(), following = steps.next();
        LaneKeys keys = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + lane / 4 + 8 * r;
            keys.start[r] = shared.start[row];
            keys.stop[r] = shared.stop[row];
            keys.bias[r] = shared.bias[row];
#if DELAY
            keys.far_from[r] = shared.far_from[row];
#endif
        }

        if (current.first < steps.end) {
            fetch_statistics(shared, p, head_row, current.first, steps.end, 0);
            fetch_statistics(shared, p, head_row, following.first, steps.end, 1);
            copy_async_commit();
            copy_async_wait<0>();
            finish_statistics(shared, 0);
            __syncthreads();  // statistics of the first step are in place
            load_queries(shared, p, t, head, current.first, 0, 0);
            fetch_words(shared, p, t, head, current, 0);
            fetch_biases(shared, p, t, head, current.first, 0);
            copy_async_commit();
        }
        for (int slot = 0, stage = 0; current.first < steps.end; stage ^= 1) {
            const QueryStep after = steps.next();
            const int next_slot = slot == 2 ? 0 : slot + 1, after_slot = next_slot == 2 ? 0 : next_slot + 1;
            copy_async_wait<0>();
            finish_statistics(shared, next_slot);
            __syncthreads();  // this step's rows and the next one's statistics are in place; no thread reads the other stage
            if (following.first < steps.end) {
                load_queries(shared, p, t, head, following.first, next_slot, stage ^ 1);
                fetch_words(shared, p, t, head, following, stage ^ 1);
                fetch_biases(shared, p, t, head, following.first, stage ^ 1);
            }
            fetch_statistics(shared, p, head_row, after.first, steps.end, after_slot);
            copy_async_commit();

            Accumulator s[QUERY_FRAGMENTS], dp[QUERY_FRAGMENTS];
            transposed_mma(s, shared.key + first_row * ROW_STRIDE, shared.query[stage]);
            transposed_mma(dp, shared.value + first_row * ROW_STRIDE, shared.dout[stage]);
            gradients(s, dp, keys, shared.lse[slot], shared.delta[slot], logit, current.first + t.shift,
                      steps.masked(current), shared, stage, current.first);
#if DVALUE
            accumulate(dv, s, shared.dout[stage], t.first_fragment);
#endif
#if DKEY
            accumulate(dk, dp, shared.query[stage], t.first_fragment);
#endif
            current = following;
            following = after;
            slot = next_slot;
        }
#if DBIAS
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + lane / 4 + 8 * r;
            const float dbias = row_sum(keys.dbias[r]);
            if ((lane & 3) != 0 || row >= t.count || t.first_fragment != 0) continue;
            if (t.is_partial(p))
                p.partial_bias[t.partial_row(p, row) * group_heads + h] = dbias;
            else
                p.dbias[head_row * p.key_length + shared.index[row]] = dbias;
        }
#endif
    }
    copy_async_wait<0>();  // for the key rows of a block without steps: no copy outlives its CTA
#if DVALUE
    write_accumulators(dv, shared, p, t, p.dvalue, p.partial_value, 1.0f);
#endif
#if DKEY
    write_accumulators(dk, shared, p, t, p.dkey, p.partial_key, p.scale);
#endif
}
