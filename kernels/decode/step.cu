// One more token for a cache that keeps, per sequence and kv head, the top `window` keys by (score, position) among those
// with a score of at least `threshold`, the first `sinks` and the last `recent` positions (SPEC section 7;
// cupy_dma/cache/state.py): inserts the token's key, computes the attention of its queries over the kept keys, and finds
// what the next token will need.
//
// key        // (B, Hkv, R, HEAD_DIM) ELEMENT     score    // (B, Hkv, R) f32      lengths  // (B) int64: tokens seen
// value      // (B, Hkv, R, VALUE_DIM) ELEMENT    position // (B, Hkv, R) int64    lowest   // (B, Hkv): slot of the top's
// query      // (B, L, H, HEAD_DIM) ELEMENT       in_top   // (B, Hkv, R) bytes    //   lowest key; while there is room, minus how much
// out        // (B, L, H, VALUE_DIM), contiguous  lse // (B, H, L) f32             free     // (B, Hkv): a slot not needed, -1
//                                                                    lowest_score // (B, Hkv) f32: that of slot `lowest`
//
// One launch. The R slots of one (sequence, kv head, set of ROWS query heads) are split among `num_splits` blocks,
// which only read the state: `lowest`, its score and `free`, found by the previous launch, tell every block which key
// leaves the top and which slot the token takes; in shared memory the token's rows replace that slot's. A block writes
// its results to `partial`: outputs, and for set 0 the lowest key of the top and a free slot of its split. The block
// with the last ticket of a (sequence, kv head) combines the splits in order and alone changes the state, which no
// block reads any more by then. `lengths` is shared by all kv heads of a sequence: the last of these changes it (a
// second ticket).
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
// Prelude: that of decode/split_kv.cuh, MIN_BLOCKS, ATTEND (0: there are no queries), CLUSTER, DELAY (of scores as
// biases: SPEC section 16), RAGGED (1: without clusters).
#include "common/arch.cuh"
#include "common/rank.cuh"
#include "decode/split_kv.cuh"

// The lowest key of the top among some slots, and the first free slot.
struct Candidate {
    long long position;
    unsigned rank;
    int slot, free;  // NO_SLOT if there is none
};

// The slots of a (sequence, kv head), if numbers of slots differ.
struct alignas(16) Segment {
    int start, slots;  // its first row; below 2^31 of all
    int pair;          // batch * kv_heads + kv head
    int first_split;   // among those of all
};

struct StepParams {
    const ELEMENT* query;
    const ELEMENT* new_key;    // (B, L, Hkv, HEAD_DIM)
    const ELEMENT* new_value;  // (B, L, Hkv, VALUE_DIM)
    const float* new_score;    // (B, Hkv, L)
    const int* counts;         // (B), or null: all sequences take the step
    ELEMENT* key;
    ELEMENT* value;
    float* score;
    long long* position;
    unsigned char* in_top;
    long long* lengths;
    int* lowest;
    float* lowest_score;
    int* free;
    ELEMENT* out;
    float* lse;
    float* partial;            // (B * Hkv, sets, splits, ROWS, VALUE_DIM); RAGGED: (sets, splits of all pairs, ...)
    SplitState* partial_state;  // (B * Hkv, sets, splits, ROWS); likewise
    Candidate* candidates;     // (B * Hkv, splits)
    unsigned* tickets;         // (B * Hkv), then (B); all 0
    long long query_batch, query_row, query_head;  // strides, in elements
    long long key_batch, key_row, key_head;
    long long value_batch, value_row, value_head;
    long long score_batch, score_head, score_token;
    int count_words;  // 32-bit words of a number of counts
    int kv_heads, group, sets;   // group: query heads of a kv head, in `sets` sets
    int num_splits, split_size;  // RAGGED: splits of all pairs; slots of a split, a multiple of STEP
    int slots, sinks, recent;    // slots: R
    int length, token;  // L, and the token's index in it
    float scale, softcap;
    float threshold;
    int delay;  // with DELAY
    const Segment* segments;  // (splits of all pairs), with RAGGED
    int pairs;                // B * Hkv, with RAGGED
};

