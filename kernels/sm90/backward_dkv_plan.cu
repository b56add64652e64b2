// Which tickets sm90/backward_dkv.cu takes with KEYS_SHARED, and the sums of its split tiles. Only the device knows how
// many steps there are: tiles of the longest-lived keys may have most of them, for one SM each.
//
//   plan_tickets  one CTA: finds the steps of tiles from their summaries, and splits tiles with more than an SM's share of
//                 all steps into parts of that share. The longest tickets come first, so SMs end nearly together. A tile
//                 of x > 1 shares has fewer than 2 x splits: there are fewer than two slots per SM.
//   add_slots     PIECES CTAs a split tile: dkey, dvalue and dbias, its slots added in order, rounded once
//
// The order of tickets within a bucket, and which slots a tile has, depend on the order of threads; no result does.
//
// Prelude: as sm90/backward_dkv.cu.
#include "common/block_select.cuh"
#include "sm90/backward_dkv_tiles.cuh"

constexpr int PLAN_THREADS = 512, BUCKETS = 64;
constexpr int MIN_STEPS = 4;  // of a split: about what a ticket costs besides its steps
constexpr int ADD_THREADS = 256, PIECES = 8;
static_assert(KEYS == KEYS_SHARED && BLOCK_N % PIECES == 0 && HEAD_DIM % 8 == 0, "what the kernels are made for");

// Steps of a tile, of all heads. The key pass may find fewer: a bias of -inf with a delay shortens a key's interval.
__device__ __forceinline__ int steps_of(const AttentionParams& p, int tile) {
    const KeyTile t = find_key_tile(p, tile);
    const int4 seen = p.summaries[mask_row_of(p, t, 0) * ((p.key_length + BLOCK_N - 1) / BLOCK_N) + t.first / BLOCK_N];
    if (seen.x >= seen.w) return 0;  // no query sees any of its keys
    int begin = seen.x - t.shift;
    if (DQUERY) begin -= begin % UNIT_QUERIES;
    return (seen.w - t.shift - begin + BLOCK_Q - 1) / BLOCK_Q * (p.heads / p.kv_heads);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_tickets(const __grid_constant__ BackwardDkvParams launch) {
    wait_for_earlier_kernels();
    __shared__ unsigned long long all_steps;
    __shared__ int longest, slots, split_tiles, warp_sums[32];
    __shared__ int next[BUCKETS];  // how many tickets of each length there are, then where the next one goes
    const AttentionParams& p = launch.attention;
    const KeyPlan& plan = launch.plan;
    if (threadIdx.x < BUCKETS) next[threadIdx.x] = 0;
    if (threadIdx.x == 0) all_steps = longest = slots = split_tiles = 0;
    __syncthreads();  // the counters are 0
    unsigned long long own_steps = 0;
    int own_longest = 0;
    for (int tile = threadIdx.x; tile < launch.tiles; tile += PLAN_THREADS) {
        const int steps = steps_of(p, tile);
        own_steps += steps;
        own_longest = max(own_longest, steps);
    }
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) own_steps += __shfl_xor_sync(ALL_LANES, own_steps, bits);
    own_longest = __reduce_max_sync(ALL_LANES, own_longest);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&all_steps, own_steps);
        atomicMax(&longest, own_longest);
    }
    __syncthreads();  // all steps are counted
    const unsigned long long mean = (all_steps + plan.sms - 1) / plan.sms;
    const int share = plan.split_steps > 0 ? plan.split_steps : max(MIN_STEPS, static_cast<int>(mean));
    const int most = max(1, min(share, longest));  // steps of a ticket
    const auto bucket = [&](int steps) { return static_cast<int>((long long)(most - steps) * (BUCKETS - 1) / most); };
    const auto splits_of = [&](int steps) { return max(1, (steps - 1) / share + 1); };
    for (int tile = threadIdx.x; tile < launch.tiles; tile += PLAN_THREADS) {
        const int steps = steps_of(p, tile), splits = splits_of(steps);
        if (splits > 1) atomicAdd(&next[0], splits - 1);
        atomicAdd(&next[bucket(steps - (splits - 1) * share)], 1);
    }
    __syncthreads();  // the tickets of each length are counted
    int tickets;
    const int before = exclusive_sum<PLAN_THREADS>(threadIdx.x < BUCKETS ? next[threadIdx.x] : 0, tickets, warp_sums);
    if (threadIdx.x < BUCKETS) next[threadIdx.x] = before;
    __syncthreads();  // every length has its place
    for (int tile = threadIdx.x; tile < launch.tiles; tile += PLAN_THREADS) {
        const int steps = steps_of(p, tile), splits = splits_of(steps);
        const int first_slot = splits > 1 ? atomicAdd(&slots, splits) : -1;
        if (splits > 1) plan.split_tiles[atomicAdd(&split_tiles, 1)] = {tile, first_slot, splits};
        for (int split = 0; split < splits; ++split) {
            const int first = split * share, own = min(share, steps - first);
            plan.tickets[atomicAdd(&next[bucket(own)], 1)] = {tile, first, own, splits > 1 ? first_slot + split : -1};
        }
    }
    __syncthreads();  // all split tiles are counted
    if (threadIdx.x == 0) plan.counts[0] = tickets, plan.counts[1] = split_tiles;
}

