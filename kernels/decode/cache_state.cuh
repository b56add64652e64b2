// The state of the decode cache (SPEC section 7; cupy_dma/cache/state.py) as kernels see it, and what a token does to it.
//
// Per sequence and kv head it keeps the top `window` keys by (score, position) among those with a score of at least
// `threshold`, the first `sinks` and the last `recent` positions:
//
// key        // (B, Hkv, R, HEAD_DIM) ELEMENT     score    // (B, Hkv, R) f32      lengths  // (B) int64: tokens seen
// value      // (B, Hkv, R, VALUE_DIM) ELEMENT    position // (B, Hkv, R) int64    lowest   // (B, Hkv): slot of the top's
// in_top     // (B, Hkv, R) bytes                                                  //   lowest key; while there is room, minus how much
// lowest_score // (B, Hkv) f32: that of slot `lowest`                              free     // (B, Hkv): a slot not needed, -1
//
// With STORAGE key and value are bytes, new ones, too (decode/quantize_rows.cu), and every row has a scale.
//
// A call has n sequences of L tokens. With SLOTS, `slots` says which of the cache's each of them is.
//
// Prelude: that of decode/split_kv.cuh, DELAY (of scores as biases: SPEC section 16), RAGGED (1: the numbers of slots
// differ), SLOTS.
#pragma once
#include "common/arch.cuh"
#include "common/rank.cuh"
#include "decode/candidate.cuh"
#include "decode/split_kv.cuh"

constexpr int MAX_TOKENS = 8;  // of a plan

// The slots of a (sequence, kv head), if numbers of slots differ.
struct alignas(16) Segment {
    int start, slots;  // its first row; below 2^31 of all
    int pair;          // batch * kv_heads + kv head
    int first_split;   // among those of all
};

// B is n where an array belongs to the call.
struct StepParams {
    const ELEMENT* query;
    const Row* new_key;        // (B, L, Hkv, HEAD_DIM)
    const Row* new_value;      // (B, L, Hkv, VALUE_DIM)
    const float* new_score;    // (B, Hkv, L)
    const int* counts;         // (B): how many of its tokens are real, or null: all
    Row* key;
    Row* value;
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
    int length, token;  // L, and the index of the first token that the launch attends from
    float scale, softcap;
    float threshold;
    int delay;  // with DELAY
    const Segment* segments;  // (splits of all pairs), with RAGGED
    int pairs;                // B * Hkv
    const int* slots_of;      // (n): which of the cache's sequences, -1: none; with SLOTS
    int calls;                // n
    struct Plan* plans;       // (n * Hkv)
    int commits;              // 0: nothing of the state changes
    const long long* segment_start;  // (B, Hkv), with RAGGED
    const int* segment_slots;        // likewise
    const float* new_key_scale;      // (B, L, Hkv), with STORAGE
    const float* new_value_scale;
    float* key_scale;                // (B, Hkv, R), with STORAGE
    float* value_scale;
};

// The effect of the token on its kv head.
struct Change {
    long long position;  // of the token
    float score;
    bool enters;         // the top
    int dropped, target;  // slots: of the key that leaves the top, and of the token; -1: none
};

// What the next token needs to know of the top and of the slots.
struct Found {
    int lowest;
    float lowest_score;
    int free;

    // After a token that `enters` or not, of what was `before` in place of `lowest`, given the candidate of all slots.
    __device__ __forceinline__ Found(int before, bool enters, const Candidate& candidate) {
        const int less_room = before + enters;
        lowest = before < 0 && less_room < 0 ? less_room : candidate.slot;
        lowest_score = from_ordered(candidate.rank);
        free = candidate.free == NO_SLOT ? -1 : candidate.free;
    }
};

// What the real tokens of a call do to a (sequence, kv head), one after the other (decode/plan.cu).
struct Plan {
    Change changes[MAX_TOKENS];
    int lowest;  // as in Found, after the last of them
    float lowest_score;
    int free;
};

// A sequence of the call, that of the cache which it is, and a kv head. Either sequence is -1 if the other has none.
struct Served {
    int batch, sequence, group;

    // Number `pair` of the call's (sequence, kv head).
    __device__ __forceinline__ static Served of_call(const StepParams& p, int pair) {
        const int batch = pair / p.kv_heads;
        return {batch, SLOTS ? p.slots_of[batch] : batch, pair % p.kv_heads};
    }

    // Number `pair` of the cache's. All lanes of a warp call it.
    __device__ __forceinline__ static Served of_cache(const StepParams& p, int pair) {
        const int sequence = pair / p.kv_heads;
        int batch = SLOTS ? -1 : sequence;
        if (SLOTS) {
            for (int i = threadIdx.x & 31; i < p.calls; i += 32)
                if (p.slots_of[i] == sequence) batch = i;
            batch = __reduce_max_sync(ALL_LANES, batch);
        }
        return {batch, sequence, pair % p.kv_heads};
    }

    __device__ __forceinline__ bool is_idle() const { return SLOTS && min(batch, sequence) < 0; }

    __device__ __forceinline__ int pair(const StepParams& p) const { return sequence * p.kv_heads + group; }

    // How many of its tokens are real.
    __device__ __forceinline__ int tokens(const StepParams& p) const {
        if (is_idle()) return 0;
        return p.counts == nullptr ? p.length : min(p.length, p.counts[batch * p.count_words]);  // fewer than 2^31
    }
};

