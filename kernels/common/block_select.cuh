// Sums and selections that a whole block computes together.
#pragma once
#include "common/arch.cuh"

using Ranked = unsigned long long;  // a key's rank in its upper half, its row in the lower; 0: no candidate

// Exclusive running sum over the block's threads of `value`; `total` of all. Contains two barriers.
template <int threads>
__device__ __forceinline__ int exclusive_sum(int value, int& total, int (&warp_sums)[32]) {
    const int lane = threadIdx.x & 31;
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        const int below = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += below;
    }
    __syncthreads();  // the sums of an earlier call have been read
    if (lane == 31) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();  // every warp's sum is in place
    const int of_warp = lane < threads / 32 ? warp_sums[lane] : 0;
    total = __reduce_add_sync(ALL_LANES, of_warp);
    return __reduce_add_sync(ALL_LANES, lane < static_cast<int>(threadIdx.x) / 32 ? of_warp : 0) + sum - value;
}

constexpr int DIGIT_BITS = 11;

struct SelectShared {
    int histogram[1 << DIGIT_BITS];
    int warp_sums[32];
    unsigned lowest[32], highest[32];  // of the ranks or rows of each warp
    int digit, above, inside;
};

struct Selection {
    Ranked threshold;  // exactly `count` candidates are >= threshold
    int count;         // min(wanted, candidates)
};

__device__ __forceinline__ unsigned rank_of(Ranked e) { return static_cast<unsigned>(e >> 32); }  // 0: no candidate
__device__ __forceinline__ int row_of(Ranked e) { return static_cast<int>(e); }

// Visits entry(0 .. n-1), distributed over the block's threads. Each thread reads its first `cached` entries once and
// keeps them in registers; every pass reads the others again, BATCH at a time. An entry of 0 is no candidate, but is
// visited.
template <int threads, int cached, typename Entry>
struct Candidates {
    static constexpr int BATCH = 8;
    Entry entry;
    int n;
    Ranked own[cached];

    __device__ __forceinline__ Candidates(const Entry& entry, int n) : entry(entry), n(n) {
        read(own, threadIdx.x);
    }

    template <int count>
    __device__ __forceinline__ void read(Ranked (&entries)[count], int first) const {
#pragma unroll
        for (int k = 0; k < count; ++k) entries[k] = first + k * threads < n ? entry(first + k * threads) : 0;
    }

    template <typename Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) const {
#pragma unroll
        for (int k = 0; k < cached; ++k) visit(own[k]);
        for (int i = cached * threads + threadIdx.x; i - static_cast<int>(threadIdx.x) < n; i += BATCH * threads) {
            Ranked more[BATCH];
            read(more, i);
#pragma unroll
            for (int k = 0; k < BATCH; ++k) visit(more[k]);
        }
    }
};

// The words lie in low .. low + span; how many there are.
struct WordRange {
    unsigned low, span;
    int count;
};

// The range of all nonzero word(e) of candidates. All threads of the block get the same.
template <int threads, int cached, typename Entry, typename Word>
__device__ __forceinline__ WordRange range_of(const Candidates<threads, cached, Entry>& candidates, const Word& word,
                                          SelectShared& shared) {
    unsigned low = ~0u, high = 0;
    int count = 0;
    candidates.for_each([&](Ranked e) {
        const unsigned x = word(e);
        count += x != 0;
        low = min(low, x - 1);  // 0 becomes the largest
        high = max(high, x);
    });
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    low = __reduce_min_sync(ALL_LANES, low);
    high = __reduce_max_sync(ALL_LANES, high);
    count = __reduce_add_sync(ALL_LANES, count);
    __syncthreads();  // what an earlier call left has been read
    if (lane == 0) {
        shared.lowest[warp] = low;
        shared.highest[warp] = high;
        shared.warp_sums[warp] = count;
    }
    for (int i = threadIdx.x; i < 1 << DIGIT_BITS; i += threads) shared.histogram[i] = 0;
    __syncthreads();  // every warp's range and number are in place, and the histogram is empty
    const bool exists = lane < threads / 32;
    low = __reduce_min_sync(ALL_LANES, exists ? shared.lowest[lane] : ~0u) + 1;
    high = __reduce_max_sync(ALL_LANES, exists ? shared.highest[lane] : 0u);
    count = __reduce_add_sync(ALL_LANES, exists ? shared.warp_sums[lane] : 0);
    return {low, high - low, count};
}

// The highest number that at least `missing` of the words in `range` reach. Each pass cuts the range into up to 2^11
// equal parts and keeps the one that contains the answer. It ends when all words of a part are wanted, with the part's
// lowest number and `missing` 0; otherwise `missing` of the words equal to the answer are wanted. The histogram is
// empty before and afterwards.
template <int threads, int cached, typename Entry, typename Word>
__device__ __forceinline__ unsigned find_word(const Candidates<threads, cached, Entry>& candidates, const Word& word,
                                              WordRange range, int& missing, SelectShared& shared) {
    constexpr int BINS = 1 << DIGIT_BITS, OWN = BINS / threads;
    unsigned low = range.low, span = range.span;
    while (span > 0) {
        const int shift = max(0, 32 - __clz(static_cast<int>(span)) - DIGIT_BITS);
        candidates.for_each([&](Ranked e) {
            const unsigned distance = word(e) - low;
            if (distance <= span) atomicAdd(&shared.histogram[distance >> shift], 1);
        });
        __syncthreads();  // the histogram is complete
        int inside[OWN], own = 0, total;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int& bin = shared.histogram[BINS - 1 - (threadIdx.x * OWN + i)];
            inside[i] = bin;
            bin = 0;
            own += inside[i];
        }
        int above = exclusive_sum<threads>(own, total, shared.warp_sums);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (above < missing && missing <= above + inside[i]) {
                shared.digit = BINS - 1 - (threadIdx.x * OWN + i);
                shared.above = above;
                shared.inside = inside[i];
            }
            above += inside[i];
        }
        __syncthreads();  // the part of the answer is known, and the histogram is empty
        missing -= shared.above;
        low += static_cast<unsigned>(shared.digit) << shift;
        if (shared.inside == missing) {
            missing = 0;
            break;
        }
        span = min((1u << shift) - 1, range.low + range.span - low);  // so that 0 is not inside
        // The barriers of the next pass also keep digit, above and inside until all have read them.
    }
    return low;
}

// The `wanted` highest of all candidates, which are distinct: by their ranks (within `ranks`), among equal ranks by
// their rows. The first range is that of the candidates, so that few share a part (and contend for its counter)
// whatever the scores. All threads of the block call it and get the same answer.
template <int threads, int cached, typename Entry>
__device__ Selection select_highest(const Candidates<threads, cached, Entry>& candidates, WordRange ranks, int wanted,
                                    SelectShared& shared) {
    if (ranks.count <= wanted) return {1, ranks.count};
    if (wanted <= 0) return {~0ull, 0};
    int missing = wanted;
    const unsigned rank = find_word(candidates, rank_of, ranks, missing, shared);
    unsigned row = 0;
    if (missing > 0) {
        const auto row_of_equal = [&](Ranked e) { return rank_of(e) == rank ? row_of(e) + 1u : 0u; };
        const WordRange rows = range_of(candidates, row_of_equal, shared);
        if (missing < rows.count) row = find_word(candidates, row_of_equal, rows, missing, shared) - 1;
    }
    return {static_cast<Ranked>(rank) << 32 | row, wanted};
}
