// From products to probabilities on Hopper: bias, softcap, masks and the online softmax of a block, in registers.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"

// Logits are kept in a unit of their own, which the exponential takes in: products times `unit`, or natural logits times
// log2(e), are powers of 2. So a product that needs neither softcap nor a bias afterwards is touched once. Needs scale > 0.
struct Logits {
    static constexpr bool CHANGED = SOFTCAP || BIAS == BIAS_DENSE;  // products need one of these
    float scale, cap, exponent, unit;

    __device__ __forceinline__ Logits(float scale, float softcap)
        : scale(scale), cap(POWERS_OF_2 ? softcap * LOG2_E : softcap), exponent(SOFTCAP ? 2.0f * LOG2_E / softcap : 0.0f),
          unit(POWERS_OF_2 ? 1.0f : CHANGED ? LOG2_E : scale * LOG2_E) {}

    // Of a product, right everywhere.
    __device__ __forceinline__ float operator()(float x, float bias) const {
        return SOFTCAP ? softcapped(x * scale, cap, exponent) + bias : fmaf(x, scale, bias);
    }
};

#if SOFTCAP
// Of the first `fragments` of a block of products, all of this warp: how many of these polynomials hold for them, from the
// first on. NaN counts for nothing.
template <int fragments>
__device__ __forceinline__ int polynomials_for(const Fragment (&s)[KEY_FRAGMENTS], const SoftcapPolynomial (&polynomials)[2]) {
    float strand[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < fragments; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) strand[i % 4] = fmaxf(strand[i % 4], fabsf(s[n].x[i]));
    const float largest = fmaxf(fmaxf(strand[0], strand[1]), fmaxf(strand[2], strand[3])), square = largest * largest;
    if (__all_sync(ALL_LANES, square < polynomials[1].square)) return 2;
    return __all_sync(ALL_LANES, square < polynomials[0].square) ? 1 : 0;
}
#endif

#if BIAS_FIRST
// Before the products: the bias in units of them.
// `own` is the address of stage 0's place_of(0, 0).
__device__ __forceinline__ void begin_with_bias(Fragment (&s)[KEY_FRAGMENTS], unsigned own, int stage) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            load_shared_pair(s[n].x[i], s[n].x[i + 1], own + (stage * BLOCK_N + place_of(0, n, i / 4 * 2)) * 4);
}
#endif

// What a lane adds to its logits of a block: to element i of fragment n `of(n)(i)`.
#if BIAS == BIAS_DENSE
static_assert(sizeof(BIAS_ELEMENT) == 2, "eight numbers are 16 bytes");

struct LaneBias {
    uint4 eight[2][KEY_FRAGMENTS / 2];  // (row, pair of fragments)
    const BIAS_ELEMENT* row[2];         // at key 0, of this lane's two rows

    __device__ __forceinline__ void fetch(const AttentionParams& p, const Shared& shared, int stage, const Order& order) {
        const int own = 8 * (lane_now() & 3), following = order.following;
        if (following >= 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int m = 0; m < KEY_FRAGMENTS / 2; ++m) eight[r][m] = load_once(row[r] + following + 32 * m + own);
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int m = 0; m < KEY_FRAGMENTS / 2; ++m) {
                if (m >= FEW_FRAGMENTS / 2 && order.few()) break;  // nobody has said which keys these are
                BIAS_ELEMENT* x = reinterpret_cast<BIAS_ELEMENT*>(&eight[r][m]);
#pragma unroll
                for (int k = 0; k < 8; ++k) x[k] = row[r][shared.key[stage][32 * m + own + k] * p.bias_key];
                __syncwarp();  // or the assembler would have all loads under way and no registers for it
            }
    }

    struct OfFragment {
        const LaneBias& all;
        int n;

        __device__ __forceinline__ float operator()(int i) const {
            const int k = own_key(n % 2, i);
            const unsigned* pairs = reinterpret_cast<const unsigned*>(&all.eight[fragment_row(i)][n / 2]);
            return half_of(pairs[k / 2], k % 2, static_cast<const BIAS_ELEMENT*>(nullptr));
        }
    };
    __device__ __forceinline__ OfFragment of(int n) const { return {*this, n}; }
};
#elif BIAS == BIAS_OF_KEYS && SOFTCAP
struct LaneBias {
    unsigned own;  // address of the block's place_of(0, 0)

    __device__ __forceinline__ void fetch(unsigned address) { own = address; }

    struct OfFragment {
        float key[4];

