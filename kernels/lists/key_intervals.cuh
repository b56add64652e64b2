// Shared by the kernels that list keys: the intervals of a mask row, whose parameters contain start, stop, their
// strides, heads and lengths; summaries of blocks of keys; how keys are distributed over threads.
//
// Prelude: CAUSAL, SEQUENCES.
#pragma once
#include "common/arch.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int OWN = 8;  // consecutive keys of a thread
constexpr int CHUNK = THREADS * OWN;

// Clipped to the positions of queries: a key that no query sees may hold NaN and must be in no list.
struct Intervals {
    const int *start, *stop;
    int first_position, key_length;

    template <typename Params>
    __device__ __forceinline__ Intervals(const Params& p, int row)
        : first_position(p.key_length - p.query_length), key_length(p.key_length) {
        const int batch = row / p.heads, head = row - batch * p.heads;
        start = p.start + batch * p.start_batch + head * p.start_head;
        stop = p.stop + batch * p.stop_batch + head * p.stop_head;
    }

    __device__ __forceinline__ int2 operator[](int j) const {
        if (j >= key_length) return make_int2(0, 0);
        const int2 own = make_int2(CAUSAL ? max(start[j], j) : start[j], stop[j]);
        return SEQUENCES ? own : make_int2(max(own.x, first_position), min(own.y, key_length));
    }
};

// Lowest and highest start, lowest and highest stop of intervals[begin .. end - 1], by a whole warp.
__device__ __forceinline__ int4 summary_of(const int2* intervals, int begin, int end) {
    int4 s = make_int4(NEVER, INT_LOWEST, NEVER, INT_LOWEST);
    for (int i = begin + (threadIdx.x & 31); i < end; i += 32) {
        const int2 v = intervals[i];
        s = make_int4(min(s.x, v.x), max(s.y, v.x), min(s.z, v.y), max(s.w, v.y));
    }
    return make_int4(__reduce_min_sync(ALL_LANES, s.x), __reduce_max_sync(ALL_LANES, s.y),
                     __reduce_min_sync(ALL_LANES, s.z), __reduce_max_sync(ALL_LANES, s.w));
}
