// The instructions that only Hopper has (sm_90a), each wrapped once: TMA, mbarriers, register budgets, warpgroup MMAs.
// With common/arch.cuh the only file with inline assembly. For the CPU (tests/emulator) a host twin replaces every
// paragraph with assembly.
//
// A warpgroup (four warps, the first a multiple of four) multiplies together. Its accumulator of 64 x 16n elements is
// an array of n Fragments: element i of fragment f is at row 16 * warp + lane/4 + 8*((i>>1)&1), column 16*f +
// 2*(lane%4) + (i&1) + 8*(i>>2), the layout of a wmma accumulator in common/arch.cuh.
//
// Matrices in shared memory are cut into chunks of 64 columns, a row of a chunk 128 bytes; the 16-byte piece c of row r
// lies at slot c ^ (r % 8) of its row ("128-byte swizzle"), chunks at 1024-byte boundaries.
//
// Prelude: ELEMENT (__half or __nv_bfloat16).
#pragma once
#include "common/arch.cuh"

constexpr int CHUNK_COLUMNS = 64;
constexpr int CHUNK_ROW_BYTES = 128;

struct Fragment {
    float x[8];
};

using Barrier = unsigned long long;

// Which axis of an operand in shared memory runs along its rows of 128 bytes: the summed one (k) or the other.
enum class Major { K, MN };

// ---- copies ----
// mad.wide.s32: the address of row `row`, rows `stride` bytes apart.
__device__ __forceinline__ const void* row_address(const void* base, int row, int stride) {
    const void* address;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(base));
    return address;
}

// copy_async_16 to a precomputed address in shared memory.
__device__ __forceinline__ void copy_async_16(unsigned shared, const void* global, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// 16 bytes from a precomputed address in shared memory.
__device__ __forceinline__ uint4 load_shared_16(unsigned shared) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared) : "memory");
    return x;
}

// Two floats from an address in shared memory, directly into these registers.
__device__ __forceinline__ void load_shared_pair(float& x, float& y, unsigned shared) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(shared) : "memory");
}

// st.relaxed: sets a flag in shared memory to 1; several threads may do so at the same time.
__device__ __forceinline__ void raise(int& flag) {
    asm volatile("st.relaxed.cta.shared.u32 [%0], 1;" ::"r"(shared_address(&flag)) : "memory");
}

// ldmatrix: what store_matrices stores, of each 8 x 8 matrix two neighbours of row lane/4.
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(row) : "memory");
}

// ld.global.nc.L1::no_allocate: 16 bytes that are read once and not kept in L1.
__device__ __forceinline__ uint4 load_once(const void* global) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(global));
    return x;
}

// A TMA descriptor of a tensor in global memory (CUtensorMap, made by the host).
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// cp.async.bulk.tensor: loads a tile of a four-axis tensor at these coordinates into shared memory; `barrier` counts
// its bytes.
__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int x0, int x1, int x2, int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// The same for a five-axis tensor.
__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int x0, int x1, int x2, int x3,
                                         int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// The opposite direction, clipped to the tensor. A thread waits for the stores that it has committed.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* shared, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(map), "r"(shared_address(shared)), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// cp.reduce.async.bulk: adds floats in shared memory to those in global memory. Asynchronous, in a group to be
