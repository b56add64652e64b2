// Pieces of rows: what a lane loads at a time, 16 bytes of ELEMENT. With STORAGE (decode/quantized_rows.cuh), rows of keys and
// values are stored in 8 bits per number, as many numbers a piece; they become ELEMENT where they are used.
//
// Prelude: ELEMENT, VECTOR (rows may be read a piece at a time), STORAGE (0 if it is not there).
#pragma once
#ifndef STORAGE
#define STORAGE 0
#endif
#include "common/arch.cuh"
#if STORAGE
#include "decode/quantized_rows.cuh"
#endif

constexpr int PIECE = 16 / sizeof(ELEMENT);
constexpr const ELEMENT* TYPE = nullptr;

struct alignas(16) Piece {
    unsigned word[4];
};

__device__ __forceinline__ unsigned bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ unsigned bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }

// Piece `number` of a row of `dim` elements; zeros past its end and if `exists` is false (nothing is read then).
template <int dim>
__device__ __forceinline__ Piece load_piece(const ELEMENT* row, int number, bool exists) {
    const ELEMENT* source = row + number * PIECE;
#if VECTOR
    const uint4 words = load_16(source, exists && (dim % (8 * PIECE) == 0 || number * PIECE < dim));
    return {words.x, words.y, words.z, words.w};
#else
    Piece piece = {};
    constexpr int PER_WORD = 4 / sizeof(ELEMENT);
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
        if (exists && number * PIECE + i < dim)
            piece.word[i / PER_WORD] |= bits_of(source[i]) << i % PER_WORD * 16;
    return piece;
#endif
}

// Writes the part of the piece that belongs to the row.
template <int dim>
__device__ __forceinline__ void store_piece(ELEMENT* row, int number, const Piece& piece) {
#if VECTOR
    if (number * PIECE < dim) reinterpret_cast<Piece*>(row)[number] = piece;
#else
    const ELEMENT* elements = reinterpret_cast<const ELEMENT*>(piece.word);
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
        if (number * PIECE + i < dim) row[number * PIECE + i] = elements[i];
#endif
}

#if STORAGE
using Row = unsigned char;
using Stored = Codes<PIECE>;

// Codes of a row with this scale as numbers.
template <typename T>
__device__ __forceinline__ Piece piece_of(const Stored& codes, float scale, const T* type) {
    const unsigned scales = pack_pair(type, scale, scale);
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned word = codes.word[i / 2], at = i % 2 * 2;
        piece.word[i] = multiply_pairs(numbers_of_pair(code_pair(word, at, word, at + 1), type), scales, type);
    }
    return piece;
}
__device__ __forceinline__ Piece piece_of(const Stored& codes, float scale, const float*) {
    float x[4];
    numbers_of(x, codes.word[0]);
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.word[i] = __float_as_uint(x[i] * scale);
    return piece;
}
__device__ __forceinline__ Piece piece_of(const Stored& codes, float scale) { return piece_of(codes, scale, TYPE); }

// Number `i` of two rows as a word of two 16-bit numbers.
template <typename T>
__device__ __forceinline__ unsigned column_pair(const Stored& first, const Stored& second, int i, float first_scale,
                                                float second_scale, const T* type) {
    const unsigned numbers = numbers_of_pair(code_pair(first.word[i / 4], i % 4, second.word[i / 4], i % 4), type);
    return multiply_pairs(numbers, pack_pair(type, first_scale, second_scale), type);
}

template <int dim>
__device__ __forceinline__ Stored load_row(const Row* row, int number, bool exists) {
    const Row* source = row + number * PIECE;
    Stored codes = {};
#if VECTOR
    const bool inside = exists && (dim % (8 * PIECE) == 0 || number * PIECE < dim);
    if constexpr (PIECE == 8) {
        const uint2 words = load_8(source, inside);
        codes.word[0] = words.x;
        codes.word[PIECE / 4 - 1] = words.y;
    } else {
        codes.word[0] = load_4(source, inside);
    }
#else
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
        if (exists && number * PIECE + i < dim) codes.word[i / 4] |= static_cast<unsigned>(source[i]) << i % 4 * 8;
#endif
    return codes;
}

template <int dim>
__device__ __forceinline__ void store_row(Row* row, int number, const Stored& codes) {
#if VECTOR
    if (number * PIECE < dim) reinterpret_cast<Stored*>(row)[number] = codes;
#else
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
        if (number * PIECE + i < dim) row[number * PIECE + i] = static_cast<Row>(codes.word[i / 4] >> i % 4 * 8);
#endif
}
#else
using Row = ELEMENT;
using Stored = Piece;

__device__ __forceinline__ const Piece& piece_of(const Stored& piece, float) { return piece; }

// As above.
template <typename T>
__device__ __forceinline__ unsigned column_pair(const Piece& first, const Piece& second, int i, float, float, const T*) {
    return __byte_perm(first.word[i / 2], second.word[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
}

template <int dim>
__device__ __forceinline__ Stored load_row(const Row* row, int number, bool exists) {
    return load_piece<dim>(row, number, exists);
}

template <int dim>
__device__ __forceinline__ void store_row(Row* row, int number, const Stored& piece) {
    store_piece<dim>(row, number, piece);
}
#endif
