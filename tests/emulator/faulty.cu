// Small right and wrong kernels with which tests/emulator/tests/test_faults.py tests the emulator. The marks `(at ...)`
// name the lines that a report must point to. The test writes out KERNEL(name): a kernel with `Arguments p`, which first
// waits for earlier kernels.
#define ELEMENT __half
#include "sm90/ptx.cuh"

struct Arguments {
    int* out;       // (n)
    const int* in;  // (n)
    int n;
};

extern __shared__ __align__(1024) unsigned char shared_memory[];

// ---- right ----
// one warp, n = 32 * 12
KERNEL(collectives) {
    const int lane = threadIdx.x, x = p.in[lane];
    int* out = p.out + lane;
    out[0] = __shfl_xor_sync(ALL_LANES, x, 5);
    out[32] = __shfl_up_sync(ALL_LANES, x, 3);
    out[64] = __shfl_down_sync(ALL_LANES, x, 3);
    out[96] = __shfl_sync(ALL_LANES, x, 7);
    out[128] = __ballot_sync(ALL_LANES, x & 1);
    out[160] = __reduce_min_sync(ALL_LANES, x);
    out[192] = __reduce_max_sync(ALL_LANES, x);
    out[224] = __reduce_add_sync(ALL_LANES, x);
    out[256] = __any_sync(ALL_LANES, x == p.in[3]);
    out[288] = __all_sync(ALL_LANES, x == p.in[3]);
    out[320] = __shfl_xor_sync(ALL_LANES, x, 1, 8);
    const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane < 16)
        out[352] = __reduce_add_sync(half, x);
    else
        out[352] = __reduce_max_sync(half, x);
}

// Every block writes a number. The block with the last ticket of its pair adds up both; that of the last pair adds up
// all. out (n): sums of pairs, the sum of all, tickets of pairs and of all, numbers of the blocks
KERNEL(tickets) {
    const int pairs = gridDim.x / 2, pair = blockIdx.x / 2;
    unsigned* counters = reinterpret_cast<unsigned*>(p.out + pairs + 1);
    int* numbers = p.out + 2 * pairs + 2;
    __shared__ int last;
    if (threadIdx.x == 1) numbers[blockIdx.x] = p.in[blockIdx.x];
    __syncthreads();  // the number is written
    if (threadIdx.x == 0) last = take_ticket(counters + pair, 1) == 1;
    __syncthreads();  // all threads know whether both numbers are written
    if (!last) return;
    if (threadIdx.x == 2) p.out[pair] = numbers[2 * pair] + numbers[2 * pair + 1];
    if (threadIdx.x == 3 && take_ticket(counters + pairs, pairs - 1) == pairs - 1) {
        int sum = 0;
        for (unsigned i = 0; i < gridDim.x; ++i) sum += numbers[i];
        p.out[pairs] = sum;
    }
}

// some threads exit early: the others' barriers do not wait for them
KERNEL(barriers) {
    if (threadIdx.x >= 40) return;
    const int x = p.in[threadIdx.x];
    const bool any = __syncthreads_or(x == 7), all = __syncthreads_and(x >= 0);
    const int count = __syncthreads_count(x > 3);
    p.out[threadIdx.x] = count + 1000 * any + 2000 * all;
}

// a warp's rows through shared memory, ordered by __syncwarp; atomics on one counter
KERNEL(neighbours) {
    __shared__ int row[32], counter;
    if (threadIdx.x == 0) counter = 0;
    row[threadIdx.x] = p.in[threadIdx.x];
    __syncwarp();
    atomicAdd(&counter, 1);
    __syncwarp();
    p.out[threadIdx.x] = row[threadIdx.x ^ 1] + counter;
}

// two groups of asynchronous copies
KERNEL(copies) {
    __shared__ __align__(16) int a[128], b[128];
    copy_async_16(a + 4 * threadIdx.x, p.in + 4 * threadIdx.x, 16);
    copy_async_commit();
    copy_async_16(b + 4 * threadIdx.x, p.in, 0);
    copy_async_commit();
    copy_async_wait<1>();
    p.out[threadIdx.x] = a[4 * threadIdx.x];
    copy_async_wait<0>();
    p.out[32 + threadIdx.x] = b[4 * threadIdx.x];
}