extern "C" __global__ void __launch_bounds__(ADD_THREADS) add_slots(const __grid_constant__ BackwardDkvParams launch) {
    wait_for_earlier_kernels();
    constexpr int ROWS = BLOCK_N / PIECES, FOURS = HEAD_DIM / 4;
    const AttentionParams& p = launch.attention;
    const int number = blockIdx.x / PIECES, first = blockIdx.x % PIECES * ROWS;
    if (number >= launch.plan.counts[1]) return;
    const SplitTile own = launch.plan.split_tiles[number];
    const KeyTile t = find_key_tile(p, own.tile);
    const int rows = min(ROWS, t.count - first), group_heads = p.heads / p.kv_heads;
    const long long partial_row = (long long)own.first_slot * BLOCK_N + first;
    const int* keys = t.list + t.first + first;
    for (int i = threadIdx.x; i < 2 * rows * FOURS; i += ADD_THREADS) {
        const int row = i / 2 / FOURS, column = i / 2 % FOURS * 4;
        const float* partial = i % 2 ? p.partial_value : p.partial_key;
        if (partial == nullptr) continue;
        double sums[4] = {};
#pragma unroll 4
        for (int split = 0; split < own.splits; ++split) {
            const float4 x = *reinterpret_cast<const float4*>(
                partial + (partial_row + (long long)split * BLOCK_N + row) * HEAD_DIM + column);
            sums[0] += x.x;
            sums[1] += x.y;
            sums[2] += x.z;
            sums[3] += x.w;
        }
        ELEMENT* result = (i % 2 ? p.dvalue : p.dkey) +
                          (((long long)t.batch * p.key_length + keys[row]) * p.kv_heads + t.group) * HEAD_DIM + column;
        *reinterpret_cast<uint2*>(result) =
            make_uint2(pack_pair(static_cast<float>(sums[0]), static_cast<float>(sums[1])),
                       pack_pair(static_cast<float>(sums[2]), static_cast<float>(sums[3])));
    }
    if (p.partial_bias == nullptr) return;
    for (int i = threadIdx.x; i < rows * group_heads; i += ADD_THREADS) {
        const int row = i % rows, h = i / rows;
        double sum = 0.0;
        for (int split = 0; split < own.splits; ++split)
            sum += p.partial_bias[(partial_row + (long long)split * BLOCK_N + row) * group_heads + h];
        p.dbias[((long long)t.batch * p.heads + t.group * group_heads + h) * p.key_length + keys[row]] =
            static_cast<float>(sum);
    }
}
