// Prototype: gradients on Hopper, key-stationary. A CTA owns 128 keys of one kv head (a block of a super-tile's list, or
// consecutive keys) and walks over the query tiles of all heads of the GQA group. See docs/lab/backward.md, version 39.
//
// Prelude: ELEMENT, HEAD_DIM (64, 128), BLOCK_Q (64; 128 with HEAD_DIM 64), STAGES, LISTED, CAUSAL, BIAS (per key), DQ (0:
// none, 1: added in any order, 2: in a fixed order), SHIFT (blocks of a super-tile begin at tiles of their own),
// PRODUCER_REGISTERS, MOST (blocks of a super-tile, in 32s).
#include "common/arch.cuh"
#include "sm90/ptx.cuh"
#include "common/params.cuh"

constexpr int BLOCK_N = 128, CHUNKS = HEAD_DIM / 64, DF = HEAD_DIM / 16, QF = BLOCK_Q / 16;
#ifndef PRODUCER_REGISTERS
#define PRODUCER_REGISTERS 24
#endif
constexpr int PRODUCERS = 128, THREADS = 384;
// A warpgroup makes half of a dq tile: 64 of 128 queries, or all 64 queries and half of the columns.
constexpr bool BY_ROWS = BLOCK_Q == 128;
constexpr int DQ_COLUMNS = BY_ROWS ? HEAD_DIM : HEAD_DIM / 2, DQF = DQ_COLUMNS / 16, COHORT = 16;
enum : int { DS_BARRIER = 1, STAGED_BARRIER = 5, FREE_BARRIER = 7 };  // 4, 2, 2 of them

struct True { static constexpr bool value = true; };
struct False { static constexpr bool value = false; };

struct BackwardParams {
    TensorMap query, dout;
    AttentionParams attention;
    float* statistics;  // (2, B, H, padded Lq): -lse * log2(e), delta
    float* dq;                 // (B, H, query tiles, 2, 64 * DQ_COLUMNS) in fragment order
    int* semaphores;           // (B, H, query tiles)
    int2* ranges;              // (B * Hkv, supers, blocks): tiles of the super-tile that a block visits
    int padded, query_tiles;
};

struct Shared {
    ELEMENT key[CHUNKS * BLOCK_N * 64];
    ELEMENT value[CHUNKS * BLOCK_N * 64];
    ELEMENT query[STAGES][CHUNKS * BLOCK_Q * 64];
    ELEMENT dout[STAGES][CHUNKS * BLOCK_Q * 64];
#if DQ
    ELEMENT ds[2][BLOCK_N * BLOCK_Q];
    float dq[2][64 * DQ_COLUMNS];
#endif
    float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];  // -lse * log2(e)
    int index[BLOCK_N], start[BLOCK_N], stop[BLOCK_N];
    float bias[BLOCK_N];
    Barrier query_full[STAGES], query_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
};

