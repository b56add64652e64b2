// Small kernels, right and wrong, by which tests/test_emulator_faults.py tests the emulator itself. The marks
// `(at ...)` name the lines that a report must point to.
#include "arch.cuh"

struct Arguments {
    int* out;       // (n)
    const int* in;  // (n)
    int n;
};

// ---- right ----
// one warp, n = 32 * 12
extern "C" __global__ void collectives(const Arguments p) {
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

// some threads exit early: the others' barriers do not wait for them
extern "C" __global__ void barriers(const Arguments p) {
    if (threadIdx.x >= 40) return;
    const int x = p.in[threadIdx.x];
    const bool any = __syncthreads_or(x == 7), all = __syncthreads_and(x >= 0);
    const int count = __syncthreads_count(x > 3);
    p.out[threadIdx.x] = count + 1000 * any + 2000 * all;
}

// a warp's rows through shared memory, ordered by __syncwarp; atomics on one counter
extern "C" __global__ void neighbours(const Arguments p) {
    __shared__ int row[32], counter;
    if (threadIdx.x == 0) counter = 0;
    row[threadIdx.x] = p.in[threadIdx.x];
    __syncwarp();
    atomicAdd(&counter, 1);
    __syncwarp();
    p.out[threadIdx.x] = row[threadIdx.x ^ 1] + counter;
}

// two groups of asynchronous copies
extern "C" __global__ void copies(const Arguments p) {
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

struct Conversions {
    const float* in;
    unsigned short *half, *bfloat16;
    float *half_back, *bfloat16_back;
    int n;
};
extern "C" __global__ void conversions(const Conversions p) {
    for (int i = threadIdx.x; i < p.n; i += 32) {
        p.half[i] = __half_as_ushort(__float2half_rn(p.in[i]));
        p.bfloat16[i] = __float2bfloat16_rn(p.in[i]).bits;
        p.half_back[i] = to_float(__float2half_rn(p.in[i]));
        p.bfloat16_back[i] = to_float(__float2bfloat16_rn(p.in[i]));
    }
}

// ---- waiting for ever, or for the wrong ones ----
extern "C" __global__ void divergent_barrier(const Arguments p) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();  // (at divergent_barrier)
}

extern "C" __global__ void missing_lane(const Arguments p) {
    if (threadIdx.x == 5)
        __syncthreads();
    else
        p.out[threadIdx.x] = __shfl_sync(ALL_LANES, 1, 0);  // (at missing_lane)
}

extern "C" __global__ void deadlock(const Arguments p) {
    if (threadIdx.x < 16)
        __syncwarp(0xffffu | 1u << 20);  // (at deadlock)
    else
        __syncwarp(0xffff0000u);
    __syncthreads();
}

extern "C" __global__ void different_collectives(const Arguments p) {
    if (threadIdx.x & 1)
        p.out[threadIdx.x] = __any_sync(ALL_LANES, 1);
    else
        p.out[threadIdx.x] = __shfl_sync(ALL_LANES, 1, 0);
}

extern "C" __global__ void exited_lane(const Arguments p) {
    if (threadIdx.x >= 31) return;
    p.out[threadIdx.x] = __shfl_down_sync(ALL_LANES, 1, 1);  // (at exited_lane)
}

extern "C" __global__ void not_in_mask(const Arguments p) {
    __syncwarp(0x7fffffffu);  // (at not_in_mask)
}

// ---- memory ----
extern "C" __global__ void shared_race(const Arguments p) {
    __shared__ int x[64];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    p.out[threadIdx.x] = x[63 - threadIdx.x];  // (at shared_race)
}

// a shuffle orders nothing
extern "C" __global__ void warp_race(const Arguments p) {
    __shared__ int x[32];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    __shfl_sync(ALL_LANES, 0, 0);
    p.out[threadIdx.x] = x[31 - threadIdx.x];  // (at warp_race)
}

extern "C" __global__ void write_after_read(const Arguments p) {
    __shared__ int x[64];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = p.in[threadIdx.x];
    __syncthreads();
    const int mine = x[0];  // read by all
    if (threadIdx.x == 63) x[0] = mine + 1;  // (at write_after_read)
    p.out[threadIdx.x] = mine;
}

extern "C" __global__ void block_race(const Arguments p) {
    p.out[threadIdx.x] = blockIdx.x;  // (at block_race)
}

extern "C" __global__ void read_behind(const Arguments p) {
    p.out[threadIdx.x] = p.in[threadIdx.x + 1];  // (at read_behind)
}

extern "C" __global__ void write_behind(const Arguments p) {
    p.out[threadIdx.x + 1] = 1;  // (at write_behind)
}

extern "C" __global__ void write_input(const Arguments p) {
    const_cast<int*>(p.in)[threadIdx.x] = 1;  // (at write_input)
}

// 64 bytes
extern "C" __global__ void shared_behind(const Arguments p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    reinterpret_cast<int*>(shared_memory)[threadIdx.x] = 1;  // (at shared_behind)
}

extern "C" __global__ void uninitialised(const Arguments p) {
    __shared__ int x[64];
    if (threadIdx.x < 31) x[threadIdx.x] = 1;
    __syncthreads();
    p.out[threadIdx.x] = x[threadIdx.x];  // (at uninitialised)
}

extern "C" __global__ void uninitialised_output(const Arguments p) {
    p.out[threadIdx.x] += 1;  // (at uninitialised_output)
}

extern "C" __global__ void missing_wait(const Arguments p) {
    __shared__ __align__(16) int x[128];
    copy_async_16(x + 4 * threadIdx.x, p.in + 4 * threadIdx.x, 16);
    copy_async_commit();
    __syncthreads();
    p.out[threadIdx.x] = x[4 * threadIdx.x];  // (at missing_wait)
}

extern "C" __global__ void missing_barrier_after_wait(const Arguments p) {
    __shared__ __align__(16) int x[128];
    for (int i = threadIdx.x; i < 128; i += 32) x[i] = 0;
    __syncthreads();
    copy_async_16(x + 4 * threadIdx.x, p.in + 4 * threadIdx.x, 16);
    copy_async_commit();
    copy_async_wait<0>();
    p.out[threadIdx.x] = x[127 - 4 * threadIdx.x];  // (at missing_barrier_after_wait)
}

extern "C" __global__ void misaligned(const Arguments p) {
    *reinterpret_cast<int4*>(p.out + 1) = make_int4(1, 2, 3, 4);  // (at misaligned)
}

extern "C" __global__ void misaligned_copy(const Arguments p) {
    __shared__ __align__(16) int x[128];
    copy_async_16(x, p.in + 1, 16);  // (at misaligned_copy)
}

extern "C" __global__ void overflow(const Arguments p) {
    p.out[threadIdx.x] = p.in[threadIdx.x] + 2147483647;  // (at overflow)
}

extern "C" __global__ void wrong_index(const Arguments p) {
    __shared__ int x[16], y[32];
    y[threadIdx.x] = 0;
    x[threadIdx.x] = 1;  // (at wrong_index)
}

extern "C" __global__ void null_pointer(const Arguments p) {
    const int* nothing = p.n == 0 ? p.in : nullptr;
    p.out[threadIdx.x] = *nothing;  // (at null_pointer)
}

__device__ __noinline__ void count_to(int* x, int n) {
    for (int i = 0; i <= n; ++i) x[i] = i;
}
extern "C" __global__ void stack_behind(const Arguments p) {
    int x[8];
    count_to(x, p.n / 4);
    p.out[threadIdx.x] = x[3];
}

__device__ __noinline__ int deeper(int n) {
    volatile char page[4096];
    page[n % 4096] = 1;
    return n == 0 ? 0 : deeper(n - 1) + page[n % 4096];
}
extern "C" __global__ void endless_recursion(const Arguments p) {
    p.out[threadIdx.x] = deeper(1000000);
}

extern "C" __global__ void half_written(const Arguments p) {
    if (threadIdx.x < 20) p.out[threadIdx.x] = 1;
}

extern "C" __global__ void written_twice(const Arguments p) {
    p.out[threadIdx.x] = 1;
    p.out[threadIdx.x] = p.in[threadIdx.x];
}
