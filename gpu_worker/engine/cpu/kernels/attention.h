// Paged attention: K and V are read from their pages, with an online softmax (arXiv:2205.14135).
// Chunks of keys begin at multiples of CHUNK, and a query's sums do not depend on who is in its tile: so
// neither do its bits.
#pragma once
#include <algorithm>
#include <vector>
#include "pages.h"
#include "phases.h"
#include "structs.h"
#include "vector.h"

constexpr int BLOCK = ROWS == 8 ? 6 : 3;
constexpr float NEVER = -1e30f, HIDDEN = -__builtin_inff();

// Sums of one chunk; with PREFETCH, the same place of the next chunk is prefetched meanwhile: memory
// is slow, and serves few requests at a time.
template <class T, int N, bool PREFETCH>
void score(const Chunk<T>& chunk, const Chunk<T>& next, int dim, const Factor<T>* queries, float* scores) {
    constexpr int P = Pairs<T>::P;
    Floats sums[N][VECTORS] = {};
    for (int d = 0; d < dim / P; d++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            if (PREFETCH) __builtin_prefetch(next.keys[v] + d * next.key_stride);
#pragma GCC unroll 2
            for (int part = 0; part < Pairs<T>::PARTS; part++) {
                auto keys = Pairs<T>::part(chunk.keys[v] + d * chunk.key_stride, part);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[n][v] = Pairs<T>::multiply(sums[n][v], keys, queries + n * dim + d * P + part);
            }
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < VECTORS; v++) store(scores + n * CHUNK + v * LANES, sums[n][v]);
}

template <class T, int N, bool PREFETCH> void accumulate(const Chunk<T>& chunk, const Chunk<T>& next,
    int width, const float* weights, const float* factors, float* outputs) {
    for (int d = 0; d < width; d += VECTORS * LANES) {
        Floats sums[N][VECTORS];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++)
                sums[n][v] = load(outputs + n * width + d + v * LANES) * factors[n];
        for (int j = 0; j < chunk.num_keys; j++) {
            const T *value = chunk.value(j) + d, *ahead = next.value(j) + d;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                if (PREFETCH && v * LANES * sizeof(T) % 64 == 0) __builtin_prefetch(ahead + v * LANES);
                Floats numbers = load(value + v * LANES);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[n][v] += numbers * weights[n * CHUNK + j];
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) store(outputs + n * width + d + v * LANES, sums[n][v]);
    }
}

template <class T, int N = BLOCK> void score_rows(int rows, const Chunk<T>& chunk, const Chunk<T>& next,
    bool prefetch, int dim, const Factor<T>* queries, float* scores) {
    for (; rows >= N; rows -= N, queries += N * dim, scores += N * CHUNK, prefetch = false)
        (prefetch ? score<T, N, true> : score<T, N, false>)(chunk, next, dim, queries, scores);
    if constexpr (N > 1)
        if (rows) score_rows<T, N - 1>(rows, chunk, next, prefetch, dim, queries, scores);
}

template <class T, int N = BLOCK> void accumulate_rows(int rows, const Chunk<T>& chunk, const Chunk<T>& next,
    bool prefetch, int width, const float* weights, const float* factors, float* outputs) {
    for (; rows >= N; rows -= N, weights += N * CHUNK, factors += N, outputs += N * width, prefetch = false)
        (prefetch ? accumulate<T, N, true> : accumulate<T, N, false>)(chunk, next, width, weights, factors,
            outputs);
    if constexpr (N > 1)
        if (rows) accumulate_rows<T, N - 1>(rows, chunk, next, prefetch, width, weights, factors, outputs);
}

// Turns the scores of a chunk into weights, and updates `top` and `total`; earlier sums are scaled by
// `factor`.
inline void softmax_chunk(float* scores, const Cache& cache, int base, int position, bool masked, float& top,
    Floats& total, float& factor) {
    Floats x[VECTORS], best = splat(HIDDEN);
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int v = 0; v < VECTORS; v++) {
        x[v] = load(scores + v * LANES) * (cache.scaling * cache.pages.key_scale);
        if (cache.softcap) x[v] = hyperbolic_tangent(x[v] * (1 / cache.softcap)) * cache.softcap;
        if (masked) {
            Ints key = lane + (base + v * LANES);
            x[v] = key > position ? splat(HIDDEN) : x[v];
            if (cache.window) x[v] = key <= position - cache.window ? splat(HIDDEN) : x[v];
        }
        best = larger(best, x[v]);
    }
    float before = top;
    top = std::max(top, largest(best));
    factor = before == top ? 1.f : exponential(splat(before - top))[0];
    total *= factor;
    for (int v = 0; v < VECTORS; v++) {
        x[v] = exponential(x[v] - top);
        total += x[v];
        store(scores + v * LANES, x[v]);
    }
}