#ifdef CUPY_DMA_HOST
#define LINE_BYTES 0
__device__ __forceinline__ void load_line(void* shared, const void* global, int bytes, Barrier* barrier) {
    for (int i = 0; i < bytes / 4; ++i) static_cast<float*>(shared)[i] = static_cast<const float*>(global)[i];
}
__device__ __forceinline__ void reduce_line(float* global, const void* shared, int bytes) { bulk_reduce_add(global, static_cast<const float*>(shared), bytes); }
__device__ __forceinline__ void store_line(float* global, const void* shared, int bytes) {
    reduce_line(global, shared, bytes);  // the emulator's sums begin at zero, and it sees no order between blocks
}
__device__ __forceinline__ void reduce_commit() { bulk_commit(); }
__device__ __forceinline__ void reduce_wait_read() { bulk_wait<0>(); }
__device__ __forceinline__ void reduce_wait() { bulk_wait<0>(); }
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) { barrier_expect(barrier, bytes); barrier_arrive(barrier); }
__device__ __forceinline__ void turn_wait(const int* semaphore, int turn) {
    if (atomicAdd(const_cast<int*>(semaphore), 0) != turn) __trap();  // blocks run one after the other
}
__device__ __forceinline__ void turn_pass(int* semaphore, int turn) { atomicAdd(semaphore, 1); }
#else
#define LINE_BYTES (BLOCK_Q * 8)
__device__ __forceinline__ void turn_wait(const int* semaphore, int turn) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(semaphore) : "memory");
    while (seen != turn);
    asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void turn_pass(int* semaphore, int turn) {
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphore), "r"(turn) : "memory");
}
__device__ __forceinline__ void load_line(void* shared, const void* global, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void reduce_line(float* global, const void* shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void store_line(float* global, const void* shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void reduce_commit() { tma_store_commit(); }
__device__ __forceinline__ void reduce_wait_read() { tma_store_wait_read(); }
__device__ __forceinline__ void reduce_wait() { tma_store_wait(); }
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
#endif
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * 64 + ((piece ^ row) & 7) * 8;
}

struct Work {
    int batch, group, count, first_query, end_query, block, blocks;
    const int* list;
    long long partial;
};

__device__ __forceinline__ Work find_work(const AttentionParams& p) {
    Work w;
    long long rest = blockIdx.x;
#if LISTED
    const int blocks = p.super_capacity / BLOCK_N;
    w.block = static_cast<int>(rest % blocks);
    rest /= blocks;
    const int super = static_cast<int>(rest % p.supers);
    rest /= p.supers;
#else
    const int blocks = (p.key_length + BLOCK_N - 1) / BLOCK_N;
    w.block = static_cast<int>(rest % blocks);
    if (DQ == 2) w.block = blocks - 1 - w.block;
    rest /= blocks;
#endif
    w.group = static_cast<int>(rest % p.kv_heads);
    w.batch = static_cast<int>(rest / p.kv_heads);
#if LISTED
    const long long mask_row = (long long)w.batch * p.mask_batch + w.group * p.mask_group;
    const long long list = mask_row * p.supers + super;
    w.list = p.super_list + list * p.super_capacity + w.block * BLOCK_N;
    w.blocks = (p.super_lengths[list] + BLOCK_N - 1) / BLOCK_N;
    w.count = min(BLOCK_N, p.super_lengths[list] - w.block * BLOCK_N);
    w.first_query = super * p.super_queries;
    w.end_query = min(w.first_query + p.super_queries, p.query_length);
    w.partial = (rest * p.supers + super) * p.super_capacity + w.block * BLOCK_N;
#else
    w.blocks = blocks;
    w.list = nullptr;
    w.count = min(BLOCK_N, p.key_length - w.block * BLOCK_N);
    w.first_query = 0;
    w.end_query = p.query_length;
#endif
    return w;
}

struct Range { int begin, end, full_begin, full_end; };  // queries; those of [full_begin, full_end) see all keys

__device__ __forceinline__ Range find_range(const Shared& s, const AttentionParams& p, const Work& w) {
    int a = NEVER, b = INT_LOWEST, c = NEVER, d = INT_LOWEST;
    for (int i = threadIdx.x & 31; i < BLOCK_N; i += 32) {
        const int start = s.start[i], stop = s.stop[i];
        b = max(b, start);
        c = min(c, stop);
        if (start >= stop) continue;
        a = min(a, start);
        d = max(d, stop);
    }
    const int shift = p.key_length - p.query_length;
    auto at = [&](int position) {
        return static_cast<int>(min(max((long long)position - shift, (long long)w.first_query), (long long)w.end_query));
    };
    Range r = {at(__reduce_min_sync(ALL_LANES, a)), at(__reduce_max_sync(ALL_LANES, d)), at(__reduce_max_sync(ALL_LANES, b)),
               at(__reduce_min_sync(ALL_LANES, c))};
    r.begin = w.first_query + (r.begin - w.first_query) / BLOCK_Q * BLOCK_Q;
    return r;
}

// The tile that a block visits first, so that the blocks of a super-tile are at different ones.
__device__ __forceinline__ int first_tile(const Work& w, int block, int begin, int end) {
    if (!SHIFT) return begin;
    const int tiles = (w.end_query - w.first_query + BLOCK_Q - 1) / BLOCK_Q;
    const int cohort = block / COHORT * COHORT, size = min(COHORT, w.blocks - cohort);
    const int first = (block - cohort) * tiles / size;
    return begin <= first && first < end ? first : begin;
}

// A CTA a block of keys: the tiles that it visits.
extern "C" __global__ void __launch_bounds__(128) find_ranges(const __grid_constant__ BackwardParams launch) {
    wait_for_earlier_kernels();
    const AttentionParams& p = launch.attention;
    const Work w = find_work(p);
    __shared__ int lowest, highest;
    if (threadIdx.x == 0) { lowest = NEVER; highest = INT_LOWEST; }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < w.count) {
        const int key = LISTED ? w.list[threadIdx.x] : w.block * BLOCK_N + threadIdx.x;
        int start = CAUSAL ? key : INT_LOWEST, stop = NEVER;
#if LISTED
        const long long mask_row = (long long)w.batch * p.mask_batch + w.group * p.mask_group;
        const long long mh = mask_row % p.mask_heads, mb = mask_row / p.mask_heads;
        start = max(start, p.start[mb * p.start_batch + mh * p.start_head + key]);
        stop = p.stop[mb * p.stop_batch + mh * p.stop_head + key];
#endif
        if (start < stop) { atomicMin(&lowest, start); atomicMax(&highest, stop); }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const long long shift = p.key_length - p.query_length;
    const int begin = static_cast<int>(min(max(lowest - shift, (long long)w.first_query), (long long)w.end_query)) - w.first_query;
    const int end = static_cast<int>(min(max(highest - shift, (long long)w.first_query), (long long)w.end_query)) - w.first_query;
    launch.ranges[blockIdx.x] = begin < end ? make_int2(begin / BLOCK_Q, (end + BLOCK_Q - 1) / BLOCK_Q) : make_int2(0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_kv(const __grid_constant__ BackwardParams launch) {
    wait_for_earlier_kernels();
    extern __shared__ unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    const AttentionParams& p = launch.attention;
    const Work w = find_work(p);
    if (w.count <= 0) return;  // (in order: blocks without keys come last)
    const int group_heads = p.heads / p.kv_heads;
    if (threadIdx.x < BLOCK_N) {
        const int i = threadIdx.x;
        const bool exists = i < w.count;
        const int key = LISTED ? (exists ? w.list[i] : 0) : min(w.block * BLOCK_N + i, p.key_length - 1);
        int start = CAUSAL ? key : INT_LOWEST, stop = NEVER;
#if LISTED
        const long long mask_row = (long long)w.batch * p.mask_batch + w.group * p.mask_group;
        const long long mh = mask_row % p.mask_heads, mb = mask_row / p.mask_heads;
        start = max(start, p.start[mb * p.start_batch + mh * p.start_head + key]);
        stop = p.stop[mb * p.stop_batch + mh * p.stop_head + key];
#endif
        shared.index[i] = key;
        shared.start[i] = exists ? start : NEVER;
        shared.stop[i] = exists ? stop : INT_LOWEST;
#if BIAS
        shared.bias[i] = exists ? p.bias[w.batch * p.bias_batch + w.group * p.bias_group + key * p.bias_key] * LOG2_E : 0.0f;
#endif
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.query_full[i], 1);
            barrier_init(&shared.query_empty[i], 256);
            barrier_init(&shared.dout_full[i], 1);
            barrier_init(&shared.dout_empty[i], 256);
        }
        barrier_init_fence();
    }
    __syncthreads();
    {
        const ELEMENT* keys = p.key + w.batch * p.key_batch + w.group * p.key_head;
        const ELEMENT* values = p.value + w.batch * p.value_batch + w.group * p.value_head;
        constexpr int PIECES = HEAD_DIM / 8;
        for (int i = threadIdx.x; i < BLOCK_N * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            const long long key = shared.index[row];
            copy_async_16(shared_address(piece_of<BLOCK_N>(shared.key, row, piece)), keys + key * p.key_row + piece * 8, row < w.count ? 16 : 0);
            copy_async_16(shared_address(piece_of<BLOCK_N>(shared.value, row, piece)), values + key * p.value_row + piece * 8, row < w.count ? 16 : 0);
        }
        copy_async_commit();
        copy_async_wait<0>();
        shared_write_fence();
    }
    __syncthreads();
    const Range range = find_range(shared, p, w);
    const int tiles = range.begin < range.end ? (range.end - range.begin + BLOCK_Q - 1) / BLOCK_Q : 0;
    const int steps = tiles * group_heads, before = (range.begin - w.first_query) / BLOCK_Q;
    const int first = tiles ? first_tile(w, w.block, before, before + tiles) - before : 0;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < PRODUCERS) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            int stage = 0; unsigned phase = 0;
            for (int h = 0; h < group_heads; ++h)
                for (int i = 0, t = first; i < tiles; ++i, t = t + 1 == tiles ? 0 : t + 1) {
                    const int head = w.group * group_heads + h, query = range.begin + t * BLOCK_Q;
                    barrier_wait(&shared.query_empty[stage], phase ^ 1);
                    barrier_arrive_expect(&shared.query_full[stage], CHUNKS * BLOCK_Q * 128 + LINE_BYTES);
                    for (int c = 0; c < CHUNKS; ++c)
                        tma_load(shared.query[stage] + c * BLOCK_Q * 64, &launch.query, &shared.query_full[stage], c * 64, head, query, w.batch);
                    const float* line = launch.statistics + ((long long)w.batch * p.heads + head) * launch.padded + query;
                    load_line(shared.lse[stage], line, BLOCK_Q * 4, &shared.query_full[stage]);
                    load_line(shared.delta[stage], line + (long long)p.batch * p.heads * launch.padded, BLOCK_Q * 4, &shared.query_full[stage]);
                    barrier_wait(&shared.dout_empty[stage], phase ^ 1);
                    barrier_arrive_expect(&shared.dout_full[stage], CHUNKS * BLOCK_Q * 128);
                    for (int c = 0; c < CHUNKS; ++c)
                        tma_load(shared.dout[stage] + c * BLOCK_Q * 64, &launch.dout, &shared.dout_full[stage], c * 64, head, query, w.batch);
                    if (++stage == STAGES) { stage = 0; phase ^= 1; }
                }
        }
#if DQ
        if (warp == 1 || warp == 2) {
            const int half = warp - 1, lane = threadIdx.x & 31;
            named_barrier_arrive(FREE_BARRIER + half, 160);  // the staging area is free
#if DQ == 2 && LISTED
            const int2* ranges = launch.ranges + blockIdx.x - w.block;
            int begins[MOST], ends[MOST], firsts[MOST];
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                const int other = 32 * i + lane;
                const int2 r = other < w.blocks ? ranges[other] : make_int2(0, 0);
                begins[i] = r.x;
                ends[i] = r.y;
                firsts[i] = first_tile(w, other, r.x, r.y);
            }
#endif
            for (int h = 0; h < group_heads; ++h) {
                const int head = w.group * group_heads + h;
                for (int i = 0, k = first; i < tiles; ++i, k = k + 1 == tiles ? 0 : k + 1) {
                    const int t = before + k;
                    const long long tile = ((long long)w.batch * p.heads + head) * launch.query_tiles + w.first_query / BLOCK_Q + t;
#if DQ == 2
                    // Blocks add to a tile in the order in which they come to it if all take equal time.
                    int rank = 0;
#if LISTED
#pragma unroll
                    for (int o = 0; o < MOST; ++o) {
                        if (32 * o >= w.blocks) break;
                        const int other = 32 * o + lane;
                        const int at = t - firsts[o] + (t < firsts[o] ? ends[o] - begins[o] : 0);
                        const bool same = other / COHORT == w.block / COHORT;
                        const bool earlier = same && SHIFT ? at < i || (at == i && other < w.block) : other < w.block;
                        rank += __popc(__ballot_sync(ALL_LANES, begins[o] <= t && t < ends[o] && earlier));
                    }
#else
                    // Causal ones the latest first.
                    rank = min(w.blocks - 1 - w.block, (t * BLOCK_Q + BLOCK_Q - 1 + p.key_length - p.query_length) / BLOCK_N - w.block);
#endif
                    int* semaphore = launch.semaphores + 2 * tile + half;
#endif
                    named_barrier(STAGED_BARRIER + half, 160);
                    if (lane == 0) {
                        float* sum = launch.dq + (2 * tile + half) * 64 * DQ_COLUMNS;
#if DQ == 2
                        turn_wait(semaphore, rank);
                        if (rank == 0) store_line(sum, shared.dq[half], 64 * DQ_COLUMNS * 4);
                        else
#endif
                        reduce_line(sum, shared.dq[half], 64 * DQ_COLUMNS * 4);
                        reduce_commit();
                        reduce_wait_read();
                    }
                    __syncwarp();
                    if (!(h == group_heads - 1 && i == tiles - 1)) named_barrier_arrive(FREE_BARRIER + half, 160);
#if DQ == 2
                    if (lane == 0) {
                        reduce_wait();
                        turn_pass(semaphore, rank + 1);
                    }
#endif
                }
            }
            if (lane == 0) reduce_wait();
        }
