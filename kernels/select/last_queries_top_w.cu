// The keys that the last Lq queries of a long history see under prefix selection, from the scores alone: the `window`
// best keys by (score, position) up to the first of these queries, in the order of their positions, and the Lq - 1
// later keys; for several queries also the positions that see each. Exact for any scores.
//
// score  // (B, Hkv, Lk) f32, any strides
// list   // (B * Hkv, window + Lq - 1) int32      interval // the same shape, int2: start <= position < stop (INTERVALS)
//
// A row is one (batch, kv head); `chunks` blocks share its keys, of which `length` = Lk - Lq + 1 compete. A key's rank
// is a 64-bit number, the ordered score above the position, so ranks are distinct. Two kernels:
//   narrow    once per digit of the rank, from the highest down: counts by that digit the keys that agree with the
//             window-th key in all higher ones. The last block of a row then knows the digit of the window-th key.
//             Does nothing if few enough keys are undecided.
//   collect   writes the certain and the undecided keys to `survivors`, block by block; the last block of a row selects
//             the window best of these.
// Counts, cells and tickets must be 0 at first.
//
// Prelude: INTERVALS.
#include "common/arch.cuh"
#include "common/rank.cuh"
#include "common/block_select.cuh"

constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int NARROW_THREADS = 512, NARROW_OWN = 8;
constexpr int COLLECT_THREADS = 1024, COLLECT_OWN = 4;
constexpr int COLLECT_KEYS = 4096;  // undecided keys that `collect` resolves itself

// The digit of the window-th best key: ranks low <= rank < low + 2^shift are undecided, those above are certain.
struct Range {
    Ranked low;
    int shift;    // 64: nothing is known yet (0 in memory, before the first pass)
    int missing;  // how many of the undecided are among the best
    int inside;   // how many are undecided
};

struct LastQueriesParams {
    const float* score;
    int* counts;            // (rows, passes, DIGITS)
    Range* ranges;          // (rows)
    unsigned* tickets;      // (rows)
    Ranked* survivors;      // (rows, chunks * chunk)
    int* survivor_count;    // (rows, chunks)
    int* list;
    int2* interval;
    long long score_batch, score_head, score_key;  // strides, in elements
    int kv_heads, length, window, queries, chunk, chunks;
    int passes, pass, shift;  // of `narrow`: the number of passes, this pass, and the shift of its digit
};

struct HistoryRow {
    const LastQueriesParams& p;
    int row;
    const float* score;

    __device__ __forceinline__ HistoryRow(const LastQueriesParams& p, int row)
        : p(p), row(row), score(p.score + row / p.kv_heads * p.score_batch + row % p.kv_heads * p.score_head) {}

    __device__ __forceinline__ static Ranked ranked(float score, int j) {
        return static_cast<Ranked>(ordered(score)) << 32 | static_cast<unsigned>(j);
    }
    __device__ __forceinline__ Ranked ranked(int j) const { return ranked(score[j * p.score_key], j); }

    // Of keys first, first + step, ... below `end`; 0 past it. All loads are issued before the first is used.
    template <int count>
    __device__ __forceinline__ void ranked(Ranked (&ranks)[count], int first, int step, int end) const {
        float scores[count];
#pragma unroll
        for (int k = 0; k < count; ++k) scores[k] = score[min(first + k * step, end - 1) * p.score_key];
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const int j = first + k * step;
            ranks[k] = j < end ? ranked(scores[k], j) : 0;
        }
    }
};

