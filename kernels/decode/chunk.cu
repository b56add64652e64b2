// A chunk of new tokens for some of a cache's sequences (cupy_dma/cache/chunked_prefill.py): the keys that they attend to,
// and what the cache keeps of them.
//
// The history of a (sequence, kv head) has T = R + L keys: its R slots in order of position, empty ones first, then the
// new tokens. A key's place is its index in the history. `top` holds the place of the first key that does not see the key
// among its best (select/prefix_top_w.cu).
//
//   gather_history  slots and new tokens -> place, before, position, raw_score, ranked_score; with queries: history rows
//   visible_stops   position, top -> start, stop: which new tokens see each key
//   store_tokens    the state after the last token. Tokens that later tokens may see are stored in slots that are no longer
//                   needed, both in order
//
// slots_of // (n): the cache's sequence of each of the call's, -1: none; or null: all, in order
// bounds   // (n + 1): cumulative lengths of packed new tokens, or null. With them L is the number of all new tokens,
//             arrays of the call have n = 1, and the histories of all sequences follow each other, T = n * R + L
// key, value, score, position, in_top, lengths, lowest, lowest_score, free: the state, as in decode/cache_state.cuh
//
// With STORAGE, rows of the state and new rows are codes with a scale each (decode/quantized_rows.cuh); rows of the history
// are of type ELEMENT.
//
// Prelude: UNIT (uint4, unsigned, unsigned short or unsigned char), in which rows are copied; STORAGE, and with it
// ELEMENT.
#include "common/block_select.cuh"
#include "common/rank.cuh"
#include "decode/candidate.cuh"

using Unit = UNIT;
#if STORAGE
#include "decode/quantized_rows.cuh"
using HistoryUnit = ELEMENT;
#else
using HistoryUnit = Unit;
#endif

struct ChunkParams {
    const Unit* new_key;          // (n, L, Hkv, key_units)
    const Unit* new_value;        // (n, L, Hkv, value_units)
    const float* new_score;       // (n, Hkv, L)
    const int* counts;            // (n): how many of its tokens are real, or null: all
    const int* slots_of;
    const int* bounds;
    const long long* segment_start;  // (B, Hkv): each kv head's first row, or null: it has R rows
    const int* segment_slots;        // (B, Hkv): and the number of its rows
    Unit* key;
    Unit* value;
    float* score;
    long long* position;
    unsigned char* in_top;
    long long* lengths;
    int* lowest;
    float* lowest_score;
    int* free;
    HistoryUnit* history_key;     // (n, T, Hkv, D), or null: no queries
    HistoryUnit* history_value;   // (n, T, Hkv, Dv)
    long long* history_position;  // (n, Hkv, T), -1 where empty
    float* raw_score;             // (n, Hkv, T), -inf where empty; or null
    float* ranked_score;          // likewise, and -inf below the threshold
    int* place;                   // (n, Hkv, R): of each slot's key
    long long* before;            // (n): tokens before the call
    int* first;                   // (n + 1): start of each history, with bounds
    int* document;                // (T): start of the key's history, with bounds
    const int* top;               // (n, Hkv, T)
    int* start;                   // (T)
    int* stop;                    // (n, Hkv, T)
    const float* new_key_scale;   // (n, L, Hkv), with STORAGE
    const float* new_value_scale;
    float* key_scale;             // (B, Hkv, R)
    float* value_scale;
    long long key_batch, key_row, key_head;  // strides, in units
    long long value_batch, value_row, value_head;
    long long score_batch, score_head, score_token;  // in elements
    int key_units, value_units;   // of a row
    int count_words, bound_words;  // 1 for 32-bit counts and bounds, 2 for 64-bit ones
    int sequences, kv_heads, slots, length;  // n, Hkv, R, L
    int window, sinks, recent, splits;  // blocks of store_tokens per (sequence, kv head)
    float threshold;
};

constexpr int ROWS = 64, GATHER_THREADS = 256, TILE = 1024;  // gather_history: rows of a block, slots compared at a time
constexpr int SHARES = GATHER_THREADS / ROWS;
constexpr int STOP_THREADS = 256, STORE_THREADS = 512;
constexpr int STORE_WARPS = STORE_THREADS / 32;
constexpr int MAX_SLOTS = 1 << 17;