#endif
        return;
    }
    grow_registers<504 / 2 - PRODUCER_REGISTERS / 2>();
    const int half = warp / 4 - 1, lane = threadIdx.x & 31, first_row = half * 64 + (warp & 3) * 16;
    Fragment s[QF], dp[QF], dk[DF], dv[DF];
#pragma unroll
    for (int d = 0; d < DF; ++d)
#pragma unroll
        for (int i = 0; i < 8; ++i) dk[d].x[i] = dv[d].x[i] = 0.0f;
    int start[2], stop[2];
    float bias[2] = {0.0f, 0.0f}, dbias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        start[r] = shared.start[first_row + lane / 4 + 8 * r];
        stop[r] = shared.stop[first_row + lane / 4 + 8 * r];
#if BIAS
        bias[r] = shared.bias[first_row + lane / 4 + 8 * r];
#endif
    }
    const float scale2 = p.scale * LOG2_E;
    const int shift = p.key_length - p.query_length;
    const unsigned key_a = matrix_descriptor(shared.key + half * 64 * 64, 0), value_a = matrix_descriptor(shared.value + half * 64 * 64, 0);
    auto qk = [&](Fragment (&x)[QF], unsigned a, const ELEMENT* rows) {
        const unsigned b = matrix_descriptor(rows, 0);
#pragma unroll
        for (int n = 0; n < QF; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[n].x[i] = 0.0f;  // or what was there would be kept until now
        pin(x);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < DF; ++d)
            Wgmma<QF>::multiply<Major::K, Major::K>(x, moved(a, d / 4 * BLOCK_N * 128 + d % 4 * 32), moved(b, d / 4 * BLOCK_Q * 128 + d % 4 * 32), d > 0);
        wgmma_commit();
    };
    auto accumulate = [&](Fragment (&x)[DF], unsigned (&a)[QF][4], const ELEMENT* rows) {
        const unsigned b = matrix_descriptor(rows, BLOCK_Q * 128);
        pin(x);
        pin(a);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < QF; ++n) Wgmma<DF>::multiply<Major::MN>(x, a[n], moved(b, n * 16 * 128), true);
        wgmma_commit();
    };
    int stage = 0, tile = first, h = 0, buffer = 0;
    unsigned phase = 0;
    auto exponentials = [&] {
        const int query = range.begin + tile * BLOCK_Q;
        const bool masked = query < range.full_begin || query + BLOCK_Q > range.full_end;
        wgmma_wait<1>();
        pin(s);
#pragma unroll
        for (int n = 0; n < QF; ++n) {
            float lse[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_shared_pair(lse[k][0], lse[k][1], shared_address(&shared.lse[stage][16 * n + 8 * k + 2 * (lane & 3)]));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = (i >> 1) & 1;
                s[n].x[i] = exp2_fast(fmaf(s[n].x[i], scale2, lse[i >> 2][i & 1] + (BIAS ? bias[r] : 0.0f)));
            }
        }
        if (masked) {
            const int position = query + shift + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < QF; ++n)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int r = (i >> 1) & 1, at = position + 16 * n + (i & 1) + 8 * (i >> 2);
                    if (!(start[r] <= at && at < stop[r])) s[n].x[i] = 0.0f;
                }
        }
        wgmma_wait<0>();
        pin(dp);
    };
    auto iterate = [&](auto with_next) {
        constexpr bool more = decltype(with_next)::value;
        unsigned probability[QF][4], gradient[QF][4];
#pragma unroll
        for (int n = 0; n < QF; ++n) {
            float delta[2][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_shared_pair(delta[k][0], delta[k][1], shared_address(&shared.delta[stage][16 * n + 8 * k + 2 * (lane & 3)]));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float ds = s[n].x[i] * (dp[n].x[i] - delta[i >> 2][i & 1]);
                if (BIAS) dbias[(i >> 1) & 1] += ds;
                dp[n].x[i] = ds;
            }
        }
#pragma unroll
        for (int n = 0; n < QF; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) gradient[n][i] = pack_pair(dp[n].x[2 * i], dp[n].x[2 * i + 1]);
#pragma unroll
        for (int n = 0; n < QF; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[n][i] = pack_pair(s[n].x[2 * i], s[n].x[2 * i + 1]);
        if (++tile == tiles) tile = 0;
        if (tile == first) {
#if BIAS
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = dbias[r];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                dbias[r] = 0.0f;
                const int row = first_row + lane / 4 + 8 * r;
                if ((lane & 3) == 0 && row < w.count) {
                    if (LISTED) p.partial_bias[(w.partial + row) * group_heads + h] = sum;
                    else p.dbias[((long long)w.batch * p.heads + w.group * group_heads + h) * p.key_length + shared.index[row]] = sum;
                }
            }
#endif
            ++h;
        }
#if DQ
        {
#pragma unroll
            for (int c = 0; c < BLOCK_Q / 64; ++c) {
                const unsigned corner = shared_address(piece_of<BLOCK_N>(shared.ds[buffer] + c * BLOCK_N * 64, first_row + lane % 16, lane / 16));
#pragma unroll
                for (int n = 0; n < 4; ++n) store_matrices(corner ^ 2 * n * 16, gradient[4 * c + n]);
            }
            shared_write_fence();
            named_barrier_arrive(DS_BARRIER + 2 * buffer + half, 256);
        }
#endif
        accumulate(dv, probability, shared.dout[stage]);
        accumulate(dk, gradient, shared.query[stage]);
        const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
        const unsigned next_phase = stage + 1 == STAGES ? phase ^ 1 : phase;
#if DQ
        Fragment dq[DQF];
        named_barrier(DS_BARRIER + 2 * buffer + 1 - half, 256);  // the other warpgroup's dS
        {
            const unsigned a = matrix_descriptor(shared.ds[buffer] + (BY_ROWS ? half * BLOCK_N * 64 : 0), 0);
            const unsigned b = matrix_descriptor(HEAD_DIM == 128 ? shared.key + half * BLOCK_N * 64 : shared.key, 0);
#pragma unroll
            for (int n = 0; n < DQF; ++n)
#pragma unroll
                for (int i = 0; i < 8; ++i) dq[n].x[i] = 0.0f;
            pin(dq);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 8; ++k)
                Wgmma<DQF>::multiply<Major::MN, Major::MN>(dq, moved(a, k * 16 * 128), moved(b, k * 16 * 128 + (HEAD_DIM == 64 && !BY_ROWS ? half * 64 : 0)), k > 0);
            wgmma_commit();
        }
        wgmma_wait<1>();  // dv, dk
        pin(dv);
        pin(dk);
        pin(probability);
        pin(gradient);
        barrier_arrive(&shared.dout_empty[stage]);
        barrier_arrive(&shared.query_empty[stage]);