// two warps fill rows for two others, with two stages: mbarriers say full and empty; a named barrier at the end
KERNEL(pipeline) {
    __shared__ __align__(16) int row[2][64], sums[64];
    __shared__ Barrier full[2], empty[2];
    if (threadIdx.x == 0)
        for (int s = 0; s < 2; ++s) {
            barrier_init(&full[s], 64);
            barrier_init(&empty[s], 64);
        }
    __syncthreads();
    const int t = threadIdx.x & 63;
    int sum = 0;
    for (int k = 0; k < 6; ++k) {
        const int s = k & 1, parity = k >> 1 & 1;
        if (threadIdx.x < 64) {
            barrier_wait(&empty[s], parity ^ 1);
            copy_async_4(&row[s][t], p.in + t, 4);
            copy_async_commit();
            barrier_arrive_after_copies(&full[s]);
        } else {
            barrier_wait(&full[s], parity);
            sum += row[s][63 - t];
            barrier_arrive(&empty[s]);
        }
    }
    if (threadIdx.x < 64) {
        named_barrier_arrive(3, 128);
        return;
    }
    sums[t] = sum;
    named_barrier(3, 128);
    p.out[t] = sums[t ^ 1];
}

struct Sums {
    float* out;
};
// every thread adds to the same 128 numbers, with vector and bulk reductions
extern "C" __global__ void reductions(const Sums p) {
    wait_for_earlier_kernels();
    __shared__ __align__(16) float rows[32][4];
    for (int i = 0; i < 4; ++i) rows[threadIdx.x][i] = i + 1.0f;
    reduce_add_4(p.out + 4 * threadIdx.x, make_float4(1.0f, 2.0f, 3.0f, 4.0f));
    bulk_reduce_add(p.out + 4 * (31 - threadIdx.x), rows[threadIdx.x], 16);
    bulk_commit();
    bulk_wait();
}

struct Conversions {
    const float* in;
    unsigned short *half, *bfloat16;
    float *half_back, *bfloat16_back;
    int n;
};
extern "C" __global__ void conversions(const Conversions p) {
    wait_for_earlier_kernels();
    for (int i = threadIdx.x; i < p.n; i += 32) {
        p.half[i] = __half_as_ushort(__float2half_rn(p.in[i]));
        p.bfloat16[i] = __float2bfloat16_rn(p.in[i]).bits;
        p.half_back[i] = to_float(__float2half_rn(p.in[i]));
        p.bfloat16_back[i] = to_float(__float2bfloat16_rn(p.in[i]));
    }
}

struct Tf32 {
    const float* in;   // (n)
    float* rounded;    // (n)
    float* product;    // (16, 8)
    int n;
};
// rounds `in`; multiplies a 16x8 matrix A by an 8x8 matrix B, both from its first numbers
extern "C" __global__ void tf32(const Tf32 p) {
    wait_for_earlier_kernels();
    for (int i = threadIdx.x; i < p.n; i += 32) p.rounded[i] = round_tf32(p.in[i]);
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float a[4], b[2], c[4] = {};
    for (int i = 0; i < 4; ++i) a[i] = round_tf32(p.in[(g + 8 * (i & 1)) * 8 + t + 4 * (i >> 1)]);
    for (int i = 0; i < 2; ++i) b[i] = round_tf32(p.in[128 + (t + 4 * i) * 8 + g]);
    multiply_add_tf32(c, a, b);
    for (int i = 0; i < 4; ++i) p.product[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = c[i];
}

// Element (row, column) of a matrix with rows of 64 elements, pieces of eight swizzled.
__device__ __half& swizzled(__half* matrix, int row, int column) {
    return matrix[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8];
}

template <Major a_major, Major b_major>
__device__ void multiply_majors(const Arguments& p, __half* a, __half* b, int* out) {
    __syncthreads();  // no thread multiplies the matrices before this
    for (int i = threadIdx.x; i < 64 * 16; i += blockDim.x)
        from_float(a_major == Major::K ? swizzled(a, i / 16, i % 16) : swizzled(a, i % 16, i / 16), p.in[i]);
    for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x)
        from_float(b_major == Major::K ? swizzled(b, i % 32, i / 32) : swizzled(b, i / 32, i % 32), p.in[1024 + i]);
    shared_write_fence();
    __syncthreads();  // both are complete
    Fragment sums[2];
    wgmma_fence();
    Wgmma<2>::multiply<a_major, b_major>(sums, matrix_descriptor(a, 0), matrix_descriptor(b, 0), false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int n = 0; n < 2; ++n)
        for (int i = 0; i < 8; ++i) {
            const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4 + 8 * (i >> 1 & 1);
            out[row * 32 + 16 * n + 2 * (lane % 4) + (i & 1) + 8 * (i >> 2)] = static_cast<int>(sums[n].x[i]);
        }
}

