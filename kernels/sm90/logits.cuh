// From Q K^T to logits on Hopper, in registers: bias, softcap and masks of a block.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/smem.cuh"

// Logits have a unit of their own that the exponential absorbs: q . k times `unit`, or natural logits times log2(e),
// are exponents of 2. An element that needs neither a softcap nor a bias afterwards is then touched once. Needs scale >
// 0.
struct Logits {
    static constexpr bool CHANGED = SOFTCAP || BIAS == BIAS_DENSE;  // accumulators need one of these
    float scale, cap, exponent, unit;

    __device__ __forceinline__ Logits(float scale, float softcap)
        : scale(scale), cap(usable_softcap(softcap) * (POWERS_OF_2 ? LOG2_E : 1.0f)),
          exponent(SOFTCAP ? 2.0f * LOG2_E / usable_softcap(softcap) : 0.0f),
          unit(POWERS_OF_2 ? 1.0f : CHANGED ? LOG2_E : scale * LOG2_E) {}

    // Of q . k. In blocks of small logits polynomials replace this (SoftcapPolynomial).
    __device__ __forceinline__ float operator()(float x, float bias) const {
        return SOFTCAP ? softcapped(x * scale, cap, exponent) + bias : fmaf(x, scale, bias);
    }
};

#if SOFTCAP
// How many of these polynomials, counted from the first, hold for the first `fragments` fragments of this warp's
// accumulators. A NaN is ignored.
template <int fragments>
__device__ __forceinline__ int polynomials_for(const Fragment (&s)[KEY_FRAGMENTS],
                                               const SoftcapPolynomial (&polynomials)[2]) {
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

#if DELAY
// Whether some bias of the block in this stage applies to only some of the tile's queries.
__device__ __forceinline__ bool has_mixed(const Shared& shared, int stage) {
    const int4 mixed = shared.mixed[stage];
    return (mixed.x | mixed.y | mixed.z | mixed.w) != 0;
}

// The first positions to which the biases of this lane's keys in fragment n apply, in the order of lane_key.
__device__ __forceinline__ void load_far_from(int (&far_from)[4], const Shared& shared, int stage, int n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) far_from[k] = shared.far_from[stage][fragment_key(n, k)];
}
#endif

#if BIAS_FIRST
#if DELAY
// Clears the biases that do not apply to this lane's two queries.
__device__ __forceinline__ void clear_near(Fragment (&s)[KEY_FRAGMENTS], const Shared& shared, int stage,
                                           const int (&position)[2]) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n) {
        int far_from[4];
        load_far_from(far_from, shared, stage, n);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (is_near(far_from[lane_key(0, i)], position[fragment_row(i)])) s[n].x[i] = 0.0f;
    }
}
#endif

// Initialises the accumulators of QK with the bias in units of q . k. `own`: address of fragment_key(0, 0) in stage 0.
__device__ __forceinline__ void init_with_bias(Fragment (&s)[KEY_FRAGMENTS], unsigned own, int stage) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            load_shared_pair(s[n].x[i], s[n].x[i + 1], own + (stage * BLOCK_N + fragment_key(0, n, i / 4 * 2)) * 4);
}
#endif

// The biases that a lane adds to its logits of a block: `of(n)(i)` for element i of fragment n.
#if BIAS == BIAS_DENSE
static_assert(sizeof(BIAS_ELEMENT) == 2, "eight elements are 16 bytes");

struct LaneBias {
    uint4 eight[2][KEY_FRAGMENTS / 2];  // (row, pair of fragments)
    const BIAS_ELEMENT* row[2];         // at key 0, of this lane's two rows

    __device__ __forceinline__ void fetch(const AttentionParams& p, const Shared& shared, int stage,
                                          const BlockInfo& block) {
        const int own = 8 * (lane_now() & 3), run = block.run;
        if (run >= 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int m = 0; m < KEY_FRAGMENTS / 2; ++m) eight[r][m] = load_once(row[r] + run + 32 * m + own);
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int m = 0; m < KEY_FRAGMENTS / 2; ++m) {
                if (m >= SHORT_BLOCK_FRAGMENTS / 2 && block.is_short()) break;  // beyond a short block keys are undefined
                BIAS_ELEMENT* x = reinterpret_cast<BIAS_ELEMENT*>(&eight[r][m]);
#pragma unroll
                for (int k = 0; k < 8; ++k) x[k] = row[r][shared.key[stage][32 * m + own + k] * p.bias_key];
                __syncwarp();  // keeps the assembler from issuing all loads at once, which takes too many registers
            }
    }

    struct OfFragment {
        const LaneBias& all;
        int n;

        __device__ __forceinline__ float operator()(int i) const {
            const int k = lane_key(n % 2, i);
            const unsigned* pairs = reinterpret_cast<const unsigned*>(&all.eight[fragment_row(i)][n / 2]);
            return half_of(pairs[k / 2], k % 2, static_cast<const BIAS_ELEMENT*>(nullptr));
        }
    };
    __device__ __forceinline__ OfFragment of(int n) const { return {*this, n}; }
};
#elif BIAS == BIAS_OF_KEYS && SOFTCAP
struct LaneBias {
    unsigned own;  // address of the block's fragment_key(0, 0)
#if DELAY
    const Shared* shared;
    int stage, position[2];
    bool mixed;
#endif