#endif
        if constexpr (more) {
            barrier_wait(&shared.query_full[next_stage], next_phase);
            qk(s, key_a, shared.query[next_stage]);
        }
        wgmma_wait<more ? 1 : 0>();
#if DQ
        pin(dq);
        named_barrier(FREE_BARRIER + half, 160);
#pragma unroll
        for (int n = 0; n < DQF; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                reinterpret_cast<float4*>(shared.dq[half])[(2 * n + k) * 128 + (threadIdx.x & 127)] =
                    make_float4(dq[n].x[4 * k], dq[n].x[4 * k + 1], dq[n].x[4 * k + 2], dq[n].x[4 * k + 3]);
        shared_write_fence();
        named_barrier_arrive(STAGED_BARRIER + half, 160);
#else
        pin(dv);
        pin(dk);
        pin(probability);
        pin(gradient);
        barrier_arrive(&shared.dout_empty[stage]);
        barrier_arrive(&shared.query_empty[stage]);
#endif
        if constexpr (more) {
            barrier_wait(&shared.dout_full[next_stage], next_phase);
            qk(dp, value_a, shared.dout[next_stage]);
            buffer ^= 1;
            stage = next_stage;
            phase = next_phase;
            exponentials();
        }
    };
    if (steps > 0) {
        barrier_wait(&shared.query_full[0], 0);
        qk(s, key_a, shared.query[0]);
        barrier_wait(&shared.dout_full[0], 0);
        qk(dp, value_a, shared.dout[0]);
        exponentials();
#pragma unroll 1
        for (int step = 1; step < steps; ++step) iterate(True());
        iterate(False());
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + lane / 4 + 8 * r;
        if (row >= w.count) continue;
#pragma unroll
        for (int d = 0; d < DF; ++d)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int column = 16 * d + 8 * k + 2 * (lane & 3), i = 4 * k + 2 * r;
#if LISTED
                *reinterpret_cast<float2*>(p.partial_key + (w.partial + row) * HEAD_DIM + column) = make_float2(dk[d].x[i] * p.scale, dk[d].x[i + 1] * p.scale);
                *reinterpret_cast<float2*>(p.partial_value + (w.partial + row) * HEAD_DIM + column) = make_float2(dv[d].x[i], dv[d].x[i + 1]);
#else
                const long long at = (((long long)w.batch * p.key_length + shared.index[row]) * p.kv_heads + w.group) * HEAD_DIM + column;
                *reinterpret_cast<unsigned*>(p.dkey + at) = pack_pair(dk[d].x[i] * p.scale, dk[d].x[i + 1] * p.scale);
                *reinterpret_cast<unsigned*>(p.dvalue + at) = pack_pair(dv[d].x[i], dv[d].x[i + 1]);
#endif
            }
    }
}