// One warpgroup: a (64 x 16) times b (16 x 32), in every layout; in (1024 + 512), out (4, 64, 32)
KERNEL(majors) {
    __half *a = reinterpret_cast<__half*>(shared_memory), *b = a + 64 * 64;
    multiply_majors<Major::K, Major::K>(p, a, b, p.out);
    multiply_majors<Major::K, Major::MN>(p, a, b, p.out + 2048);
    multiply_majors<Major::MN, Major::K>(p, a, b, p.out + 2 * 2048);
    multiply_majors<Major::MN, Major::MN>(p, a, b, p.out + 3 * 2048);
}

// ---- waiting forever, or for the wrong threads ----
KERNEL(divergent_barrier) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();  // (at divergent_barrier)
}

KERNEL(missing_lane) {
    if (threadIdx.x == 5)
        __syncthreads();
    else
        p.out[threadIdx.x] = __shfl_sync(ALL_LANES, 1, 0);  // (at missing_lane)
}

KERNEL(deadlock) {
    if (threadIdx.x < 16)
        __syncwarp(0xffffu | 1u << 20);  // (at deadlock)
    else
        __syncwarp(0xffff0000u);
    __syncthreads();
}

KERNEL(different_collectives) {
    if (threadIdx.x & 1)
        p.out[threadIdx.x] = __any_sync(ALL_LANES, 1);
    else
        p.out[threadIdx.x] = __shfl_sync(ALL_LANES, 1, 0);
}

KERNEL(exited_lane) {
    if (threadIdx.x >= 31) return;
    p.out[threadIdx.x] = __shfl_down_sync(ALL_LANES, 1, 1);  // (at exited_lane)
}

KERNEL(unrounded_operand) {
    const float a[4] = {1.0f, 1.0f, threadIdx.x == 9 ? 1.0001f : 1.0f, 1.0f}, b[2] = {1.0f, 2.0f};
    float c[4] = {};
    multiply_add_tf32(c, a, b);  // (at unrounded_operand)
    p.out[threadIdx.x] = c[0];
}

KERNEL(not_in_mask) {
    __syncwarp(0x7fffffffu);  // (at not_in_mask)
}

// the first phase never ends: one arrival of two
KERNEL(mbarrier_deadlock) {
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) barrier_init(&barrier, 33);
    __syncthreads();
    barrier_arrive(&barrier);
    barrier_wait(&barrier, 0);  // (at mbarrier_deadlock)
}

KERNEL(mbarrier_not_made) {
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) barrier = 0;
    __syncthreads();
    barrier_arrive(&barrier);  // (at mbarrier_not_made)
}

KERNEL(named_barrier_short) {
    if (threadIdx.x < 32) named_barrier(1, 64);  // (at named_barrier_short)
}

KERNEL(bulk_not_waited) {
    __shared__ __align__(16) float row[4];
    for (int i = 0; i < 4; ++i) row[i] = 1.0f;
    bulk_reduce_add(reinterpret_cast<float*>(p.out), row, 16);  // (at bulk_not_waited)
    bulk_commit();
}

// ---- Hopper ----
KERNEL(mmas_not_waited) {
    Fragment sums[1];
    Wgmma<1>::multiply<Major::K, Major::K>(sums, 0, 0, false);  // (at mmas_not_waited)
    wgmma_commit();
}

KERNEL(register_changed) {
    Fragment sums[1];
    unsigned a[4] = {0, 0, 0, 0};
    Wgmma<1>::multiply<Major::MN>(sums, a, matrix_descriptor(shared_memory, 0), false);  // (at register_changed)
    wgmma_commit();
    if (threadIdx.x == 5) a[2] = 1;
    wgmma_wait<0>();
}

KERNEL(different_mmas) {
    Fragment sums[1];
    if (threadIdx.x < 5) Wgmma<1>::multiply<Major::K, Major::K>(sums, 0, 0, false);
    wgmma_commit();
    wgmma_wait<0>();  // (at different_mmas)
}

// A row of 64 elements.
__device__ TensorMap row_of_input(const Arguments& p) {
    return {{4, reinterpret_cast<unsigned long long>(p.in), 64, 1, 1, 1, 0, 128, 128, 128, 0, 64, 1, 1, 1, 0}};
}

// Thread 0 asks for it and tells the barrier of `bytes`.
__device__ void ask_for_row(const Arguments& p, Barrier& barrier, unsigned char* shared, int bytes) {
    if (threadIdx.x == 0) {
        const TensorMap map = row_of_input(p);
        barrier_init(&barrier, 1);
        barrier_expect(&barrier, bytes);
        tma_load(shared, &map, &barrier, 0, 0, 0, 0);
        barrier_arrive(&barrier);
    }
    __syncthreads();
}

