// A row of logits as scores, and their weights: penalties, temperature, sums. As sampling/sampler.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "structs.h"
#include "vector.h"

constexpr int STRETCH = 32 * LANES;  // scores whose weights are summed together
constexpr float EXCLUDED = -__builtin_inff();
constexpr double ONE =
    1099511627776.;  // 2^40, the likeliest's weight: 2^23 tokens as likely fit into 64 bits
constexpr float ROOT = 1048576.f;  // 2^20

typedef int64_t Longs __attribute__((vector_size(8 * LANES)));

// Numbers from 0 to 1 in units of 2^-40: whole units of 2^-20, and the rest, so that vectors can sum them.
struct Weights {
    Ints high, low;
    Longs whole() const {
        return (__builtin_convertvector(high, Longs) << 20) + __builtin_convertvector(low, Longs);
    }
};
inline Weights to_fixed_point(Floats numbers) {
    Floats units = numbers * ROOT;
    Ints high = __builtin_convertvector(units, Ints);
    return {high, __builtin_convertvector((units - __builtin_convertvector(high, Floats)) * ROOT, Ints)};
}
// NaN has no weight.
inline Weights weights_of(Floats scores) {
    return to_fixed_point(scores > -28.f ? exponential(scores) : splat(0.f));
}
// p log p, for an entropy.
inline Weights information_of(Floats scores) {
    return to_fixed_point(scores > -80.f ? exponential(scores) * -scores : splat(0.f));
}
inline int64_t sum(Ints x) {
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

inline float log_of(int64_t weights) { return (float)std::log((double)weights / ONE); }

// Whole stretches of scores; NaN after the vocabulary and where the model's logit is NaN: such a token is
// never sampled.
struct Scores {
    std::vector<float> values;
    std::vector<int64_t> sums;  // of each stretch's weights
    int size = 0;
    int64_t total = 0;

    float* begin() { return values.data(); }
    int padded() const { return (int)sums.size() * STRETCH; }

    template <class T> void read(const T* logits, int count) {
        size = count;
        sums.resize((size + STRETCH - 1) / STRETCH);
        values.resize(padded());
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(begin() + i, load(logits + i));
        for (; i < size; i++) values[i] = load_one(logits + i);
        std::fill(values.begin() + size, values.end(), __builtin_nanf(""));
    }

    float maximum() {
        Floats best = splat(EXCLUDED);
        for (int i = 0; i < padded(); i += LANES) best = larger(load(begin() + i), best);
        return largest(best);
    }

    // The likeliest token's score becomes 0, so no temperature makes others overflow. False where no score is
    // a number that others can be compared with.
    bool apply_temperature(float temperature) {
        float top = maximum();
        if (!std::isfinite(top)) return false;
        for (int i = 0; i < padded(); i += LANES) store(begin() + i, (load(begin() + i) - top) / temperature);
        return true;
    }

    template <class F> int64_t sum_of(int stretch, F parts) {
        Ints high = {}, low = {};
        for (int i = stretch * STRETCH; i < (stretch + 1) * STRETCH; i += LANES) {
            Weights some = parts(load(begin() + i));
            high += some.high, low += some.low;
        }
        return (sum(high) << 20) + sum(low);
    }

    void sum_weights() {
        total = 0;
        for (int stretch = 0; stretch < (int)sums.size(); stretch++)
            total += sums[stretch] = sum_of(stretch, weights_of);
    }

    // The entropy less the logarithm of the total, as scores are.
    float entropy() {
        int64_t information = 0;
        for (int stretch = 0; stretch < (int)sums.size(); stretch++)
            information += sum_of(stretch, information_of);
        return (float)information / (float)total;
    }
};

// Of one row.
struct SampleRequest {
    uint64_t seed;
    uint32_t choice, index;  // with the seed they decide the row's random numbers
    double typical_p, top_p;
    float temperature, repetition, lowest;
    int32_t top_k, raw_logprobs, num_tops, num_masked;
    const int32_t *parts, *ids, *mask;
    const float* values;

    SampleRequest(const SamplingArguments& from, int n)
        : seed(from.seed[n]), choice(from.choice[n]), index(from.index[n]), typical_p(from.typical_p[n]),
          top_p(from.top_p[n]), temperature(from.temperature[n]), repetition(from.repetition[n]),
          lowest(from.lowest[n]), top_k(from.top_k[n]), raw_logprobs(from.raw_logprobs[n]),
          num_tops(from.num_tops[n]), num_masked(from.mask[2 * n + 1]), parts(from.parts + n * (PARTS + 1)),
          ids(from.ids), mask(from.masks + from.mask[2 * n]), values(from.values) {}
};

// Of one part of a row's ids. An id outside the model's vocabulary is never sampled.
template <class F> void each(const SampleRequest& request, int part, Scores& scores, F change) {
    for (int i = request.parts[part]; i < request.parts[part + 1]; i++)
        if (request.ids[i] < scores.size) change(scores.values[request.ids[i]], request.values[i]);
}

// Logit bias, watermark, bans; then penalties.
inline void apply_penalties(Scores& scores, const SampleRequest& request) {
    for (int part = 0; part < PARTS - 1; part++)
        each(request, part, scores, [](float& score, float value) { score += value; });
    each(request, PARTS - 1, scores, [&](float& score, float value) {
        score = (score < 0 ? score * request.repetition : score / request.repetition) - value;
    });
}

// The tokens that a grammar, or a list of ids, allows; those after the mask's end stay as they are.
inline void apply_mask(Scores& scores, const SampleRequest& request) {
    for (int i = 0; i < std::min(request.num_masked, scores.size); i++)
        if (!(request.mask[i / 32] >> i % 32 & 1)) scores.values[i] = EXCLUDED;
}