constexpr int NO_SLOT = 2147483647;
constexpr Candidate NOTHING = {0, 0, NO_SLOT, NO_SLOT};

constexpr int KEY_PIECES = 4 * KEY_CHUNKS, VALUE_PIECES = 8 * VALUE_CHUNKS;

struct StepShared {
    SplitShared split;
    Piece token[KEY_PIECES + VALUE_PIECES];  // its key, then its value
#if CLUSTER > 1
    struct {
        float o[CLUSTER][ROWS][VALUE_DIM];
        SplitState state[CLUSTER][ROWS];
        Candidate candidates[CLUSTER];
    } splits;  // of the first block: the results of all
#endif
    Candidate candidates[WARPS];
    int last;
};

// The effect of the token on its kv head.
struct Change {
    long long position;  // of the token
    float score;
    bool enters;         // the top
    int dropped, target;  // slots: of the key that leaves the top, and of the token; -1: none
};

struct Head {
    const StepParams& p;
    long long pair, position;  // batch * kv_heads + kv head; of the token
    int batch, group;
    int lowest, free;
    float lowest_score, score;  // score: of the token
    int start, slots;  // of its segment, with RAGGED

    __device__ __forceinline__ Head(const StepParams& p, const Segment& segment)
        : p(p), pair(segment.pair), batch(segment.pair / p.kv_heads), group(segment.pair % p.kv_heads),
          start(segment.start), slots(segment.slots) {
        position = p.lengths[batch];
        lowest = p.lowest[pair];
        lowest_score = p.lowest_score[pair];
        free = p.free[pair];
        score = p.new_score[batch * p.score_batch + group * p.score_head + p.token * p.score_token];
    }

    __device__ __forceinline__ int end() const { return RAGGED ? slots : p.slots; }
    __device__ __forceinline__ long long row(int slot) const { return (RAGGED ? start : pair * p.slots) + slot; }

    __device__ __forceinline__ Change change() const {
        const bool enters = !(score < p.threshold) && (lowest < 0 || ordered(score) >= ordered(lowest_score));
        const int dropped = enters ? lowest : -1;
        const bool stored = enters || position < p.sinks || p.recent > 0;
        return {position, score, enters, dropped, !stored ? -1 : free >= 0 ? free : dropped};
    }

    __device__ __forceinline__ const ELEMENT* new_key() const {
        return p.new_key + batch * p.key_batch + p.token * p.key_row + group * p.key_head;
    }
    __device__ __forceinline__ const ELEMENT* new_value() const {
        return p.new_value + batch * p.value_batch + p.token * p.value_row + group * p.value_head;
    }
    __device__ __forceinline__ ELEMENT* key_of(int slot) const { return p.key + row(slot) * HEAD_DIM; }
    __device__ __forceinline__ ELEMENT* value_of(int slot) const { return p.value + row(slot) * VALUE_DIM; }
};

// A lane's data of a slot.
struct Slot {
    int number;
    long long position;  // -1: empty
    float score;
    int in_top;

    // As in the state.
    __device__ __forceinline__ Slot(const Head& head, int number, int end)
        : number(number), position(-1), score(0.0f), in_top(0) {
        if (number < end) {
            const long long at = head.row(number);
            position = head.p.position[at];
            score = head.p.score[at];
            in_top = head.p.in_top[at];
        }
    }

    // As after the token's arrival.
    __device__ __forceinline__ void apply(const Change& change) {
        if (number == change.dropped || position < 0) in_top = 0;
        if (number != change.target) return;
        position = change.position;
        score = change.score;
        in_top = change.enters;
    }

    // The bias of the key for the token at `now`.
    __device__ __forceinline__ float bias(const StepParams& p, long long now) const {
        return DELAY && position > now - p.delay ? 0.0f : score;
    }

    // Whether the token at `now` sees the key, or the key must be kept.
    __device__ __forceinline__ bool needed(const StepParams& p, long long now) const {
        return position >= 0 && (in_top || position < p.sinks || position > now - p.recent);
    }
};

