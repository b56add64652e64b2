// Split-KV attention of few query rows over many keys: the keys are split among blocks, so that even few queries fill a
// GPU. The same mathematics as sm80/forward.cu.
//
// query  // (B, Lq, H, HEAD_DIM) ELEMENT       key, value // (B, Lk, Hkv, HEAD_DIM or VALUE_DIM) ELEMENT, any batch, row and
//   head strides
// bias   // (1|B, 1|Hkv, Lk) f32, natural-log units (BIAS)
// start, stop  // (1|B, 1|Hkv, Lk): key j is visible to positions start_j <= p < stop_j (INTERVALS)
// out    // (B, Lq, H, VALUE_DIM) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// The Lq * H / Hkv rows of a (sequence, kv head), query by query, are cut into `sets` of ROWS; the keys of a set are
// split among `num_splits` blocks. With LISTED the keys are `list` (B * Hkv, slots), with their intervals entry by
// entry in list_interval (B * Hkv, slots). Keys that no row of the set sees are not read. A block writes its split's
// results to global memory; the block with the last ticket of a set combines them in order.
//
// Prelude: that of decode/split_kv.cuh, MIN_BLOCKS, LISTED, INTERVALS, CAUSAL, BIAS, DELAY (of the bias).
#include "common/arch.cuh"
#include "decode/split_kv.cuh"

struct FlashDecodeParams {
    const ELEMENT* query;
    const ELEMENT* key;
    const ELEMENT* value;
    ELEMENT* out;
    float* lse;
    const float* bias;
    const int* start;
    const int* stop;
    const int* list;
    const int2* list_interval;
    float* partial;            // (B * Hkv, sets, splits, ROWS, VALUE_DIM)
    SplitState* partial_state;  // (B * Hkv, sets, splits, ROWS)
    unsigned* tickets;         // (B * Hkv, sets), all 0
    long long query_batch, query_row, query_head;  // strides, in elements
    long long key_batch, key_row, key_head;
    long long value_batch, value_row, value_head;
    long long bias_batch, bias_group, bias_key;
    long long start_batch, start_group, stop_batch, stop_group;
    int query_length, key_length, kv_heads, group;  // group: query heads of a kv head
    int sets, num_splits;
    int split_size, slots;  // keys of a split, a multiple of STEP; entries of the list, or key_length
    float scale, softcap;
    int bias_delay;  // a key's bias applies from this many positions after the key
};

struct FlashDecodeShared {
    SplitShared split;
    int last;
};

// The rows of a block, and its keys.
struct Rows {
    const FlashDecodeParams& p;
    int pair, batch, group, set;
    int first, count;                     // rows: of the tile, of all rows of the kv head
    int first_position, last_position;    // of its queries

    __device__ __forceinline__ Rows(const FlashDecodeParams& p, int tile)
        : p(p), pair(tile / p.sets), batch(pair / p.kv_heads), group(pair % p.kv_heads), set(tile % p.sets) {
        first = set * ROWS;
        count = min(ROWS, p.query_length * p.group - first);
        const int shift = p.key_length - p.query_length;
        first_position = first / p.group + shift;
        last_position = (first + count - 1) / p.group + shift;
    }

    __device__ __forceinline__ int query_of(int row) const { return (first + row) / p.group; }
    __device__ __forceinline__ int head_of(int row) const { return group * p.group + (first + row) % p.group; }
    __device__ __forceinline__ int position_of(int row) const {
        return query_of(row) + p.key_length - p.query_length;
    }
};

// A lane's data of one key of a step.
struct Key {
    int row;           // of key and value; -1: there is none
    int start, stop;
    float bias;        // log 2 units
#if DELAY
    int far_from;      // first position to which the bias applies
#endif

    __device__ __forceinline__ Key(const Rows& rows, int slot, int end)
        : row(-1), start(INT_LOWEST), stop(NEVER), bias(0.0f) {
#if DELAY
        far_from = INT_LOWEST;
#endif
        const FlashDecodeParams& p = rows.p;
        if (slot >= end) return;
        row = slot;
#if LISTED
        const long long entry = (long long)rows.pair * p.slots + slot;
        row = p.list[entry];
#if INTERVALS
        const int2 interval = p.list_interval[entry];
        start = interval.x;
        stop = interval.y;
#endif
#elif INTERVALS
        start = p.start[rows.batch * p.start_batch + rows.group * p.start_group + row];
        stop = p.stop[rows.batch * p.stop_batch + rows.group * p.stop_group + row];
#endif
        if (CAUSAL) start = max(start, row);
        if (BIAS)
            bias = log2_units(p.bias[rows.batch * p.bias_batch + rows.group * p.bias_group + row * p.bias_key]);
#if DELAY
        far_from = row + p.bias_delay;
        if (bias == -infinity()) {
            stop = min(stop, far_from);
            bias = 0.0f;
        }
#else
        if (BIAS && bias == -infinity()) row = -1;  // nobody sees the key
#endif
    }

