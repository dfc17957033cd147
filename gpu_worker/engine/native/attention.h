// Paged attention: K and V are read where they lie, softmax as it goes along (arXiv:2205.14135).
// Chunks of keys begin at multiples of CHUNK, and a query's sums do not depend on who is in its tile: so neither do its bits.
#pragma once
#include <algorithm>
#include <vector>
#include "shapes.h"
#include "vector.h"

constexpr int VECTORS = 4, CHUNK = VECTORS * LANES, BLOCK = ROWS == 8 ? 6 : 3;
constexpr float NEVER = -1e30f, HIDDEN = -__builtin_inff();

inline int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <class T> void write(const Step& step, const Cache& cache, int token, int head, const T* key, const T* value) {
    constexpr int P = Pairs<T>::P;
    int64_t size = step.block_size, page = step.slots[token] / size * cache.kv_heads + head, offset = step.slots[token] % size;
    T* keys = (T*)cache.keys + page * size * cache.key_dim + offset * P;
    for (int d = 0; d < cache.key_dim; d += P) memcpy(keys + d * size, key + d, sizeof(T) * P);
    memcpy((T*)cache.values + (page * size + offset) * cache.value_dim, value, sizeof(T) * cache.value_dim);
}

// A chunk of keys: where the K of every vector of them and the V of each lie. What the kernels cannot take as it lies is copied.
template <class T> struct Chunk {
    static constexpr int P = Pairs<T>::P;
    int num_keys, stride;
    const T *keys[VECTORS], *values[CHUNK];
    std::vector<T> key_copy, value_copy;

    void gather(const Step& step, const Cache& cache, const int32_t* table, int head, int base, int end) {
        int size = step.block_size, dim = cache.key_dim, width = rounded_up(cache.value_dim, VECTORS * LANES);
        bool lies = size % LANES == 0, whole = width == cache.value_dim;
        num_keys = std::min(CHUNK, end - base);
        stride = (lies ? size : CHUNK) * P;
        if (!lies) key_copy.assign(dim * CHUNK, T{});
        if (!whole) value_copy.assign(CHUNK * width, T{});
        int block = base / size, offset = base % size;
        for (int key = 0; key < num_keys; block++, offset = 0) {
            int64_t page = ((int64_t)table[block] * cache.kv_heads + head) * size;
            const T *page_keys = (const T*)cache.keys + page * dim, *page_values = (const T*)cache.values + page * cache.value_dim;
            for (; offset < size && key < num_keys; offset++, key++) {
                const T* from = page_keys + offset * P;
                if (lies && key % LANES == 0) keys[key / LANES] = from;
                if (!lies)
                    for (int d = 0; d < dim; d += P) memcpy(&key_copy[d * CHUNK + key * P], from + (int64_t)d * size, sizeof(T) * P);
                const T* value = page_values + (int64_t)offset * cache.value_dim;
                values[key] = whole ? value : (const T*)memcpy(&value_copy[key * width], value, sizeof(T) * cache.value_dim);
            }
        }
        for (int v = 0; v < VECTORS; v++)
            if (!lies || v * LANES >= num_keys) keys[v] = lies ? keys[0] : &key_copy[v * LANES * P];
    }
};

// Asks for the pages of the chunk that comes next, which lie anywhere.
template <class T> void ask(const Step& step, const Cache& cache, const int32_t* table, int head, int base, int end) {
    int size = step.block_size;
    for (int block = base / size; block * size < std::min(base + CHUNK, end); block++) {
        int64_t page = ((int64_t)table[block] * cache.kv_heads + head) * size;
        const char *keys = (const char*)((const T*)cache.keys + page * cache.key_dim);
        const char *values = (const char*)((const T*)cache.values + page * cache.value_dim);
        for (size_t line = 0; line < size * cache.key_dim * sizeof(T); line += 64) __builtin_prefetch(keys + line);
        for (size_t line = 0; line < size * cache.value_dim * sizeof(T); line += 64) __builtin_prefetch(values + line);
    }
}

template <class T, int N> void score(const Chunk<T>& chunk, int dim, const typename Pairs<T>::Query* queries, float* scores) {
    constexpr int P = Pairs<T>::P;
    Floats sums[N][VECTORS] = {};
    for (int d = 0; d < dim / P; d++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                sums[n][v] = Pairs<T>::multiply(sums[n][v], chunk.keys[v] + d * chunk.stride, queries + n * dim + d * P);
    for (int n = 0; n < N; n++)
        for (int v = 0; v < VECTORS; v++) store(scores + n * CHUNK + v * LANES, sums[n][v]);
}

template <class T, int N> void accumulate(const Chunk<T>& chunk, int width, const float* weights, const float* factors, float* outputs) {
    for (int d = 0; d < width; d += VECTORS * LANES) {
        Floats sums[N][VECTORS];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) sums[n][v] = load(outputs + n * width + d + v * LANES) * factors[n];
        for (int j = 0; j < chunk.num_keys; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                Floats value = load(chunk.values[j] + d + v * LANES);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[n][v] += value * weights[n * CHUNK + j];
            }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) store(outputs + n * width + d + v * LANES, sums[n][v]);
    }
}

