// One step of a Llama-like model on the CPU, of few tokens: from their ids to logits in one call.
//
// Steps of few rows are bound by reading weights, and by what each of some hundred small operators costs to call. Here
// the whole step is one parallel region: activations stay float32 in cache, weights and KV are float32 or bfloat16.
// The structures are those of decode_step.py. No library but OpenMP's.

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"
#include "few_rows.h"

namespace {

struct Layer {
    const float *norm1, *norm2;
    const float* qk_norm;  // [heads + kv_heads, head_dim] or null
    Matrix qkv, out, gate, up, down;
    void* kv;  // [blocks, 2, kv_heads, block_size, head_dim]
    int64_t window;
};

struct Model {
    int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, block_size;
    float eps, scale;
    const Layer* layers;
    const float* norm;
    Matrix head;
    const void* embedding;   // [vocab, hidden]
    const float* rotations;  // [positions, head_dim / 2, 2]: cosine and sine of a pair
};

struct Step {
    int64_t rows;
    const int64_t *token_ids, *positions;  // [rows]
    const int64_t* tables;                 // [rows, width]
    int64_t width;
    float *hidden, *logits;  // [rows, hidden] normalised, [rows, vocab] or null
    float* scratch;          // see scratch_floats
    int64_t threads;
};

// this thread's share of `all`
struct Share {
    int64_t begin, end;
    Share(int64_t all, int64_t thread, int64_t threads)
        : begin(all * thread / threads), end(all * (thread + 1) / threads) {}
};

template <class T>
class Decode {
  public:
    Decode(const Model& model, const Step& step) : m(model), s(step) {
        qkv_size = (m.heads + 2 * m.kv_heads) * m.head_dim;
        residual = s.scratch;
        normed = residual + s.rows * m.hidden;
        qkv = normed + s.rows * m.hidden;
        attended = qkv + s.rows * qkv_size;
        gated = attended + s.rows * m.heads * m.head_dim;
        scores = gated + s.rows * m.inner;
    }

    static int64_t scratch_floats(const Model& m, int64_t rows, int64_t longest, int64_t threads) {
        int64_t a_row = 2 * m.hidden + (2 * m.heads + 2 * m.kv_heads) * m.head_dim + m.inner;
        return rows * a_row + threads * score_floats(longest, m.block_size);
    }

    void run(int64_t thread, int64_t threads) {
        t = thread, n = threads;
        Share mine(s.rows, t, n);
        for (int64_t row = mine.begin; row < mine.end; row++) {
            const T* from = static_cast<const T*>(m.embedding) + s.token_ids[row] * m.hidden;
            float* to = residual + row * m.hidden;
            for (int64_t i = 0; i < m.hidden; i += LANES) store(to + i, load(from + i));
        }
        for (int64_t i = 0; i < m.num_layers; i++) layer(m.layers[i]);
        norm_rows(m.norm, s.hidden);
        if (!s.logits) return;
        const int64_t vocab = m.head.out;
        product(m.head, s.hidden, [&](int64_t row, int64_t column, int64_t count, const float* values) {
            std::memcpy(s.logits + row * vocab + column, values, count * sizeof(float));
        });
    }

  private:
    const Model& m;
    const Step& s;
    int64_t qkv_size, t = 0, n = 1;  // t of n threads
    float *residual, *normed, *qkv, *attended, *gated, *scores;

    void barrier() {
        if (n > 1) {
#pragma omp barrier
        }
    }

    void layer(const Layer& l) {
        auto add = [&](int64_t row, int64_t column, int64_t count, const float* values) {
            float* to = residual + row * m.hidden + column;
            for (int64_t i = 0; i < count; i++) to[i] += values[i];
        };
        norm_rows(l.norm1, normed);
        product(l.qkv, normed, [&](int64_t row, int64_t column, int64_t count, const float* values) {
            std::memcpy(qkv + row * qkv_size + column, values, count * sizeof(float));
        });
        Share mine(s.rows * m.kv_heads, t, n);
        for (int64_t i = mine.begin; i < mine.end; i++) place(l, i / m.kv_heads, i % m.kv_heads);
        barrier();  // rows may be of one sequence
        for (int64_t i = mine.begin; i < mine.end; i++) attend(l, i / m.kv_heads, i % m.kv_heads);
        barrier();
        product(l.out, attended, add);
        norm_rows(l.norm2, normed);
        gate(l);
        product(l.down, gated, add);
    }

    // rows of the residual, normalised; every thread sees them all afterwards
    void norm_rows(const float* weight, float* out) {
        Share mine(s.rows, t, n);
        for (int64_t row = mine.begin; row < mine.end; row++)
            norm(residual + row * m.hidden, weight, m.hidden, out + row * m.hidden);
        barrier();
    }

    void norm(const float* x, const float* weight, int64_t size, float* out) {
        Vec squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
        float factor = 1.0f / std::sqrt(sum(squares) / size + m.eps);
        for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    }