// Keeps the lower of two lowest keys, and the first of two free slots.
__device__ __forceinline__ void merge(Candidate& own, const Candidate& other) {
    const bool below = other.rank < own.rank || (other.rank == own.rank && other.position < own.position);
    const int free = min(own.free, other.free);
    if (other.slot != NO_SLOT && (own.slot == NO_SLOT || below)) own = other;
    own.free = free;
}

// The same, over a warp.
__device__ __forceinline__ Candidate merge_lanes(const Candidate& own) {
    const auto lowest = [](bool among, unsigned x) { return __reduce_min_sync(ALL_LANES, among ? x : ~0u); };
    bool among = own.slot != NO_SLOT;
    const unsigned rank = lowest(among, own.rank);
    among = among && own.rank == rank;
    const unsigned high = static_cast<unsigned>(own.position >> 32), highest = lowest(among, high);
    among = among && high == highest;
    const unsigned low = static_cast<unsigned>(own.position), lower = lowest(among, low);
    among = among && low == lower;
    const unsigned slot = lowest(among, own.slot);
    return {static_cast<long long>(static_cast<unsigned long long>(highest) << 32 | lower), rank,
            slot == ~0u ? NO_SLOT : static_cast<int>(slot),
            static_cast<int>(__reduce_min_sync(ALL_LANES, static_cast<unsigned>(own.free)))};
}

__device__ __forceinline__ void consider(Candidate& own, const Slot& slot, const Change& change, const StepParams& p) {
    Candidate other = {slot.position, ordered(slot.score), NO_SLOT, NO_SLOT};
    if (slot.in_top) other.slot = slot.number;
    if (!slot.needed(p, change.position + 1)) other.free = slot.number;
    merge(own, other);
}

// The logits of a step under the mask `seen` of its 16 slots, their biases in lanes 0 to 15.
__device__ __forceinline__ void mask_logits(Logits& s, const LogitScale& logit, unsigned seen, float score) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int key = 2 * (threadIdx.x & 3) + fragment_column(i);
        const float bias = log2_units(__shfl_sync(ALL_LANES, score, key));
        s.x[i] = seen >> key & 1 ? logit(s.x[i], bias) : -infinity();
    }
}

// out and lse of a sequence that takes no step.
__device__ void write_nothing(const StepParams& p, const Head& head, int first_head, int rows) {
    for (int i = threadIdx.x; i < rows * VALUE_DIM; i += THREADS) {
        const long long row = (long long)head.batch * p.length + p.token;
        from_float(p.out[(row * p.kv_heads * p.group + first_head + i / VALUE_DIM) * VALUE_DIM + i % VALUE_DIM], 0.0f);
    }
    if (p.lse != nullptr && threadIdx.x < rows)
        p.lse[((long long)head.batch * p.kv_heads * p.group + first_head + threadIdx.x) * p.length + p.token] =
            -infinity();
}

// The state after the token, except its rows. One thread.
__device__ void change_state(const StepParams& p, const Head& head, const Change& change, Candidate lowest) {
    if (change.dropped >= 0) p.in_top[head.row(change.dropped)] = 0;
    if (change.target >= 0) {
        const long long at = head.row(change.target);
        p.score[at] = change.score;
        p.position[at] = change.position;
        p.in_top[at] = change.enters;
    }
    const int before = p.lowest[head.pair];  // read again: a register less in the loop
    const int less_room = before + change.enters;
    p.lowest[head.pair] = before < 0 && less_room < 0 ? less_room : lowest.slot;
    p.lowest_score[head.pair] = from_ordered(lowest.rank);
    p.free[head.pair] = lowest.free == NO_SLOT ? -1 : lowest.free;
}

// The token's rows on their way to shared memory, one piece per thread.
struct TokenRows {
    Piece piece;

    __device__ __forceinline__ TokenRows(const Head& head) {
        static_assert(KEY_PIECES + VALUE_PIECES <= THREADS, "a piece a thread");
        const int i = threadIdx.x;
        piece = i < KEY_PIECES ? load_piece<HEAD_DIM>(head.new_key(), i, true)
                               : load_piece<VALUE_DIM>(head.new_value(), i - KEY_PIECES, i < KEY_PIECES + VALUE_PIECES);
    }

