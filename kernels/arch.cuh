// Every hardware instruction the kernels use, wrapped once. The only file with inline assembly.
//
// Tensor cores are reached through nvcuda::wmma (m16n16k16, float32 accumulation), sm_80 and later. The kernels rely
// on the register layout of an accumulator fragment, which is opaque by contract but the same on every GPU since
// sm_80; the backend checks it once per device (layout.cu):
//     element i of lane t stands at row t/4 + 8*((i>>1)&1), column 2*(t%4) + (i&1) + 8*(i>>2),
// and a 16-bit A fragment holds its first eight elements in that same order, so that probabilities computed in an
// accumulator become the operand of the next product without leaving the registers.
//
// Prelude: ELEMENT (__half or __nv_bfloat16), the 16-bit type of query, key and value.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

constexpr int INT_LOWEST = -2147483647 - 1;
constexpr int NEVER = 2147483647;  // stop of a key that is visible to the end
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// ---- conversions between float32 and the 16-bit types, round to nearest even ----
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float& y, float x) { y = x; }

// The exponent bits of the two numbers in a 32-bit word.
__device__ __forceinline__ constexpr unsigned exponent_bits(const __half*) { return 0x7c007c00u; }
__device__ __forceinline__ constexpr unsigned exponent_bits(const __nv_bfloat16*) { return 0x7f807f80u; }

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

// Until at most `pending` of the calling thread's youngest groups are still under way.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif

// ---- tensor cores ----
#ifdef ELEMENT
using FragmentA = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, ELEMENT, nvcuda::wmma::row_major>;
using FragmentB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, ELEMENT, nvcuda::wmma::row_major>;
using FragmentBT = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, ELEMENT, nvcuda::wmma::col_major>;
using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

// A 16x16 tile of shared memory, `ld` elements from row to row. For half the compiler turns load_matrix_sync into one
// ldmatrix, for bfloat16 into four generic loads (CUDA 13.0); so bfloat16 is loaded as half: the bits and the places are
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

// c += a * b
template <typename B>
__device__ __forceinline__ void multiply_add(Accumulator& c, const FragmentA& a, const B& b) {
    nvcuda::wmma::mma_sync(c, a, b, c);
}

// An accumulator, rounded to 16 bit, as the left operand of a product (a half fragment holds every element twice).
__device__ __forceinline__ void round_to_operand(FragmentA& a, const Accumulator& c) {
#pragma unroll
    for (int i = 0; i < a.num_elements; ++i) from_float(a.x[i], c.x[i % 8]);
}

__device__ __forceinline__ void clear(Accumulator& c) { nvcuda::wmma::fill_fragment(c, 0.0f); }
#endif

// Row (0 or 8 further down) and column of accumulator element i, relative to (lane / 4, 2 * (lane % 4)).
__device__ __forceinline__ constexpr int fragment_row(int i) { return (i >> 1) & 1; }
__device__ __forceinline__ constexpr int fragment_column(int i) { return (i & 1) + 8 * (i >> 2); }
