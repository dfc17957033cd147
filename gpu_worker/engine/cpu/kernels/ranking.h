// Tokens in the order of a key, without sorting them all: they lie in buckets by key, and a bucket is sorted
// when it is read.
#pragma once
#include <algorithm>
#include <vector>
#include "scores.h"

// A part of a row's tokens, by id; `keys` are what they are ranked by, none above 0.
struct Candidates {
    std::vector<float> keys;
    std::vector<int32_t> ids;
    std::vector<int64_t> weights;
    int size = 0;

    void reserve(int count) {
        if ((int)keys.size() < count + LANES)
            keys.resize(count + LANES), ids.resize(count + LANES), weights.resize(count + LANES);
    }

    float lowest() const {
        Floats most = {};
        for (int i = 0; i < size; i += LANES) most = larger(-load(&keys[i]), most);
        return -largest(most);
    }

    // Those whose score is not below the bound.
    void select(const Scores& scores, float bound) {
        reserve(scores.padded());
        const float* x = scores.values.data();
        int count = 0;
        for (int begin = 0; begin < scores.padded(); begin += LANES)
            for (uint32_t above = bits(load(x + begin) >= bound); above; above &= above - 1, count++) {
                ids[count] = begin + __builtin_ctz(above);
                keys[count] = x[ids[count]];
            }
        size = count;
        std::fill_n(keys.begin() + size, LANES, 0.f);
        for (int i = 0; i < size; i += LANES) {
            Longs some = weights_of(load(&keys[i])).whole();
            memcpy(&weights[i], &some, sizeof some);
        }
    }
};

struct RankedToken {
    float key;
    int32_t id;
    int64_t weight;

    bool outranks(float other, int other_id) const { return key > other || (key == other && id < other_id); }
};

struct TokenRanking {
    static constexpr int BUCKETS = 1024;
    static constexpr float DEEPEST = 28;  // keys below -DEEPEST have no weight
    std::vector<RankedToken> tokens;
    int32_t starts[BUCKETS + 1];
    int64_t masses[BUCKETS + 1];  // of all buckets before one
    bool sorted[BUCKETS];
    float scale;
    int size;

    // Never rises with the key.
    int bucket(float key) const { return (int)std::min(-key * scale, BUCKETS - 1.f); }

    void rank(const Candidates& from) {
        size = from.size;
        if ((int)tokens.size() < size) tokens.resize(size);
        scale = BUCKETS / std::min(std::max(-from.lowest(), 1e-3f), DEEPEST);
        std::fill_n(starts, BUCKETS + 1, 0);
        std::fill_n(masses, BUCKETS + 1, 0);
        std::fill_n(sorted, BUCKETS, false);
        for (int i = 0; i < size; i++) {
            int place = bucket(from.keys[i]) + 1;
            starts[place]++, masses[place] += from.weights[i];
        }
        for (int place = 0; place < BUCKETS; place++)
            starts[place + 1] += starts[place], masses[place + 1] += masses[place];
        int32_t next[BUCKETS];
        std::copy_n(starts, BUCKETS, next);
        for (int i = 0; i < size; i++)
            tokens[next[bucket(from.keys[i])]++] = {from.keys[i], from.ids[i], from.weights[i]};
    }

    void sort(int bucket) {
        if (sorted[bucket]) return;
        auto before = [](const RankedToken& a, const RankedToken& b) { return a.outranks(b.key, b.id); };
        RankedToken *begin = tokens.data() + starts[bucket], *end = tokens.data() + starts[bucket + 1];
        if (!std::is_sorted(begin, end, before)) std::sort(begin, end, before);
        sorted[bucket] = true;
    }

    const RankedToken& at(int place) {
        int bucket = std::upper_bound(starts, starts + BUCKETS + 1, place) - starts - 1;
        sort(bucket);
        return tokens[place];
    }

    // Weight of the first `count`.
    int64_t mass(int count) {
        int bucket = std::lower_bound(starts, starts + BUCKETS, count) - starts - 1;
        if (count == starts[bucket + 1]) return masses[bucket + 1];
        sort(bucket);
        int64_t mass = masses[bucket];
        for (int i = starts[bucket]; i < count; i++) mass += tokens[i].weight;
        return mass;
    }

    // How many of the first weigh at least `mass` together; all where they never do.
    int count_until(int64_t mass) {
        int bucket = std::lower_bound(masses + 1, masses + BUCKETS + 1, mass) - masses - 1;
        if (bucket == BUCKETS) return size;
        sort(bucket);
        int count = starts[bucket];
        for (int64_t so_far = masses[bucket]; so_far < mass && count < starts[bucket + 1]; count++)
            so_far += tokens[count].weight;
        return count;
    }

    // How many have a key that is not below this one.
    int count(float key) const {
        int last = bucket(key), count = starts[last];
        for (int i = starts[last]; i < starts[last + 1]; i++) count += tokens[i].key >= key;
        return count;
    }
};