    // Complete after the next barrier.
    __device__ __forceinline__ void store(StepShared& shared) const {
        if (threadIdx.x < KEY_PIECES + VALUE_PIECES) shared.token[threadIdx.x] = piece;
    }
};

// From shared memory to the token's slot.
__device__ __forceinline__ void store_token(const StepShared& shared, const Head& head, int slot) {
    const int i = threadIdx.x;
    if (i < KEY_PIECES)
        store_piece<HEAD_DIM>(head.key_of(slot), i, shared.token[i]);
    else if (i < KEY_PIECES + VALUE_PIECES)
        store_piece<VALUE_DIM>(head.value_of(slot), i - KEY_PIECES, shared.token[i]);
}

// The token's rows replace those of key `number` of a step.
__device__ __forceinline__ void take_key(Keys& keys, const StepShared& shared, int number) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 2; ++n)
        if (8 * n + lane / 4 == number)
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) keys.piece[n][c] = shared.token[4 * c + lane % 4];
}

__device__ __forceinline__ void take_value(Values& values, const StepShared& shared, int number) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (value_key(k) == number)
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c) values.piece[c][k] = shared.token[KEY_PIECES + 8 * c + lane / 4];
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" CLUSTERED __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) decode_step(const StepParams p) {
    wait_for_earlier_kernels();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    StepShared& shared = *reinterpret_cast<StepShared*>(shared_memory);
    float* weights = reinterpret_cast<float*>(shared_memory + sizeof(StepShared));  // (ROWS, max(num_splits, WARPS))
    const int sets = CLUSTER > 1 ? 1 : p.sets;
#if RAGGED
    const int set = blockIdx.x / p.num_splits, of_all = blockIdx.x % p.num_splits;
    const Segment segment = p.segments[of_all];
    const int num_splits = (segment.slots + p.split_size - 1) / p.split_size, blocks = num_splits * sets;
    const int split = of_all - segment.first_split;
#else
    const int num_splits = CLUSTER > 1 ? CLUSTER : p.num_splits, blocks = num_splits * sets;
    const int split = blockIdx.x % num_splits, set = blockIdx.x / num_splits % sets, pair = blockIdx.x / blocks;
    const Segment segment = {0, 0, pair, pair * num_splits};
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Head head(p, segment);
    const int rows = ATTEND ? min(ROWS, p.group - set * ROWS) : 0;  // query heads of this block
    const int first_head = head.group * p.group + set * ROWS;
    if (p.counts != nullptr && p.counts[head.batch * p.count_words] <= p.token) {  // fewer than 2^31 tokens
        if (ATTEND && split == 0) write_nothing(p, head, first_head, rows);
        return;
    }
#if CLUSTER > 1
    cluster_arrive_running();  // its shared memory exists
