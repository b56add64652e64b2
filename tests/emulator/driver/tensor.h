// nvcuda::wmma and mma on the level of warps (machine.h, include/mma.h, include/arch_host.h).
#pragma once
#include <cmath>

#include "schedule.h"

namespace {

float widen(uint16_t x, bool bfloat16) {
    const auto bits = [](uint32_t u) {
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    };
    if (bfloat16) return bits(static_cast<uint32_t>(x) << 16);
    static const std::vector<float> table = [&] {
        std::vector<float> t(65536);
        for (uint32_t h = 0; h < 65536; ++h) {
            const int exponent = h >> 10 & 31, fraction = h & 1023;
            const float sign = h & 0x8000 ? -1.0f : 1.0f;
            const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                               : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                               : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
            t[h] = sign * size;
        }
        return t;
    }();
    return table[x];
}

int row_of(int lane, int i) { return lane / 4 + 8 * (i >> 1 & 1); }
int column_of(int lane, int i) { return 2 * (lane % 4) + (i & 1) + 8 * (i >> 2); }
int b_row_of(int lane, int i) { return 2 * (lane % 4) + (i & 1) + 8 * (i >> 1 & 1); }
int b_column_of(int lane, int i) { return lane / 4 + 8 * (i >> 2); }
size_t offset(int row, int column, unsigned ld, bool by_column) {
    return by_column ? size_t(column) * ld + row : size_t(row) * ld + column;
}

struct Product {
    float* d;
    const uint16_t *a, *b;
    const float* c;
    bool bfloat16;
    int differs;  // an element whose two copies differ, or -1
};

// d = a * b + c for a whole warp. Each element is a sum in order of k, every step rounded to float32.
void multiply(OpenMeeting& o) {
    float a[16][16], b[16][16], c[16][16];
    for (int lane = 0; lane < 32; ++lane) {
        Product& p = *reinterpret_cast<Product*>(o.meeting.values[lane]);
        p.differs = -1;
        for (int i = 0; i < 8; ++i) {
            if (p.a[i] != p.a[i + 8] || p.b[i] != p.b[i + 8]) p.differs = i;
            a[row_of(lane, i)][column_of(lane, i)] = widen(p.a[i], p.bfloat16);
            b[b_row_of(lane, i)][b_column_of(lane, i)] = widen(p.b[i], p.bfloat16);
            c[row_of(lane, i)][column_of(lane, i)] = p.c[i];
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 16; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane) {
        const Product& p = *reinterpret_cast<Product*>(o.meeting.values[lane]);
        for (int i = 0; i < 8; ++i) p.d[i] = c[row_of(lane, i)][column_of(lane, i)];
    }
}

struct Tf32Product {
    float* c;
    const float *a, *b;
    int unrounded;  // a lane with an operand that is not a TF32 number, or -1
};

// c += a * b of 16x8 by 8x8 for a whole warp, summed in order of k, every step rounded to float32.
void multiply_tf32(OpenMeeting& o) {
    const auto rounded = [](float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return (bits & 0x1fff) == 0 || std::isnan(x);
    };
    float a[16][8], b[8][8], c[16][8];
    int unrounded = -1;
    for (int lane = 0; lane < 32; ++lane) {
        const Tf32Product& p = *reinterpret_cast<Tf32Product*>(o.meeting.values[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            a[g + 8 * (i & 1)][t + 4 * (i >> 1)] = p.a[i];
            c[g + 8 * (i >> 1)][2 * t + (i & 1)] = p.c[i];
            if (!rounded(p.a[i]) || !rounded(p.b[i & 1])) unrounded = lane;
        }
        for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = p.b[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 8; ++k)
            for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane) {
        Tf32Product& p = *reinterpret_cast<Tf32Product*>(o.meeting.values[lane]);
        p.unrounded = unrounded;
        for (int i = 0; i < 4; ++i) p.c[i] = c[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
    }
}

struct HalfProduct {
    float* c;
    const uint32_t *a, *b;
    bool bfloat16;
};

// c += a * b of 16x16 by 16x8 16-bit elements, two in a word, for a whole warp; summed as above.
void multiply_half(OpenMeeting& o) {
    float a[16][16], b[16][8], c[16][8];
    const auto half = [](uint32_t word, int side, bool bfloat16) {
        return widen(static_cast<uint16_t>(word >> 16 * side), bfloat16);
    };
    for (int lane = 0; lane < 32; ++lane) {
        const HalfProduct& p = *reinterpret_cast<HalfProduct*>(o.meeting.values[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int side = 0; side < 2; ++side) {
            for (int i = 0; i < 4; ++i) a[g + 8 * (i & 1)][2 * t + side + 8 * (i >> 1)] = half(p.a[i], side, p.bfloat16);
            for (int i = 0; i < 2; ++i) b[2 * t + side + 8 * i][g] = half(p.b[i], side, p.bfloat16);
        }
        for (int i = 0; i < 4; ++i) c[g + 8 * (i >> 1)][2 * t + (i & 1)] = p.c[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane) {
        const HalfProduct& p = *reinterpret_cast<HalfProduct*>(o.meeting.values[lane]);
        for (int i = 0; i < 4; ++i) p.c[i] = c[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
    }
}

// A tile must be aligned and be the same for all lanes. Each lane checks half a row.
void check_tile(MeetingKind kind, const void* tile, unsigned ld, size_t element, Where where) {
    const OpenMeeting* o = meet(~0u, kind, reinterpret_cast<uintptr_t>(tile), where);
    for (int lane = 0; lane < 32; ++lane)
        if (o->meeting.values[lane] != reinterpret_cast<uintptr_t>(tile))
            fault(format("%s at %s: lanes name different tiles", MEETING_NAMES[kind], at(where).c_str()));
    if (reinterpret_cast<uintptr_t>(tile) % 32 || ld * element % 16)
        fault(format("%s at %s: the tile must be aligned to 32 bytes, its rows to 16: address 0x%zx, %zu bytes a row",
                     MEETING_NAMES[kind], at(where).c_str(), reinterpret_cast<size_t>(tile), ld * element));
    if (!m.watched) return;
    const int lane = m.current & 31;
    access(reinterpret_cast<uintptr_t>(tile) + (lane / 2 * ld + lane % 2 * 8) * element, 8 * element,
           kind == WMMA_STORE ? WRITE : READ, site_of(where));
}

}  // namespace

extern "C" {
void machine_wmma_load(uint16_t* x, bool is_b, bool by_column, const uint16_t* tile, unsigned ld, Where where) {
    check_tile(WMMA_LOAD, tile, ld, 2, where);
    const int lane = m.current & 31;
    for (int i = 0; i < 8; ++i) {
        const int row = is_b ? b_row_of(lane, i) : row_of(lane, i);
        const int column = is_b ? b_column_of(lane, i) : column_of(lane, i);
        x[i] = x[i + 8] = tile[offset(row, column, ld, by_column)];
    }
}

void machine_wmma_multiply(float* d, const uint16_t* a, const uint16_t* b, const float* c, bool bfloat16, Where where) {
    Product own{d, a, b, c, bfloat16, -1};
    meet(~0u, WMMA_MULTIPLY, reinterpret_cast<uintptr_t>(&own), where, multiply);
    if (own.differs >= 0)
        fault(format("mma_sync at %s: elements %d and %d of a 16-bit fragment must be the same", at(where).c_str(),
                     own.differs, own.differs + 8));
}

void machine_mma_tf32(float* c, const float* a, const float* b, Where where) {
    Tf32Product own{c, a, b, -1};
    meet(~0u, MMA_TF32, reinterpret_cast<uintptr_t>(&own), where, multiply_tf32);
    if (own.unrounded >= 0)
        fault(format("mma at %s: lane %d has an operand that was not rounded to TF32", at(where).c_str(),
                     own.unrounded));
}

void machine_mma_half(float* c, const uint32_t* a, const uint32_t* b, bool bfloat16, Where where) {
    HalfProduct own{c, a, b, bfloat16};
    meet(~0u, MMA_HALF, reinterpret_cast<uintptr_t>(&own), where, multiply_half);
}

void machine_wmma_load_float(float* x, bool by_column, const float* tile, unsigned ld, Where where) {
    check_tile(WMMA_LOAD, tile, ld, 4, where);
    const int lane = m.current & 31;
    for (int i = 0; i < 8; ++i)
        x[i] = tile[offset(row_of(lane, i), column_of(lane, i), ld, by_column)];
}

void machine_wmma_store_float(float* tile, bool by_column, const float* x, unsigned ld, Where where) {
    check_tile(WMMA_STORE, tile, ld, 4, where);
    const int lane = m.current & 31;
    for (int i = 0; i < 8; ++i)
        tile[offset(row_of(lane, i), column_of(lane, i), ld, by_column)] = x[i];
}
}
