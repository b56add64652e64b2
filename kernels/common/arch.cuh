// Every hardware instruction that the kernels use, wrapped once. This file and sm90/ptx.cuh (Hopper only) are the only
// ones with inline assembly.
//
// Tensor cores are reached through nvcuda::wmma (m16n16k16, float32 accumulation), sm_80 and later. The kernels rely
// on the register layout of an accumulator fragment, which is opaque by contract but the same on every GPU since
// sm_80; the backend checks it once per device (common/check_fragment_layout.cu):
//     element i of lane t stands at row t/4 + 8*((i>>1)&1), column 2*(t%4) + (i&1) + 8*(i>>2),
// and a 16-bit A fragment holds its first eight elements in that same order, so that probabilities computed in an
// accumulator become the operand of the next MMA without leaving the registers.
//
// float32 operands are rounded to TF32 (10 bits of mantissa, to nearest) and multiplied by mma m16n8k8, four of which
// make the same step of 16x16x16 with the same accumulator.
//
// Prelude: ELEMENT (__half, __nv_bfloat16 or float), the type of query, key and value.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

constexpr int INT_LOWEST = -2147483647 - 1;
constexpr int NEVER = 2147483647;  // stop of a key that is visible to the end
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL_LANES = 0xffffffffu;

constexpr float LARGEST_FLOAT = 3.402823466e38f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The largest one that is no farther from 0, with the sign of x; infinity is one.
__device__ __forceinline__ float power_of_2_below(float x) { return __uint_as_float(__float_as_uint(x) & 0xff800000u); }

// A logit or bias in units of log 2. Rounding towards zero keeps a finite one finite: a bias may be the lowest number
// of its type, and only -inf hides a key.
__device__ __forceinline__ float log2_units(float natural) { return __fmul_rz(natural, LOG2_E); }

// ---- conversions between float32 and the type of the elements, round to nearest even ----
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float& y, float x) { y = x; }

// One of two elements in a word, 0 for the lower half. A float32 is a bfloat16 followed by zeros: shifted or masked
// it takes one instruction, where the conversion takes two.
__device__ __forceinline__ float half_of(unsigned word, int side, const __half*) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(side ? word >> 16 : word)));
}
__device__ __forceinline__ float half_of(unsigned word, int side, const __nv_bfloat16*) {
    return __uint_as_float(side ? word & 0xffff0000u : word << 16);
}