    template <class Done>
    void product(const Matrix& w, const float* x, Done done) {
        Share mine((w.out + PANEL - 1) / PANEL, t, n);
        alignas(64) float out[MOST][PANEL];
        for (int64_t p = mine.begin; p < mine.end; p++)
            for (int64_t row = 0; row < s.rows; row += MOST) {
                int64_t rows = std::min<int64_t>(MOST, s.rows - row);
                multiply<T>(w, p, rows, x + row * w.in, out);
                for (int64_t i = 0; i < rows; i++)
                    done(row + i, p * PANEL, std::min(PANEL, w.out - p * PANEL), out[i]);
            }
        barrier();
    }

    // gated = silu(gate(normed)) * up(normed)
    void gate(const Layer& l) {
        Share mine((m.inner + PANEL - 1) / PANEL, t, n);
        alignas(64) float gates[MOST][PANEL], ups[MOST][PANEL];
        for (int64_t p = mine.begin; p < mine.end; p++)
            for (int64_t row = 0; row < s.rows; row += MOST) {
                int64_t rows = std::min<int64_t>(MOST, s.rows - row);
                multiply<T>(l.gate, p, rows, normed + row * m.hidden, gates);
                multiply<T>(l.up, p, rows, normed + row * m.hidden, ups);
                for (int64_t i = 0; i < rows; i++) {
                    for (int64_t j = 0; j < PANEL; j += LANES) {
                        Vec g = load(gates[i] + j);
                        store(ups[i] + j, g / (1.0f + exp(-g)) * load(ups[i] + j));
                    }
                    int64_t count = std::min(PANEL, m.inner - p * PANEL);
                    std::memcpy(gated + (row + i) * m.inner + p * PANEL, ups[i], count * sizeof(float));
                }
            }
        barrier();
    }

    void rotate(float* head, int64_t position) {
        const float* turn = m.rotations + position * m.head_dim;
        for (int64_t i = 0; i < m.head_dim; i += 2) {
            float a = head[i], b = head[i + 1], cosine = turn[i], sine = turn[i + 1];
            head[i] = a * cosine - b * sine;
            head[i + 1] = a * sine + b * cosine;
        }
    }

    // where row `row`'s keys and values of a head lie
    Blocks<T> blocks(const Layer& l, int64_t row, int64_t kv_head) {
        const int64_t head = m.block_size * m.head_dim;
        return {static_cast<T*>(l.kv), s.tables + row * s.width, 2 * m.kv_heads * head, kv_head * head,
                m.kv_heads * head,     m.block_size,             m.head_dim};
    }

    float* query(int64_t row, int64_t kv_head) {
        return qkv + row * qkv_size + kv_head * (m.heads / m.kv_heads) * m.head_dim;
    }

    // normalises and rotates the heads of one row that share a K/V head, and stores its K and V
    void place(const Layer& l, int64_t row, int64_t kv_head) {
        const int64_t dim = m.head_dim, group = m.heads / m.kv_heads, position = s.positions[row];
        float *q = query(row, kv_head), *k = qkv + row * qkv_size + (m.heads + kv_head) * dim;
        const float* v = k + m.kv_heads * dim;
        if (l.qk_norm) {
            for (int64_t g = 0; g < group; g++)
                norm(q + g * dim, l.qk_norm + (kv_head * group + g) * dim, dim, q + g * dim);
            norm(k, l.qk_norm + (m.heads + kv_head) * dim, dim, k);
        }
        if (m.rotations) {
            for (int64_t g = 0; g < group; g++) rotate(q + g * dim, position);
            rotate(k, position);
        }
        Blocks<T> kv = blocks(l, row, kv_head);
        T* here = kv.keys(position / m.block_size) + position % m.block_size * dim;
        for (int64_t i = 0; i < dim; i += LANES)
            store(here + i, load(k + i)), store(here + kv.values + i, load(v + i));
    }

    void attend(const Layer& l, int64_t row, int64_t kv_head) {
        const int64_t group = m.heads / m.kv_heads, end = s.positions[row] + 1;
        const int64_t seen = l.window ? std::max<int64_t>(end - l.window, 0) : 0;
        float* mine = scores + t * score_floats(s.width * m.block_size, m.block_size);
        float* out = attended + (row * m.heads + kv_head * group) * m.head_dim;
        ::attend(blocks(l, row, kv_head), seen, end, query(row, kv_head), group, m.scale, mine, out);
    }
};

template <class T>
void run(const Model& model, const Step& step) {
#ifdef _OPENMP
#pragma omp parallel num_threads(step.threads)
    Decode<T>(model, step).run(omp_get_thread_num(), omp_get_num_threads());
#else
    Decode<T>(model, step).run(0, 1);
#endif
}

}  // namespace

extern "C" int64_t scratch_floats(const Model* model, int64_t rows, int64_t longest, int64_t threads) {
    return Decode<float>::scratch_floats(*model, rows, longest, threads);
}

extern "C" void decode_float32(const Model* model, const Step* step) { run<float>(*model, *step); }
extern "C" void decode_bfloat16(const Model* model, const Step* step) { run<bfloat16>(*model, *step); }