        __device__ __forceinline__ float operator()(int i) const { return key[own_key(0, i)]; }
    };
    __device__ __forceinline__ OfFragment of(int n) const {
        OfFragment bias;
#pragma unroll
        for (int k = 0; k < 4; k += 2) load_shared_pair(bias.key[k], bias.key[k + 1], own + place_of(0, n, k) * 4);
        return bias;
    }
};
#else
struct LaneBias {
    __device__ __forceinline__ void fetch(unsigned) {}

    struct OfFragment {
        __device__ __forceinline__ float operator()(int) const { return 0.0f; }
    };
    __device__ __forceinline__ OfFragment of(int) const { return {}; }
};
#endif

// What says who sees the block's key `place`: the word of this warp's queries, or the first position that sees it and the
// first that no longer does.
#if BITS
static_assert(32 % (16 / HEADS > 0 ? 16 / HEADS : 1) == 0, "a warp's queries are in one word");

__device__ __forceinline__ const unsigned* warp_words(const Shared& shared, int stage) {
    return shared.words[stage][(thread_now() - PRODUCER_THREADS) / 32 * 16 / HEADS / 32];
}

__device__ __forceinline__ int visibility(const Shared& shared, int stage, int place) {
    return static_cast<int>(warp_words(shared, stage)[place]);
}
#else
__device__ __forceinline__ int2 visibility(const Shared& shared, int stage, int place) {
    int start = shared.start[stage][place];
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    start = max(start, shared.key[stage][place]);
#endif
    return make_int2(start, shared.stop[stage][place]);
}

// Of the four keys of this lane in fragment n.
__device__ __forceinline__ void visibilities(int2 (&seen)[4], const Shared& shared, int stage, int n) {
#if BULK
#pragma unroll
    for (int k = 0; k < 4; ++k) seen[k] = visibility(shared, stage, place_of(n, k));
#else
    int4 start = *reinterpret_cast<const int4*>(shared.start[stage] + place_of(n, 0));
    const int4 stop = *reinterpret_cast<const int4*>(shared.stop[stage] + place_of(n, 0));
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    const int4 key = *reinterpret_cast<const int4*>(shared.key[stage] + place_of(n, 0));
    start = make_int4(max(start.x, key.x), max(start.y, key.y), max(start.z, key.z), max(start.w, key.w));
#endif
    seen[0] = make_int2(start.x, stop.x);
    seen[1] = make_int2(start.y, stop.y);
    seen[2] = make_int2(start.z, stop.z);
    seen[3] = make_int2(start.w, stop.w);
#endif
}
#endif

// All queries see the block's first `clear` keys.
template <int fragments>
__device__ __forceinline__ void apply_mask(Fragment (&s)[KEY_FRAGMENTS], const Shared& shared, int stage, int clear,
                                           const int (&position)[2]) {
#pragma unroll
    for (int n = 0; n < fragments; ++n) {
        if (!BITS && clear >= n / 2 * 32 + 32) continue;  // of masks as bits few blocks have clear keys
#if BITS
        const int4 words = *reinterpret_cast<const int4*>(warp_words(shared, stage) + place_of(n, 0));
        const int seen[4] = {words.x, words.y, words.z, words.w};
#else
        int2 seen[4];
        visibilities(seen, shared, stage, n);
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!visible(position[fragment_row(i)], seen[own_key(0, i)])) s[n].x[i] = -infinity();
    }
}

// Whether references may be 0, for p and its 16 bits have the range of float32: no logit needs a subtraction then. Without a
// bias it costs nothing. Blocks of few keys, even of one, must be known as such.
constexpr bool ZERO_REFERENCES = POWERS_OF_2 && BIAS == BIAS_OF_KEYS && PLAIN && (FEW || !HOLES) &&
                                 has_range_of_float(static_cast<const ELEMENT*>(nullptr));

// Two rows' running sums of p = 2^(unit * s - reference), each lane's share. The reference need not be the maximum: rounding
// is relative, so any will do that keeps p in range. A row's first block sets it, to the maximum of its logits or of some, or to 0
// if that is near. Then the sums of a block say whether it is too low: only if one is above LARGEST, which hardly ever
// happens, does it follow.
struct RowSums {
    static constexpr bool LARGE = ZERO_REFERENCES;  // so p may be
    static constexpr float LARGEST = LARGE ? 1073741824.0f : 256.0f;
    static constexpr float NEAR = 20.0f;             // of 0
    static constexpr float NONE = -3.402823466e38f;  // where a row has seen nothing: all its logits are -inf, and p = 0
    float reference[2], l[2];

    __device__ __forceinline__ RowSums() : reference{NONE, NONE}, l{0.0f, 0.0f} {}

    // Whether a row of this warp has no reference.
    __device__ __forceinline__ bool incomplete() const {
        return __any_sync(ALL_LANES, fminf(reference[0], reference[1]) == NONE);
    }

