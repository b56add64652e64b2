// The intervals of a row of a mask, of which parameters hold start, stop, their strides, heads and lengths.
//
// Prelude: CAUSAL, SEQUENCES.
#pragma once
#include "common/arch.cuh"

// Within the positions of queries: a key that no query sees may hold NaN, and must be in no list.
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
