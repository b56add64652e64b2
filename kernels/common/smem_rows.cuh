// Rows from global to shared memory: contiguous or gathered, HEAD_DIM elements each.
//
// In shared memory a row takes ROW_STRIDE elements: HEAD_DIM rounded up to 16 (the tensor cores' step, zero-filled)
// plus 16 bytes. The eight rows of one ldmatrix phase then lie in different banks, as do the four rows and eight
// columns of floats that common/arch.cuh reads at once.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR (1: HEAD_DIM, all strides and pointers are multiples of 16 bytes).
#pragma once
#include "common/arch.cuh"

constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int PIECE = 16 / sizeof(ELEMENT);  // elements in 16 bytes
constexpr int ROW_STRIDE = HEAD_DIM_PADDED + PIECE;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / PIECE;
constexpr int ROW_LANES = ROW_PIECES <= 2 ? 2 : ROW_PIECES <= 4 ? 4 : ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;

// Piece `piece` (16 bytes) of one row; zeros if it does not exist. With VECTOR the copy is asynchronous and complete
// after copy_async_wait, otherwise complete at once. `source` must be a valid address even if nothing is read.
__device__ __forceinline__ void copy_piece(ELEMENT* row, const ELEMENT* source, int piece, bool exists) {
#if VECTOR
    if (HEAD_DIM < HEAD_DIM_PADDED) exists = exists && piece * PIECE < HEAD_DIM;
    copy_async_16(row + piece * PIECE, source + piece * PIECE, exists ? 16 : 0);
#else
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        const int d = piece * PIECE + i;
        ELEMENT x;
        from_float(x, 0.0f);
        if (exists && d < HEAD_DIM) x = source[d];
        row[d] = x;
    }
#endif
}

// Calls copy(row, piece) for every piece of `rows` rows, distributed over `threads` threads. A thread keeps to one
// piece (two if a row has more than 32) and steps through rows at a fixed distance, so its shared addresses are
// constant distances apart.
template <int rows, int threads, typename Copy>
__device__ __forceinline__ void for_each_piece(const Copy& copy) {
    constexpr int DISTANCE = threads / ROW_LANES;
    const int piece = threadIdx.x % ROW_LANES, first = threadIdx.x / ROW_LANES;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll
    for (int k = 0; k < (rows + DISTANCE - 1) / DISTANCE; ++k)
        if (rows % DISTANCE == 0 || first + k * DISTANCE < rows) {
            copy(first + k * DISTANCE, piece);
            if (ROW_PIECES > ROW_LANES && piece + ROW_LANES < ROW_PIECES) copy(first + k * DISTANCE, piece + ROW_LANES);
        }
}

// Rounds the rows of a tile that will be an A operand, in place. A thread rounds what it has copied itself with the
// same arguments of for_each_piece, so call it before the barrier. 16-bit numbers are operands already.
template <int rows, int threads>
__device__ __forceinline__ void round_rows(float* tile) {
    copy_async_wait<0>();
    for_each_piece<rows, threads>([&](int row, int piece) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            float& x = tile[row * ROW_STRIDE + piece * PIECE + i];
            x = round_tf32(x);
        }
    });
}
template <int rows, int threads, typename T>
__device__ __forceinline__ void round_rows(T*) {}
