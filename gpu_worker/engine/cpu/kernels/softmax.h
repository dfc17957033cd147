// The online softmax of a row (arXiv:2205.14135): scores of a chunk become weights of its values.
#pragma once
#include <vector>
#include "pages.h"
#include "vector.h"

constexpr float NEVER = -1e30f, HIDDEN = -__builtin_inff();
constexpr float LOG2_E = 1.44269504088896341f;
// How far a score may exceed `top` before `top` follows it: earlier sums are seldom scaled, no weight
// overflows.
constexpr float SLACK = 8;

// 2 to the x for x below 127, 0 below -126. PRECISE: within 2 units in the last place; else within 2^-13 of
// it, for weights that are rounded to bfloat16.
template <bool PRECISE> inline Floats power_of_two(Floats x) {
#if defined(__AVX512DQ__)
    Floats rest = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
    const Floats magic = splat(12582912.f + 127);  // adding 1.5 * 2^23 rounds to an integer
    Floats bounded = larger(splat(-126.f), x), shifted = bounded - .5f + magic;
    Floats rest = bounded - (shifted - magic);
#endif
    Floats y;
    if (PRECISE) {
        y = splat(2.161291532e-4f);
        y = y * rest + 1.246784632e-3f;
        y = y * rest + 9.675451582e-3f;
        y = y * rest + 5.548528061e-2f;
        y = y * rest + 2.402293056e-1f;
        y = y * rest + 6.931470444e-1f;
        y = y * rest + 1.f;
    } else {
        y = splat(7.802451680e-2f);
        y = y * rest + 2.260671637e-1f;
        y = y * rest + 6.958335376e-1f;
        y = y * rest + 9.999252187e-1f;
    }
#if defined(__AVX512DQ__)
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    return x < -126.f ? splat(0.f) : y * (Floats)((Ints)shifted << 23);
#endif
}

// The weights of a chunk take the place of its scores.
inline void store_weights(float* to, const Floats* x) {
    for (int v = 0; v < VECTORS; v++) store(to + v * LANES, x[v]);
}
inline void store_weights(bfloat16* to, const Floats* x) {
#if defined(__AVX512BF16__)
    for (int v = 0; v < VECTORS; v += 2) {
        auto rounded = _mm512_cvtne2ps_pbh((__m512)x[v + 1], (__m512)x[v]);
        memcpy(to + v * LANES, &rounded, sizeof rounded);
    }
#else
    for (int v = 0; v < VECTORS; v++) store(to + v * LANES, x[v]);
#endif
}

// Hides the scores of keys that a query at `position` does not see, of the first `seen`.
inline void hide(float* scores, int base, int position, int seen, int window) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int j = 0; j < CHUNK; j += LANES) {
        Ints key = lane + (base + j);
        Floats x = key >= seen ? splat(HIDDEN) : load(scores + j);
        if (window) x = key <= position - window ? splat(HIDDEN) : x;
        store(scores + j, x);
    }
}

inline void cap(float* scores, float scaling, float softcap) {
    for (int j = 0; j < CHUNK; j += LANES)
        store(scores + j, hyperbolic_tangent(load(scores + j) * (scaling / softcap)) * softcap);
}

// Of one query. `scaling`, which is above 0, makes its scores exponents of 2.
struct Softmax {
    float top = NEVER;
    Floats total = {};

    // Puts weights in the place of scores, and returns what earlier sums of values are to be scaled with.
    template <class W> float weigh(const float* scores, float scaling, W* weights) {
        Floats x[VECTORS], best = splat(HIDDEN), sum = total;
        for (int v = 0; v < VECTORS; v++) x[v] = load(scores + v * LANES), best = larger(best, x[v]);
        float factor = 1;
        if (any_above(best * scaling, top + SLACK)) {
            float highest = largest(best) * scaling;
            if (top != NEVER) factor = power_of_two<true>(splat(top - highest))[0];
            top = highest, sum *= factor;
        }
        for (int v = 0; v < VECTORS; v++) {
            x[v] = power_of_two<std::is_same_v<W, float>>(x[v] * scaling - top);
            sum += x[v];
        }
        store_weights(weights, x);
        total = sum;
        return factor;
    }
};

// Sums of queries over some keys: of weights, which are powers of 2 by scores less `top`, and of values.
struct Sums {
    int rows = 0, width = 0;
    Numbers<float> tops, totals, factors;  // [rows, whole vectors of them]
    Numbers<float> outputs;  // [rows][width]

    // What the softmax of rows has summed.
    void take(const Numbers<Softmax>& softmax) {
        rows = softmax.size();
        for (auto* numbers : {&tops, &totals, &factors}) numbers->resize((rows + LANES - 1) / LANES * LANES);
        for (int row = 0; row < rows; row++)
            tops[row] = softmax[row].top, totals[row] = sum(softmax[row].total);
    }

    // Adds sums over later keys. Where there are no keys, what is there does not change.
    void add(Sums& later) {
        for (int row = 0; row < rows; row += LANES) {
            Floats before = load(&tops[row]), other = load(&later.tops[row]), top = larger(before, other);
            Floats factor = power_of_two<true>(before - top), others = power_of_two<true>(other - top);
            store(&tops[row], top), store(&factors[row], factor), store(&later.factors[row], others);
            store(&totals[row], load(&totals[row]) * factor + load(&later.totals[row]) * others);
        }
        for (int row = 0; row < rows; row++) {
            float factor = factors[row], others = later.factors[row];
            for (int d = row * width; d < (row + 1) * width; d += LANES)
                store(&outputs[d], load(&outputs[d]) * factor + load(&later.outputs[d]) * others);
        }
    }

    // Sets `factors` to what makes outputs of sums: `scale` over the totals. A sink is a score without value.
    void divide(const Numbers<float>& sinks, float scale) {
        for (int row = 0; row < rows; row += LANES) {
            Floats before = load(&tops[row]), sink = load(&sinks[row]), top = larger(before, sink);
            Floats factor = power_of_two<true>(before - top), others = power_of_two<true>(sink - top);
            store(&factors[row], scale * factor / (load(&totals[row]) * factor + others));
        }
    }
};