// A (sequence, kv head) of the call.
struct Head {
    const ChunkParams& p;
    int batch, group, sequence;  // sequence: the cache's, -1: none
    int slots;
    int begin, length;           // first new token (0 unless packed) and number of them; the last sequence's include
                                 // padding at the end of a packed call

    __device__ __forceinline__ Head(const ChunkParams& p, int pair)
        : p(p), batch(pair / p.kv_heads), group(pair % p.kv_heads),
          sequence(p.slots_of == nullptr ? batch : p.slots_of[batch]),
          slots(p.segment_slots == nullptr ? p.slots : sequence < 0 ? 0 : p.segment_slots[pair_of_cache()]),
          begin(p.bounds == nullptr ? 0 : bound(batch)),
          length((p.bounds == nullptr || batch == p.sequences - 1 ? p.length : bound(batch + 1)) - begin) {}

    __device__ __forceinline__ int bound(int number) const { return p.bounds[number * p.bound_words]; }
    __device__ __forceinline__ long long pair_of_cache() const { return (long long)sequence * p.kv_heads + group; }

    __device__ __forceinline__ long long row(int slot) const {
        return (p.segment_start == nullptr ? pair_of_cache() * p.slots : p.segment_start[pair_of_cache()]) + slot;
    }
    __device__ __forceinline__ long long position(int slot) const {
        return sequence < 0 || slot >= slots ? -1 : p.position[row(slot)];
    }

    // ---- new tokens ----
    __device__ __forceinline__ int tokens() const {  // real ones
        if (sequence < 0) return 0;
        const int own = p.bounds == nullptr ? length : bound(batch + 1) - begin;
        return p.counts == nullptr ? own : max(0, min(own, p.counts[batch * p.count_words]));
    }
    // Index of a token in an array with these strides.
    __device__ __forceinline__ long long offset(long long of_batch, long long of_token, long long of_head,
                                                int token) const {
        return (p.bounds == nullptr ? batch * of_batch : begin * of_token) + token * of_token + group * of_head;
    }
    __device__ __forceinline__ float new_score(int token) const {
        return p.new_score[offset(p.score_batch, p.score_token, p.score_head, token)];
    }
    __device__ __forceinline__ const Unit* new_key(int token) const {
        return p.new_key + offset(p.key_batch, p.key_row, p.key_head, token);
    }
    __device__ __forceinline__ const Unit* new_value(int token) const {
        return p.new_value + offset(p.value_batch, p.value_row, p.value_head, token);
    }
    __device__ __forceinline__ long long new_row(int token) const {
        return offset((long long)p.length * p.kv_heads, p.kv_heads, 1, token);
    }

    // ---- the history ----
    __device__ __forceinline__ int keys() const { return p.slots + length; }
    __device__ __forceinline__ int first() const { return p.bounds == nullptr ? 0 : batch * p.slots + begin; }
    __device__ __forceinline__ long long key_of_history(int place) const {
        if (p.bounds == nullptr) return ((long long)batch * p.kv_heads + group) * keys() + place;
        return (long long)group * (p.sequences * p.slots + p.length) + first() + place;
    }
    __device__ __forceinline__ long long row_of_history(int place) const {
        return ((p.bounds == nullptr ? (long long)batch * keys() : first()) + place) * p.kv_heads + group;
    }
    __device__ __forceinline__ int& place(int slot) const {
        return p.place[((long long)batch * p.kv_heads + group) * p.slots + slot];
    }

    __device__ __forceinline__ void write_key(int place, long long position, float score) const {
        const long long at = key_of_history(place);
        p.history_position[at] = position;
        if (p.raw_score != nullptr) p.raw_score[at] = score;
        p.ranked_score[at] = score < p.threshold ? -infinity() : score;
        if (p.bounds != nullptr && group == 0) p.document[first() + place] = first();
    }
};

// Copies rows of `units` units from from(row) to to(row), except rows whose to(row) is null.
template <typename To, typename From>
__device__ __forceinline__ void copy_rows(int rows, int units, const To& to, const From& from) {
    for (int i = threadIdx.x; i < rows * units; i += STORE_THREADS) {
        const int row = i / units;
        Unit* target = to(row);
        if (target != nullptr) target[i % units] = from(row)[i % units];
    }
}

