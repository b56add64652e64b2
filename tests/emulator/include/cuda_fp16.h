// __half: conversions round to nearest even, as the hardware's do.
#pragma once

struct __half {
    uint16_t bits;
};

inline float __half2float(__half h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16, rest = h.bits & 0x7fffu;
    if (rest >= 0x7c00u) return same_bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
    // As if the exponent's bias were float's, and then corrected by a product, which also normalizes.
    return same_bits<float>(same_bits<uint32_t>(same_bits<float>(rest << 13) * 0x1p112f) | sign);
}

inline __half __float2half_rn(float f) {
    const uint32_t bits = same_bits<uint32_t>(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return {0x7fff};                                      // NaN
    if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};      // 65520 and above: infinity
    if (rest < 0x38800000u) {                                                     // below 2^-14: denormal
        const uint32_t units = same_bits<uint32_t>(same_bits<float>(rest) + 0.5f);  // the sum rounds to 2^-24
        return {static_cast<uint16_t>(sign | (units - 0x3f000000u))};
    }
    const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

inline __half __float2half(float f) { return __float2half_rn(f); }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }

struct __half2 {
    __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
