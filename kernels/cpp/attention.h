// Attention of one new token over KV in blocks, for the heads that share a K/V head.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

// Where one K/V head of one sequence lies: the keys of block `table[i]`, its values `values` elements behind them.
template <class T>
struct Blocks {
    T* layer;
    const int64_t* table;
    int64_t stride, head, values;  // of a block, of this head in it, elements
    int64_t size, dim;             // tokens of a block; a multiple of PAIR
    T* keys(int64_t block) const { return layer + table[block] * stride + head; }
};

// bfloat16 is read two numbers a word, so that queries and results are held with the odd ones behind the even ones
inline void part(float* head, int64_t dim, const bfloat16*) {
    for (float* end = head + dim; head < end; head += PAIR) {
        float parted[PAIR];
        for (int64_t i = 0; i < LANES; i++) parted[i] = head[2 * i], parted[LANES + i] = head[2 * i + 1];
        std::memcpy(head, parted, sizeof(parted));
    }
}
inline void join(float* head, int64_t dim, const bfloat16*) {
    for (float* end = head + dim; head < end; head += PAIR) {
        float joined[PAIR];
        for (int64_t i = 0; i < LANES; i++) joined[2 * i] = head[i], joined[2 * i + 1] = head[LANES + i];
        std::memcpy(head, joined, sizeof(joined));
    }
}
inline void part(float*, int64_t, const float*) {}
inline void join(float*, int64_t, const float*) {}

// scores[g][j] of up to LANES keys, whatever lies behind the last
template <class T, int G>
inline void score(const T* keys, int64_t count, const float* q, int64_t dim, float scale, float* scores, int64_t pitch) {
    Vec dots[G][LANES];
    for (int64_t j = 0; j < LANES; j++) {
        const T* key = keys + std::min(j, count - 1) * dim;
        for (int g = 0; g < G; g++) dots[g][j] = all(0);
        for (int64_t i = 0; i < dim; i += PAIR) {
            Vec low, high;
            load_pair(key + i, low, high);
            for (int g = 0; g < G; g++)
                dots[g][j] += low * load(q + g * dim + i) + high * load(q + g * dim + i + LANES);
        }
    }
    for (int g = 0; g < G; g++) store(scores + g * pitch, sums(dots[g]) * scale);
}

// out[g] += shares[g] * values, over PAIR columns
template <class T, int G>
inline void weigh(const T* values, int64_t count, const float* shares, int64_t pitch, float* out, int64_t dim) {
    Vec low[G], high[G];
    for (int g = 0; g < G; g++) low[g] = load(out + g * dim), high[g] = load(out + g * dim + LANES);
    for (int64_t j = 0; j < count; j++) {
        Vec first, second;
        load_pair(values + j * dim, first, second);
        for (int g = 0; g < G; g++) low[g] += first * shares[g * pitch + j], high[g] += second * shares[g * pitch + j];
    }
    for (int g = 0; g < G; g++) store(out + g * dim, low[g]), store(out + g * dim + LANES, high[g]);
}

// softmax over what lies from `begin` to `end`; the rest, up to a multiple of LANES, becomes 0
inline void soften(float* x, int64_t begin, int64_t end) {
    float largest = *std::max_element(x + begin, x + end);
    Vec total = {};
    for (int64_t i = 0; i < end; i += LANES) {
        Ints place = LANE_NUMBERS + int32_t(i);
        Vec share = exp(load(x + i) - largest);
        share = (place >= int32_t(begin)) & (place < int32_t(end)) ? share : all(0);
        store(x + i, share);
        total += share;
    }
    float factor = 1.0f / sum(total);
    for (int64_t i = 0; i < end; i += LANES) store(x + i, load(x + i) * factor);
}

template <class T, int G>
void attend_some(const Blocks<T>& kv, int64_t seen, int64_t end, float* q, float scale, float* scores, float* out) {
    const int64_t first = seen / kv.size, base = first * kv.size, pitch = padded(end - base) + LANES;
    for (int64_t block = first; block * kv.size < end; block++)
        for (int64_t j = 0; j < kv.size && block * kv.size + j < end; j += LANES) {
            const int64_t at = block * kv.size + j, count = std::min({LANES, kv.size - j, end - at});
            score<T, G>(kv.keys(block) + j * kv.dim, count, q, kv.dim, scale, scores + at - base, pitch);
        }
    for (int g = 0; g < G; g++) soften(scores + g * pitch, seen - base, end - base);
    std::fill(out, out + G * kv.dim, 0.0f);
    for (int64_t block = first; block * kv.size < end; block++) {
        const int64_t at = block * kv.size, count = std::min(kv.size, end - at);
        for (int64_t i = 0; i < kv.dim; i += PAIR)
            weigh<T, G>(kv.keys(block) + kv.values + i, count, scores + at - base, pitch, out + i, kv.dim);
    }
}

inline int64_t score_floats(int64_t longest, int64_t block_size) {
    return 4 * (padded(longest + block_size) + LANES);
}

// out [group, dim] from q [group, dim], which is written to; keys from `seen` to `end` count
template <class T>
void attend(const Blocks<T>& kv, int64_t seen, int64_t end, float* q, int64_t group, float scale, float* scores,
            float* out) {
    for (int64_t g = 0; g < group; g++) part(q + g * kv.dim, kv.dim, (const T*)nullptr);
    for (int64_t g = 0; g < group;) {
        float *some = q + g * kv.dim, *to = out + g * kv.dim;
        if (group - g >= 4) attend_some<T, 4>(kv, seen, end, some, scale, scores, to), g += 4;
        else if (group - g >= 2) attend_some<T, 2>(kv, seen, end, some, scale, scores, to), g += 2;
        else attend_some<T, 1>(kv, seen, end, some, scale, scores, to), g += 1;
    }
    for (int64_t g = 0; g < group; g++) join(out + g * kv.dim, kv.dim, (const T*)nullptr);
}
