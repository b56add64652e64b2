// CUDA C++ for g++: the built-ins of nvcc and NVRTC. Included before every kernel (g++ -include).
//
// Kernels are compiled unchanged. __shared__ becomes thread_local, which C++ allows in a function and together with
// `extern`: a kernel's shared memory is then the thread-local storage of its library, whose bounds the driver knows.
// Dynamic shared memory must be declared, as in the CUDA manuals, as an array of unsigned char named shared_memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __host__
#define __device__
#define __global__
#define __shared__ thread_local
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

extern thread_local unsigned char shared_memory[];

// ---- vector types ----
#define VECTOR_TYPES(name, scalar, size2, size4)                                                                       \
    struct alignas(size2) name##2 {                                                                                    \
        scalar x, y;                                                                                                   \
    };                                                                                                                 \
    struct name##3 {                                                                                                   \
        scalar x, y, z;                                                                                                \
    };                                                                                                                 \
    struct alignas(size4) name##4 {                                                                                    \
        scalar x, y, z, w;                                                                                             \
    };                                                                                                                 \
    inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                               \
    inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                                  \
    inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
VECTOR_TYPES(char, signed char, 2, 4)
VECTOR_TYPES(uchar, unsigned char, 2, 4)
VECTOR_TYPES(short, short, 4, 8)
VECTOR_TYPES(ushort, unsigned short, 4, 8)
VECTOR_TYPES(int, int, 8, 16)
VECTOR_TYPES(uint, unsigned, 8, 16)
VECTOR_TYPES(float, float, 8, 16)
VECTOR_TYPES(double, double, 16, 16)
VECTOR_TYPES(longlong, long long, 16, 16)
VECTOR_TYPES(ulonglong, unsigned long long, 16, 16)
#undef VECTOR_TYPES

// ---- arithmetic ----
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return static_cast<std::common_type_t<A, B>>(b) < static_cast<std::common_type_t<A, B>>(a) ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}
using std::isfinite;
using std::isinf;
using std::isnan;

template <typename To, typename From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(static_cast<long long>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }

// Fast forms: here the exact functions, rounded once.
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::isfinite(y) ? 0.0f * x : x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __frcp_rz(float x) {
    const float y = 1.0f / x;
    return std::fabs(double(y) * x) > 1.0 ? std::nextafter(y, 0.0f) : y;
}

inline float __fmul_rz(float x, float y) {
    const double exact = static_cast<double>(x) * y;
    const float nearest = static_cast<float>(exact);
    return std::fabs(nearest) > std::fabs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

// ---- memory ----
template <typename T>
inline T __ldg(const T* p) { return *p; }
template <typename T>
inline T __ldcs(const T* p) { return *p; }
template <typename T>
inline void __stcs(T* p, T x) { *p = x; }
template <typename T>
inline T __ldcg(const T* p) { return *p; }
template <typename T>
inline void __stcg(T* p, T x) { *p = x; }
inline void __threadfence() {}
inline void __threadfence_block() {}

// Reports the access as atomic and hides the plain ones below from the compiler's own reports.
template <typename T, typename Change>
__attribute__((no_sanitize("thread"), noinline)) T atomic_change(T* p, Where where, const Change& change) {
    machine_access(p, sizeof(T), ATOMIC, where);
    const T old = *p;
    *p = change(old);
    return old;
}
template <typename T>
inline T atomicAdd(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T y) __attribute__((no_sanitize("undefined"))) -> T { return y + x; });
}
template <typename T>
inline T atomicMin(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T y) { return y < x ? y : x; });
}
template <typename T>
inline T atomicMax(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T y) { return y < x ? x : y; });
}
template <typename T>
inline T atomicOr(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T y) -> T { return y | x; });
}
template <typename T>
inline T atomicAnd(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T y) -> T { return y & x; });
}
template <typename T>
inline T atomicExch(T* p, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [x](T) { return x; });
}
template <typename T>
inline T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> x, Where w = caller()) {
    return atomic_change(p, w, [=](T y) { return y == expected ? x : y; });
}

