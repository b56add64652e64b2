// The MMAs of both Hopper gradients, each its own wgmma group, and shared operations on accumulators.
//
// Prelude: ELEMENT, HEAD_DIM.
#pragma once
#include "sm90/ptx.cuh"

constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int ROW_STEPS = (HEAD_DIM + 15) / 16;  // of an MMA along a row
constexpr int OUT_FRAGMENTS = ROW_STEPS == 1 ? 1 : (ROW_STEPS + 1) / 2 * 2;  // of a gradient, in wgmma's sizes

template <int count>
__device__ __forceinline__ void clear(Fragment (&x)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) x[n].x[i] = 0.0f;
}

// x += 64 rows . rows of b, with a matrix of `a_rows` rows in shared memory on the left; without `keeps` x is overwritten.
template <int a_rows, int b_rows, int count>
__device__ __forceinline__ void add_rows(Fragment (&x)[count], unsigned a, const ELEMENT* rows, bool keeps = true) {
    const unsigned b = matrix_descriptor(rows, 0);
    pin(x);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < ROW_STEPS; ++d)
        Wgmma<count>::template multiply<Major::K, Major::K>(x, moved(a, d / 4 * a_rows * CHUNK_ROW_BYTES + d % 4 * 32),
                                                            moved(b, d / 4 * b_rows * CHUNK_ROW_BYTES + d % 4 * 32),
                                                            keeps || d > 0);
    wgmma_commit();
}

// x = 64 rows . rows of b, with a matrix of `a_rows` rows in shared memory on the left. Accumulators are cleared although
// the first MMA overwrites them, or what was there would be kept until then.
template <int a_rows, int b_rows, int count>
__device__ __forceinline__ void multiply_rows(Fragment (&x)[count], unsigned a, const ELEMENT* rows) {
    clear(x);
    add_rows<a_rows, b_rows>(x, a, rows, false);
}

// The same with the left operand in registers.
template <int b_rows, int count>
__device__ __forceinline__ void multiply_rows(Fragment (&x)[count], unsigned (&a)[ROW_STEPS][4], const ELEMENT* rows) {
    const unsigned b = matrix_descriptor(rows, 0);
    clear(x);
    pin(x);
    pin(a);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < ROW_STEPS; ++d)
        Wgmma<count>::template multiply<Major::K>(x, a[d], moved(b, d / 4 * b_rows * CHUNK_ROW_BYTES + d % 4 * 32), d > 0);
    wgmma_commit();
}

// x += a . b, 16 rows of b for each of a's operands, 128 columns at a time.
template <int steps, int first = OUT_FRAGMENTS < 8 ? OUT_FRAGMENTS : 8, int rest = OUT_FRAGMENTS - first>
__device__ __forceinline__ void accumulate(Fragment (&x)[OUT_FRAGMENTS], unsigned (&a)[steps][4], const ELEMENT* rows) {
    const unsigned b = matrix_descriptor(rows, steps * 16 * CHUNK_ROW_BYTES);
    pin(x);
    pin(a);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < steps; ++n) {
        const unsigned rows_of_b = moved(b, n * 16 * CHUNK_ROW_BYTES);
        Wgmma<first>::template multiply<Major::MN>(x, a[n], rows_of_b, true);
        if constexpr (rest > 0)
            Wgmma<rest>::template multiply<Major::MN>(x + first, a[n], moved(rows_of_b, 2 * steps * 16 * CHUNK_ROW_BYTES), true);
    }
    wgmma_commit();
}

// Accumulators rounded to a left operand.
template <int count>
__device__ __forceinline__ void round(unsigned (&operand)[count][4], const Fragment (&x)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[n][i] = pack_pair(x[n].x[2 * i], x[n].x[2 * i + 1]);
}

// store(column, x, next) for this lane's pairs of neighbouring columns in row r of its two, times `factor`.
template <typename Store>
__device__ __forceinline__ void for_each_pair(const Fragment (&x)[OUT_FRAGMENTS], int r, float factor, const Store& store) {
#pragma unroll
    for (int d = 0; d < OUT_FRAGMENTS; ++d)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int column = 16 * d + 8 * k + 2 * (threadIdx.x & 3), i = 4 * k + 2 * r;
            if (column < HEAD_DIM) store(column, x[d].x[i] * factor, x[d].x[i + 1] * factor);
        }
}

// Logits in log 2 units from q . k: as LogitScale of common/softmax.cuh, for softcaps that are not large.
struct BackwardLogits {
    float scale, cap, exponent;  // scale in log 2 units without a softcap

    __device__ __forceinline__ BackwardLogits(float scale, float softcap)
        : scale(SOFTCAP ? scale : scale * LOG2_E), cap(softcap), exponent(SOFTCAP ? 2.0f * LOG2_E / softcap : 0.0f) {}

    __device__ __forceinline__ float operator()(float x, float bias) const {
        return SOFTCAP ? fmaf(softcapped(x * scale, cap, exponent), LOG2_E, bias) : fmaf(x, scale, bias);
    }
};

// The derivative of a softcap, 1 - tanh^2, at a logit in log 2 units that has been through it.
__device__ __forceinline__ float softcap_slope(float capped, float cap) {
    const float t = capped * LN_2 / cap;
    return 1.0f - t * t;
}
