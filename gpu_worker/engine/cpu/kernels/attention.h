// Paged attention: K and V are read from their pages, with an online softmax (arXiv:2205.14135).
// Chunks of keys begin at multiples of CHUNK, and a query's sums do not depend on who is in its tile: so
// neither do its bits.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "softmax.h"

// The number of this thread in an OpenMP region, and of all its threads. Not every system that has the
// runtime has its header, too.
#if defined(_OPENMP)
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
inline int this_thread() { return omp_get_thread_num(); }
inline int all_threads() { return omp_get_num_threads(); }
#else
inline int this_thread() { return 0; }
inline int all_threads() { return 1; }
#endif

// How T's scores and outputs are computed: the same for every query, so that its bits do not depend on others.
template <class T>
using AttentionProducts =
    std::conditional_t<HAS_TILES && std::is_same_v<T, bfloat16>, TileProducts, VectorProducts<T>>;

// A tile and one of its K heads are a unit of work, numbered tile by tile. Each thread starts the next
// one when it is done, and knows it in advance.
template <class F> void for_units(std::atomic<int>& started, int units, F each) {
    for (int unit = this_thread(), next; unit < units; unit = next)
        each(unit, (next = all_threads() + started++) < units ? next : unit);
}

// The queries of a tile of tokens and a K head, [group][tokens], and their sums so far.
template <class T> struct QueryTile {
    typedef AttentionProducts<T> Products;
    typedef typename Products::Keys Keys;
    typedef typename Products::Weight Weight;
    static constexpr int ROWS = Products::ROWS;
    int begin, count, position, head, rows, dim, width;
    float scaling;
    std::vector<typename Products::Query> queries;  // [rows][dim]
    std::vector<float> outputs;  // [rows][width]
    std::vector<Softmax> softmax;  // [rows]

    int token(int row) const { return row % count; }
    int query_head(const Cache& cache, int row) const { return head * cache.group + row / count; }

    void read(const int32_t* tile, const Cache& cache, int kv_head, Heads query) {
        begin = tile[0], count = tile[1], position = tile[2], head = kv_head, rows = cache.group * count;
        dim = Keys::padded_dim(cache), width = Keys::padded_width(cache);
        scaling = (cache.softcap ? 1 : cache.scaling * cache.pages.key_scale) * LOG2_E;
        int room = rounded_up(rows, ROWS);
        queries.assign(room * dim, {}), outputs.assign(room * width, 0.f), softmax.assign(rows, {});
        for (int row = 0; row < rows; row++) {
            int h = query_head(cache, row);
            const T* from = (const T*)query.data + (begin + token(row)) * query.token + h * query.head;
            convert_all(from, cache.key_dim, &queries[row * dim]);
            if (cache.sinks) softmax[row].top = cache.sinks[h] * LOG2_E, softmax[row].total[0] = 1;
        }
    }

    // Adds a chunk of keys, the first of them at `base`, to the rows that see some of them.
    void add(const Cache& cache, const Keys& chunk, const Keys& ahead, int base) {
        bool prefetch = true;
        for (int row = 0; row < rows; row += ROWS) {
            int some = std::min(ROWS, rows - row), first = token(row), last = first + some - 1;
            if (last >= count) first = 0, last = count - 1;
            first += position, last += position;
            int seen = std::min(CHUNK, last + 1 - base);
            if (seen <= 0 || (cache.window && base + CHUNK <= first + 1 - cache.window)) continue;
            bool hides = base + CHUNK > first + 1 || (cache.window && base <= last - cache.window);
            alignas(64) float scores[ROWS * CHUNK];
            Weight* weights = (Weight*)scores;
            Products::score(some, seen, chunk, ahead, prefetch, dim, &queries[row * dim], scores);
            for (int n = 0; n < some; n++) weigh(cache, base, row + n, hides, scores + n * CHUNK);
            Products::accumulate(
                some, seen, chunk, ahead, prefetch, width, weights, &outputs[row * width]);
            prefetch = false;
        }
    }

    // Turns a row's scores into weights.
    void weigh(const Cache& cache, int base, int row, bool hides, float* scores) {
        if (cache.softcap) cap(scores, cache.scaling * cache.pages.key_scale, cache.softcap);
        if (hides) hide(scores, base, position + token(row), cache.window);
        float factor = softmax[row].weigh(scores, scaling, (Weight*)scores);
        float* output = &outputs[row * width];
        if (factor != 1)
            for (int d = 0; d < width; d += LANES) store(output + d, load(output + d) * factor);
    }

    // → out [tokens][heads][value_dim]
    template <class U> void write(const Cache& cache, U* out) const {
        int heads = cache.kv_heads * cache.group, size = cache.value_dim;
        for (int row = 0; row < rows; row++) {
            U* to = out + ((int64_t)(begin + token(row)) * heads + query_head(cache, row)) * size;
            const float* from = &outputs[row * width];
            float inverse = cache.pages.value_scale / sum(softmax[row].total);
            int d = 0;
            for (; d + LANES <= size; d += LANES) store(to + d, load(from + d) * inverse);
            for (; d < size; d++) store_one(to + d, from[d] * inverse);
        }
    }
};

// One unit → out [tokens][heads][value_dim]
template <class T, class U>
void attend(const Step& step, const Cache& cache, int unit, int next, Heads query, U* out, Tiles& tiles) {
    typedef AttentionProducts<T> Products;
    struct Memory {  // kept by each thread
        QueryTile<T> tile;
        typename Products::Keys chunks[2];
    };
    static thread_local Memory own;
    Memory& memory = own;  // looked up once
    auto& [tile, chunks] = memory;
    int head = unit % cache.kv_heads, next_head = next % cache.kv_heads;
    tile.read(step.tiles + 4 * (unit / cache.kv_heads), cache, head, query);
    KeyRange keys = visible_keys(step, cache, unit / cache.kv_heads);
    KeyRange next_keys = visible_keys(step, cache, next / cache.kv_heads);
    if (std::is_same_v<Products, TileProducts>) tiles.fit(std::min(tile.rows, TILE));
    chunks[0].gather(step, cache, keys, head);
    for (int i = 0; keys.base < keys.end; i = !i, keys.base += CHUNK) {
        bool last = keys.base + CHUNK >= keys.end;
        if (!last || !cache.pages.stored) {
            KeyRange next = last ? next_keys : KeyRange{keys.table, keys.base + CHUNK, keys.end};
            chunks[!i].gather(step, cache, next, last ? next_head : head);
        }
        Products::prepare(chunks[i], chunks[!i], cache);
        tile.add(cache, chunks[i], chunks[!i], keys.base);
    }
    tile.write(cache, out);
}

template <class T>
void write_and_attend(const Step& step, const Cache& cache, Heads query, Heads key, Heads value, T* out) {
    std::atomic<int> started{0};
#pragma omp parallel num_threads(step.threads)
    {
#pragma omp for
        for (int token = 0; token < step.num_tokens; token++)
            for (int head = 0; head < cache.kv_heads; head++)
                write<T>(step, cache, token, head, (const T*)key.data + token * key.token + head * key.head,
                    (const T*)value.data + token * value.token + head * value.head);
        Tiles tiles;
        for_units(started, step.num_tiles * cache.kv_heads,
            [&](int unit, int next) { attend<T>(step, cache, unit, next, query, out, tiles); });
    }
}