extern "C" __global__ void __launch_bounds__(NARROW_THREADS) narrow(const LastQueriesParams p) {
    wait_for_earlier_kernels();
    __shared__ int histogram[DIGITS];
    __shared__ int warp_sums[32];
    __shared__ int last;
    const int chunk = blockIdx.x % p.chunks;
    const HistoryRow row(p, blockIdx.x / p.chunks);
    const Range before = p.pass == 0 ? Range{0, 64, p.window, p.length} : p.ranges[row.row];
    if (p.pass > 0 && (before.inside <= COLLECT_KEYS || before.inside == before.missing)) return;

    for (int i = threadIdx.x; i < DIGITS; i += NARROW_THREADS) histogram[i] = 0;
    __syncthreads();  // the histogram is empty
    const int begin = chunk * p.chunk, end = min(begin + p.chunk, p.length);
    for (int base = begin; base < end; base += NARROW_THREADS * NARROW_OWN) {
        Ranked own[NARROW_OWN];
        row.ranked(own, base + threadIdx.x, NARROW_THREADS, end);
#pragma unroll
        for (int k = 0; k < NARROW_OWN; ++k)
            if (own[k] != 0 && (before.shift == 64 || (own[k] - before.low) >> before.shift == 0))
                atomicAdd(&histogram[static_cast<int>(own[k] >> p.shift) & (DIGITS - 1)], 1);
    }
    __syncthreads();  // the histogram is complete
    int* counts = p.counts + ((long long)row.row * p.passes + p.pass) * DIGITS;
    for (int i = threadIdx.x; i < DIGITS; i += NARROW_THREADS)
        if (histogram[i] != 0) atomicAdd(&counts[i], histogram[i]);
    __syncthreads();  // the block's counts are there
    if (threadIdx.x == 0) last = take_ticket(p.tickets + row.row, p.chunks - 1) == p.chunks - 1;
    __syncthreads();  // all know whether the other blocks' counts are
    if (!last) return;

    constexpr int OWN = DIGITS / NARROW_THREADS;
    int own[OWN], sum = 0, total;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = counts[DIGITS - 1 - (threadIdx.x * OWN + i)];
        sum += own[i];
    }
    int above = exclusive_sum<NARROW_THREADS>(sum, total, warp_sums);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (above < before.missing && before.missing <= above + own[i]) {
            const Ranked digit = DIGITS - 1 - (threadIdx.x * OWN + i);
            p.ranges[row.row] = {before.low | digit << p.shift, p.shift, before.missing - above, own[i]};
        }
        above += own[i];
    }
}

struct CollectShared {
    SelectShared select;
    int chunk[COLLECT_THREADS], offset[COLLECT_THREADS + 1];  // the chunks with survivors, where theirs begin; their number
    Ranked mortal[COLLECT_THREADS];   // INTERVALS: the lowest of the best, which arrivals can push out
    int mortals, last;
};

// When a key is dropped: the first position at which `remaining` of the keys after the first query outrank it.
__device__ __forceinline__ int position_of_death(const HistoryRow& row, Ranked e, int remaining) {
    const int first = row.p.length - 1;
    if (remaining <= 0) return first;
    for (int i = 1; i < row.p.queries; ++i)
        if (row.ranked(first + i) > e && --remaining == 0) return first + i;
    return NEVER;
}

