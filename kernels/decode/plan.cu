// What each of a call's tokens does to the cache (decode/cache_state.cuh), as if they came one by one: which key leaves the
// top, which slot the token takes, and what the next call's first token needs to know.
//
//     plans   // (n * Hkv) Plan: for decode/step.cu, which attends; 1 <= L <= MAX_TOKENS
//
// One block per sequence of the call and kv head. The state tells the change of the first token. For every next one,
// the block looks for the lowest key of the top and for the first free slot among all slots, with the changes so far. A
// thread keeps what it knows of its first KEPT slots in registers; their loads are issued ahead of all else.
//
// UPDATE: there are no queries. The block then changes the state itself, and writes no plan. ATTEND: out and lse of tokens
// that take no step.
//
// Prelude: that of decode/cache_state.cuh, ATTEND (0: UPDATE).
#include "decode/cache_state.cuh"

constexpr bool UPDATE = !ATTEND;
constexpr int KEPT = 12;

extern "C" __global__ void __launch_bounds__(THREADS) decode_plan(const StepParams p) {
    wait_for_earlier_kernels();
    __shared__ Candidate found[2][WARPS];
    __shared__ Change changes[MAX_TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Served served = Served::of_call(p, blockIdx.x);
    const int tokens = served.tokens(p);
    if constexpr (ATTEND)
        for (int t = max(tokens, 0); t < p.length; ++t)
            for (int row = 0; row < p.group; row += THREADS)
                write_nothing(p, served.batch, t, served.group * p.group + row, min(THREADS, p.group - row));
    if (tokens <= 0) return;

    const int pair = served.pair(p);
    Head head(p, served, pair, RAGGED ? static_cast<int>(p.segment_start[pair]) : 0, RAGGED ? p.segment_slots[pair] : 0);
    Slot kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = Slot(head, threadIdx.x + i * THREADS, head.end());
    const long long first_position = head.position;
    for (int t = 0; t < tokens; ++t) {
        head.position = first_position + t;
        head.score = head.new_score(t);
        const Change change = head.change();
        if (threadIdx.x == 0) changes[t] = change;
        Candidate candidate = NOTHING;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            kept[i].apply(change);
            if (kept[i].number < head.end()) consider(candidate, kept[i], change, p);
        }
        for (int number = threadIdx.x + KEPT * THREADS; number < head.end(); number += THREADS) {
            Slot slot(head, number, head.end());
            for (int k = 0; k < t; ++k) slot.apply(changes[k]);
            slot.apply(change);
            consider(candidate, slot, change, p);
        }
        candidate = merge_lanes(candidate);
        if (lane == 0) found[t & 1][warp] = candidate;
        __syncthreads();  // `changes` and all warps' candidates are written; no warp still reads the previous candidates
        candidate = merge_lanes(lane < WARPS ? found[t & 1][lane] : NOTHING);
        const Found next(head.lowest, change.enters, candidate);
        head.lowest = next.lowest;
        head.lowest_score = next.lowest_score;
        head.free = next.free;
    }

    if constexpr (UPDATE) {
        if (threadIdx.x == 0) {
            for (int t = 0; t < tokens; ++t) change_slots(p, head, changes[t]);
            p.lowest[pair] = head.lowest;
            p.lowest_score[pair] = head.lowest_score;
            p.free[pair] = head.free;
            change_length(p, head, p.pairs, first_position + tokens);
        }
        for (int t = 0; t < tokens; ++t) {
            const int slot = changes[t].target;
            if (slot < 0) continue;
            for (int i = threadIdx.x; i < 4 * KEY_CHUNKS; i += THREADS)
                store_row<HEAD_DIM>(head.key_of(slot), i, load_row<HEAD_DIM>(head.new_key(t), i, true));
            for (int i = threadIdx.x; i < 8 * VALUE_CHUNKS; i += THREADS)
                store_row<VALUE_DIM>(head.value_of(slot), i, load_row<VALUE_DIM>(head.new_value(t), i, true));
            if (STORAGE && threadIdx.x == 0) {
                p.key_scale[head.row(slot)] = p.new_key_scale[head.new_row(t)];
                p.value_scale[head.row(slot)] = p.new_value_scale[head.new_row(t)];
            }
        }
    } else {
        Plan& plan = p.plans[blockIdx.x];
        if (threadIdx.x < tokens) plan.changes[threadIdx.x] = changes[threadIdx.x];
        if (threadIdx.x == 0) {
            plan.lowest = head.lowest;
            plan.lowest_score = head.lowest_score;
            plan.free = head.free;
        }
    }
}
