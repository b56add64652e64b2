// One token more for a cache that keeps, per sequence and kv head, the keys that are in the top `window` by (score,
// position), the first `sinks` and the last `recent` positions (SPEC section 7; cupy_dma/cache_state.py): takes the token's
// key in, computes the attention of its queries over what is kept, and finds what the token after it will need.
//
// key        // (B, Hkv, R, HEAD_DIM) ELEMENT     score    // (B, Hkv, R) f32      lengths  // (B) int64: tokens seen
// value      // (B, Hkv, R, VALUE_DIM) ELEMENT    position // (B, Hkv, R) int64    lowest   // (B, Hkv): slot of the top's
// query      // (B, L, H, HEAD_DIM) ELEMENT       in_top   // (B, Hkv, R) bytes    //   lowest key, -1 while there is room
// out        // (B, L, H, VALUE_DIM), contiguous  lse // (B, H, L) f32             free     // (B, Hkv): a slot not needed, -1
//
// One launch. `parts` blocks share the R slots of one (sequence, kv head, set of ROWS query heads). They only read the state:
// `lowest` and `free`, found by the launch before, tell every block which key leaves the top and which slot the token
// takes; for that slot they read the token's own rows. What a block finds goes to `partial`: outputs, and
// of set 0 the lowest key of the top and a free slot of its share. The block that takes the last ticket of a (sequence,
// kv head) adds the parts up in their order and alone changes the state; by then nobody reads it any more. `lengths` is
// read for all kv heads of a sequence: the last of these changes it (a second ticket).
//
// A warp loads its first rows before it is known which are needed, because they take as long to come as that takes to be
// found out; of the others only those that are needed. counts: sequences with fewer than `token` + 1 tokens take no step.
//
// Prelude: that of split.cuh, MIN_BLOCKS, ATTEND (0: there are no queries).
#include "arch.cuh"
#include "rank.cuh"
#include "split.cuh"

// The lowest key of the top in some slots, and the first free one of them.
struct Candidate {
    long long position;
    unsigned rank;
    int slot, free;  // NO_SLOT if there is none
};

struct StepParams {
    const ELEMENT* query;
    const ELEMENT* new_key;    // (B, L, Hkv, HEAD_DIM)
    const ELEMENT* new_value;  // (B, L, Hkv, VALUE_DIM)
    const float* new_score;    // (B, Hkv, L)
    const int* counts;         // (B), or null: all take the step
    ELEMENT* key;
    ELEMENT* value;
    float* score;
    long long* position;
    unsigned char* in_top;
    long long* lengths;
    int* lowest;
    int* free;
    ELEMENT* out;
    float* lse;
    float* partial;            // (B * Hkv, sets, parts, ROWS, VALUE_DIM)
    PartState* partial_state;  // (B * Hkv, sets, parts, ROWS)
    Candidate* candidates;     // (B * Hkv, parts)
    unsigned* tickets;         // (B * Hkv), then (B); all 0
    long long query_batch, query_row, query_head;  // strides, in elements
    long long key_batch, key_row, key_head;
    long long value_batch, value_row, value_head;
    long long score_batch, score_head, score_token;
    int count_words;  // 32-bit words of a number of counts
    int kv_heads, group, sets, parts, share;  // query heads of a kv head; sets of them; slots of a part, a multiple of STEP
    int slots, window, sinks, recent;
    int length, token;  // L, and which of them
    float scale, softcap;
};

constexpr int NO_SLOT = 2147483647;
constexpr Candidate NOTHING = {0, 0, NO_SLOT, NO_SLOT};

struct StepShared {
    SplitShared split;
    Candidate candidates[WARPS];
    int last;
};

// What the token does to its kv head.
struct Change {
    long long position;  // of the token
    float score;
    bool enters;         // the top
    int dropped, target;  // slots: whose key leaves the top, and that the token takes; -1: none
};

struct Head {
    const StepParams& p;
    long long pair, position;  // batch * kv_heads + kv head; of the token
    int batch, group;
    int lowest, free;
    float score;  // of the token

    __device__ __forceinline__ Head(const StepParams& p, int pair)
        : p(p), pair(pair), batch(pair / p.kv_heads), group(pair % p.kv_heads) {
        position = p.lengths[batch];
        lowest = p.lowest[pair];
        free = p.free[pair];
        score = p.new_score[batch * p.score_batch + group * p.score_head + p.token * p.score_token];
    }

