// Host twins of the functions of kernels/arch.cuh that are written in PTX there. A new instruction gets its twin here.
#pragma once

// ex2.approx.ftz.f32; here rounded once, with the same treatment of denormal numbers.
inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return std::fabs(y) < 0x1p-126f ? 0.0f : y;
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
