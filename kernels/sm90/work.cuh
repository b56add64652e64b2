// The messages between the warps of a CTA: a block of keys (BlockInfo), a tile's keys (Plan) and its output (Output);
// and the parameters of a launch.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"
#include "sm90/split_kv.cuh"

// A block of keys, for the consumers.
struct BlockInfo {
    int flags;  // 0: a full block that is not the last of its tile
    int run;  // BIAS_DENSE: the first key, if the BLOCK_N keys are consecutive from a multiple of 16 bytes on, else -1

    // In the flags: the number of keys, at the end of the block, that not all queries see; and these bits. ENDS_WORK
    // and the bits above it: the block is the last one for that consumer.
    static constexpr int MASKED = 255, SHORT = 256, ENDS_TILE = 512, UNWRITTEN = 1024, CHECK_NONFINITE = 2048,
                         ENDS_WORK = 4096;
    static_assert(BLOCK_N <= MASKED, "the flags hold the number of masked keys");

    BlockInfo() = default;
    __device__ __forceinline__ explicit BlockInfo(int flags) : flags(flags), run(-1) {}

    // `unmasked`: all queries see that many keys from the block's first on. `ends_tile`: it is the last block of its
    // tile, and `active_consumers` consumers have rows of the next tile.
    __device__ __forceinline__ BlockInfo(int unmasked, bool is_short, bool ends_tile, int active_consumers, int run)
        : flags(BLOCK_N - unmasked + (SHORT_BLOCK && is_short ? SHORT : 0) +
                (ends_tile ? ENDS_TILE + (ENDS_WORK << CONSUMERS) - (ENDS_WORK << active_consumers) : 0)),
          run(run) {}

    __device__ __forceinline__ int unmasked() const { return BLOCK_N - (flags & MASKED); }
    __device__ __forceinline__ bool is_short() const { return SHORT_BLOCK && (flags & SHORT) != 0; }
    __device__ __forceinline__ bool is_full() const { return (flags & (MASKED | SHORT)) == 0; }
    __device__ __forceinline__ bool ends_tile() const { return (flags & ENDS_TILE) != 0; }
    // Whether it is the last block for this consumer, and for all.
    __device__ __forceinline__ bool ends_work(int consumer) const { return (flags & (ENDS_WORK << consumer)) != 0; }
    __device__ __forceinline__ bool ends_work() const { return ends_work(0); }
    // Of the current block: the output of the tile before its own has not been written yet; its values must be checked
    // for NaN and infinity, until then its keys are not released.
    __device__ __forceinline__ bool unwritten() const { return (flags & UNWRITTEN) != 0; }
    __device__ __forceinline__ bool checks_nonfinite() const { return (flags & CHECK_NONFINITE) != 0; }
};

#if SOFTCAP
// cap * tanh(scale / cap * x) as an odd polynomial of x where x^2 < `square` (negative if there is none), times log2(e)
// with POWERS_OF_2. `softcapped` needs two results of the special function unit instead.
struct SoftcapPolynomial {
    float square;
    float c[4];  // of x (x^2 - square)^k

    // Below 0 if the polynomial holds.
    __device__ __forceinline__ float distance(float x) const { return fmaf(x, x, -square); }

    // Of x, whose distance is t, plus a bias. `high`: c[3] is not 0.
    template <bool high>
    __device__ __forceinline__ float logit(float x, float t, float bias) const {
        return fmaf(fmaf(fmaf(high ? fmaf(c[3], t, c[2]) : c[2], t, c[1]), t, c[0]), x, bias);
    }
};
#endif

struct ForwardParams {
#if KV_TMA || RUNS
    TensorMap key, value;
#endif
#if QUERY_TMA
    TensorMap query;
#endif
#if OUT_TMA
    TensorMap out;
#endif
    AttentionParams attention;
#if SPLIT
    Splits splits;
#endif
#if SOFTCAP
    SoftcapPolynomial softcap[2];  // the second one has a lower degree and a smaller range
#endif
};

// The location of a tile's output.
struct Output {
    int batch, first_head, first_query, rows;  // rows: of the tile
    float* lse;  // of its first row

    __device__ __forceinline__ Output(const AttentionParams& p, const Tile& t)
        : batch(t.batch), first_head(t.first_head), first_query(t.first_query),
          rows(min(t.end_query - t.first_query, QUERIES) * HEADS),
          lse(p.lse + ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query) {}
};

// A tile, and the locations of its keys, their visibility and its output.
struct Plan {
    Tile tile;
    Output output;
    KeySource source;  // KEYS_LISTED: the lengths of the list arrive asynchronously (cp.async)
    const ELEMENT *keys, *values;
    const float* bias;
#if SPLIT
    int split;  // which split of the tile's keys; negative: all keys
#endif

    __device__ __forceinline__ Plan(const AttentionParams& p, const Tile& t)
        : tile(t), output(p, t), source(locate_keys(p, t)), keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + (BIAS == BIAS_OF_KEYS
                             ? t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head : 0)) {}
};