KERNEL(tma_not_waited) {
    __shared__ Barrier barrier;
    ask_for_row(p, barrier, shared_memory, 128);
}

KERNEL(tma_read_early) {
    __shared__ Barrier barrier;
    ask_for_row(p, barrier, shared_memory, 128);
    p.out[threadIdx.x] = reinterpret_cast<int*>(shared_memory)[threadIdx.x];  // (at tma_read_early)
    barrier_wait(&barrier, 0);
}

KERNEL(tma_of_fewer_bytes) {
    __shared__ Barrier barrier;
    ask_for_row(p, barrier, shared_memory, 256);
    barrier_wait(&barrier, 0);  // (at tma_of_fewer_bytes)
}

KERNEL(tma_between_rows) {
    __shared__ Barrier barrier;
    ask_for_row(p, barrier, shared_memory + 64, 128);
}

KERNEL(arrival_too_many) {
    __shared__ Barrier barrier;
    ask_for_row(p, barrier, shared_memory, 128);
    barrier_arrive(&barrier);
}

KERNEL(store_not_waited) {
    reinterpret_cast<int*>(shared_memory)[threadIdx.x] = 1;
    __syncwarp();
    const TensorMap map = row_of_input({nullptr, p.out, 0});
    if (threadIdx.x == 0) tma_store(&map, shared_memory, 0, 0, 0, 0);  // (at store_not_waited)
    bulk_wait();  // for what has been committed
}

// ---- memory ----
// the stage is refilled without waiting until it is empty
KERNEL(pipeline_race) {
    __shared__ int row[32];
    __shared__ Barrier full;
    if (threadIdx.x == 0) barrier_init(&full, 32);
    __syncthreads();
    for (int k = 0; k < 2; ++k) {
        if (threadIdx.x < 32) {
            row[threadIdx.x] = p.in[threadIdx.x] + k;  // (at pipeline_race)
            barrier_arrive(&full);
        } else {
            barrier_wait(&full, k);
            p.out[threadIdx.x - 32] = row[63 - threadIdx.x];
        }
    }
}

// the third warp waits for the second one, but reads what the first one writes
KERNEL(barrier_of_others) {
    __shared__ int row[32];
    __shared__ Barrier full, other;
    if (threadIdx.x == 0) {
        barrier_init(&full, 32);
        barrier_init(&other, 32);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        row[threadIdx.x] = p.in[threadIdx.x];
        barrier_arrive(&full);
    } else if (threadIdx.x < 64) {
        barrier_arrive(&other);
    } else {
        barrier_wait(&other, 0);
        p.out[threadIdx.x - 64] = row[threadIdx.x - 64];  // (at barrier_of_others)
    }
}

KERNEL(shared_race) {
    __shared__ int x[64];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    p.out[threadIdx.x] = x[63 - threadIdx.x];  // (at shared_race)
}

// a shuffle orders nothing
KERNEL(warp_race) {
    __shared__ int x[32];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    __shfl_sync(ALL_LANES, 0, 0);
    p.out[threadIdx.x] = x[31 - threadIdx.x];  // (at warp_race)
}

KERNEL(write_after_read) {
    __shared__ int x[64];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    __syncthreads();
    const int mine = x[0];  // read by all
    if (threadIdx.x == 63) x[0] = mine + 1;  // (at write_after_read)
    p.out[threadIdx.x] = mine;
}

KERNEL(block_race) {
    p.out[threadIdx.x] = blockIdx.x;  // (at block_race)
}

// The number is written after the ticket is taken.
KERNEL(ticket_too_early) {
    bool last = false;
    if (threadIdx.x == 0) last = take_ticket(reinterpret_cast<unsigned*>(p.out), 1) == 1;
    __syncthreads();
    if (threadIdx.x == 1) p.out[1 + blockIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0 && last) p.out[3] = p.out[1] + p.out[2];  // (at ticket_too_early)
}

// A thread other than the ticket's reads, without a barrier between them.
KERNEL(ticket_of_another) {
    if (threadIdx.x == 0) p.out[1 + blockIdx.x] = 1;
    if (threadIdx.x == 0) take_ticket(reinterpret_cast<unsigned*>(p.out), 1);
    if (threadIdx.x == 1 && blockIdx.x == 1) p.out[3] = p.out[1];  // (at ticket_of_another)
}