    // Rows without a reference get one from a block of logits. `zero`: it may be 0.
    template <int fragments>
    __device__ __forceinline__ void refer(const Fragment (&s)[KEY_FRAGMENTS], float unit, bool zero) {
        float highest[2];
        highest_logits<fragments>(s, unit, highest);
        if (ZERO_REFERENCES && zero && __all_sync(ALL_LANES, fmaxf(fabsf(highest[0]), fabsf(highest[1])) <= NEAR))
            highest[0] = highest[1] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (reference[r] == NONE) reference[r] = fmaxf(NONE, highest[r]);
    }

    // Whether polynomials serve the rows of this warp.
    __device__ __forceinline__ bool plain() const {
        return !ZERO_REFERENCES || __all_sync(ALL_LANES, reference[0] == 0.0f && reference[1] == 0.0f);
    }

    // Turns a block's logits into p. Their sums are not in l yet.
    template <int fragments>
    __device__ __forceinline__ void exponentiate(Fragment (&s)[KEY_FRAGMENTS], float unit, float (&sum)[2]) const {
        float strands[2][4];
#pragma unroll
        for (int n = 0; n < fragments; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i), k = strand(i);
                s[n].x[i] = exp2_fast(fmaf(s[n].x[i], unit, -reference[r]));
                strands[r][k] = n == 0 ? s[n].x[i] : strands[r][k] + s[n].x[i];
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = (strands[r][0] + strands[r][1]) + (strands[r][2] + strands[r][3]);
    }

#if SOFTCAP && BIAS != BIAS_DENSE
    // The same of a whole block of products that a polynomial makes logits of, of rows that are plain; whether it holds for all
    // of them.
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
                const float lower = -reference[fragment_row(i)];
                const float logit =
                    polynomial.template logit<high>(s[n].x[i], distance, BIAS == BIAS_NONE ? lower : of_fragment(i));
                s[n].x[i] = exp2_fast(BIAS == BIAS_NONE || ZERO_REFERENCES ? logit : logit + lower);
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

    // References follow large sums, all of them finite, by powers of 2. Earlier outputs must be multiplied by `factor`; p, its
    // sums and l have been.
    __device__ __forceinline__ void follow(Fragment (&s)[KEY_FRAGMENTS], float (&sum)[2], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = row_max(sum[r]);
            const int exponent = largest > LARGEST ? min((__float_as_int(largest) >> 23) - 127, 126) : 0;
            factor[r] = __int_as_float((127 - exponent) << 23);
            reference[r] += static_cast<float>(exponent);
            sum[r] *= factor[r];
            l[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n].x[i] *= factor[fragment_row(i)];
    }

    // References move up to the maxima of these logits, where these are far above them; other rows must not know. Earlier
    // outputs must be multiplied by `factor`; l has been.
    __device__ __forceinline__ void leap(const Fragment (&s)[KEY_FRAGMENTS], float unit, float (&factor)[2]) {
        float highest[2];
        highest_logits<KEY_FRAGMENTS>(s, unit, highest);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float now = fmaxf(reference[r], highest[r]);
            factor[r] = exp2_fast(reference[r] - now);
            if (factor[r] < 1.0f / LARGEST) reference[r] = now;
            else factor[r] = 1.0f;
            l[r] *= factor[r];
        }
    }

    // Sums l over the row's four lanes.
    __device__ __forceinline__ void finish() {
        l[0] = row_sum(l[0]);
        l[1] = row_sum(l[1]);
    }

    // In few instructions: l is about 1 at least (or 0, or not finite), so they are as good as exact ones.
    __device__ __forceinline__ float inverse_sum(int r) const { return l[r] == 0.0f ? 0.0f : inverse_fast(l[r]); }

    // Of row r, which this lane has. A row that has seen nothing has a logarithm of -inf.
    __device__ __forceinline__ float lse(int r) const {
        return LN_2 * ((r == 0 ? reference[0] : reference[1]) + log2_fast(r == 0 ? l[0] : l[1]));
    }

private:
    // In four strands a row, as all that goes over a block: a warp has few others beside it and registers to spare.
    static __device__ __forceinline__ constexpr int strand(int i) { return (i & 1) + 2 * (i >> 2); }

    template <int fragments>
    static __device__ __forceinline__ void highest_logits(const Fragment (&s)[KEY_FRAGMENTS], float unit, float (&highest)[2]) {
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
            highest[r] = row_max(fmaxf(fmaxf(strands[r][0], strands[r][1]), fmaxf(strands[r][2], strands[r][3]))) * unit;
    }
};
