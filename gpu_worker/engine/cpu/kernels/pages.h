// Pages of K and V: where a token's are written, and chunks of them as queries go over them.
#pragma once
#include <algorithm>
#include <vector>
#include "floats8.h"
#include "structs.h"
#include "vector.h"

constexpr int VECTORS = 4, CHUNK = VECTORS * LANES;

inline int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <class T>
void write(const Step& step, const Cache& cache, int token, int head, const T* key, const T* value) {
    with_stored<T>(cache, [&](auto number) {
        typedef decltype(number) S;
        constexpr int P = Pairs<T>::P;
        static thread_local std::vector<S> line;
        line.resize(cache.key_dim);
        narrow(key, cache.key_dim, cache.pages.key_scale, line.data());
        int64_t size = step.block_size, offset = step.slots[token] % size;
        int64_t page = step.slots[token] / size * cache.kv_heads + head;
        S* keys = (S*)cache.pages.keys + page * size * cache.key_dim + offset * P;
        for (int d = 0; d < cache.key_dim; d += P) memcpy(keys + d * size, &line[d], sizeof(S) * P);
        S* values = (S*)cache.pages.values + (page * size + offset) * cache.value_dim;
        narrow(value, cache.value_dim, cache.pages.value_scale, values);
    });
}

constexpr int SEGMENT = 1024;  // keys that are summed by themselves
static_assert(SEGMENT % CHUNK == 0);

// The keys that the queries of a tile see, from the beginning of a chunk on.
struct KeyRange {
    const int32_t* table;
    int base, end;
};

inline KeyRange visible_keys(const Step& step, const Cache& cache, const Tile& tile) {
    int first = cache.window ? std::max(0, tile.position - cache.window + 1) : 0;
    int base = first / CHUNK * CHUNK, end = std::max(tile.position + tile.count, tile.seen);
    if (tile.parts > 1)
        base = std::max(base, tile.part * SEGMENT), end = std::min(end, (tile.part + 1) * SEGMENT);
    return {step.tables + tile.table, base, end};
}

// A chunk of keys, LANES by LANES: pointers to their K and V. Blocks or dimensions that do not fit the units
// of dimensions that are multiplied at once are copied, and so are 8-bit floats, which are widened.
template <class T, int KEY_UNIT, int VALUE_UNIT> struct Chunk {
    static constexpr int P = Pairs<T>::P;
    int num_keys;
    int key_stride;  // from one pair of a K to its next one
    int value_stride;  // from one V to the next key's
    const T *keys[VECTORS], *values[VECTORS];
    Numbers<T> key_copy, value_copy;

    static int padded_dim(const Cache& cache) { return rounded_up(cache.key_dim, KEY_UNIT); }
    static int padded_width(const Cache& cache) { return rounded_up(cache.value_dim, VALUE_UNIT); }
    const T* value(int key) const { return values[key / LANES] + key % LANES * value_stride; }

    void gather(const Step& step, const Cache& cache, KeyRange seen, int head) {
        int size = step.block_size, dim = padded_dim(cache), width = padded_width(cache);
        bool fits = size % LANES == 0 && dim == cache.key_dim && width == cache.value_dim;
        num_keys = std::min(CHUNK, seen.end - seen.base);
        if (!fits || cache.pages.stored)
            return with_stored<T>(cache, [&](auto number) {
                typedef decltype(number) S;
                (size % LANES == 0 && width == cache.value_dim ? &Chunk::copy<S, LANES> : &Chunk::copy<S, 1>)(
                    *this, step, cache, seen, head);
            });
        key_stride = size * P, value_stride = width;
        for (int v = 0; v < VECTORS; v++) {
            int key = seen.base + (v * LANES < num_keys ? v * LANES : 0);
            int64_t page = ((int64_t)seen.table[key / size] * cache.kv_heads + head) * size;
            keys[v] = (const T*)cache.pages.keys + page * dim + key % size * P;
            values[v] = (const T*)cache.pages.values + (page + key % size) * width;
        }
    }

    // Copies numbers of type S, of `RUN` keys at a time, which lie next to each other in a block.
    template <class S, int RUN>
    static void copy(Chunk& to, const Step& step, const Cache& cache, KeyRange seen, int head) {
        int size = step.block_size, dim = cache.key_dim, width = padded_width(cache);
        to.key_copy.resize(padded_dim(cache) * CHUNK), to.value_copy.resize(CHUNK * width);
        to.key_stride = CHUNK * P, to.value_stride = width;
        std::fill(to.key_copy.begin() + dim * CHUNK, to.key_copy.end(), T{});
        for (int key = 0; key < to.num_keys; key += RUN) {
            int at = seen.base + key;
            int64_t page = ((int64_t)seen.table[at / size] * cache.kv_heads + head) * size;
            const S* from = (const S*)cache.pages.keys + page * dim + at % size * P;
            for (int d = 0; d < dim; d += P)
                widen(from + (int64_t)d * size, RUN * P, &to.key_copy[d * CHUNK + key * P]);
            widen((const S*)cache.pages.values + (page + at % size) * cache.value_dim, RUN * cache.value_dim,
                &to.value_copy[key * width]);
        }
        for (int v = 0; v < VECTORS; v++) {
            to.keys[v] = &to.key_copy[v * LANES * P];
            to.values[v] = &to.value_copy[v * LANES * width];
        }
    }
};
