// What the warps of a CTA tell each other of their work: a block of keys (BlockInfo), a tile's keys (Plan) and its output
// (Output); and the parameters of a launch.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "sm90/config.cuh"
#include "sm90/split_kv.cuh"

// What the consumers are told of a block of keys.
struct Order {
    int state;      // 0: all queries see all of its keys, and others of the tile follow
    int following;  // BIAS_DENSE: the first key, if BLOCK_N keys follow each other from a multiple of 16 bytes on, else -1

    // In a state: how many keys not all queries see, all those before them being seen, and these. LEAVING, and the bits above
    // it: that a consumer has no part in what follows.
    static constexpr int MASKED = 255, FEW_OF_THEM = 256, CLOSES = 512, UNWRITTEN = 1024, HELD = 2048, LEAVING = 4096;
    static_assert(BLOCK_N <= MASKED, "a state holds their number");

    Order() = default;
    __device__ __forceinline__ explicit Order(int state) : state(state), following(-1) {}

    // `clear`: all queries see so many keys from the block's first on. `closes`: it is its tile's last, and so many consumers
    // have a part in the next tile.
    __device__ __forceinline__ Order(int clear, bool few, bool closes, int staying, int following)
        : state(BLOCK_N - clear + (FEW && few ? FEW_OF_THEM : 0) +
                (closes ? CLOSES + (LEAVING << CONSUMERS) - (LEAVING << staying) : 0)),
          following(following) {}

    __device__ __forceinline__ int clear() const { return BLOCK_N - (state & MASKED); }
    __device__ __forceinline__ bool few() const { return FEW && (state & FEW_OF_THEM) != 0; }  // at most FEW_KEYS keys
    __device__ __forceinline__ bool whole() const { return (state & (MASKED | FEW_OF_THEM)) == 0; }
    __device__ __forceinline__ bool closes() const { return (state & CLOSES) != 0; }
    // Whether it is the last one of which this consumer has rows, and of all.
    __device__ __forceinline__ bool ends(int consumer) const { return (state & (LEAVING << consumer)) != 0; }
    __device__ __forceinline__ bool ends() const { return ends(0); }
    // Of a block at hand: the tile before its own has not been written yet; its keys have not been released yet.
    __device__ __forceinline__ bool unwritten() const { return (state & UNWRITTEN) != 0; }
    __device__ __forceinline__ bool held() const { return (state & HELD) != 0; }
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
#if BULK || RUNS
    TensorMap key, value;
#endif
#if QUERY_BULK
    TensorMap query;
#endif
#if OUT_BULK
    TensorMap out;
#endif
    AttentionParams attention;
#if SPLIT
    Parts parts;
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
    int part;  // the tile's keys are those of this part; negative: all
#endif

    __device__ __forceinline__ Plan(const AttentionParams& p, const Tile& t)
        : tile(t), output(p, t), source(locate_keys(p, t)), keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head) {}
};
