// Paged attention: K and V are read from their pages, with an online softmax (arXiv:2205.14135).
// Chunks of keys begin at multiples of CHUNK, segments at multiples of SEGMENT, and a query's sums do not
// depend on who is in its tile: so neither do its bits.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "phases.h"
#include "softmax.h"

// How T's scores and outputs are computed: in the same way for every query, alone or beside others.
template <class T>
using AttentionProducts =
    std::conditional_t<HAS_TILES && std::is_same_v<T, bfloat16>, TileProducts, VectorProducts<T>>;

// The sums of tiles whose keys are split into parts. Units of work, which threads share, are a tile and one
// of its K heads each, tile by tile.
struct PartSums {
    std::vector<Sums> sums;  // [units]
    std::vector<std::atomic<int>> done;  // [units]: at a tile's first part, how many of them are

    PartSums(const Step& step, int heads)
        : sums(step.num_parts ? step.num_tiles * heads : 0), done(sums.size()) {}

    // Keeps the sums of a part. After the last one → the sums of all parts, in their order.
    Sums* add(int unit, int heads, const Tile& tile, const Sums& part) {
        int first = unit - tile.part * heads;
        sums[unit] = part;
        if (++done[first] < tile.parts) return nullptr;
        done[first] = 0;
        for (int i = 1; i < tile.parts; i++) sums[first].add(sums[first + i * heads]);
        return &sums[first];
    }
};

// The queries of a tile of tokens and a K head, [group][tokens].
template <class T> struct Queries {
    typedef AttentionProducts<T> Products;
    typedef typename Products::Keys Keys;
    typedef typename Products::Weight Weight;
    static constexpr int ROWS = Products::ROWS;
    Tile tile;
    int head, rows, dim;
    float scaling;
    Numbers<typename Products::Query> queries;  // [rows][dim]
    Numbers<Softmax> softmax;  // [rows], of this segment
    Sums sums, earlier;  // of this segment, and of those before it
    Numbers<float> sinks;  // [rows]

    int token(int row) const { return row % tile.count; }
    int query_head(const Cache& cache, int row) const { return head * cache.group + row / tile.count; }

    void read(const Tile& own, const Cache& cache, int kv_head, Heads query) {
        tile = own, head = kv_head, rows = cache.group * tile.count, dim = Keys::padded_dim(cache);
        scaling = (cache.softcap ? 1 : cache.scaling * cache.pages.key_scale) * LOG2_E;
        queries.assign(rounded_up(rows, ROWS) * dim, {});
        for (int row = 0; row < rows; row++) {
            const T* from = (const T*)query.data + (tile.token + token(row)) * query.token;
            convert_all(from + query_head(cache, row) * query.head, cache.key_dim, &queries[row * dim]);
        }
        earlier.rows = 0;
        begin_segment(cache);
    }

    void begin_segment(const Cache& cache) {
        sums.width = Keys::padded_width(cache);
        sums.outputs.assign(rounded_up(rows, ROWS) * sums.width, 0.f), softmax.assign(rows, {});
    }

    void end_segment() {
        sums.take(softmax);
        if (earlier.rows) earlier.add(sums);
        else std::swap(earlier, sums);
    }

    // Adds a chunk of keys, the first of them at `base`, to the rows that see some of them.
    void add(const Cache& cache, const Keys& chunk, const Keys& ahead, int base) {
        bool prefetch = true;
        for (int row = 0; row < rows; row += ROWS) {
            int some = std::min(ROWS, rows - row), first = token(row), last = first + some - 1;
            if (last >= tile.count) first = 0, last = tile.count - 1;
            first += tile.position, last += tile.position;
            int seen = std::min(CHUNK, std::max(last + 1, tile.seen) - base);
            if (seen <= 0 || (cache.window && base + CHUNK <= first + 1 - cache.window)) continue;
            bool hides = base + CHUNK > std::max(first + 1, tile.seen);
            hides |= cache.window && base <= last - cache.window;
            alignas(64) float scores[ROWS * CHUNK];
            Products::score(some, seen, chunk, ahead, prefetch, dim, &queries[row * dim], scores);
            for (int n = 0; n < some; n++) weigh(cache, base, row + n, hides, scores + n * CHUNK);
            Products::accumulate(some, seen, chunk, ahead, prefetch, sums.width, (const Weight*)scores,
                &sums.outputs[row * sums.width]);
            prefetch = false;
        }
    }

    // Turns a row's scores into weights.
    void weigh(const Cache& cache, int base, int row, bool hides, float* scores) {
        if (cache.softcap) cap(scores, cache.scaling * cache.pages.key_scale, cache.softcap);
        int position = tile.position + token(row);
        if (hides) hide(scores, base, position, std::max(position + 1, tile.seen), cache.window);
        float factor = softmax[row].weigh(scores, scaling, (Weight*)scores);
        float* output = &sums.outputs[row * sums.width];
        if (factor != 1)
            for (int d = 0; d < sums.width; d += LANES) store(output + d, load(output + d) * factor);
    }

    // → out [tokens][heads][value_dim]
    template <class U> void write(const Cache& cache, Sums& all, U* out) {
        int heads = cache.kv_heads * cache.group, size = cache.value_dim;
        sinks.assign(all.tops.size(), NEVER);
        for (int row = 0; cache.sinks && row < rows; row++)
            sinks[row] = cache.sinks[query_head(cache, row)] * LOG2_E;
        all.divide(sinks, cache.pages.value_scale);
        for (int row = 0; row < rows; row++) {
            const float* from = &all.outputs[row * all.width];
            float factor = all.factors[row];
            U* to = out + ((int64_t)(tile.token + token(row)) * heads + query_head(cache, row)) * size;
            int d = 0;
            for (; d + LANES <= size; d += LANES) store(to + d, load(from + d) * factor);
            for (; d < size; d++) store_one(to + d, from[d] * factor);
        }
    }
};