template <class T, int N = BLOCK> void score_rows(int rows, const Chunk<T>& chunk, int dim, const typename Pairs<T>::Query* queries, float* scores) {
    for (; rows >= N; rows -= N, queries += N * dim, scores += N * CHUNK) score<T, N>(chunk, dim, queries, scores);
    if constexpr (N > 1)
        if (rows) score_rows<T, N - 1>(rows, chunk, dim, queries, scores);
}

template <class T, int N = BLOCK>
void accumulate_rows(int rows, const Chunk<T>& chunk, int width, const float* weights, const float* factors, float* outputs) {
    for (; rows >= N; rows -= N, weights += N * CHUNK, factors += N, outputs += N * width)
        accumulate<T, N>(chunk, width, weights, factors, outputs);
    if constexpr (N > 1)
        if (rows) accumulate_rows<T, N - 1>(rows, chunk, width, weights, factors, outputs);
}

// Scores of a chunk to weights; `top` and `total` go along, `factor` is what earlier sums are scaled with.
inline void soften(float* scores, const Cache& cache, int base, int position, bool masked, float& top, Floats& total, float& factor) {
    Floats x[VECTORS], best = splat(HIDDEN);
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int v = 0; v < VECTORS; v++) {
        x[v] = load(scores + v * LANES) * cache.scaling;
        if (cache.softcap) x[v] = tangent(x[v] * (1 / cache.softcap)) * cache.softcap;
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

// One tile and one K head → out [tokens][heads][value_dim]
template <class T> void attend(const Step& step, const Cache& cache, int tile, int head, Heads query, T* out) {
    typedef typename Pairs<T>::Query Query;
    static thread_local Chunk<T> chunk;
    static thread_local std::vector<Query> queries;
    static thread_local std::vector<float> scores, outputs, tops, factors;
    static thread_local std::vector<Floats> totals;
    const int32_t* at = step.tiles + 4 * tile;
    int begin = at[0], count = at[1], position = at[2], end = position + count, rows = cache.group * count, dim = cache.key_dim;
    const int32_t* table = step.tables + at[3];
    int width = rounded_up(cache.value_dim, VECTORS * LANES), heads = cache.kv_heads * cache.group;

    queries.resize(rows * dim), scores.resize(rows * CHUNK), factors.resize(rows);
    outputs.assign(rows * width, 0.f), tops.assign(rows, NEVER), totals.assign(rows, Floats{});
    for (int row = 0; row < rows; row++) {
        int h = head * cache.group + row / count;
        const T* from = (const T*)query.data + (begin + row % count) * query.token + h * query.head;
        for (int d = 0; d < dim; d++) queries[row * dim + d] = Pairs<T>::query(from + d);
        if (cache.sinks) tops[row] = cache.sinks[h], totals[row][0] = 1;
    }
    int first = cache.window ? std::max(0, position - cache.window + 1) : 0;
    for (int base = first / CHUNK * CHUNK; base < end; base += CHUNK) {
        chunk.gather(step, cache, table, head, base, end);
        ask<T>(step, cache, table, head, base + CHUNK, end);
        bool masked = base + CHUNK > position + 1 || (cache.window && base <= end - 1 - cache.window);
        score_rows<T>(rows, chunk, dim, queries.data(), scores.data());
        for (int row = 0; row < rows; row++)
            soften(&scores[row * CHUNK], cache, base, position + row % count, masked, tops[row], totals[row], factors[row]);
        accumulate_rows<T>(rows, chunk, width, scores.data(), factors.data(), outputs.data());
    }
    for (int row = 0; row < rows; row++) {
        T* to = out + ((int64_t)(begin + row % count) * heads + head * cache.group + row / count) * cache.value_dim;
        float inverse = 1 / sum(totals[row]);
        int d = 0;
        for (; d + LANES <= cache.value_dim; d += LANES) store(to + d, load(&outputs[row * width + d]) * inverse);
        for (; d < cache.value_dim; d++) store_one(to + d, outputs[row * width + d] * inverse);
    }
}

template <class T> void write_and_attend(const Step& step, const Cache& cache, Heads query, Heads key, Heads value, T* out) {
#pragma omp parallel num_threads(step.threads)
    {
#pragma omp for
        for (int token = 0; token < step.num_tokens; token++)
            for (int head = 0; head < cache.kv_heads; head++)
                write<T>(step, cache, token, head, (const T*)key.data + token * key.token + head * key.head,
                         (const T*)value.data + token * value.token + head * value.head);
#pragma omp for collapse(2) schedule(dynamic)
        for (int tile = 0; tile < step.num_tiles; tile++)
            for (int head = 0; head < cache.kv_heads; head++) attend<T>(step, cache, tile, head, query, out);
    }
}