    __device__ __forceinline__ bool seen_by(int position) const {
        return row >= 0 && start <= position && position < stop;
    }
    __device__ __forceinline__ bool seen_by_some(const Rows& rows) const {
        return row >= 0 && start <= rows.last_position && stop > rows.first_position && start < stop;
    }
    __device__ __forceinline__ bool seen_by_all(const Rows& rows) const {
        return row >= 0 && start <= rows.first_position && rows.last_position < stop;
    }
};

// Which of a lane's two rows see its key `i` of the step (bit 0, bit 1), if rows differ.
__device__ __forceinline__ unsigned rows_that_see(const Key& key, const Rows& rows, int i) {
    const int start = __shfl_sync(ALL_LANES, key.start, i), stop = __shfl_sync(ALL_LANES, key.stop, i);
    const int exists = __shfl_sync(ALL_LANES, key.row, i) >= 0;
    unsigned seen = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = rows.position_of((threadIdx.x & 31) / 4 + 8 * r);
        seen |= static_cast<unsigned>(exists && start <= position && position < stop) << r;
    }
    return seen;
}

// Non-finite values of keys that some rows of the tile see and others do not: added to the rows that see them, and zero
// in the MMA, where 0 * inf would be NaN.
__device__ __forceinline__ void isolate_nonfinite(WarpState& state, Values& values, const Key& key, const Rows& rows,
                                                  unsigned partial) {
    unsigned found = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                if (partial >> value_key(k) & 1) found |= nonfinite(values.piece[c][k].word[w], TYPE);
    if (!__any_sync(ALL_LANES, (found & sign_bits(sizeof(ELEMENT))) != 0)) return;
    const int lane = threadIdx.x & 31;
    for (int i = 0; i < STEP; ++i) {  // the key whose piece lane (g, i / 2 % 4) of each quad holds as its k-th
        if (!(partial >> i & 1)) continue;
        const int owner = lane / 4 * 4 + i / 2 % 4, k = (i & 1) + 2 * (i / 8);
        const int start = __shfl_sync(ALL_LANES, key.start, i), stop = __shfl_sync(ALL_LANES, key.stop, i);
#pragma unroll
        for (int d = 0; d < VALUE_TILES; ++d) {
            constexpr int EACH = PIECE / 2;
            constexpr int PER_WORD = 4 / sizeof(ELEMENT);
#pragma unroll
            for (int side = 0; side < 2; ++side) {  // the two dims of a tile that a lane holds
                const int word_at = (d % EACH * 2 + side) / PER_WORD;
                unsigned own = 0;
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (n == k) own = values.piece[d / EACH][n].word[word_at];
                const unsigned word = __shfl_sync(ALL_LANES, own, owner);
                const float x = element_of(word, side, TYPE);
                if (isfinite(x)) continue;
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int row = WarpState::row_at(r, j), position = rows.position_of(row);
                        if (row < rows.count && start <= position && position < stop) state.o[d][r][2 * side + j] += x;
                    }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (partial >> value_key(k) & 1)
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c)
#pragma unroll
                for (int w = 0; w < 4; ++w) values.piece[c][k].word[w] = finite_word(values.piece[c][k].word[w]);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) flash_decode(const FlashDecodeParams p) {
    wait_for_earlier_kernels();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    FlashDecodeShared& shared = *reinterpret_cast<FlashDecodeShared*>(shared_memory);
    float* weights = reinterpret_cast<float*>(shared_memory + sizeof(FlashDecodeShared));  // (ROWS, max(num_splits, WARPS))
    const int tiles = gridDim.x / p.num_splits;
    const int split = blockIdx.x / tiles, tile = blockIdx.x % tiles;  // heads lie side by side
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Rows rows(p, tile);
    const ELEMENT* keys_of_head = p.key + rows.batch * p.key_batch + rows.group * p.key_head;
    const ELEMENT* values_of_head = p.value + rows.batch * p.value_batch + rows.group * p.value_head;

    constexpr int STRIDE = WARPS * STEP;
    const int first = split * p.split_size + warp * STEP, end = min((split + 1) * p.split_size, p.slots);
    const auto key_at = [&](int base) { return Key(rows, base + lane, lane < STEP ? end : 0); };
    Key key = key_at(first), following = key_at(first + STRIDE);
    const Query query(rows.count, [&](int row) {
        return p.query + rows.batch * p.query_batch + rows.query_of(row) * p.query_row +
               rows.head_of(row) * p.query_head;
    });
    unsigned some = __ballot_sync(ALL_LANES, key.seen_by_some(rows));
    int next_slot = first;  // of the step whose rows are loaded next
    const auto row_of = [&](const ELEMENT* head, long long stride) {
        return [&, head, stride](int i) {
            const int chosen = key_to_read(i, some);
            const int row = LISTED ? __shfl_sync(ALL_LANES, key.row, chosen) : next_slot + chosen;
            return head + (some != 0 ? row : 0) * stride;
        };
    };
    Keys keys;
    Values values;
    if (TOGETHER) {
        load_keys(keys, row_of(keys_of_head, p.key_row));
        load_values(values, row_of(values_of_head, p.value_row));
    }
    query.store(shared.split);
    __syncthreads();  // the query is in place
    const LogitScale logit(p.scale, p.softcap);
    WarpState state;
    for (int base = first; base < end; base += STRIDE) {
        const Key current = key;
        const unsigned now = some;
        Products products;
        Logits s;
        if (!TOGETHER && now != 0) load_keys(keys, row_of(keys_of_head, p.key_row));
        if (now != 0) score_keys(products, shared.split, keys);
        if (!TOGETHER && now != 0) load_values(values, row_of(values_of_head, p.value_row));
        // The next step's keys load while this step waits for its values; its values load during its QK MMA.
        key = following;
        following = key_at(base + 2 * STRIDE);
        some = __ballot_sync(ALL_LANES, key.seen_by_some(rows));
        next_slot = base + STRIDE;
        if (TOGETHER) load_keys(keys, row_of(keys_of_head, p.key_row));
        if (now != 0) {
            const unsigned all = __ballot_sync(ALL_LANES, current.seen_by_all(rows));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (fragment_row(i) >= ROW_TILES) continue;
                const int column = 2 * (lane & 3) + fragment_column(i);
                float bias = BIAS ? __shfl_sync(ALL_LANES, current.bias, column) : 0.0f;
#if DELAY
                const int far_from = __shfl_sync(ALL_LANES, current.far_from, column);
                if (rows.position_of(lane / 4 + 8 * fragment_row(i)) < far_from) bias = 0.0f;
#endif
                s.x[i] = now >> column & 1 ? logit(products[i], bias) : -infinity();
            }
            if (now != all) {  // only some rows see some of the keys
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (fragment_row(i)) continue;
                    const unsigned seen = rows_that_see(current, rows, 2 * (lane & 3) + fragment_column(i));
                    if (!(seen & 1)) s.x[i] = -infinity();
                    if (!(seen & 2)) s.x[i + 2] = -infinity();
                }
            }
            state.online_softmax(s);
            only_seen(values, now);
            if (now != all) isolate_nonfinite(state, values, current, rows, now & ~all);
            state.add(s, values);
        }
        if (TOGETHER) load_values(values, row_of(values_of_head, p.value_row));
    }
    state.leave(shared.split);
    __syncthreads();  // the results of all warps are in place

    const float* o = &shared.split.o[0][0][0];
    const SplitState* states = &shared.split.state[0][0];
    const int heads = p.kv_heads * p.group;
    const auto write_lse = [&](int row, const SplitState& found) {
        p.lse[((long long)rows.batch * heads + rows.head_of(row)) * p.query_length + rows.query_of(row)] =
            natural_lse(found);
    };
    const auto write_out = [&](int row, int d, float x, float l) {
        const long long of_query = (long long)rows.batch * p.query_length + rows.query_of(row);
        from_float(p.out[(of_query * heads + rows.head_of(row)) * VALUE_DIM + d], l == 0.0f ? 0.0f : x / l);
    };
    if (p.num_splits == 1) {
        combine<false>(o, states, WARPS, weights, shared.split, rows.count, write_lse, write_out);
        return;
    }
    const long long own = (long long)tile * p.num_splits + split;
    combine<false>(o, states, WARPS, weights, shared.split, rows.count,
                   [&](int row, const SplitState& s) { p.partial_state[own * ROWS + row] = s; },
                   [&](int row, int d, float x, float) { p.partial[(own * ROWS + row) * VALUE_DIM + d] = x; });
    __syncthreads();  // the block's results are written
    if (threadIdx.x == 0) shared.last = take_ticket(p.tickets + tile, p.num_splits - 1) == p.num_splits - 1;
    __syncthreads();  // `last` is known to all threads
    if (!shared.last) return;
    combine<true>(p.partial + (long long)tile * p.num_splits * (ROWS * VALUE_DIM),
                  p.partial_state + (long long)tile * p.num_splits * ROWS, p.num_splits, weights, shared.split, rows.count,
                  write_lse, write_out);
}
