#pragma once
#include <cmath>
#include "vector.h"

// The first of the largest logits, and the logarithm of its probability.
template <class T> void argmax(const T* logits, int size, int64_t* id, float* logprob) {
    Floats best = splat(-__builtin_inff());
    Ints where = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        Floats x = load(logits + i);
        where = x > best ? Ints{} + i : where;
        best = x > best ? x : best;
    }
    float top = -__builtin_inff();
    int64_t first = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t at = where[lane] + lane;
        if (best[lane] > top || (best[lane] == top && at < first)) top = best[lane], first = at;
    }
    for (; i < size; i++)
        if (load_one(logits + i) > top) top = load_one(logits + i), first = i;
    Floats totals = {};
    float rest = 0;
    for (i = 0; i + LANES <= size; i += LANES) totals += exponential(load(logits + i) - top);
    for (; i < size; i++) rest += std::exp(load_one(logits + i) - top);
    *id = first, *logprob = -std::log(sum(totals) + rest);
}