struct Head {
    const StepParams& p;
    long long pair, position;  // sequence * kv_heads + kv head; of the token
    int batch, sequence, group;  // batch: of the call
    int lowest, free;
    float lowest_score, score;  // score: of the token
    int start, slots;  // of its segment, with RAGGED

    __device__ __forceinline__ Head(const StepParams& p, const Served& served, long long pair, int start, int slots)
        : p(p), pair(pair), batch(served.batch), sequence(served.sequence), group(served.group), start(start),
          slots(slots) {
        position = p.lengths[sequence];
        lowest = p.lowest[pair];
        lowest_score = p.lowest_score[pair];
        free = p.free[pair];
        score = new_score(p.token);
    }

    __device__ __forceinline__ float new_score(int token) const {
        return p.new_score[batch * p.score_batch + group * p.score_head + token * p.score_token];
    }

    __device__ __forceinline__ int end() const { return RAGGED ? slots : p.slots; }
    __device__ __forceinline__ long long row(int slot) const { return (RAGGED ? start : pair * p.slots) + slot; }

    __device__ __forceinline__ Change change() const {
        const bool enters = !(score < p.threshold) && (lowest < 0 || ordered(score) >= ordered(lowest_score));
        const int dropped = enters ? lowest : -1;
        const bool stored = enters || position < p.sinks || p.recent > 0;
        return {position, score, enters, dropped, !stored ? -1 : free >= 0 ? free : dropped};
    }

    __device__ __forceinline__ const Row* new_key(int token) const {
        return p.new_key + batch * p.key_batch + token * p.key_row + group * p.key_head;
    }
    __device__ __forceinline__ const Row* new_value(int token) const {
        return p.new_value + batch * p.value_batch + token * p.value_row + group * p.value_head;
    }
    __device__ __forceinline__ Row* key_of(int slot) const { return p.key + row(slot) * HEAD_DIM; }
    __device__ __forceinline__ Row* value_of(int slot) const { return p.value + row(slot) * VALUE_DIM; }
    __device__ __forceinline__ long long new_row(int token) const {
        return ((long long)batch * p.length + token) * p.kv_heads + group;
    }
};

// A lane's data of a slot.
struct Slot {
    int number;
    long long position;  // -1: empty
    float score;
    int in_top;

    Slot() = default;

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

    // Of the tokens at `now`, `now` + 1, ..., bit by bit: those that see the key, and those that are too near for its
    // bias.
    __device__ __forceinline__ unsigned seen_by(const StepParams& p, long long now) const {
        const unsigned near = near_to(p, now);
        const unsigned seen = in_top || position < p.sinks ? ~0u : bits_below(position + p.recent - now);
        return position < 0 ? 0 : score == -infinity() ? seen & near : seen;
    }
    __device__ __forceinline__ unsigned near_to(const StepParams& p, long long now) const {
        return DELAY ? bits_below(position + p.delay - now) : 0;
    }
    __device__ __forceinline__ static unsigned bits_below(long long limit) {
        return limit <= 0 ? 0 : limit >= 32 ? ~0u : (1u << limit) - 1;
    }

    // Whether the token at `now` sees the key, or the key must be kept.
    __device__ __forceinline__ bool needed(const StepParams& p, long long now) const {
        return position >= 0 && (in_top || position < p.sinks || position > now - p.recent);
    }
};

__device__ __forceinline__ void consider(Candidate& own, const Slot& slot, const Change& change, const StepParams& p) {
    Candidate other = {slot.position, ordered(slot.score), NO_SLOT, NO_SLOT};
    if (slot.in_top) other.slot = slot.number;
    if (!slot.needed(p, change.position + 1)) other.free = slot.number;
    merge(own, other);
}

// The state after a token, except its rows and what the next token needs. One thread.
__device__ __forceinline__ void change_slots(const StepParams& p, const Head& head, const Change& change) {
    if (change.dropped >= 0) p.in_top[head.row(change.dropped)] = 0;
    if (change.target >= 0) {
        const long long at = head.row(change.target);
        p.score[at] = change.score;
        p.position[at] = change.position;
        p.in_top[at] = change.enters;
    }
}

// One thread of the last block of a (sequence, kv head) writes the sequence's length, which all its kv heads share: the
// last of them does.
__device__ __forceinline__ void change_length(const StepParams& p, const Head& head, int pairs, long long length) {
    unsigned* heads = p.tickets + pairs + head.sequence;
    if (p.kv_heads == 1 || take_ticket(heads, p.kv_heads - 1) == p.kv_heads - 1) p.lengths[head.sequence] = length;
}

// out and lse of a token that takes no step.
__device__ void write_nothing(const StepParams& p, int batch, int token, int first_head, int rows) {
    for (int i = threadIdx.x; i < rows * VALUE_DIM; i += THREADS) {
        const long long row = (long long)batch * p.length + token;
        from_float(p.out[(row * p.kv_heads * p.group + first_head + i / VALUE_DIM) * VALUE_DIM + i % VALUE_DIM], 0.0f);
    }
    if (p.lse != nullptr && threadIdx.x < rows)
        p.lse[((long long)batch * p.kv_heads * p.group + first_head + threadIdx.x) * p.length + token] = -infinity();
}
