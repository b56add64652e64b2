// The online softmax of a block of logits, in registers, two rows per lane, with a lazily rescaled running max.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/logits.cuh"

// Whether the running max may be 0: p and its 16-bit form have the range of float32, so logits need no subtraction.
// Without a bias the subtraction costs nothing. Blocks of few keys, even of one, must be known as such.
constexpr bool ZERO_MAX = POWERS_OF_2 && BIAS == BIAS_OF_KEYS && FULL_BLOCK_PATH && (SHORT_BLOCK || !PAD_BY_BIAS) &&
                                 has_range_of_float(static_cast<const ELEMENT*>(nullptr));

// Whether a bias per pair may be so low that m cannot hold products with it. (One in __half cannot.)
#if BIAS == BIAS_DENSE
constexpr bool LOW_ROWS = has_range_of_float(static_cast<const BIAS_ELEMENT*>(nullptr));
#else
constexpr bool LOW_ROWS = false;
#endif

// Two rows' running sums of p = 2^(unit * s - m), each lane's part of them. m need not be the maximum: rounding is
// relative, so any m that keeps p in range gives the same precision. A row's first block sets it to the maximum of all
// or some of its logits, or to 0 if that is near. Then the sums of each block tell whether m is too low: only if a sum
// exceeds LARGEST, which is rare, m is raised and the accumulators are rescaled.
struct OnlineSoftmax {
    static constexpr bool LARGE = ZERO_MAX;  // whether p may be large
    static constexpr float SMALL = 256.0f, LARGEST = LARGE ? 1073741824.0f : SMALL;
    static constexpr float NEAR = 20.0f;  // distance from 0
    // If m cannot hold a product s * unit, half its last place is left as an exponent. Key biases are adjusted for this
    // (sm90/gather.cuh). Logits with a dense bias below this have p = 0 beside others. A row that has seen no others is
    // low: m is its highest logit, and p = 2^(s - m), where both are exact. That is 1, or 0 from the next lower float
    // on, as e^(s - m) is.
    static constexpr float LOWEST_DENSE = -1073741824.0f;
    static constexpr float NONE = -LARGEST_FLOAT;  // m of a row that has seen nothing: its logits are -inf, p = 0
    float m[2], l[2];
    unsigned low[2];  // LOW_ROWS: a bit per lane of the warp, whether its row is low

    __device__ __forceinline__ OnlineSoftmax() : m{NONE, NONE}, l{0.0f, 0.0f}, low{0, 0} {}

    __device__ __forceinline__ bool is_low(int r) const {
        return LOW_ROWS && ((r == 0 ? low[0] : low[1]) >> lane_now() & 1) != 0;
    }

    // Turns a row's logits into exponents of 2; `unit` is that of other rows.
    __device__ __forceinline__ float unit_of(int r, float unit) const { return is_low(r) ? 1.0f : unit; }

    // Whether a row of this warp has no m yet.
    __device__ __forceinline__ bool lacks_max() const {
        return __any_sync(ALL_LANES, fminf(m[0], m[1]) == NONE);
    }

    // Sets m of the rows that have none from a block of logits. `zero`: it may be 0.
    template <int fragments>
    __device__ __forceinline__ void init_max(const Fragment (&s)[KEY_FRAGMENTS], float unit, bool zero) {
        float highest[2];
        highest_logits<fragments>(s, highest);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool is_low = LOW_ROWS && highest[r] < LOWEST_DENSE && highest[r] > -infinity();
            if (LOW_ROWS) low[r] |= __ballot_sync(ALL_LANES, is_low && m[r] == NONE);
            if (!is_low) highest[r] *= unit;
        }
        if (ZERO_MAX && zero && __all_sync(ALL_LANES, fmaxf(fabsf(highest[0]), fabsf(highest[1])) <= NEAR))
            highest[0] = highest[1] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (m[r] == NONE) m[r] = fmaxf(NONE, highest[r]);
    }

    // Whether m of all rows of this warp is 0, which the polynomials of a softcap with bias need.
    __device__ __forceinline__ bool max_is_zero() const {
        return !ZERO_MAX || __all_sync(ALL_LANES, m[0] == 0.0f && m[1] == 0.0f);
    }

    // Turns a block's logits into p and returns their sums, which are not in l yet.
    template <int fragments>
    __device__ __forceinline__ void exponentiate(Fragment (&s)[KEY_FRAGMENTS], float unit, float (&sum)[2]) const {
        float strands[2][4], units[2] = {unit, unit};
        if (LOW_ROWS && (low[0] | low[1]) != 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) units[r] = unit_of(r, unit);
        }
#pragma unroll
        for (int n = 0; n < fragments; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i), k = strand(i);
                s[n].x[i] = exp2_fast(fmaf(s[n].x[i], LOW_ROWS ? units[r] : unit, -m[r]));
                strands[r][k] = n == 0 ? s[n].x[i] : strands[r][k] + s[n].x[i];
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = (strands[r][0] + strands[r][1]) + (strands[r][2] + strands[r][3]);
    }

