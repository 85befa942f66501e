// Products of a few rows of activations with a matrix: each weight is read once for as many rows as registers hold.

#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t PANEL = PAIR;  // outputs that are computed together
constexpr int64_t AHEAD = 4096;         // bytes of weights that are asked for before their turn
#ifdef __AVX512F__
constexpr int MOST = 8;  // rows that are computed together: as many as keep their sums in registers
#else
constexpr int MOST = 3;
#endif

struct Matrix {
    const void* panels;  // [panels, in, PANEL]; bfloat16: outputs i and i + LANES lie side by side
    const float* bias;   // or null
    int64_t in, out;
};

// out[m] = PANEL products of row m of x with a panel; UNROLL sums each hide the latency of additions
template <class T, int M>
inline void multiply(const T* panel, int64_t in, const float* x, int64_t pitch, float (*out)[PANEL]) {
    constexpr int UNROLL = M == 1 ? 4 : M <= 3 ? 2 : 1;
    Vec sums[UNROLL][M][2] = {};
    int64_t k = 0;
    for (; k + UNROLL <= in; k += UNROLL)
        for (int u = 0; u < UNROLL; u++) {
            Vec low, high;
            __builtin_prefetch(reinterpret_cast<const char*>(panel + (k + u) * PANEL) + AHEAD);
            load_pair(panel + (k + u) * PANEL, low, high);
            for (int m = 0; m < M; m++) {
                float value = x[m * pitch + k + u];
                sums[u][m][0] += low * value;
                sums[u][m][1] += high * value;
            }
        }
    for (; k < in; k++) {
        Vec low, high;
        load_pair(panel + k * PANEL, low, high);
        for (int m = 0; m < M; m++) {
            sums[0][m][0] += low * x[m * pitch + k];
            sums[0][m][1] += high * x[m * pitch + k];
        }
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            Vec total = sums[0][m][half];
            for (int u = 1; u < UNROLL; u++) total += sums[u][m][half];
            store(out[m] + half * LANES, total);
        }
}

template <class T>
void multiply(const Matrix& w, int64_t panel, int64_t rows, const float* x, float (*out)[PANEL]) {
    const T* weights = static_cast<const T*>(w.panels) + panel * w.in * PANEL;
    switch (rows) {
        case 1: multiply<T, 1>(weights, w.in, x, w.in, out); break;
        case 2: multiply<T, 2>(weights, w.in, x, w.in, out); break;
        case 3: multiply<T, 3>(weights, w.in, x, w.in, out); break;
#ifdef __AVX512F__
        case 4: multiply<T, 4>(weights, w.in, x, w.in, out); break;
        case 5: multiply<T, 5>(weights, w.in, x, w.in, out); break;
        case 6: multiply<T, 6>(weights, w.in, x, w.in, out); break;
        case 7: multiply<T, 7>(weights, w.in, x, w.in, out); break;
        case 8: multiply<T, 8>(weights, w.in, x, w.in, out); break;
#endif
    }
    if (w.bias)
        for (int64_t m = 0; m < rows; m++)
            for (int64_t i = 0; i < std::min(PANEL, w.out - panel * PANEL); i++)
                out[m][i] += w.bias[panel * PANEL + i];
}