// Copies rows from from(row) to row to(row) of a history: zeros if from(row) is null. With STORAGE, codes are multiplied by
// scale(row).
template <typename To, typename From, typename Scale>
__device__ __forceinline__ void gather_rows(HistoryUnit* history, int rows, int units, const To& to, const From& from,
                                            const Scale& scale) {
    const int own = STORAGE ? units * static_cast<int>(sizeof(Unit)) : units;
    for (int i = threadIdx.x; i < rows * own; i += GATHER_THREADS) {
        const int row = i / own, at = i % own;
        const Unit* source = from(row);
        HistoryUnit& target = history[to(row) * own + at];
#if STORAGE
        float x[4] = {};
        if (source != nullptr) numbers_of(x, reinterpret_cast<const unsigned char*>(source)[at]);
        from_float(target, source == nullptr ? 0.0f : x[0] * scale(row));
#else
        target = source == nullptr ? Unit{} : source[at];
#endif
    }
}

// A block takes ROWS slots or ROWS new tokens of a (sequence, kv head). A slot's place is the number of slots with lower
// positions, which SHARES threads count.
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 2) gather_history(const ChunkParams p) {
    wait_for_earlier_kernels();
    __shared__ long long positions[TILE];
    __shared__ int places[ROWS];
    const int old_blocks = (p.slots + ROWS - 1) / ROWS, blocks = old_blocks + (p.length + ROWS - 1) / ROWS;
    const Head head(p, blockIdx.x / blocks);
    const int block = blockIdx.x % blocks;
    const bool is_old = block < old_blocks;
    const int first = (is_old ? block : block - old_blocks) * ROWS;
    const int rows = min(ROWS, (is_old ? p.slots : head.length) - first);
    if (rows <= 0) return;  // fewer tokens than other sequences
    const long long before = head.sequence < 0 ? 0 : p.lengths[head.sequence];
    if (block == 0 && head.group == 0 && threadIdx.x == 0) {
        p.before[head.batch] = before;
        if (p.bounds != nullptr) {
            p.first[head.batch] = head.first();
            if (head.batch == p.sequences - 1) p.first[p.sequences] = p.sequences * p.slots + head.bound(p.sequences);
        }
    }

    if (is_old) {
        const int own = threadIdx.x / SHARES, slot = first + own;
        const long long position = own < rows ? head.position(slot) : -1;
        int lower = 0;
        for (int begin = 0; begin < p.slots; begin += TILE) {
            __syncthreads();  // the last tile has been read
            for (int i = threadIdx.x; i < TILE; i += GATHER_THREADS)
                if (begin + i < p.slots) positions[i] = head.position(begin + i);
            __syncthreads();  // the tile is complete
            for (int i = threadIdx.x % SHARES; i < min(TILE, p.slots - begin); i += SHARES)
                lower += positions[i] < position || (positions[i] == position && begin + i < slot);
        }
#pragma unroll
        for (int lane = 1; lane < SHARES; lane *= 2) lower += __shfl_xor_sync(ALL_LANES, lower, lane);
        if (threadIdx.x % SHARES == 0) {
            places[own] = position < 0 ? -1 - lower : lower;
            if (own < rows) {
                head.place(slot) = lower;
                head.write_key(lower, position, position < 0 ? -infinity() : p.score[head.row(slot)]);
            }
        }
        __syncthreads();
    } else if (threadIdx.x < rows) {
        const int token = first + threadIdx.x;
        head.write_key(p.slots + token, before + token, head.new_score(token));
    }
    if (p.history_key == nullptr) return;

    const auto to = [&](int row) {
        return head.row_of_history(is_old ? max(places[row], -1 - places[row]) : p.slots + first + row);
    };
    const auto is_empty = [&](int row) { return is_old && places[row] < 0; };
    const auto key = [&](int row) {
        if (is_empty(row)) return static_cast<const Unit*>(nullptr);
        return is_old ? p.key + head.row(first + row) * p.key_units : head.new_key(first + row);
    };
    const auto value = [&](int row) {
        if (is_empty(row)) return static_cast<const Unit*>(nullptr);
        return is_old ? p.value + head.row(first + row) * p.value_units : head.new_value(first + row);
    };
    gather_rows(p.history_key, rows, p.key_units, to, key, [&](int row) {
        return is_old ? p.key_scale[head.row(first + row)] : p.new_key_scale[head.new_row(first + row)];
    });
    gather_rows(p.history_value, rows, p.value_units, to, value, [&](int row) {
        return is_old ? p.value_scale[head.row(first + row)] : p.new_value_scale[head.new_row(first + row)];
    });
}

