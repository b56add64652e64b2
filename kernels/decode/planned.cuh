// What the tokens of a call see of a warp's slots in decode/step.cu, given the changes that decode/plan.cu found.
//
// Prelude: that of decode/step.cu.
#pragma once
#include "decode/cache_state.cuh"

// What the tokens that a launch attends from see of a lane's slot in a step of a warp.
struct Turns {
    unsigned sees;    // bit t: token t sees the slot
    unsigned begins;  // bit t: token t is not like the one before it: another key in a slot of the step, or seen otherwise

    __device__ __forceinline__ unsigned seen() const { return __ballot_sync(ALL_LANES, sees != 0); }
    __device__ __forceinline__ unsigned seen_by(int t) const { return __ballot_sync(ALL_LANES, sees >> t & 1); }
};

struct Planned {
    const StepParams& p;
    const Change* changes;     // in shared memory
    long long first_position;  // of the launch's first token
    int count;                 // tokens of the call up to the launch's last
    Change own;                // token threadIdx.x

    __device__ __forceinline__ Planned(const StepParams& p, const Change* changes, const Head& head, int count)
        : p(p), changes(changes), first_position(head.position + p.token), count(count) {
        const Plan& plan = p.plans[head.batch * p.kv_heads + head.group];
        if (threadIdx.x < count) own = plan.changes[threadIdx.x];
    }

    // Complete after the next barrier.
    __device__ __forceinline__ void store(Change* changes) const {
        if (threadIdx.x < count) changes[threadIdx.x] = own;
    }

    __device__ __forceinline__ long long position(int t) const { return first_position + t; }

    // The tokens of the call that change one of the 16 slots from `base` on.
    __device__ __forceinline__ unsigned at(int base) const {
        const int lane = threadIdx.x & 31;
        const auto here = [&](int slot) { return static_cast<unsigned>(slot - base) < STEP; };
        return __ballot_sync(ALL_LANES,
                             lane < count && (here(changes[lane].dropped) || here(changes[lane].target)));
    }

    // Given the lane's slot of a step as it is in the state.
    __device__ __forceinline__ Turns turns(Slot slot, int base, int end) const {
        const bool mine = (threadIdx.x & 31) < STEP && slot.number < end;
        unsigned sees = 0, near = 0, begins = 0;
        int from = 0;
        const auto until = [&](int to) {  // the tokens up to `to` find the slot as it is
            const unsigned tokens = (1u << to) - (1u << from);
            sees |= tokens & slot.seen_by(p, first_position);
            near |= tokens & slot.near_to(p, first_position);
            from = to;
        };
        for (unsigned left = at(base); left != 0; left &= left - 1) {
            const int k = __ffs(left) - 1, t = max(k - p.token, 0);
            until(t);
            slot.apply(changes[k]);
            if (static_cast<unsigned>(changes[k].target - base) < STEP) begins |= 1u << t;
        }
        until(count - p.token);
        if (!mine) sees = 0;
        near &= sees;
        begins |= __reduce_or_sync(ALL_LANES, (sees ^ sees << 1) | (near ^ near << 1));
        return {sees, TOKENS == 1 ? 0 : begins & ((1u << (count - p.token)) - 2)};
    }
};