// The copy is issued before the wait, by one thread of a warp whose other threads wait.
extern "C" __global__ void copy_too_early(const Arguments p) {
    __shared__ int row[32];
    if (threadIdx.x != 5) wait_for_earlier_kernels();
    copy_async_4(&row[threadIdx.x], p.in + threadIdx.x, 4);  // (at copy_too_early)
    copy_async_commit();
    if (threadIdx.x == 5) wait_for_earlier_kernels();
    copy_async_wait<0>();
    p.out[threadIdx.x] = row[threadIdx.x];
}

// The TMA load is issued after the wait, and may arrive immediately.
extern "C" __global__ void tma_too_early(const Arguments p) {
    __shared__ Barrier barrier;
    if (threadIdx.x != 0) wait_for_earlier_kernels();
    ask_for_row(p, barrier, shared_memory, 128);
    if (threadIdx.x == 0) wait_for_earlier_kernels();
    barrier_wait(&barrier, 0);
}

// The previous kernel may still read what this one writes.
extern "C" __global__ void write_too_early(const Arguments p) {
    p.out[threadIdx.x] = 1;  // (at write_too_early)
    wait_for_earlier_kernels();
}

// A thread without work exits without waiting for the previous kernel.
extern "C" __global__ void exit_too_early(const Arguments p) {
    if (threadIdx.x == 31) return;
    wait_for_earlier_kernels();
    p.out[threadIdx.x] = 1;
}

KERNEL(read_behind) {
    p.out[threadIdx.x] = p.in[threadIdx.x + 1];  // (at read_behind)
}

KERNEL(write_behind) {
    p.out[threadIdx.x + 1] = 1;  // (at write_behind)
}

KERNEL(write_input) {
    const_cast<int*>(p.in)[threadIdx.x] = 1;  // (at write_input)
}

// 64 bytes
KERNEL(shared_behind) {
    reinterpret_cast<int*>(shared_memory)[threadIdx.x] = 1;  // (at shared_behind)
}

KERNEL(uninitialised) {
    __shared__ int x[64];
    if (threadIdx.x < 31) x[threadIdx.x] = 1;
    __syncthreads();
    p.out[threadIdx.x] = x[threadIdx.x];  // (at uninitialised)
}

KERNEL(uninitialised_output) {
    p.out[threadIdx.x] += 1;  // (at uninitialised_output)
}

KERNEL(missing_wait) {
    __shared__ __align__(16) int x[128];
    copy_async_16(x + 4 * threadIdx.x, p.in + 4 * threadIdx.x, 16);
    copy_async_commit();
    __syncthreads();
    p.out[threadIdx.x] = x[4 * threadIdx.x];  // (at missing_wait)
}

KERNEL(missing_barrier_after_wait) {
    __shared__ __align__(16) int x[128];
    for (int i = threadIdx.x; i < 128; i += 32) x[i] = 0;
    __syncthreads();
    copy_async_16(x + 4 * threadIdx.x, p.in + 4 * threadIdx.x, 16);
    copy_async_commit();
    copy_async_wait<0>();
    p.out[threadIdx.x] = x[127 - 4 * threadIdx.x];  // (at missing_barrier_after_wait)
}

KERNEL(misaligned) {
    *reinterpret_cast<int4*>(p.out + 1) = make_int4(1, 2, 3, 4);  // (at misaligned)
}

KERNEL(misaligned_copy) {
    __shared__ __align__(16) int x[128];
    copy_async_16(x, p.in + 1, 16);  // (at misaligned_copy)
}

KERNEL(overflow) {
    p.out[threadIdx.x] = p.in[threadIdx.x] + 2147483647;  // (at overflow)
}

KERNEL(wrong_index) {
    __shared__ int x[16], y[32];
    y[threadIdx.x] = 0;
    x[threadIdx.x] = 1;  // (at wrong_index)
}

KERNEL(null_pointer) {
    const int* nothing = p.n == 0 ? p.in : nullptr;
    p.out[threadIdx.x] = *nothing;  // (at null_pointer)
}

__device__ __noinline__ void count_to(int* x, int n) {
    for (int i = 0; i <= n; ++i) x[i] = i;
}
KERNEL(stack_behind) {
    int x[8];
    count_to(x, p.n / 4);
    p.out[threadIdx.x] = x[3];
}

__device__ __noinline__ int deeper(int n) {
    volatile char page[4096];
    page[n % 4096] = 1;
    return n == 0 ? 0 : deeper(n - 1) + page[n % 4096];
}
KERNEL(endless_recursion) {
    p.out[threadIdx.x] = deeper(1000000);
}

KERNEL(half_written) {
    if (threadIdx.x < 20) p.out[threadIdx.x] = 1;
}

KERNEL(written_twice) {
    p.out[threadIdx.x] = 1;
    p.out[threadIdx.x] = p.in[threadIdx.x];
}