// A tile and one of its K heads are a unit of work, numbered tile by tile → out [tokens][heads][value_dim].
// `next` is probably computed next, and prefetched.
template <class T, class U>
void attend(const Step& step, const Cache& cache, int unit, int next, Heads query, U* out) {
    static thread_local Chunk<T> chunks[2];
    static thread_local std::vector<Factor<T>> queries;
    static thread_local std::vector<float> scores, outputs, tops, factors;
    static thread_local std::vector<Floats> totals;
    int head = unit % cache.kv_heads, next_head = next % cache.kv_heads;
    const int32_t* at = step.tiles + 4 * (unit / cache.kv_heads);
    int begin = at[0], count = at[1], position = at[2], rows = cache.group * count, dim = cache.key_dim;
    int width = rounded_up(cache.value_dim, VECTORS * LANES), heads = cache.kv_heads * cache.group;

    queries.resize(rows * dim), scores.resize(rows * CHUNK), factors.resize(rows);
    outputs.assign(rows * width, 0.f), tops.assign(rows, NEVER), totals.assign(rows, Floats{});
    for (int row = 0; row < rows; row++) {
        int h = head * cache.group + row / count;
        const T* from = (const T*)query.data + (begin + row % count) * query.token + h * query.head;
        for (int d = 0; d < dim; d++) convert(from + d, &queries[row * dim + d]);
        if (cache.sinks) tops[row] = cache.sinks[h], totals[row][0] = 1;
    }
    KeyRange keys = visible_keys(step, cache, unit / cache.kv_heads);
    KeyRange next_keys = visible_keys(step, cache, next / cache.kv_heads);
    chunks[0].gather(step, cache, keys, head);
    for (int i = 0; keys.base < keys.end; i = !i, keys.base += CHUNK) {
        const Chunk<T>& chunk = chunks[i];
        const Chunk<T>& ahead = chunks[!i];
        bool last = keys.base + CHUNK >= keys.end;
        if (!last || !cache.pages.stored) {
            KeyRange next = last ? next_keys : KeyRange{keys.table, keys.base + CHUNK, keys.end};
            chunks[!i].gather(step, cache, next, last ? next_head : head);
        }
        bool masked = keys.base + CHUNK > position + 1 ||
                      (cache.window && keys.base <= keys.end - 1 - cache.window);
        score_rows<T>(rows, chunk, ahead, true, dim, queries.data(), scores.data());
        for (int row = 0; row < rows; row++)
            softmax_chunk(&scores[row * CHUNK], cache, keys.base, position + row % count, masked, tops[row],
                totals[row], factors[row]);
        accumulate_rows<T>(rows, chunk, ahead, true, width, scores.data(), factors.data(), outputs.data());
    }
    for (int row = 0; row < rows; row++) {
        U* to = out +
                ((int64_t)(begin + row % count) * heads + head * cache.group + row / count) * cache.value_dim;
        float inverse = cache.pages.value_scale / sum(totals[row]);
        int d = 0;
        for (; d + LANES <= cache.value_dim; d += LANES)
            store(to + d, load(&outputs[row * width + d]) * inverse);
        for (; d < cache.value_dim; d++) store_one(to + d, outputs[row * width + d] * inverse);
    }
}

template <class T>
void write_and_attend(const Step& step, const Cache& cache, Heads query, Heads key, Heads value, T* out) {
    int units = step.num_tiles * cache.kv_heads;
    Progress progress(step.threads);
#pragma omp parallel num_threads(step.threads)
    {
        Phases phases(progress);
        phases.run(step.num_tokens, [&](int token) {
            for (int head = 0; head < cache.kv_heads; head++)
                write<T>(step, cache, token, head, (const T*)key.data + token * key.token + head * key.head,
                    (const T*)value.data + token * value.token + head * value.head);
        });
        phases.run(units, [&](int unit) {
            attend<T>(step, cache, unit, std::min(unit + 1, units - 1), query, out);
        });
    }
}