// What the call's tokens do to the keys of a (sequence, kv head).
struct Keys {
    const Head& head;
    const ChunkParams& p;
    long long before;
    int tokens, end;  // real tokens; the place after the last of them

    __device__ __forceinline__ explicit Keys(const Head& head)
        : head(head), p(head.p), before(p.before[head.batch]), tokens(head.tokens()), end(p.slots + tokens) {}

    __device__ __forceinline__ long long position(int place) const {
        return p.history_position[head.key_of_history(place)];
    }
    // Place of the first key that does not see this one among its best, 0 if none does.
    __device__ __forceinline__ int top(int place) const {
        const long long at = head.key_of_history(place);
        if (p.threshold > -infinity() && p.ranked_score[at] == -infinity()) return 0;
        const int stop = p.top[at];
        return stop == NEVER ? NEVER : stop - head.first();
    }
    // Whether the slot or token holds a key that is among the best after the last token.
    __device__ __forceinline__ bool stays(int place, long long position) const {
        return position >= 0 && place < end && top(place) >= end;
    }
    // Whether the token at `now` sees a key at `position`, given whether it is in the top.
    __device__ __forceinline__ bool is_needed(long long position, bool in_top, long long now) const {
        return position >= 0 && (in_top || position < p.sinks || position > now - p.recent);
    }
};

extern "C" __global__ void __launch_bounds__(STOP_THREADS) visible_stops(const ChunkParams p) {
    wait_for_earlier_kernels();
    const int keys = p.slots + p.length, blocks = (keys + STOP_THREADS - 1) / STOP_THREADS;
    const int place = blockIdx.x % blocks * STOP_THREADS + threadIdx.x;
    const Head head(p, blockIdx.x / blocks);
    if (place >= head.keys()) return;
    const Keys all(head);
    const long long position = all.position(place);
    int stop = all.top(place);
    if (p.recent > 0) {
        const long long until = position + p.slots - all.before + p.recent;
        if (until > stop) stop = until < NEVER ? static_cast<int>(until) : NEVER;
    }
    if (position < p.sinks) stop = NEVER;
    if (p.counts != nullptr || p.slots_of != nullptr || p.bounds != nullptr)
        stop = min(stop, all.end);  // padding sees nothing
    p.stop[head.key_of_history(place)] = position < 0 ? 0 : stop == NEVER ? NEVER : head.first() + stop;
    if (head.group == 0 && (head.batch == 0 || p.bounds != nullptr)) p.start[head.first() + place] = head.first() + place;
}