// dq in fragment order -> (B, Lq, H, D); a CTA a tile
extern "C" __global__ void __launch_bounds__(256) convert_dq(const __grid_constant__ BackwardParams launch) {
    wait_for_earlier_kernels();
    const AttentionParams& p = launch.attention;
    __shared__ unsigned rows[BLOCK_Q][HEAD_DIM / 2 + 4];
    const long long tile = blockIdx.x;
    const int t = static_cast<int>(tile % launch.query_tiles), head = static_cast<int>(tile / launch.query_tiles % p.heads);
    const long long batch = tile / launch.query_tiles / p.heads;
    const bool visited = DQ != 2 || launch.semaphores[2 * tile] > 0;
#pragma unroll
    for (int i = threadIdx.x; i < 2 * 64 * DQ_COLUMNS / 4; i += 256) {
        const float4 x = visited ? __ldcs(reinterpret_cast<const float4*>(launch.dq + tile * 128 * DQ_COLUMNS) + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int half = i / (16 * DQ_COLUMNS), e = i % (16 * DQ_COLUMNS), k = e / 128, thread = e % 128;
        const int row = (BY_ROWS ? 64 * half : 0) + thread / 32 * 16 + thread % 32 / 4;
        const int pair = ((BY_ROWS ? 0 : half * DQ_COLUMNS) + 8 * k) / 2 + (thread & 3);
        rows[row][pair] = pack_pair(x.x * p.scale, x.y * p.scale);
        rows[row + 8][pair] = pack_pair(x.z * p.scale, x.w * p.scale);
    }
    __syncthreads();
    constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_Q * PIECES; i += 256) {
        const int row = i / PIECES, piece = i % PIECES, query = t * BLOCK_Q + row;
        if (query < p.query_length)
            *reinterpret_cast<uint4*>(p.dquery + ((batch * p.query_length + query) * p.heads + head) * HEAD_DIM + piece * 8) = *reinterpret_cast<const uint4*>(&rows[row][piece * 4]);
    }
}