    __device__ __forceinline__ Change change() const {
        const bool enters = lowest < 0 || ordered(score) >= ordered(p.score[pair * p.slots + lowest]);
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
    __device__ __forceinline__ ELEMENT* key_of(int slot) const { return p.key + (pair * p.slots + slot) * HEAD_DIM; }
    __device__ __forceinline__ ELEMENT* value_of(int slot) const {
        return p.value + (pair * p.slots + slot) * VALUE_DIM;
    }
};

// What is known of a slot.
struct Slot {
    int number;
    long long position;  // -1: empty
    float score;
    int in_top;

    // As the state has it.
    __device__ __forceinline__ Slot(const Head& head, int number, int end)
        : number(number), position(-1), score(0.0f), in_top(0) {
        if (number < end) {
            const long long at = head.pair * head.p.slots + number;
            position = head.p.position[at];
            score = head.p.score[at];
            in_top = head.p.in_top[at];
        }
    }

    // As it is when the token has come.
    __device__ __forceinline__ void follow(const Change& change) {
        if (number == change.dropped || position < 0) in_top = 0;
        if (number != change.target) return;
        position = change.position;
        score = change.score;
        in_top = change.enters;
    }

    // Whether the token at `now` sees the key, or needs it to be kept.
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

// The same for a warp.
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

// The logits of a step under the mask `seen` of its 16 slots, their scores in lanes 0 to 15.
__device__ __forceinline__ void mask_logits(Logits& s, const LogitScale& logit, unsigned seen, float score) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int key = 2 * (threadIdx.x & 3) + fragment_column(i);
        const float bias = __shfl_sync(ALL_LANES, score, key) * LOG2_E;
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

// The state after the token. One warp: thread `lane` of 32.
__device__ void change_state(const StepParams& p, const Head& head, const Change& change, Candidate lowest) {
    const long long first = head.pair * p.slots;
    if (change.dropped >= 0) p.in_top[first + change.dropped] = 0;
    if (change.target >= 0) {
        p.score[first + change.target] = change.score;
        p.position[first + change.target] = change.position;
        p.in_top[first + change.target] = change.enters;
    }
    p.lowest[head.pair] = change.position + 1 < p.window ? -1 : lowest.slot;
    p.free[head.pair] = lowest.free == NO_SLOT ? -1 : lowest.free;
}

template <int dim>
__device__ __forceinline__ void copy_row(ELEMENT* target, const ELEMENT* source, int first, int threads) {
#if VECTOR
    for (int i = first; i < dim / PIECE; i += threads)
        reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
#else
    for (int i = first; i < dim; i += threads) target[i] = source[i];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) decode_step(const StepParams p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    StepShared& shared = *reinterpret_cast<StepShared*>(shared_memory);
    float* weights = reinterpret_cast<float*>(shared_memory + sizeof(StepShared));  // (ROWS, max(parts, WARPS))
    const int part = blockIdx.x % p.parts, set = blockIdx.x / p.parts % p.sets;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Head head(p, blockIdx.x / p.parts / p.sets);
    const int rows = ATTEND ? min(ROWS, p.group - set * ROWS) : 0;  // query heads of this block
    const int first_head = head.group * p.group + set * ROWS;
    if (p.counts != nullptr && p.counts[head.batch * p.count_words] <= p.token) {  // fewer than 2^31 tokens
        if (ATTEND && part == 0) write_nothing(p, head, first_head, rows);
        return;
    }

    // ---- this block's share of the slots ----
    const int first = part * p.share + warp * STEP, end = min((part + 1) * p.share, p.slots);
    constexpr int STRIDE = WARPS * STEP;  // from a warp's step to its next
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
        int place = first;  // of the step whose rows are loaded next
        unsigned seen = place < end ? ~0u >> (32 - min(STEP, end - place)) : 0;  // of its slots; at first: that there are
        const auto slot_to_read = [&](int i) { return min(place + key_to_read(i, seen), end - 1); };
        const auto key_at = [&](int i) {
            const int slot = slot_to_read(i);
            return slot == change.target ? head.new_key() : head.key_of(slot);
        };
        const auto value_at = [&](int i) {
            const int slot = slot_to_read(i);
            return slot == change.target ? head.new_value() : head.value_of(slot);
        };
        const auto slot_at = [&](int base) { return Slot(head, base + lane, lane < STEP ? end : 0); };
        const auto arrive = [&](Slot& slot) {  // the token has come: what is seen of the step's slots
            slot.follow(change);
            const bool mine = lane < STEP && slot.number < end;
            if (mine && set == 0) consider(candidate, slot, change, p);
            return __ballot_sync(ALL_LANES, mine && slot.needed(p, change.position));
        };
        Slot slot = slot_at(first), following = slot_at(first + STRIDE);
        if (TOGETHER) {
            load_keys(keys, key_at);
            load_values(values, value_at);
        }
        change = head.change();
        seen = arrive(slot);
        if (TOGETHER && place <= change.target && change.target < min(place + STEP, end)) {  // once more, with the token
            load_keys(keys, key_at);
            load_values(values, value_at);
        }
        query.store(shared.split);
        __syncthreads();  // the query is in place
        for (int base = first; base < end; base += STRIDE) {
            const unsigned now = seen;
            const float score = slot.score;
            Logits s;
            if (!TOGETHER) load_keys(keys, key_at);
            score_keys(s, shared.split, keys);
            if (!TOGETHER) load_values(values, value_at);
            // The next step's keys come while this one's values are waited for, its values while its keys are multiplied.
            slot = following;
            following = slot_at(base + 2 * STRIDE);
            place = base + STRIDE;
            seen = arrive(slot);
            if (TOGETHER) load_keys(keys, key_at);
            mask_logits(s, logit, now, score);
            state.soften(s);
            only_seen(values, now);
            state.add(s, values);
            if (TOGETHER) load_values(values, value_at);
        }
        state.leave(shared.split);
    } else {
        change = head.change();
        for (int base = first; base < end; base += STRIDE) {
            Slot slot(head, base + lane, lane < STEP ? end : 0);
            slot.follow(change);
            if (lane < STEP && slot.number < end) consider(candidate, slot, change, p);
        }
    }
    candidate = merge_lanes(candidate);
    if (lane == 0) shared.candidates[warp] = candidate;
    __syncthreads();  // what each warp has found is in place

