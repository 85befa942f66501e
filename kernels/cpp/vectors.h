// Vectors of 16 floats by GCC's and Clang's extension, which becomes AVX-512, AVX2 or NEON.

#pragma once

#include <cstdint>

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

constexpr int64_t LANES = 16, PAIR = 2 * LANES;
const Ints LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

struct bfloat16 {
    uint16_t bits;
};

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const bfloat16* p) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16);
}
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline void store(bfloat16* p, Vec v) {  // to nearest, ties to even; what is not a number stays none
    Words w = (Words)v;
    Words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
    Words kept = (v == v) ? rounded : ((w >> 16) | 0x40);
    *reinterpret_cast<Halves*>(p) = __builtin_convertvector(kept, Halves);
}

inline void load_pair(const float* p, Vec& low, Vec& high) { low = load(p), high = load(p + LANES); }
inline void load_pair(const bfloat16* p, Vec& low, Vec& high) {
    Words both = *reinterpret_cast<const Words*>(p);
    low = (Vec)(both << 16), high = (Vec)(both & 0xffff0000u);
}

inline Vec all(float value) { return Vec{} + value; }

inline float sum(Vec v) {
    float total[LANES];
    store(total, v);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

// the sum of each of 16 vectors
inline Vec sums(const Vec* v) {
    Vec eights[8], fours[4], twos[2];
    for (int i = 0; i < 8; i++) {
        Vec a = v[2 * i], b = v[2 * i + 1];
        eights[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                    __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        Vec a = eights[2 * i], b = eights[2 * i + 1];
        fours[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                   __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        Vec a = fours[2 * i], b = fours[2 * i + 1];
        twos[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                  __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    return __builtin_shufflevector(twos[0], twos[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(twos[0], twos[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Cephes' expf: a polynomial on [-ln 2 / 2, ln 2 / 2], relative error 2e-7
inline Vec exp(Vec x) {
    x = x < 88.0f ? x : all(88.0f);
    x = x > -87.0f ? x : all(-87.0f);
    Vec turns = x * 1.44269504f;
    Ints n = __builtin_convertvector(turns + (turns > 0 ? all(0.5f) : all(-0.5f)), Ints);
    Vec whole = __builtin_convertvector(n, Vec);
    Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Vec)((n + 127) << 23);
}
