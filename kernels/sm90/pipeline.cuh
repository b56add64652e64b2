// The position of a warp in a ring of stages in shared memory, and the parity of the mbarrier phase it waits for there.
// Each stage has a full and an empty barrier; the parity flips each time the ring wraps around.
#pragma once
#include "common/arch.cuh"

// A stage and a phase.
template <int count>
struct PipelineState {
    int stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == count) {
            stage = 0;
            phase ^= 1;
        }
    }

    __device__ __forceinline__ PipelineState next() const {
        PipelineState state = *this;
        state.advance();
        return state;
    }

    __device__ __forceinline__ int stage_before() const { return stage == 0 ? count - 1 : stage - 1; }
};