// committed. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add(float* global, const float* shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// Commits the thread's TMA stores and bulk reductions since the last commit as one group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until these are in global memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until these have been read from shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- barriers in shared memory ----
// mbarrier.init: a phase ends after `count` arrivals.
__device__ __forceinline__ void barrier_init(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// mbarrier.inval: it may be initialised again.
__device__ __forceinline__ void barrier_end(Barrier* barrier) {
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// fence.mbarrier_init: initialised barriers become visible to the asynchronous copies.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: one arrival, which releases everything the calling thread did before.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.expect_tx: the phase does not end before this many more bytes have arrived by tma_load.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// cp.async.mbarrier.arrive.noinc: one of the expected arrivals, once all of the calling thread's copies so far are
// complete.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.try_wait: until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// mbarrier.test_wait: whether the phase of this parity has ended.
__device__ __forceinline__ bool barrier_test(Barrier* barrier, unsigned parity) {
    unsigned ended;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.test_wait.parity.shared.b64 ended, [%1], %2;\n"
        "selp.b32 %0, 1, 0, ended;\n"
        "}\n" : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return ended != 0;
}

// bar.sync: named barrier `id` among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: the calling thread arrives at named barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// fence.proxy.async: makes the calling thread's writes to shared memory visible to the tensor cores and to TMA.
__device__ __forceinline__ void shared_write_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// stmatrix: four 8 x 8 matrices of 16-bit elements side by side in an accumulator's layout; lane l has the address of
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(unsigned row, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// ---- register budgets: setmaxnreg ----
template <int registers>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- warpgroup MMA: wgmma ----
// The lower word of a matrix descriptor: first address in shared memory, bytes from chunk to chunk (only where columns run
// along n). The upper word is the same for all: 1024 bytes from eight rows to the next eight, 128-byte swizzle.
__device__ __forceinline__ unsigned matrix_descriptor(const void* first, int chunk_bytes) {
    return (shared_address(first) & 0x3ffff) >> 4 | static_cast<unsigned>(chunk_bytes >> 4) << 16;
}

// The descriptor of the matrix that starts `bytes` further on, a multiple of 16.
__device__ __forceinline__ unsigned moved(unsigned descriptor, int bytes) { return descriptor + bytes / 16; }

// This lane's index, read again, so that results computed from it are not kept in registers across a loop.
__device__ __forceinline__ int lane_now() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The same for this thread's index in the CTA.
__device__ __forceinline__ int thread_now() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// 0, unknown to the compiler.
__device__ __forceinline__ int zero_now() {
    int zero;
    asm volatile("mov.s32 %0, 0;" : "=r"(zero));
    return zero;
}

// Keeps the compiler from merging this point of the code with another.
__device__ __forceinline__ void code_anchor() { asm volatile("" ::: "memory"); }

// The value in a register of its own, so that it is not recomputed.
__device__ __forceinline__ unsigned kept(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Lane 0's value, which the compiler then knows to be warp-uniform.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(ALL_LANES, value, 0); }

// wgmma.fence: before the first MMA, and again whenever registers that an MMA reads or accumulates into were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: waits until at most `pending` of the youngest groups of MMAs are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of registers across MMAs in flight.
template <int count>
__device__ __forceinline__ void pin(Fragment (&f)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(f[n].x[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(unsigned (&words)[count][4]) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(words[n][i])::"memory");
}

#define PTX_TYPE___half "f16"
#define PTX_TYPE___nv_bfloat16 "bf16"
#define PTX_TYPE_OF_NAME(name) PTX_TYPE_##name
#define PTX_TYPE_OF(name) PTX_TYPE_OF_NAME(name)
#define PTX_TYPE PTX_TYPE_OF(ELEMENT)

#define FRAGMENT_OPERANDS(f)                                                                                           \
    "+f"((f).x[0]), "+f"((f).x[1]), "+f"((f).x[2]), "+f"((f).x[3]), "+f"((f).x[4]), "+f"((f).x[5]), "+f"((f).x[6]),    \
        "+f"((f).x[7])
#define OPERANDS_1(d) FRAGMENT_OPERANDS(d[0])
#define OPERANDS_2(d) OPERANDS_1(d), FRAGMENT_OPERANDS(d[1])
#define OPERANDS_4(d) OPERANDS_2(d), FRAGMENT_OPERANDS(d[2]), FRAGMENT_OPERANDS(d[3])
#define OPERANDS_6(d) OPERANDS_4(d), FRAGMENT_OPERANDS(d[4]), FRAGMENT_OPERANDS(d[5])
#define OPERANDS_8(d) OPERANDS_6(d), FRAGMENT_OPERANDS(d[6]), FRAGMENT_OPERANDS(d[7])
#define REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_2 REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_4 REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_6 REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_8 REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// wgmma.mma_async.m64nNk16, N = 16 * fragments: d = a . b (+ d), a 64 x 16 and b 16 x N. b lies in shared memory, a there
// too or in registers. (Majors of a in registers are K.)
template <int fragments>
struct Wgmma;

#define DEFINE_WGMMA(fragments, columns, i0, i1, i2, i3, i4, i5, i6)                                                   \
    template <>                                                                                                        \
    struct Wgmma<fragments> {                                                                                          \
        template <Major a_major, Major b_major>                                                                        \
        static __device__ __forceinline__ void multiply(Fragment* d, unsigned a, unsigned b, int add) {                \
            asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #i2 ", 0;\n"                        \
                         "mov.b64 a, {%" #i0 ", 0x40000040};\nmov.b64 b, {%" #i1 ", 0x40000040};\n"                     \
                         "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." PTX_TYPE "." PTX_TYPE                 \
                         " {" REGISTERS_##fragments "}, a, b, add, 1, 1, %" #i3 ", %" #i4 ";\n}\n"                      \
                         : OPERANDS_##fragments(d)                                                                     \
                         : "r"(a), "r"(b), "r"(add), "n"(a_major == Major::MN), "n"(b_major == Major::MN));            \
        }                                                                                                              \
        template <Major b_major>                                                                                       \
        static __device__ __forceinline__ void multiply(Fragment* d, const unsigned (&a)[4], unsigned b, int add) {    \
            asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %" #i5 ", 0;\n"                           \
                         "mov.b64 b, {%" #i4 ", 0x40000040};\n"                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." PTX_TYPE "." PTX_TYPE                 \
                         " {" REGISTERS_##fragments "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, add, 1, 1, %" #i6  \
                         ";\n}\n"                                                                                      \
                         : OPERANDS_##fragments(d)                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(b_major == Major::MN));   \
        }                                                                                                              \
    };
DEFINE_WGMMA(1, 16, 8, 9, 10, 11, 12, 13, 14)
DEFINE_WGMMA(2, 32, 16, 17, 18, 19, 20, 21, 22)
DEFINE_WGMMA(4, 64, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(6, 96, 48, 49, 50, 51, 52, 53, 54)
DEFINE_WGMMA(8, 128, 64, 65, 66, 67, 68, 69, 70)

// mma.m16n8k16 by one warp, twice: d += a * b^T for 16 rows of b, which are the columns of fragment d.
__device__ __forceinline__ void multiply_warp(Fragment& d, const unsigned (&a)[4], const unsigned (&b)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX_TYPE "." PTX_TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d.x[4 * half]), "+f"(d.x[4 * half + 1]), "+f"(d.x[4 * half + 2]), "+f"(d.x[4 * half + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * half]), "r"(b[2 * half + 1]));
}

// ---- arithmetic ----
// 1 / x and log2(x), for x that is not denormal; like exp2_fast.
__device__ __forceinline__ float inverse_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sum + 0 * pair, for two 16-bit elements each: 0 until one of them is not finite.
__device__ __forceinline__ unsigned add_zero_times(unsigned sum, unsigned pair) {
    asm("fma.rn." PTX_TYPE "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
    return sum;
}

__device__ __forceinline__ constexpr bool has_range_of_float(const __half*) { return false; }
__device__ __forceinline__ constexpr bool has_range_of_float(const __nv_bfloat16*) { return true; }

// Two floats rounded to ELEMENT, the first in the lower half.
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    return pack_pair(static_cast<const ELEMENT*>(nullptr), low, high);
}