    __device__ __forceinline__ void fetch(unsigned address) { own = address; }

    struct OfFragment {
        float key[4];
#if DELAY
        int far_from[4], position[2];
#endif

        __device__ __forceinline__ float operator()(int i) const {
#if DELAY
            if (is_near(far_from[lane_key(0, i)], position[fragment_row(i)])) return 0.0f;
#endif
            return key[lane_key(0, i)];
        }
    };
    __device__ __forceinline__ OfFragment of(int n) const {
        OfFragment bias;
#pragma unroll
        for (int k = 0; k < 4; k += 2) load_shared_pair(bias.key[k], bias.key[k + 1], own + fragment_key(0, n, k) * 4);
#if DELAY
        bias.position[0] = position[0];
        bias.position[1] = position[1];
        for (int k = 0; k < 4; ++k) bias.far_from[k] = INT_LOWEST;
        if (mixed) load_far_from(bias.far_from, *shared, stage, n);
#endif
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

// The visibility of the block's key `key`: the word of this warp's queries, or the first position that sees it and the
// first that no longer does.
#if BITS
static_assert(32 % (16 / HEADS > 0 ? 16 / HEADS : 1) == 0, "a warp's queries lie in one word");

__device__ __forceinline__ const unsigned* warp_words(const Shared& shared, int stage) {
    return shared.words[stage][(thread_now() - PRODUCER_THREADS) / 32 * 16 / HEADS / 32];
}

__device__ __forceinline__ int visibility(const Shared& shared, int stage, int key) {
    return static_cast<int>(warp_words(shared, stage)[key]);
}
#else
__device__ __forceinline__ int2 visibility(const Shared& shared, int stage, int key) {
    int start = shared.start[stage][key];
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    start = max(start, shared.key[stage][key]);
#endif
    return make_int2(start, shared.stop[stage][key]);
}

// The same of the four keys of this lane in fragment n.
__device__ __forceinline__ void visibilities(int2 (&seen)[4], const Shared& shared, int stage, int n) {
#if KV_TMA
#pragma unroll
    for (int k = 0; k < 4; ++k) seen[k] = visibility(shared, stage, fragment_key(n, k));
#else
    int4 start = *reinterpret_cast<const int4*>(shared.start[stage] + fragment_key(n, 0));
    const int4 stop = *reinterpret_cast<const int4*>(shared.stop[stage] + fragment_key(n, 0));
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    const int4 key = *reinterpret_cast<const int4*>(shared.key[stage] + fragment_key(n, 0));
    start = make_int4(max(start.x, key.x), max(start.y, key.y), max(start.z, key.z), max(start.w, key.w));
#endif
    seen[0] = make_int2(start.x, stop.x);
    seen[1] = make_int2(start.y, stop.y);
    seen[2] = make_int2(start.z, stop.z);
    seen[3] = make_int2(start.w, stop.w);
#endif
}
#endif

// Masks a block of logits. All queries see its first `unmasked` keys.
template <int fragments>
__device__ __forceinline__ void apply_mask(Fragment (&s)[KEY_FRAGMENTS], const Shared& shared, int stage, int unmasked,
                                           const int (&position)[2]) {
#pragma unroll
    for (int n = 0; n < fragments; ++n) {
        if (!BITS && unmasked >= n / 2 * 32 + 32) continue;  // with BITS few blocks have unmasked keys
#if BITS
        const int4 words = *reinterpret_cast<const int4*>(warp_words(shared, stage) + fragment_key(n, 0));
        const int seen[4] = {words.x, words.y, words.z, words.w};
#else
        int2 seen[4];
        visibilities(seen, shared, stage, n);
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!visible(position[fragment_row(i)], seen[lane_key(0, i)])) s[n].x[i] = -infinity();
    }
}