// a warp a row
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ BackwardParams launch) {
    wait_for_earlier_kernels();
    const AttentionParams& p = launch.attention;
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;  // (b, i of padded, h)
    const int lane = threadIdx.x & 31;
    if (row >= (long long)p.batch * launch.padded * p.heads) return;
    const int head = static_cast<int>(row % p.heads), query = static_cast<int>(row / p.heads % launch.padded);
    const long long batch = row / p.heads / launch.padded;
    float2 result = make_float2(-infinity(), 0.0f);
    if (query < p.query_length) {
        const ELEMENT* out = p.out + batch * p.out_batch + query * p.out_row + head * p.out_head;
        const ELEMENT* dout = p.dout + batch * p.dout_batch + query * p.dout_row + head * p.dout_head;
        float sum = 0.0f;
        for (int d = 4 * lane; d < HEAD_DIM; d += 128) {
            const uint2 a = *reinterpret_cast<const uint2*>(out + d), b = *reinterpret_cast<const uint2*>(dout + d);
            const unsigned u[2] = {a.x, a.y}, v[2] = {b.x, b.y};
            for (int i = 0; i < 4; ++i)
                sum = fmaf(half_of(u[i / 2], i % 2, (const ELEMENT*)nullptr), half_of(v[i / 2], i % 2, (const ELEMENT*)nullptr), sum);
        }
        for (int distance = 16; distance > 0; distance >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        const long long at = (batch * p.heads + head) * p.query_length + query;
        const float lse = p.lse[at];
        result = make_float2(lse == -infinity() ? -infinity() : -lse * LOG2_E, lse == -infinity() ? 0.0f : sum);
    }
    if (lane != 0) return;
    float* line = launch.statistics + (batch * p.heads + head) * launch.padded + query;
    line[0] = result.x;
    line[(long long)p.batch * p.heads * launch.padded] = result.y;
}
