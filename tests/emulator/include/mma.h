// nvcuda::wmma for 16 x 16 x 16 products of 16-bit elements, with the registers that sm_80 and later have.
//
// Element i of lane t:  accumulator and A   row t/4 + 8*((i>>1)&1), column 2*(t%4) + (i&1) + 8*(i>>2)
//                       B                   row 2*(t%4) + (i&1) + 8*((i>>1)&1), column t/4 + 8*(i>>2)
// A 16-bit fragment holds each of its eight elements twice (i and i + 8); a product checks that they agree.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nvcuda::wmma {
struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
    static_assert(m == 16 && n == 16 && k == 16 && sizeof(T) == 2, "");
    static constexpr int num_elements = 16;
    T x[16];
};

template <int m, int n, int k>
struct fragment<accumulator, m, n, k, float, void> {
    static_assert(m == 16 && n == 16 && k == 16, "");
    static constexpr int num_elements = 8;
    float x[8];
};
using Sums = fragment<accumulator, 16, 16, 16, float>;

template <typename Use, int m, int n, int k, typename T, typename Layout, typename Value>
inline void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, const Value& value) {
    for (T& x : f.x) x = value;
}

template <typename Use, typename T, typename Layout>
inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* tile, unsigned ld, Where w = caller()) {
    machine_wmma_load(reinterpret_cast<uint16_t*>(f.x), std::is_same_v<Use, matrix_b>,
                      std::is_same_v<Layout, col_major>, reinterpret_cast<const uint16_t*>(tile), ld, w);
}

inline void load_matrix_sync(Sums& f, const float* tile, unsigned ld, layout_t layout, Where w = caller()) {
    machine_wmma_load_float(f.x, layout == mem_col_major, tile, ld, w);
}

inline void store_matrix_sync(float* tile, const Sums& f, unsigned ld, layout_t layout, Where w = caller()) {
    machine_wmma_store_float(tile, layout == mem_col_major, f.x, ld, w);
}

template <typename T, typename LayoutA, typename LayoutB>
inline void mma_sync(Sums& d, const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
                     const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b, const Sums& c, Where w = caller()) {
    machine_wmma_multiply(d.x, reinterpret_cast<const uint16_t*>(a.x), reinterpret_cast<const uint16_t*>(b.x), c.x,
                          std::is_same_v<T, __nv_bfloat16>, w);
}
}  // namespace nvcuda::wmma
