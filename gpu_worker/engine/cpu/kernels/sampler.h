// A row's choice by inverse transform of its one random number. As gpu_worker/engine/sampling/sampler.py and truncate.py, whose docstrings say where
// each part comes from.
#pragma once
#include "top_k.h"
#include "ranking.h"

// Where the choice of one row goes.
struct Choice {
    const Choices& all;
    int rows, row;

    void is(int64_t id, float logprob) const { all.ids[row] = id, all.logprobs[row] = logprob; }
    void top(int place, int64_t id, float logprob) const {
        all.top_ids[(int64_t)place * rows + row] = id, all.top_logprobs[(int64_t)place * rows + row] = logprob;
    }
};

struct Chooser {
    Scores scores;
    Candidates some;
    Ranking ranking;
    std::vector<float> maxima;

    template <class T> void choose(const T* logits, int size, const Turn& turn, const Choice& to) {
        scores.read(logits, size);
        adjust(scores, turn);
        steer(scores, turn);
        if (!scores.temper(turn.temperature ? turn.temperature : 1)) return nothing(to);
        scores.sum_up();
        if (turn.temperature == 0) tell(first(), turn.num_tops, to);
        else if (turn.typical_p < 1) typically(turn, to);
        else if (truncates(turn)) narrowly(turn, to);
        else tell(drawn(turn.number), turn.num_tops, to);
        if (turn.raw) tell(logits, size, to.all.ids[to.row], turn.num_tops, to);
    }

    // What the model itself says of a token.
    template <class T> void tell(const T* logits, int size, int64_t id, int num_tops, const Choice& to) {
        scores.read(logits, size);
        if (!scores.temper(1)) return nothing(to);
        scores.sum_up();
        tell(id, num_tops, to);
    }

    void tell(int64_t id, int num_tops, const Choice& to) {
        float total = log_of(scores.total);
        to.is(id, scores.values[id] - total);
        if (!num_tops) return;
        rank(bound_of(num_tops));
        tell_tops(num_tops, ranking.size, total, to);
    }

    // Of those beyond the first `kept`, that they cannot come.
    void tell_tops(int num_tops, int kept, float total, const Choice& to) {
        for (int i = 0; i < std::min(num_tops, ranking.size); i++) {
            const Ranked& token = ranking.at(i);
            to.top(i, token.id, i < kept ? token.key - total : OUT);
        }
    }

    void nothing(const Choice& to) { to.is(0, __builtin_nanf("")); }

    int first() { return std::find(scores.values.begin(), scores.values.end(), 0.f) - scores.values.begin(); }

    // Among all tokens.
    int drawn(double number) {
        int64_t target = target_of(number, scores.total);
        int stretch = 0, last = scores.sums.size() - 1;
        while (stretch < last && target >= scores.sums[stretch]) target -= scores.sums[stretch++];
        for (int i = stretch * STRETCH; i < (stretch + 1) * STRETCH; i += LANES) {
            Longs weights = weigh(load(scores.begin() + i)).whole();
            for (int lane = 0; lane < LANES; lane++)
                if ((target -= weights[lane]) < 0) return i + lane;
        }
        return first();
    }

    static int64_t target_of(double number, int64_t total) { return std::min((int64_t)(number * (double)total), total - 1); }

    void narrowly(const Turn& turn, const Choice& to) {
        int kept = truncate(turn);
        int64_t mass = ranking.mass(kept);
        float total = log_of(mass);
        const Ranked& token = ranking.at(ranking.reach(target_of(turn.number, mass) + 1) - 1);
        to.is(token.id, token.key - total);
        tell_tops(turn.num_tops, kept, total, to);
    }

    void typically(const Turn& turn, const Choice& to) {
        if (truncates(turn)) {
            Ranked last = ranking.at(truncate(turn) - 1);
            keep([=](float score, int id) { return score > last.key || (score == last.key && id <= last.id); });
        }
        float entropy = scores.entropy();
        some.take(scores, -__FLT_MAX__);
        for (int i = 0; i < some.size; i++) some.keys[i] = -std::fabs(some.keys[i] + entropy);
        ranking.rank(some);
        float nearest = ranking.at(ranking.reach((int64_t)std::ceil(turn.typical_p * scores.total)) - 1).key;
        keep([=](float score, int) { return -std::fabs(score + entropy) >= nearest; });
        tell(drawn(turn.number), turn.num_tops, to);
    }

    template <class F> void keep(F kept) {
        for (int i = 0; i < scores.size; i++)
            if (!kept(scores.values[i], i)) scores.values[i] = OUT;
        scores.sum_up();
    }

    static bool truncates(const Turn& turn) { return turn.top_k || turn.top_p < 1 || turn.min_p; }

    // How many of its likeliest tokens a row keeps; these are ranked.
    int truncate(const Turn& turn) {
        rank(bound_of(turn));
        int by_k = turn.top_k ? ranking.count(ranking.at(std::min(turn.top_k, ranking.size) - 1).key) : ranking.size;
        double left = turn.top_k ? ranking.mass(by_k) : scores.total;
        int by_p = turn.top_p < 1 ? ranking.reach(std::max<int64_t>(1, std::ceil(turn.top_p * left))) : ranking.size;
        int by_m = ranking.count((float)std::log(turn.min_p));
        return std::max(1, std::min({by_k, by_p, by_m}));
    }

    void rank(float bound) {
        some.take(scores, bound);
        ranking.rank(some);
    }

    // A score below which a row keeps nothing, and tells of nothing.
    float bound_of(const Turn& turn) {
        if (turn.top_k) return bound_of(std::max(turn.top_k, turn.num_tops));
        double share = (1 - turn.top_p) * scores.total / scores.size;  // all that weigh less weigh less than what top-p leaves out
        float bound = std::max(share > 0 ? std::log(share / ONE) - 1e-3 : OUT, std::log(turn.min_p));
        return turn.num_tops ? std::min(bound, bound_of(turn.num_tops)) : bound;
    }

    // A score that at least so many reach.
    float bound_of(int count) {
        maxima.resize(scores.padded() / 32);
        if (count > (int)maxima.size()) return OUT;
        for (int begin = 0; begin < scores.padded(); begin += STRETCH) {
            Floats best = splat(OUT);
            for (int i = begin; i < begin + STRETCH; i += LANES) best = larger(load(scores.begin() + i), best);
            store(&maxima[begin / 32], best);
        }
        std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
        return maxima[count - 1];
    }
};

// Memory of this thread, which grows and stays.
inline Chooser& chooser() {
    static thread_local Chooser own;
    return own;
}