// One unit → out [tokens][heads][value_dim]. The next one is probably computed next, and prefetched.
template <class T, class U>
void attend(const Step& step, const Cache& cache, PartSums& parts, int unit, Heads query, U* out) {
    typedef AttentionProducts<T> Products;
    struct Memory {  // kept by each thread
        Queries<T> queries;
        typename Products::Keys chunks[2];
    };
    static thread_local Memory own;
    Memory& memory = own;  // looked up once
    auto& [queries, chunks] = memory;
    typename Products::Arithmetic arithmetic;
    int next = std::min(unit + 1, step.num_tiles * cache.kv_heads - 1);
    int head = unit % cache.kv_heads, next_head = next % cache.kv_heads;
    const Tile& tile = step.tiles[unit / cache.kv_heads];
    KeyRange keys = visible_keys(step, cache, tile);
    KeyRange next_keys = visible_keys(step, cache, step.tiles[next / cache.kv_heads]);
    queries.read(tile, cache, head, query);
    chunks[0].gather(step, cache, keys, head);
    for (int i = 0; keys.base < keys.end; i = !i, keys.base += CHUNK) {
        bool last = keys.base + CHUNK >= keys.end;
        if (!last || !cache.pages.stored) {
            KeyRange next = last ? next_keys : KeyRange{keys.table, keys.base + CHUNK, keys.end};
            chunks[!i].gather(step, cache, next, last ? next_head : head);
        }
        Products::prepare(queries.rows, chunks[i], chunks[!i], cache);
        queries.add(cache, chunks[i], chunks[!i], keys.base);
        if (!last && (keys.base + CHUNK) % SEGMENT == 0) queries.end_segment(), queries.begin_segment(cache);
    }
    queries.end_segment();
    Sums* all = &queries.earlier;
    if (tile.parts > 1) all = parts.add(unit, cache.kv_heads, tile, *all);
    if (all) queries.write(cache, *all, out);
}

template <class T>
void write_and_attend(const Step& step, const Cache& cache, Heads query, Heads key, Heads value, T* out) {
    PartSums parts(step, cache.kv_heads);
    Progress progress(step.threads);
#pragma omp parallel num_threads(step.threads)
    {
        Tiles tiles;
        Phases phases(progress);
        phases.run(step.num_tokens, [&](int token) {
            for (int head = 0; head < cache.kv_heads; head++)
                write<T>(step, cache, token, head, (const T*)key.data + token * key.token + head * key.head,
                    (const T*)value.data + token * value.token + head * value.head);
        });
        phases.run(step.num_tiles * cache.kv_heads,
            [&](int unit) { attend<T>(step, cache, parts, unit, query, out); });
    }
}
