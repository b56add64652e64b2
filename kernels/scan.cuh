// Sums and selections that a whole block computes together.
#pragma once
#include "arch.cuh"

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

__device__ __forceinline__ Ranked lowest_of_warp(Ranked x) {
    const unsigned high = static_cast<unsigned>(x >> 32), highest = __reduce_min_sync(ALL_LANES, high);
    const unsigned low = high == highest ? static_cast<unsigned>(x) : ~0u;
    return static_cast<Ranked>(highest) << 32 | __reduce_min_sync(ALL_LANES, low);
}

constexpr int DIGIT_BITS = 11;

struct SelectShared {
    int histogram[1 << DIGIT_BITS];
    int warp_sums[32];
    Ranked lowest[32], highest[32];  // of the candidates of each warp
    int digit, above, inside;
};

struct Selection {
    Ranked threshold;  // exactly `count` candidates are >= threshold
    int count;         // min(wanted, candidates)
};

// entry(0 .. n-1) shared out among the block's threads. The first CACHED of a thread are read once and stay in
// registers, the others are read again, BATCH at a time, by every pass. An entry of 0 is no candidate.
template <int threads, typename Entry>
struct Candidates {
    static constexpr int CACHED = 8, BATCH = 8;
    Entry entry;
    int n;
    Ranked own[CACHED];

    __device__ __forceinline__ Candidates(const Entry& entry, int n) : entry(entry), n(n) {
        read(own, threadIdx.x);
    }

    __device__ __forceinline__ void read(Ranked (&entries)[BATCH], int first) const {
#pragma unroll
        for (int k = 0; k < BATCH; ++k) entries[k] = first + k * threads < n ? entry(first + k * threads) : 0;
    }

    template <typename Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) const {
#pragma unroll
        for (int k = 0; k < CACHED; ++k)
            if (own[k] != 0) visit(own[k]);
        for (int i = CACHED * threads + threadIdx.x; i - static_cast<int>(threadIdx.x) < n; i += BATCH * threads) {
            Ranked more[BATCH];
            read(more, i);
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
                if (more[k] != 0) visit(more[k]);
        }
    }
};

// The `wanted` highest of all candidates, which differ from each other. Each pass cuts the range that must hold the last
// of them into up to 2^11 equal parts and keeps one; the first range is that of the candidates, so that few share a part
// (and contend for its counter) whatever the scores. It ends when a part holds just what is missing. All threads of the
// block call it and get the same answer.
template <int threads, typename Entry>
__device__ Selection select_highest(const Candidates<threads, Entry>& candidates, int wanted, SelectShared& shared) {
    __syncthreads();  // an earlier selection's results have been read
    Ranked low = ~0ull, high = 0;
    int count = 0;
    candidates.for_each([&](Ranked e) {
        ++count;
        low = min(low, e);
        high = max(high, e);
    });
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    low = lowest_of_warp(low);
    high = ~lowest_of_warp(~high);
    count = __reduce_add_sync(ALL_LANES, count);
    if (lane == 0) {
        shared.lowest[warp] = low;
        shared.highest[warp] = high;
        shared.warp_sums[warp] = count;
    }
    __syncthreads();  // every warp's range and number are in place
    const bool exists = lane < threads / 32;
    low = lowest_of_warp(exists ? shared.lowest[lane] : ~0ull);
    high = ~lowest_of_warp(exists ? ~shared.highest[lane] : ~0ull);
    int total = __reduce_add_sync(ALL_LANES, exists ? shared.warp_sums[lane] : 0);
    if (total <= wanted) return {1, total};
    if (wanted <= 0) return {~0ull, 0};
    Ranked span = high - low;  // the range is low .. low + span
    int missing = wanted;

    constexpr int BINS = 1 << DIGIT_BITS, OWN = BINS / threads;
    while (true) {
        const int shift = max(0, 64 - __clzll(static_cast<long long>(span)) - DIGIT_BITS);
        for (int i = threadIdx.x; i < BINS; i += threads) shared.histogram[i] = 0;
        __syncthreads();  // the histogram is empty
        candidates.for_each([&](Ranked e) {
            if (e - low <= span) atomicAdd(&shared.histogram[static_cast<int>((e - low) >> shift)], 1);
        });
        __syncthreads();  // the histogram is complete
        int own = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) own += shared.histogram[BINS - 1 - (threadIdx.x * OWN + i)];
        int above = exclusive_sum<threads>(own, total, shared.warp_sums);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int digit = BINS - 1 - (threadIdx.x * OWN + i), inside = shared.histogram[digit];
            if (above < missing && missing <= above + inside) {
                shared.digit = digit;
                shared.above = above;
                shared.inside = inside;
            }
            above += inside;
        }
        __syncthreads();  // the part of the wanted-th candidate is known
        missing -= shared.above;
        low += static_cast<Ranked>(shared.digit) << shift;
        if (shared.inside == missing || shift == 0) return {low, wanted};
        span = (1ull << shift) - 1;
        // The next round's barrier after clearing also keeps digit, above and inside until all have read them.
    }
}
