// Scores and outputs of attention by the matrix unit, for bfloat16. Weights are rounded to it, too.
#pragma once
#include "amx.h"
#include "pages.h"
#include "vector.h"

// A chunk whose values lie in pairs of keys, as the unit wants them: [CHUNK / 2][width][2]. Zeros follow the
// last key: what is there may be no number.
struct PairedChunk : Chunk<bfloat16, TILE_INPUTS, TILE> {
    Numbers<bfloat16> pairs, zeros;

    void pair_values(const Cache& cache) {
        int width = padded_width(cache);
        pairs.resize(CHUNK * width), zeros.resize(width);
        for (int j = 0; j < CHUNK; j += 2) {
            const bfloat16* first = j < num_keys ? value(j) : zeros.data();
            const bfloat16* second = j + 1 < num_keys ? value(j + 1) : zeros.data();
            for (int d = 0; d < width; d += LANES) {
                Words pair = words(first + d) | words(second + d) << 16;
                memcpy(&pairs[j * width + 2 * d], &pair, sizeof pair);
            }
        }
    }

    void prefetch(const Cache& cache) const {
        for (int v = 0; v < VECTORS; v++)
            for (int d = 0; d < cache.key_dim / 2; d++) __builtin_prefetch(keys[v] + d * key_stride);
        for (int j = 0; j < num_keys; j++)
            for (int d = 0; d < cache.value_dim; d += TILE_INPUTS) __builtin_prefetch(value(j) + d);
    }
};

struct TileProducts {
    static constexpr int ROWS = TILE;  // of queries that are multiplied at once, and that memory has
    static constexpr int WEIGHTS = 2 * CHUNK;  // from one query's weights to the next one's
    typedef PairedChunk Keys;
    typedef bfloat16 Query, Weight;

    static void prepare(Keys& chunk, const Keys& next, const Cache& cache) {
        next.prefetch(cache);
        chunk.pair_values(cache);
    }

    // Scores [ROWS][CHUNK] of the first `count` keys.
    static void score(int, int count, const Keys& chunk, const Keys&, bool, int dim, const bfloat16* queries,
        float* scores) {
        for (int v = 0; v * TILE < count; v += 2)
            score_pair(
                {queries, dim}, dim, keys_of(chunk, v), keys_of(chunk, v + 1), {scores + v * TILE, CHUNK});
    }

    static Matrix<const bfloat16> keys_of(const Keys& chunk, int v) {
        return {chunk.keys[v], chunk.key_stride};
    }

    // Of two tiles of keys, which may lie in two blocks.
    static void score_pair(Matrix<const bfloat16> queries, int dim, Matrix<const bfloat16> left,
        Matrix<const bfloat16> right, Matrix<float> scores) {
        zero_tile<0>(), zero_tile<1>();
        for (int d = 0; d < dim; d += TILE_INPUTS) {
            load_tile<4>(queries.from(0, d));
            load_tile<6>(left.from(d / 2, 0)), load_tile<7>(right.from(d / 2, 0));
            multiply_tiles<0, 4, 6>(), multiply_tiles<1, 4, 7>();
        }
        store_tile<0>(scores), store_tile<1>(scores.from(0, TILE));
    }

    // Adds the first `count` values, multiplied with weights, to outputs [ROWS][width].
    static void accumulate(int, int count, const Keys& chunk, const Keys&, bool, int width,
        const bfloat16* weights, float* outputs) {
        Matrix<const bfloat16> rows{weights, WEIGHTS}, values{chunk.pairs.data(), 2 * width};
        Matrix<float> to{outputs, width};
        int keys = rounded_up(count, TILE_INPUTS), d = 0;
        for (; d + 2 * TILE <= width; d += 2 * TILE)
            add_product<1, 2>(rows, keys, values.from(0, 2 * d), to.from(0, d), [](int) {});
        if (d < width) add_product<1, 1>(rows, keys, values.from(0, 2 * d), to.from(0, d), [](int) {});
    }
};