    // ---- the last block of a (sequence, kv head) goes on ----
    const float* o = &shared.split.o[0][0][0];
    const PartState* states = &shared.split.state[0][0];
    int sources = WARPS;
    const int blocks = p.parts * p.sets;
    if (blocks > 1) {
        const long long place = (head.pair * p.sets + set) * p.parts + part;
        if (ATTEND)
            combine(o, states, WARPS, false, weights, shared.split, rows,
                    [&](int row, const PartState& s) { p.partial_state[place * ROWS + row] = s; },
                    [&](int row, int d, float x, float) { p.partial[(place * ROWS + row) * VALUE_DIM + d] = x; });
        if (set == 0 && warp == 0) {
            candidate = merge_lanes(lane < WARPS ? shared.candidates[lane] : NOTHING);
            if (lane == 0) p.candidates[head.pair * p.parts + part] = candidate;
        }
        __syncthreads();  // the block's results are written
        if (threadIdx.x == 0) shared.last = take_ticket(p.tickets + head.pair, blocks - 1) == blocks - 1;
        __syncthreads();  // all know whether the other blocks' results are there
        if (!shared.last) return;
    }

    // ---- nobody else reads the state any more: change it ----
    if (warp == 0) {
        const Candidate* found = blocks > 1 ? p.candidates + head.pair * p.parts : shared.candidates;
        const int count = blocks > 1 ? p.parts : WARPS;
        Candidate all = NOTHING;
        for (int i = lane; i < count; i += 32) merge(all, found[i]);
        all = merge_lanes(all);
        if (lane == 0) change_state(p, head, change, all);
    } else if (warp == WARPS - 1 && lane == 0) {
        unsigned* heads = p.tickets + gridDim.x / blocks + head.batch;
        if (take_ticket(heads, p.kv_heads - 1) == p.kv_heads - 1) p.lengths[head.batch] = change.position + 1;
    }
    if (change.target >= 0) {
        copy_row<HEAD_DIM>(head.key_of(change.target), head.new_key(), threadIdx.x, THREADS);
        copy_row<VALUE_DIM>(head.value_of(change.target), head.new_value(), threadIdx.x, THREADS);
    }
    if (!ATTEND) return;
    for (int s = 0; s < p.sets; ++s) {
        const long long place = (head.pair * p.sets + s) * p.parts;
        if (blocks > 1) {
            o = p.partial + place * (ROWS * VALUE_DIM);
            states = p.partial_state + place * ROWS;
            sources = p.parts;
        }
        const int first_of_set = head.group * p.group + s * ROWS;
        combine(o, states, sources, blocks > 1, weights, shared.split, min(ROWS, p.group - s * ROWS),
                [&](int row, const PartState& found) {
                    const long long of_head = (long long)head.batch * p.kv_heads * p.group + first_of_set + row;
                    if (p.lse != nullptr) p.lse[of_head * p.length + p.token] = natural_lse(found);
                },
                [&](int row, int d, float x, float l) {
                    const long long of_token = (long long)head.batch * p.length + p.token;
                    from_float(p.out[(of_token * p.kv_heads * p.group + first_of_set + row) * VALUE_DIM + d],
                               l == 0.0f ? 0.0f : x / l);
                });
        __syncthreads();  // weights and sums have been read
    }
}
