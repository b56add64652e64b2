// What the warps of a CTA tell each other of their work: a block of keys (BlockInfo), a tile's keys (Plan) and its output
// (Output); and the parameters of a launch.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"
#include "sm90/split_kv.cuh"

// What the consumers are told of a block of keys.
struct BlockInfo {
    int flags;      // 0: all queries see all of its keys, and others of the tile follow
    int run;  // BIAS_DENSE: the first key, if BLOCK_N keys follow each other from a multiple of 16 bytes on, else -1

    // In a state: how many keys not all queries see, all those before them being seen, and these. ENDS_WORK, and the bits above
    // it: that a consumer has no part in what follows.
    static constexpr int MASKED = 255, SHORT = 256, ENDS_TILE = 512, UNWRITTEN = 1024, HELD = 2048, ENDS_WORK = 4096;
    static_assert(BLOCK_N <= MASKED, "a flags holds their number");

    BlockInfo() = default;
    __device__ __forceinline__ explicit BlockInfo(int flags) : flags(flags), run(-1) {}

    // `unmasked`: all queries see so many keys from the block's first on. `ends_tile`: it is its tile's last, and so many consumers
    // have a part in the next tile.
    __device__ __forceinline__ BlockInfo(int unmasked, bool is_short, bool ends_tile, int active_consumers, int run)
        : flags(BLOCK_N - unmasked + (SHORT_BLOCK && is_short ? SHORT : 0) +
                (ends_tile ? ENDS_TILE + (ENDS_WORK << CONSUMERS) - (ENDS_WORK << active_consumers) : 0)),
          run(run) {}

    __device__ __forceinline__ int unmasked() const { return BLOCK_N - (flags & MASKED); }
    __device__ __forceinline__ bool is_short() const { return SHORT_BLOCK && (flags & SHORT) != 0; }  // at most SHORT_BLOCK_KEYS keys
    __device__ __forceinline__ bool whole() const { return (flags & (MASKED | SHORT)) == 0; }
    __device__ __forceinline__ bool ends_tile() const { return (flags & ENDS_TILE) != 0; }
    // Whether it is the last one of which this consumer has rows, and of all.
    __device__ __forceinline__ bool ends_work(int consumer) const { return (flags & (ENDS_WORK << consumer)) != 0; }
    __device__ __forceinline__ bool ends_work() const { return ends_work(0); }
    // Of a block at hand: the tile before its own has not been written yet; its keys have not been released yet.
    __device__ __forceinline__ bool unwritten() const { return (flags & UNWRITTEN) != 0; }
    __device__ __forceinline__ bool held() const { return (flags & HELD) != 0; }
};

#if SOFTCAP
// cap * tanh(scale / cap * x) as an odd polynomial of x, where x^2 < `square`, which is below 0 if there is none; with
// POWERS_OF_2 times log2(e). `softcapped` is right everywhere, but takes two results of the special functions unit.
struct SoftcapPolynomial {
    float square;
    float c[4];  // of x (x^2 - square)^k

    // Below 0 where the polynomial holds.
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
    SoftcapPolynomial softcap[2];  // the second one of a lower degree, and of fewer products
#endif
};

// Where a tile's output goes to.
struct Output {
    int batch, first_head, first_query, rows;  // as many rows as the tile has
    float* lse;                                // of its first row

    __device__ __forceinline__ Output(const AttentionParams& p, const Tile& t)
        : batch(t.batch), first_head(t.first_head), first_query(t.first_query),
          rows(min(t.end_query - t.first_query, QUERIES) * HEADS),
          lse(p.lse + ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query) {}
};

// A tile and where its keys, what is known of them and its output lie.
struct Plan {
    Tile tile;
    Output output;
    KeySource source;  // KEYS_LISTED: the list's lengths are on their way when the tile has been found
    const ELEMENT *keys, *values;
    const float* bias;
#if SPLIT
    int split;  // the tile's keys are those of this part; negative: all
#endif

    __device__ __forceinline__ Plan(const AttentionParams& p, const Tile& t)
        : tile(t), output(p, t), source(locate_keys(p, t)), keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head) {}
};