// ---- barriers and warps ----
inline void __syncthreads(Where w = caller()) { machine_barrier(BARRIER, 0, w); }
inline int __syncthreads_or(int x, Where w = caller()) { return machine_barrier(BARRIER_OR, x, w); }
inline int __syncthreads_and(int x, Where w = caller()) { return machine_barrier(BARRIER_AND, x, w); }
inline int __syncthreads_count(int x, Where w = caller()) { return machine_barrier(BARRIER_COUNT, x, w); }
inline void __syncwarp(unsigned mask = 0xffffffffu, Where w = caller()) { machine_meet(mask, SYNC_WARP, 0, w); }
inline void __nanosleep(unsigned) {}
inline void __cluster_barrier_arrive() { machine_cluster_arrive(true); }
inline void __cluster_barrier_arrive_relaxed() { machine_cluster_arrive(false); }
inline void __cluster_barrier_wait(Where w = caller()) { machine_cluster_wait(w); }
[[noreturn]] inline void __trap(Where w = caller()) { machine_trap("__trap", w); }
inline void* __cluster_map_shared_rank(void* shared, unsigned rank, Where w = caller()) {
    if (rank != 0) machine_trap("memory of another block than the cluster's first, which the emulator cannot map,", w);
    return machine_first_of_cluster(shared);
}

inline unsigned own_lane() { return threadIdx.x & 31; }

// The value of lane `source`, which must be in the mask and not have exited (undefined on hardware).
template <typename T>
inline T shuffled(unsigned mask, T x, unsigned source, Where w) {
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    const Meeting* m = machine_meet(mask, SHUFFLE, bits, w);
    if (!(m->present >> source & 1)) machine_trap("a shuffle from a lane that does not take part", w);
    T y;
    std::memcpy(&y, &m->values[source], sizeof y);
    return y;
}
// Lanes form groups of `width`; a source outside of a lane's group becomes the lane itself.
template <typename T>
inline T __shfl_sync(unsigned mask, T x, int source, int width = 32, Where w = caller()) {
    return shuffled(mask, x, (own_lane() & ~(width - 1u)) | (source & (width - 1u)), w);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32, Where w = caller()) {
    const unsigned source = own_lane() ^ bits;
    return shuffled(mask, x, source / width <= own_lane() / width ? source : own_lane(), w);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned distance, int width = 32, Where w = caller()) {
    return shuffled(mask, x, own_lane() % width < distance ? own_lane() : own_lane() - distance, w);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned distance, int width = 32, Where w = caller()) {
    return shuffled(mask, x, own_lane() % width + distance >= width + 0u ? own_lane() : own_lane() + distance, w);
}

inline unsigned __ballot_sync(unsigned mask, int x, Where w = caller()) {
    const Meeting* m = machine_meet(mask, VOTE, x != 0, w);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (m->present >> lane & 1) votes |= static_cast<unsigned>(m->values[lane]) << lane;
    return votes;
}
inline int __any_sync(unsigned mask, int x, Where w = caller()) { return __ballot_sync(mask, x, w) != 0; }
inline int __all_sync(unsigned mask, int x, Where w = caller()) { return __ballot_sync(mask, !x, w) == 0; }

template <typename T, typename Combine>
inline T reduced(unsigned mask, T x, Where w, const Combine& combine) {
    const Meeting* m = machine_meet(mask, REDUCE, static_cast<uint64_t>(x), w);
    for (unsigned lane = 0; lane < 32; ++lane)
        if (m->present >> lane & 1) x = combine(x, static_cast<T>(m->values[lane]), lane == own_lane());
    return x;
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T x, Where w = caller()) {
    return reduced(mask, x, w, [](T a, T b, bool) { return b < a ? b : a; });
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T x, Where w = caller()) {
    return reduced(mask, x, w, [](T a, T b, bool) { return a < b ? b : a; });
}
template <typename T>
inline T __reduce_add_sync(unsigned mask, T x, Where w = caller()) {
    return reduced(mask, x, w, [](T a, T b, bool own) -> T { return own ? a : a + b; });
}
template <typename T>
inline T __reduce_or_sync(unsigned mask, T x, Where w = caller()) {
    return reduced(mask, x, w, [](T a, T b, bool) -> T { return a | b; });
}
template <typename T>
inline T __reduce_and_sync(unsigned mask, T x, Where w = caller()) {
    return reduced(mask, x, w, [](T a, T b, bool) -> T { return a & b; });
}

// ---- how the driver enters a kernel (build.py writes one KERNEL_ENTRY per __global__ function) ----
template <typename Params>
void enter_kernel(void (*kernel)(Params), const void* params) {
    kernel(*static_cast<const std::remove_const_t<Params>*>(params));
}
template <typename Params>
constexpr size_t params_size(void (*)(Params)) {
    return sizeof(Params);
}
#define KERNEL_ENTRY(name)                                                                                             \
    extern "C" __attribute__((no_sanitize("thread"))) void enter_##name(const void* params) {                          \
        enter_kernel(name, params);                                                                                    \
    }                                                                                                                  \
    extern "C" const size_t params_of_##name = params_size(name);