// Each block of a (sequence, kv head) copies the rows of some of the tokens; the first one updates everything else.
extern "C" __global__ void __launch_bounds__(STORE_THREADS, 1) store_tokens(const ChunkParams p) {
    wait_for_earlier_kernels();
    __shared__ unsigned unused[MAX_SLOTS / 32];  // a bit per slot: not visible after the last token
    __shared__ int unused_before[MAX_SLOTS / 32];
    __shared__ int warp_sums[32], targets[STORE_THREADS];
    __shared__ Candidate found[STORE_WARPS];
    const Head head(p, blockIdx.x / p.splits);
    if (head.sequence < 0) return;
    const Keys keys(head);
    const int split = blockIdx.x % p.splits, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const bool is_first = split == 0;
    const long long next = keys.before + keys.tokens, last = next - 1;
    const int words = (head.slots + 31) / 32;
    Candidate candidate = NOTHING;
    int in_top = 0;
    const auto consider = [&](int slot, long long position, bool top, float score) {
        in_top += top;
        merge(candidate, {position, ordered(score), top ? slot : NO_SLOT,
                          keys.is_needed(position, top, next) ? NO_SLOT : slot});
    };

    for (int word = warp; word < words; word += STORE_WARPS) {
        const int slot = 32 * word + lane;
        bool needed = true;
        if (slot < head.slots) {
            const int place = head.place(slot);
            const long long position = keys.position(place);
            const bool top = keys.stays(place, position);
            needed = keys.is_needed(position, top, last);
            if (is_first && needed) {
                p.in_top[head.row(slot)] = top;
                consider(slot, position, top, p.ranked_score[head.key_of_history(place)]);
            }
        }
        const unsigned bits = __ballot_sync(ALL_LANES, !needed);
        if (lane == 0) unused[word] = bits;
    }
    __syncthreads();  // `unused` is complete
    int all_unused = 0, total;
    for (int begin = 0; begin < words; begin += STORE_THREADS) {
        const int word = begin + threadIdx.x;
        const int sum = exclusive_sum<STORE_THREADS>(word < words ? __popc(unused[word]) : 0, total, warp_sums);
        if (word < words) unused_before[word] = all_unused + sum;
        all_unused += total;
    }
    __syncthreads();  // `unused_before` is complete
    const auto unused_slot = [&](int number) {  // in order of slots
        if (number >= all_unused) return NO_SLOT;
        int low = 0, high = words - 1;  // search for the last word with at most `number` unused slots before it
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (unused_before[middle] <= number) low = middle;
            else high = middle - 1;
        }
        unsigned bits = unused[low];
        for (int i = unused_before[low]; i < number; ++i) bits &= bits - 1;
        return 32 * low + __ffs(bits) - 1;
    };

    const int share = ((head.length + p.splits - 1) / p.splits + STORE_THREADS - 1) / STORE_THREADS * STORE_THREADS;
    const int end = is_first ? keys.tokens : min(keys.tokens, (split + 1) * share);
    int taken = 0;
    for (int begin = 0; begin < end; begin += STORE_THREADS) {
        const int token = begin + threadIdx.x, place = p.slots + token;
        const long long position = keys.before + token;
        const bool top = token < keys.tokens && keys.stays(place, position);
        const bool kept = token < keys.tokens && keys.is_needed(position, top, last);
        const int number = taken + exclusive_sum<STORE_THREADS>(kept, total, warp_sums);
        taken += total;
        const bool is_own = begin / share == split;
        if (!is_first && !is_own) continue;
        const int slot = kept ? unused_slot(number) : NO_SLOT;
        if (is_first && slot != NO_SLOT) consider(slot, position, top, head.new_score(token));
        if (!is_own) continue;
        targets[threadIdx.x] = slot;
        if (slot != NO_SLOT) {
            p.score[head.row(slot)] = head.new_score(token);
            p.position[head.row(slot)] = position;
            p.in_top[head.row(slot)] = top;
#if STORAGE
            p.key_scale[head.row(slot)] = p.new_key_scale[head.new_row(token)];
            p.value_scale[head.row(slot)] = p.new_value_scale[head.new_row(token)];
#endif
        }
        __syncthreads();  // `targets` is complete; the barriers of the next sum come before it is overwritten
        const int tokens = min(STORE_THREADS, keys.tokens - begin);
        copy_rows(tokens, p.key_units, [&](int row) {
            return targets[row] == NO_SLOT ? nullptr : p.key + head.row(targets[row]) * p.key_units;
        }, [&](int row) { return head.new_key(begin + row); });
        copy_rows(tokens, p.value_units, [&](int row) {
            return targets[row] == NO_SLOT ? nullptr : p.value + head.row(targets[row]) * p.value_units;
        }, [&](int row) { return head.new_value(begin + row); });
    }
    if (!is_first) return;

    for (int slot = threadIdx.x; slot < head.slots; slot += STORE_THREADS) {  // slots that no token has taken
        const unsigned bits = unused[slot / 32], bit = 1u << slot % 32;
        if ((bits & bit) != 0 && unused_before[slot / 32] + __popc(bits & (bit - 1)) >= taken)
            p.in_top[head.row(slot)] = 0;
    }
    candidate = merge_lanes(candidate);
    if (lane == 0) found[warp] = candidate;
    exclusive_sum<STORE_THREADS>(in_top, total, warp_sums);  // its barriers make `found` visible
    if (threadIdx.x >= 32) return;
    candidate = merge_lanes(lane < STORE_WARPS ? found[lane] : NOTHING);
    if (lane > 0) return;
    const int free = min(candidate.free, unused_slot(taken));
    const int room = (p.segment_slots == nullptr ? p.window : head.slots - p.sinks - p.recent) - total;
    p.lowest[head.pair_of_cache()] = room > 0 ? -room : candidate.slot;
    p.lowest_score[head.pair_of_cache()] = from_ordered(candidate.rank);
    p.free[head.pair_of_cache()] = free == NO_SLOT ? -1 : free;
    if (head.group == 0) p.lengths[head.sequence] = next;
}
