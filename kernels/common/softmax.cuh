// The online softmax of a tile of logits, in registers (Milakov and Gimelshein 2018; FlashAttention).
//
// Prelude: SOFTCAP.
//
// A warp holds 16 rows; a lane holds two of them (lane/4 and lane/4 + 8) and the columns that common/arch.cuh states,
// so a row lives in four neighbouring lanes. Logits are in units of log 2: s2 = s * log2(e), p = 2^(s2 - m).
#pragma once
#include "common/arch.cuh"

__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// c * tanh(x / c) with tanh(y) = 1 - 2 / (e^2y + 1): absolute error of some 1e-7 c, where tanh.approx has 5e-4 c.
__device__ __forceinline__ float softcapped(float x, float cap, float two_log2e_over_cap) {
    return cap - __fdividef(2.0f * cap, exp2_fast(x * two_log2e_over_cap) + 1.0f);
}

// Logits in log 2 units from x = q . k: softcap(scale * x) + bias.
struct LogitScale {
    float scale, cap, exponent;  // scale in log 2 units without a softcap

    __device__ __forceinline__ LogitScale(float scale, float softcap)
        : scale(SOFTCAP ? scale : scale * LOG2_E), cap(softcap), exponent(SOFTCAP ? 2.0f * LOG2_E / softcap : 0.0f) {}

    __device__ __forceinline__ float operator()(float x, float bias) const {
        return SOFTCAP ? fmaf(softcapped(x * scale, cap, exponent), LOG2_E, bias) : fmaf(x, scale, bias);
    }

    // Derivative of the softcap at scale * x: 1 - tanh^2.
    __device__ __forceinline__ float slope(float x) const {
        if (!SOFTCAP) return 1.0f;
        const float t = softcapped(x * scale, 1.0f, exponent);
        return 1.0f - t * t;
    }
};

// Two rows' running maximum m (log 2 units) and this lane's share l of the running sum of p.
struct RowState {
    float m[2], l[2];

    __device__ __forceinline__ RowState() : m{-infinity(), -infinity()}, l{0.0f, 0.0f} {}

    // Turns logits into p = 2^(s2 - m) and returns in `rescale` what earlier sums and outputs must be multiplied by.
    template <int columns, typename Fragment>
    __device__ __forceinline__ void update(Fragment (&s)[columns], float (&rescale)[2]) {
        float highest[2] = {m[0], m[1]};
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                highest[fragment_row(i)] = fmaxf(highest[fragment_row(i)], s[n].x[i]);
        float finite_max[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = row_max(highest[r]);
            finite_max[r] = highest[r] == -infinity() ? 0.0f : highest[r];  // a row that has seen nothing: p = 2^-inf
            rescale[r] = exp2_fast(m[r] - finite_max[r]);
            m[r] = highest[r];
            l[r] *= rescale[r];
        }
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                s[n].x[i] = exp2_fast(s[n].x[i] - finite_max[fragment_row(i)]);
                l[fragment_row(i)] += s[n].x[i];
            }
    }

    // Sums l over the row's four lanes. Afterwards sum[r] = 0 where a row saw nothing.
    __device__ __forceinline__ void finish() {
        l[0] = row_sum(l[0]);
        l[1] = row_sum(l[1]);
    }

    __device__ __forceinline__ float inverse_sum(int r) const { return l[r] == 0.0f ? 0.0f : 1.0f / l[r]; }

    __device__ __forceinline__ float lse(int r) const {
        return l[r] == 0.0f ? -infinity() : LN_2 * m[r] + logf(l[r]);
    }
};
