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

// tanh(y) with a relative error of about 5e-7, for softcaps of any size: 1 - 2 / (e^2y + 1) has an absolute error of
// about 1e-7 (tanh.approx 5e-4), so near 0 a minimax polynomial replaces it. Its seven instructions hide behind the two
// of the special function unit, which has a quarter of the throughput.
__device__ __forceinline__ float tanh_of(float y) {
    const float square = y * y, near = fmaf(y * square, fmaf(square, 0.12876417f, -0.33324571f), y);
    const float far = 1.0f - __fdividef(2.0f, exp2_fast(y * (2.0f * LOG2_E)) + 1.0f);
    return fabsf(y) < 0.25f ? near : far;
}

// c * tanh(x / c), with an absolute error of about 1e-7 c: for kernels without the registers for tanh_of, which are
// not used for large c.
__device__ __forceinline__ float softcapped(float x, float cap, float two_log2e_over_cap) {
    return cap - __fdividef(2.0f * cap, exp2_fast(x * two_log2e_over_cap) + 1.0f);
}

// A softcap whose multiples and inverses are normal numbers; no logit is large enough to tell the difference.
__device__ __forceinline__ float usable_softcap(float softcap) { return fminf(softcap, 1.8446744e19f); }

// Not an infinity, whose product with 0 would be NaN.
__device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, -LARGEST_FLOAT), LARGEST_FLOAT); }

// Logits in log 2 units from x = q . k: softcap(scale * x) + bias.
struct LogitScale {
    float scale, cap;  // in log 2 units; scale / softcap with a softcap

    __device__ __forceinline__ LogitScale(float scale, float softcap)
        : scale(SOFTCAP ? finite(scale / usable_softcap(softcap)) : scale * LOG2_E), cap(usable_softcap(softcap) * LOG2_E) {}

    __device__ __forceinline__ float operator()(float x, float bias) const {
        return SOFTCAP ? fmaf(tanh_of(x * scale), cap, bias) : fmaf(x, scale, bias);
    }

    // Derivative of the softcap: 1 - tanh^2.
    __device__ __forceinline__ float slope(float x) const {
        if (!SOFTCAP) return 1.0f;
        const float t = tanh_of(x * scale);
        return fmaf(-t, t, 1.0f);
    }
};

// lse of a row with the maximum m (log 2 units) and the sum l of 2^(s2 - m); l = 0 if it saw nothing. At the end of the
// range m stands for everything beyond.
__device__ __forceinline__ float natural_lse(float m, float l) {
    if (l == 0.0f) return -infinity();
    return fabsf(m) == LARGEST_FLOAT ? m : LN_2 * m + logf(l);
}

// lse in log 2 units, for p = 2^(s2 - lse2). Far from 0 rounding errors reach whole exponents, and p could be 2^64 or
// infinite: there lse2 is raised by more than these errors, and p vanishes.
__device__ __forceinline__ float log2_lse(float lse) {
    constexpr float FAR = 4194304.0f, ROUNDINGS = 3.8e-6f;
    const float x = log2_units(lse);
    return fabsf(x) > FAR && fabsf(lse) <= LARGEST_FLOAT ? fmaf(fabsf(x), ROUNDINGS, x) : x;
}

// Two rows' running maximum m (log 2 units) and this lane's share l of the running sum of p.
struct RowState {
    float m[2], l[2];

    __device__ __forceinline__ RowState() : m{-infinity(), -infinity()}, l{0.0f, 0.0f} {}

    // Turns logits into p = 2^(s2 - m) and returns in `rescale` what earlier sums and outputs must be multiplied by. With
    // rows = 1 only of the first row.
    template <int rows = 2, int columns, typename Fragment>
    __device__ __forceinline__ void update(Fragment (&s)[columns], float (&rescale)[2]) {
        float highest[2] = {m[0], m[1]};
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (fragment_row(i) < rows) highest[fragment_row(i)] = fmaxf(highest[fragment_row(i)], s[n].x[i]);
        float finite_max[2];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            highest[r] = row_max(highest[r]);
            finite_max[r] = highest[r] == -infinity() ? 0.0f : highest[r];  // nothing seen so far: p = 2^-inf
            rescale[r] = exp2_fast(m[r] - finite_max[r]);
            m[r] = highest[r];
            l[r] *= rescale[r];
        }
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (fragment_row(i) >= rows) continue;
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

    __device__ __forceinline__ float lse(int r) const { return natural_lse(m[r], l[r]); }
};