extern "C" __global__ void __launch_bounds__(COLLECT_THREADS) collect(const LastQueriesParams p) {
    wait_for_earlier_kernels();
    __shared__ CollectShared shared;
    const int chunk = blockIdx.x % p.chunks;
    const HistoryRow row(p, blockIdx.x / p.chunks);
    const Ranked low = p.ranges[row.row].low;
    const int begin = chunk * p.chunk, end = min(begin + p.chunk, p.length);
    Ranked* survivors = p.survivors + (long long)row.row * p.chunks * p.chunk;
    int found = 0;
    for (int base = begin; base < end; base += COLLECT_THREADS * COLLECT_OWN) {
        Ranked own[COLLECT_OWN];
        int passing = 0, total;
        row.ranked(own, base + threadIdx.x * COLLECT_OWN, 1, end);
#pragma unroll
        for (int k = 0; k < COLLECT_OWN; ++k) {
            if (own[k] < low) own[k] = 0;
            passing += own[k] != 0;
        }
        int index = begin + found + exclusive_sum<COLLECT_THREADS>(passing, total, shared.select.warp_sums);
#pragma unroll
        for (int k = 0; k < COLLECT_OWN; ++k)
            if (own[k] != 0) survivors[index++] = own[k];
        found += total;
    }
    if (threadIdx.x == 0) p.survivor_count[row.row * p.chunks + chunk] = found;
    __syncthreads();  // the block's survivors are there
    if (threadIdx.x == 0) shared.last = take_ticket(p.tickets + row.row, p.chunks - 1) == p.chunks - 1;
    __syncthreads();  // all know whether the other blocks' survivors are
    if (!shared.last) return;

    // ---- the window best of all survivors, in the order of their positions ----
    int total, filled;
    const int count = threadIdx.x < p.chunks ? p.survivor_count[row.row * p.chunks + threadIdx.x] : 0;
    const int offset = exclusive_sum<COLLECT_THREADS>(count, total, shared.select.warp_sums);
    const int number = exclusive_sum<COLLECT_THREADS>(count != 0, filled, shared.select.warp_sums);
    if (count != 0) {
        shared.chunk[number] = threadIdx.x;
        shared.offset[number] = offset;
    }
    if (threadIdx.x == 0) {
        shared.offset[filled] = total;
        shared.mortals = 0;
    }
    __syncthreads();  // chunks and offsets are in place
    const int each = (total + COLLECT_THREADS - 1) / COLLECT_THREADS;  // consecutive survivors per thread
    int begins = 0;  // the chunk of the thread's first survivor
#pragma unroll
    for (int step = COLLECT_THREADS / 2; step > 0; step /= 2)
        if (begins + step < filled && shared.offset[begins + step] <= static_cast<int>(threadIdx.x) * each) begins += step;
    const auto entry = [&](int i) -> Ranked {
        const int n = threadIdx.x * each + i / COLLECT_THREADS;
        if (n >= total) return 0;
        int at = begins;
        while (shared.offset[at + 1] <= n) ++at;
        return survivors[(long long)shared.chunk[at] * p.chunk + n - shared.offset[at]];
    };
    const Candidates<COLLECT_THREADS, 8, decltype(entry)> candidates(entry, each * COLLECT_THREADS);
    const WordRange ranks = range_of(candidates, rank_of, shared.select);
    const Selection best = select_highest(candidates, ranks, p.window, shared.select);
    const int first = p.length - 1, coming = p.queries - 1;
    const long long of_row = (long long)row.row * (p.window + coming);
    Selection safe = best;
    if (INTERVALS) {  // each arrival pushes out one key at most
        safe = select_highest(candidates, ranks, max(p.window - coming, 0), shared.select);
        candidates.for_each([&](Ranked e) {
            if (e >= best.threshold && e < safe.threshold) shared.mortal[atomicAdd(&shared.mortals, 1)] = e;
        });
    }
    const auto better_mortals = [&](Ranked e) {
        int better = 0;
        for (int i = 0; i < shared.mortals; ++i) better += shared.mortal[i] > e;
        return better;
    };
    int kept = 0;
    candidates.for_each([&](Ranked e) { kept += e >= best.threshold; });
    // Its barriers also complete the mortals.
    long long index = of_row + exclusive_sum<COLLECT_THREADS>(kept, total, shared.select.warp_sums);
    candidates.for_each([&](Ranked e) {
        if (e < best.threshold) return;
        p.list[index] = static_cast<int>(e & 0xffffffffu);
        if (INTERVALS)
            p.interval[index] = make_int2(
                INT_LOWEST,
                e < safe.threshold ? position_of_death(row, e, p.window - safe.count - better_mortals(e)) : NEVER);
        ++index;
    });
    if (INTERVALS)
        for (int i = threadIdx.x; i < coming; i += COLLECT_THREADS) {
            const int j = first + 1 + i;
            const Ranked e = row.ranked(j);
            const int stop = position_of_death(row, e, p.window - safe.count - better_mortals(e));
            p.list[of_row + p.window + i] = j;
            p.interval[of_row + p.window + i] = make_int2(j, max(stop, j));
        }
}