// Two floats rounded to 16 bit, the first in the lower half.
__device__ __forceinline__ unsigned pack_pair(const __half*, float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ unsigned pack_pair(const __nv_bfloat16*, float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Two words of two 16-bit numbers each: products and differences, rounded to nearest even.
__device__ __forceinline__ __half2 as_pair(unsigned word, const __half*) {
    return *reinterpret_cast<const __half2*>(&word);
}
__device__ __forceinline__ __nv_bfloat162 as_pair(unsigned word, const __nv_bfloat16*) {
    return *reinterpret_cast<const __nv_bfloat162*>(&word);
}
template <typename T>
__device__ __forceinline__ unsigned multiply_pairs(unsigned x, unsigned y, const T* type) {
    const auto pair = __hmul2(as_pair(x, type), as_pair(y, type));
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <typename T>
__device__ __forceinline__ unsigned subtract_pairs(unsigned x, unsigned y, const T* type) {
    const auto pair = __hsub2(as_pair(x, type), as_pair(y, type));
    return *reinterpret_cast<const unsigned*>(&pair);
}

// ---- instructions in PTX; on a CPU (tests/emulator) their twins ----
#ifdef CUPY_DMA_HOST
#include <arch_host.h>
#else
// ---- special functions ----
// ex2.approx.ftz.f32: 2^x, relative error 2^-22; 0 for -inf, NaN for NaN.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// lop3: x & mask | bits. ptxas makes two instructions of the expression if both are constants.
__device__ __forceinline__ unsigned and_or(unsigned x, unsigned mask, unsigned bits) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

// ---- loads that stay where they are written ----
// ld.global.v4.u32 of 16 aligned bytes; zeros and no access unless `exists`. The compiler does not move it past MMAs
// and other instructions of this file, so loads that are written together are in flight together.
__device__ __forceinline__ uint4 load_16(const void* global, bool exists) {
    uint4 x;
    asm volatile("{\n\t.reg .pred exists;\n\tsetp.ne.s32 exists, %5, 0;\n\t"
                 "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
                 "@exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
                 : "l"(global), "r"(static_cast<int>(exists)));
    return x;
}

// The same of 8 and of 4 bytes.
__device__ __forceinline__ uint2 load_8(const void* global, bool exists) {
    uint2 x;
    asm volatile("{\n\t.reg .pred exists;\n\tsetp.ne.s32 exists, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
                 "@exists ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
                 : "=&r"(x.x), "=&r"(x.y)
                 : "l"(global), "r"(static_cast<int>(exists)));
    return x;
}
__device__ __forceinline__ unsigned load_4(const void* global, bool exists) {
    unsigned x;
    asm volatile("{\n\t.reg .pred exists;\n\tsetp.ne.s32 exists, %2, 0;\n\tmov.b32 %0, 0;\n\t"
                 "@exists ld.global.u32 %0, [%1];\n\t}"
                 : "=&r"(x)
                 : "l"(global), "r"(static_cast<int>(exists)));
    return x;
}

// ---- asynchronous copies from global to shared memory (cp.async, sm_80) ----
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes past L1; the bytes from `valid` (0 or 16) on are zero-filled and not read.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
}

// 4 bytes; zero-filled and not read when `valid` is 0.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of the calling thread's youngest groups are in flight.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// prefetch.global.L2: fetches the line that holds this address into L2.
__device__ __forceinline__ void prefetch_line(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// ---- TF32 ----
// cvt.rna.tf32.f32 (sm_80): to 10 bits of mantissa, ties away from zero; the result is a float32.
__device__ __forceinline__ float round_tf32(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 (sm_80): c += a * b for a warp. With g = lane / 4 and t = lane % 4
//     a[0..3] stand at (g, t), (g+8, t), (g, t+4), (g+8, t+4) of 16x8,   b[0..1] at (t, g), (t+4, g) of 8x8,
//     c[0..3] at (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1) of 16x8.
__device__ __forceinline__ void multiply_add_tf32(float* c, const float* a, const float* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32, or bf16 (sm_80): c += a * b for a warp; two elements in a word,
// the first in the lower half. With g = lane / 4 and t = lane % 4
//     a[0..3] stand at (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8) of 16x16,   b[0..1] at (2t, g), (2t+8, g) of 16x8,
//     c[0..3] at (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1) of 16x8.
__device__ __forceinline__ void multiply_add_half(float* c, const unsigned* a, const unsigned* b, const __half*) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add_half(float* c, const unsigned* a, const unsigned* b, const __nv_bfloat16*) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- consecutive kernels (sm_90) ----
// Programmatic dependent launch (PDL). griddepcontrol.wait: waits until the previous kernel in the stream has ended,
// which itself waited for its predecessor, so everything they wrote can be read. Every thread of every kernel calls
// this before it reads or writes global memory. It may prefetch before.
// griddepcontrol.launch_dependents: from now on the next kernel's blocks may start, once all blocks of this kernel have
// called it: they displace none of these, take the remaining room, and wait. It comes second, so that no third kernel
// starts.
// A kernel launched without PDL (cupy_dma/backends/cuda/runtime/launch.py) begins after its predecessor has ended and
// waits for nothing.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- work finished by the last of several blocks ----
// Takes the next number from 0 to `last` of a counter, which is 0 again after the last (atom.inc). What the thread's
// block did before a preceding barrier is visible to the blocks that get later numbers, after their next barrier.
__device__ __forceinline__ unsigned take_ticket(unsigned* counter, unsigned last) {
    unsigned number;
    asm volatile("fence.acq_rel.gpu;\n\tatom.relaxed.gpu.global.inc.u32 %0, [%1], %2;\n\tfence.acq_rel.gpu;"
                 : "=r"(number)
                 : "l"(__cvta_generic_to_global(counter)), "r"(last)
                 : "memory");
    return number;
}
#endif

// ---- clusters of blocks (sm_90) ----
#if CLUSTER > 1
// What a block did before it arrives is visible to the others after they wait, except if the arrival only announces
// that the block runs: that does not wait for work in flight. Threads that have ended count as arrived.
__device__ __forceinline__ void cluster_arrive() { __cluster_barrier_arrive(); }
__device__ __forceinline__ void cluster_arrive_running() { __cluster_barrier_arrive_relaxed(); }
__device__ __forceinline__ void cluster_wait() { __cluster_barrier_wait(); }

// The same object in the shared memory of the first block of the cluster.
template <typename T>
__device__ __forceinline__ T* first_of_cluster(T* shared) {
    return static_cast<T*>(__cluster_map_shared_rank(shared, 0));
}
#endif

// ---- elements as operands of the tensor cores ----
__device__ __forceinline__ float to_operand(__half x) { return to_float(x); }
__device__ __forceinline__ float to_operand(__nv_bfloat16 x) { return to_float(x); }
__device__ __forceinline__ float to_operand(float x) { return round_tf32(x); }

// Sets the sign bit of each element in a 32-bit word if it is not a finite operand; other bits are undefined. Adding
// the lowest bit of an exponent of ones carries there (for float also half a unit of TF32, which may round up to it).
__device__ __forceinline__ unsigned nonfinite(unsigned x, const __half*) { return (x & 0x7c007c00u) + 0x04000400u; }
__device__ __forceinline__ unsigned nonfinite(unsigned x, const __nv_bfloat16*) {
    return (x & 0x7f807f80u) + 0x00800080u;
}
__device__ __forceinline__ unsigned nonfinite(unsigned x, const float*) { return (x & 0x7fffffffu) + 0x00801000u; }

// The same for any of four words.
template <typename T>
__device__ __forceinline__ unsigned nonfinite(const uint4& x, const T* type) {
    return nonfinite(x.x, type) | nonfinite(x.y, type) | nonfinite(x.z, type) | nonfinite(x.w, type);
}

__device__ __forceinline__ constexpr unsigned sign_bits(int bytes) { return bytes == 2 ? 0x80008000u : 0x80000000u; }

// ---- tensor cores ----
#ifdef ELEMENT
// 16x16 TF32 numbers as the operands of multiply_add_tf32, [4 * step + ...] for two steps of 8 along k:
//     A  a[0..3]        B, BT  b[0..1] of columns 0 to 7, b[0..1] of columns 8 to 15
// Both operands of an MMA must agree on which k has which slot. An A and a BT tile of shared memory come in the
// order of mma (k = t, t+4). An accumulator as A has k = 2t, 2t+1 in lane t, so a B tile is loaded in that order.
template <typename Use, typename Layout>
struct FragmentTf32 {
    static constexpr int num_elements = 8;
    float x[8];
};

template <typename Use>
constexpr bool IS_LEFT = false;
template <>
constexpr bool IS_LEFT<nvcuda::wmma::matrix_a> = true;

template <typename T, typename Use, typename Layout>
struct Operand {
    using Fragment = nvcuda::wmma::fragment<Use, 16, 16, 16, T, Layout>;
};
template <typename Use, typename Layout>
struct Operand<float, Use, Layout> {
    using Fragment = FragmentTf32<Use, Layout>;
};

using FragmentA = Operand<ELEMENT, nvcuda::wmma::matrix_a, nvcuda::wmma::row_major>::Fragment;
using FragmentB = Operand<ELEMENT, nvcuda::wmma::matrix_b, nvcuda::wmma::row_major>::Fragment;
using FragmentBT = Operand<ELEMENT, nvcuda::wmma::matrix_b, nvcuda::wmma::col_major>::Fragment;
using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

// A 16x16 tile of shared memory, `ld` elements from row to row. For half the compiler turns load_matrix_sync into one
// ldmatrix, for bfloat16 into four generic loads (CUDA 13.0); so bfloat16 is loaded as half: the bits and the slots are
// the same.
template <typename Use, typename Layout>
__device__ __forceinline__ void load_fragment(nvcuda::wmma::fragment<Use, 16, 16, 16, __half, Layout>& fragment,
                                              const __half* tile, int ld) {
    nvcuda::wmma::load_matrix_sync(fragment, tile, ld);
}

template <typename Use, typename Layout>
__device__ __forceinline__ void load_fragment(nvcuda::wmma::fragment<Use, 16, 16, 16, __nv_bfloat16, Layout>& fragment,
                                              const __nv_bfloat16* tile, int ld) {
    nvcuda::wmma::fragment<Use, 16, 16, 16, __half, Layout> bits;
    nvcuda::wmma::load_matrix_sync(bits, reinterpret_cast<const __half*>(tile), ld);
#pragma unroll
    for (int i = 0; i < fragment.num_elements; ++i) fragment.x[i] = __ushort_as_bfloat16(__half_as_ushort(bits.x[i]));
}

// 16x8 floats are loaded as 16x16 halves: a lane gets the float at (g, t) where it would get the halves (g, 2t) and
// (g, 2t+1), which is the order of mma for A and BT. B and BT tiles are rounded here; A tiles, which stay in shared memory
// for many MMAs, must have been rounded there (round_rows in common/smem_rows.cuh).
template <typename Use, typename Layout>
__device__ __forceinline__ void load_fragment(FragmentTf32<Use, Layout>& fragment, const float* tile, int ld) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        nvcuda::wmma::fragment<Use, 16, 16, 16, __half, Layout> bits;
        nvcuda::wmma::load_matrix_sync(bits, reinterpret_cast<const __half*>(tile + 8 * step), 2 * ld);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned low = __half_as_ushort(bits.x[2 * i]), high = __half_as_ushort(bits.x[2 * i + 1]);
            const float x = __uint_as_float(high << 16 | low);
            fragment.x[4 * step + i] = IS_LEFT<Use> ? x : round_tf32(x);
        }
    }
}

__device__ __forceinline__ void load_fragment(
    FragmentTf32<nvcuda::wmma::matrix_b, nvcuda::wmma::row_major>& fragment, const float* tile, int ld) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        fragment.x[i] = round_tf32(tile[(8 * (i >> 2) + 2 * (lane & 3) + (i & 1)) * ld + lane / 4 + 8 * ((i >> 1) & 1)]);
}

// c += a * b
template <typename A, typename B>
__device__ __forceinline__ void multiply_add(Accumulator& c, const A& a, const B& b) {
    nvcuda::wmma::mma_sync(c, a, b, c);
}

template <typename LayoutA, typename LayoutB>
__device__ __forceinline__ void multiply_add(Accumulator& c, const FragmentTf32<nvcuda::wmma::matrix_a, LayoutA>& a,
                                             const FragmentTf32<nvcuda::wmma::matrix_b, LayoutB>& b) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side)  // columns 0 to 7, 8 to 15
            multiply_add_tf32(c.x + 4 * side, a.x + 4 * step, b.x + 4 * step + 2 * side);
}

// An accumulator, rounded to the type of an operand, as the left operand of an MMA with a B tile (a half fragment
// holds every element twice).
template <typename A>
__device__ __forceinline__ void round_to_operand(A& a, const Accumulator& c) {
#pragma unroll
    for (int i = 0; i < a.num_elements; ++i) from_float(a.x[i], c.x[i % 8]);
}

template <typename Use, typename Layout>
__device__ __forceinline__ void round_to_operand(FragmentTf32<Use, Layout>& a, const Accumulator& c) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)  // (row, k): (0, 0), (8, 0), (0, 1), (8, 1)
            a.x[4 * step + i] = round_tf32(c.x[4 * step + 2 * (i & 1) + (i >> 1)]);
}

__device__ __forceinline__ void clear(Accumulator& c) { nvcuda::wmma::fill_fragment(c, 0.0f); }
#endif

// Row (0 or 8 further down) and column of accumulator element i, relative to (lane / 4, 2 * (lane % 4)).
__device__ __forceinline__ constexpr int fragment_row(int i) { return (i >> 1) & 1; }
__device__ __forceinline__ constexpr int fragment_column(int i) { return (i & 1) + 8 * (i >> 2); }