#endif

    // ---- this block's split of the slots ----
    const int first = split * p.split_size + warp * STEP, end = min((split + 1) * p.split_size, head.end());
    constexpr int STRIDE = WARPS * STEP;  // from a warp's step to its next
    const TokenRows token(head);
    Candidate candidate = NOTHING;
    Change change = {0, 0.0f, false, -1, -1};
    if constexpr (ATTEND) {
        const Query query(rows, [&](int row) {
            return p.query + head.batch * p.query_batch + p.token * p.query_row + (first_head + row) * p.query_head;
        });
        const LogitScale logit(p.scale, p.softcap);
        WarpState state;
        Keys keys;
        Values values;
        int next_slot = first;  // of the step whose rows are loaded next
        // Its slots in bounds; at first all that exist.
        unsigned seen = next_slot < end ? ~0u >> (32 - min(STEP, end - next_slot)) : 0;
        const auto slot_to_read = [&](int i) { return min(next_slot + key_to_read(i, seen), end - 1); };
        const auto key_at = [&](int i) { return head.key_of(slot_to_read(i)); };
        const auto value_at = [&](int i) { return head.value_of(slot_to_read(i)); };
        const auto slot_at = [&](int base) { return Slot(head, base + lane, lane < STEP ? end : 0); };
        const auto arrive = [&](Slot& slot) {  // after the token's arrival: the mask of the step's slots
            slot.apply(change);
            const bool mine = lane < STEP && slot.number < end;
            if (mine && set == 0) consider(candidate, slot, change, p);
            const bool hidden = slot.bias(p, change.position) == -infinity();
            return __ballot_sync(ALL_LANES, mine && slot.needed(p, change.position) && !hidden);
        };
        Slot slot = slot_at(first), following = slot_at(first + STRIDE);
        if (TOGETHER) {
            load_keys(keys, key_at);
            load_values(values, value_at);
        }
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
            Logits s;
            if (!TOGETHER) load_keys(keys, key_at);
            if (here) take_key(keys, shared, taken);
            score_keys(s, shared.split, keys);
            if (!TOGETHER) load_values(values, value_at);
            if (here) take_value(values, shared, taken);
            // The next step's keys load while this step waits for its values; its values load during its QK MMA.
            slot = following;
            following = slot_at(base + 2 * STRIDE);
            next_slot = base + STRIDE;
            seen = arrive(slot);
            if (TOGETHER) load_keys(keys, key_at);
            mask_logits(s, logit, now, score);
            state.online_softmax(s);
            only_seen(values, now);
            state.add(s, values);
            if (TOGETHER) load_values(values, value_at);
        }
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
    candidate = merge_lanes(candidate);
    if (lane == 0) shared.candidates[warp] = candidate;
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
        if (set == 0 && warp == WARPS - 1) {
            candidate = merge_lanes(lane < WARPS ? shared.candidates[lane] : NOTHING);
            if (lane == 0) *split_candidate = candidate;
        }
        if (ATTEND)
            combine<false>(o, states, WARPS, weights, shared.split, rows,
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
    if (warp == WARPS - 1) {
        Candidate best = NOTHING;
        for (int i = lane; i < candidates; i += 32) merge(best, found[i]);
        best = merge_lanes(best);
        if (lane == 0) change_state(p, head, change, best);
    } else if (warp == WARPS - 2 && lane == 0) {
        unsigned* heads = p.tickets + (RAGGED ? p.pairs : gridDim.x / blocks) + head.batch;
        if (p.kv_heads == 1 || take_ticket(heads, p.kv_heads - 1) == p.kv_heads - 1)
            p.lengths[head.batch] = change.position + 1;
    }
    if (change.target >= 0) store_token(shared, head, change.target);
    if (!ATTEND) return;
    for (int s = 0; s < sets; ++s) {
        const int first_of_set = head.group * p.group + s * ROWS, rows_of_set = min(ROWS, p.group - s * ROWS);
        const auto write_lse = [&](int row, const SplitState& found) {
            const long long of_head = (long long)head.batch * p.kv_heads * p.group + first_of_set + row;
            if (p.lse != nullptr) p.lse[of_head * p.length + p.token] = natural_lse(found);
        };
        const auto write_out = [&](int row, int d, float x, float l) {
            const long long of_token = (long long)head.batch * p.length + p.token;
            from_float(p.out[(of_token * p.kv_heads * p.group + first_of_set + row) * VALUE_DIM + d],
                       l == 0.0f ? 0.0f : x / l);
        };
        if (CLUSTER > 1 || blocks == 1) {
            combine<false>(o, states, CLUSTER > 1 ? CLUSTER : WARPS, weights, shared.split, rows_of_set, write_lse, write_out);
        } else {
            const long long of_set = RAGGED ? s * p.num_splits + segment.first_split : (head.pair * sets + s) * num_splits;
            combine<true>(p.partial + of_set * (ROWS * VALUE_DIM), p.partial_state + of_set * ROWS, num_splits, weights,
                          shared.split, rows_of_set, write_lse, write_out);
        }
        __syncthreads();  // weights and sums have been read
    }
}
