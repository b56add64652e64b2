// Host twins of the functions of kernels/common/arch.cuh that are written in PTX there. A new instruction gets its twin here.
#pragma once

// ex2.approx.ftz.f32; here rounded once, with the same treatment of denormal numbers.
inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}

// lop3.b32
inline unsigned and_or(unsigned x, unsigned mask, unsigned bits) { return (x & mask) | bits; }

// ld.global.v4.u32
inline uint4 load_16(const void* global, bool exists) {
    return exists ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
}

// ld.global.v2.u32 and ld.global.u32
inline uint2 load_8(const void* global, bool exists) {
    return exists ? *static_cast<const uint2*>(global) : uint2{0, 0};
}
inline unsigned load_4(const void* global, bool exists) { return exists ? *static_cast<const unsigned*>(global) : 0; }

inline void prefetch_line(const void*) {}

// Relative to the start of dynamic shared memory, which holds everything addressed this way.
inline unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(static_cast<const unsigned char*>(shared) - shared_memory);
}

inline void copy_async_16(void* shared, const void* global, int valid, Where w = caller()) {
    machine_copy_async(shared, global, 16, valid, w);
}

inline void copy_async_4(void* shared, const void* global, int valid, Where w = caller()) {
    machine_copy_async(shared, global, 4, valid, w);
}

inline void copy_async_commit() { machine_copy_commit(); }

template <int pending>
inline void copy_async_wait() {
    machine_copy_wait(pending);
}

// cvt.rna.tf32.f32: to 10 bits of mantissa, ties away from zero. NaN becomes the one with all bits set.
inline float round_tf32(float x) {
    const unsigned bits = __float_as_uint(x);
    if (std::isnan(x)) return __uint_as_float(0x7fffffffu);
    return std::isinf(x) ? x : __uint_as_float((bits + 0x1000u) & ~0x1fffu);
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
inline void multiply_add_tf32(float* c, const float* a, const float* b, Where w = caller()) {
    machine_mma_tf32(c, a, b, w);
}

// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32
inline void multiply_add_half(float* c, const unsigned* a, const unsigned* b, const __half*, Where w = caller()) {
    machine_mma_half(c, a, b, false, w);
}
inline void multiply_add_half(float* c, const unsigned* a, const unsigned* b, const __nv_bfloat16*, Where w = caller()) {
    machine_mma_half(c, a, b, true, w);
}

// griddepcontrol.wait, .launch_dependents
inline void wait_for_earlier_kernels() { machine_wait_for_earlier_kernels(); }

// atom.inc between two fences
inline unsigned take_ticket(unsigned* counter, unsigned last, Where w = caller()) {
    machine_ticket(counter);
    return atomic_change(counter, w, [last](unsigned y) -> unsigned { return y >= last ? 0 : y + 1; });
}

// The twin of an instruction that kernels do not use yet; arch.cuh will get its PTX with the first use.

// red.global.add.v4.f32
inline void reduce_add_4(float* global, float4 x, Where w = caller()) {
    if (reinterpret_cast<uintptr_t>(global) % 16 != 0) machine_trap("vector reduction to an address not on 16 bytes", w);
    atomicAdd(global, x.x, w);
    atomicAdd(global + 1, x.y, w);
    atomicAdd(global + 2, x.z, w);
    atomicAdd(global + 3, x.w, w);
}