#if SOFTCAP && BIAS != BIAS_DENSE
    // The same for a full block of Q K^T that a polynomial turns into logits, for rows with max_is_zero(). Returns
    // whether the polynomial holds for all of them.
    template <bool high>
    __device__ __forceinline__ bool exponentiate(Fragment (&s)[KEY_FRAGMENTS], const LaneBias& bias,
                                                 const SoftcapPolynomial& polynomial, float (&sum)[2]) const {
        unsigned signs[2] = {~0u, ~0u};
        float of_row[2][KEY_FRAGMENTS];
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            const auto of_fragment = bias.of(n);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float distance = polynomial.distance(s[n].x[i]);
                signs[i / 4] &= __float_as_uint(distance);
                const float lower = -m[fragment_row(i)];
                const float logit =
                    polynomial.template logit<high>(s[n].x[i], distance, BIAS == BIAS_NONE ? lower : of_fragment(i));
                s[n].x[i] = exp2_fast(BIAS == BIAS_NONE || ZERO_MAX ? logit : logit + lower);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
                of_row[r][n] = (s[n].x[2 * r] + s[n].x[2 * r + 1]) + (s[n].x[2 * r + 4] + s[n].x[2 * r + 5]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] = of_row[r][0];
#pragma unroll
            for (int n = 1; n < KEY_FRAGMENTS; ++n) sum[r] += of_row[r][n];
        }
        return __all_sync(ALL_LANES, static_cast<int>(signs[0] & signs[1]) < 0);
    }
#endif

    // Raises m by the exponents of finite sums above `limit`, as far as a float holds the result. Earlier outputs must
    // be multiplied by `factor`; p, its sums and l have been.
    __device__ __forceinline__ void rescale_by_power_of_2(Fragment (&s)[KEY_FRAGMENTS], float (&sum)[2], float limit,
                                                          float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = row_max(sum[r]);
            const int wanted = largest > limit ? min((__float_as_int(largest) >> 23) - 127, 126) : 0;
            const float raised = m[r] + static_cast<float>(wanted);
            const int exponent = min(static_cast<int>(rintf(raised - m[r])), 126);
            factor[r] = __int_as_float((127 - exponent) << 23);
            m[r] = raised;
            sum[r] *= factor[r];
            l[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] *= factor[fragment_row(i)];
    }

    // Raises m to the maxima of these logits where those are far above it; other rows are unaffected. Earlier outputs
    // must be multiplied by `factor`; l has been.
    __device__ __forceinline__ void rescale_to_max(const Fragment (&s)[KEY_FRAGMENTS], float unit, float limit, float (&factor)[2]) {
        float highest[2];
        highest_logits<KEY_FRAGMENTS>(s, highest);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (LOW_ROWS) {
                const bool raised = is_low(r) && highest[r] >= LOWEST_DENSE;
                if (raised) m[r] = NONE;
                low[r] &= ~__ballot_sync(ALL_LANES, raised);
            }
            const float now = fmaxf(m[r], highest[r] * unit_of(r, unit));
            factor[r] = exp2_fast(m[r] - now);
            if (factor[r] < 1.0f / limit) m[r] = now;
            else factor[r] = 1.0f;
            l[r] *= factor[r];
        }
    }

    // Reduces l over the four lanes of a row.
    __device__ __forceinline__ void finish() {
        l[0] = row_sum(l[0]);
        l[1] = row_sum(l[1]);
    }

    // Approximate instructions: l is at least about 1 (or 0, or not finite), so they are as good as exact ones.
    __device__ __forceinline__ float inverse_sum(int r) const { return l[r] == 0.0f ? 0.0f : inverse_fast(l[r]); }

    // Of row r of this lane. A row that has seen nothing has -inf.
    __device__ __forceinline__ float lse(int r) const {
        return (is_low(r) ? 1.0f : LN_2) * ((r == 0 ? m[0] : m[1]) + log2_fast(r == 0 ? l[0] : l[1]));
    }

    // The same as a sum of two numbers: if m is far from 0, it has no digits left for the logarithm of l. The second is
    // -inf for a row that has seen nothing.
    __device__ __forceinline__ float2 lse_in_two(int r) const {
        return make_float2((is_low(r) ? 1.0f : LN_2) * (r == 0 ? m[0] : m[1]), LN_2 * log2_fast(r == 0 ? l[0] : l[1]));
    }

private:
    // Loops over a block use four independent chains per row: a scheduler has few other warps to hide latency.
    static __device__ __forceinline__ constexpr int strand(int i) { return (i & 1) + 2 * (i >> 2); }

    template <int fragments>
    static __device__ __forceinline__ void highest_logits(const Fragment (&s)[KEY_FRAGMENTS], float (&highest)[2]) {
        float strands[2][4];
#pragma unroll
        for (int n = 0; n < fragments; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& h = strands[fragment_row(i)][strand(i)];
                h = n == 0 ? s[n].x[i] : fmaxf(h, s[n].x[i]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            highest[r] = row_max(fmaxf(fmaxf(strands[r][0], strands[r][1]), fmaxf(strands[r][2], strands[r][3])));
    }
};
