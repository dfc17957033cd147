// Samples a row by a race of its tokens, as sampling/sampler.py does. Its docstrings name each
// part's source.
#pragma once
#include "noise.h"
#include "ranking.h"

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

// The output of one row.
struct RowOutput {
    const SamplerOutput& all;
    int rows, row;

    void write(int64_t id, float logprob) const { all.ids[row] = id, all.logprobs[row] = logprob; }
    void write_top(int place, int64_t id, float logprob) const {
        int64_t at = (int64_t)place * rows + row;
        all.top_ids[at] = id, all.top_logprobs[at] = logprob;
    }
};

constexpr RankedToken NO_LAST = {-__FLT_MAX__, __INT32_MAX__, 0};  // no token is ranked lower
constexpr float EARLIEST = -22.2f;  // no noise has a smaller logarithm

struct RowSampler {
    Scores scores;
    Candidates candidates;
    TokenRanking ranking;
    std::vector<float> maxima;

    template <class T>
    void sample(const T* logits, int size, const SampleRequest& request, const RowOutput& to) {
        scores.read(logits, size);
        apply_penalties(scores, request);
        apply_mask(scores, request);
        if (!scores.apply_temperature(request.temperature ? request.temperature : 1))
            return write_nothing(to);
        scores.sum_weights();
        if (request.temperature == 0) write_logprobs(first(), request.num_tops, to);
        else if (request.typical_p < 1) typical_sample(request, to);
        else if (truncates(request)) truncated_sample(request, to);
        else write_logprobs(winner(request, NO_LAST), request.num_tops, to);
        if (request.raw_logprobs) write_logprobs(logits, size, to.all.ids[to.row], request.num_tops, to);
    }

    // The model's own log-probability of a token.
    template <class T>
    void write_logprobs(const T* logits, int size, int64_t id, int num_tops, const RowOutput& to) {
        scores.read(logits, size);
        if (!scores.apply_temperature(1)) return write_nothing(to);
        scores.sum_weights();
        write_logprobs(id, num_tops, to);
    }

    void write_logprobs(int64_t id, int num_tops, const RowOutput& to) {
        float total = log_of(scores.total);
        to.write(id, scores.values[id] - total);
        if (!num_tops) return;
        rank(bound_of(num_tops));
        write_tops(num_tops, ranking.size, total, to);
    }

    // Tokens beyond the first `kept` have -inf.
    void write_tops(int num_tops, int kept, float total, const RowOutput& to) {
        for (int i = 0; i < std::min(num_tops, ranking.size); i++) {
            const RankedToken& token = ranking.at(i);
            to.write_top(i, token.id, i < kept ? token.key - total : EXCLUDED);
        }
    }

    void write_nothing(const RowOutput& to) { to.write(0, __builtin_nanf("")); }

    int first() { return std::find(scores.values.begin(), scores.values.end(), 0.f) - scores.values.begin(); }

    // The token that arrives first, of those that are ranked no lower than `last`.
    int winner(const SampleRequest& request, RankedToken last) {
        Noise noise{request.seed, request.choice, request.index};
        float least = __builtin_inff(), floor = last.key;
        int first = scores.size;
        for (int group = 0; group < scores.padded(); group += DRAWN) {
            if (!reaches(group, floor)) continue;
            for (int begin = 0; begin < RUN; begin += LANES) {
                Words words[4];
                noise.draw(group / 4 + begin, words);
                for (int part = 0; part < 4; part++) {
                    Floats x = load(scores.begin() + group + part * RUN + begin), weights = exponential(x);
                    uint32_t early = bits(below_exponentials(words[part]) < weights * least);
                    for (; early; early &= early - 1) {
                        int lane = __builtin_ctz(early), id = group + part * RUN + begin + lane;
                        float time = exponential_number(words[part][lane]) / weights[lane];
                        if (!last.outranks(x[lane], id) && (time < least || (time == least && id < first)))
                            least = time, first = id, floor = std::max(floor, EARLIEST - std::log(least));
                    }
                }
            }
        }
        return first;
    }

    // Whether a score of a group does.
    bool reaches(int group, float floor) {
        Floats best = splat(EXCLUDED);
        for (int i = group; i < group + DRAWN; i += LANES) best = larger(load(scores.begin() + i), best);
        return largest(best) >= floor;
    }

    void truncated_sample(const SampleRequest& request, const RowOutput& to) {
        int kept = truncate(request);
        int64_t mass = ranking.mass(kept);
        float total = log_of(mass);
        int id = winner(request, ranking.at(kept - 1));
        to.write(id, scores.values[id] - total);
        write_tops(request.num_tops, kept, total, to);
    }

    void typical_sample(const SampleRequest& request, const RowOutput& to) {
        if (truncates(request)) {
            RankedToken last = ranking.at(truncate(request) - 1);
            keep_if([=](float score, int id) { return !last.outranks(score, id); });
        }
        float entropy = scores.entropy();
        candidates.select(scores, -__FLT_MAX__);
        for (int i = 0; i < candidates.size; i++)
            candidates.keys[i] = -std::fabs(candidates.keys[i] + entropy);
        ranking.rank(candidates);
        float nearest =
            ranking.at(ranking.count_until((int64_t)std::ceil(request.typical_p * scores.total)) - 1).key;
        keep_if([=](float score, int) { return -std::fabs(score + entropy) >= nearest; });
        write_logprobs(winner(request, NO_LAST), request.num_tops, to);
    }

    template <class F> void keep_if(F kept) {
        for (int i = 0; i < scores.size; i++)
            if (!kept(scores.values[i], i)) scores.values[i] = EXCLUDED;
        scores.sum_weights();
    }

    static bool truncates(const SampleRequest& request) {
        return request.top_k || request.top_p < 1 || request.lowest > EXCLUDED;
    }

    // How many of its likeliest tokens a row keeps; these are ranked.
    int truncate(const SampleRequest& request) {
        rank(bound_of(request));
        int by_k = request.top_k ? ranking.count(ranking.at(std::min(request.top_k, ranking.size) - 1).key)
                                 : ranking.size;
        double left = request.top_k ? ranking.mass(by_k) : scores.total;
        int by_p = request.top_p < 1
                       ? ranking.count_until(std::max<int64_t>(1, std::ceil(request.top_p * left)))
                       : ranking.size;
        int by_m = ranking.count(request.lowest);
        return std::max(1, std::min({by_k, by_p, by_m}));
    }

    void rank(float bound) {
        candidates.select(scores, bound);
        ranking.rank(candidates);
    }

    // A score below which a row neither keeps a token nor reports one.
    float bound_of(const SampleRequest& request) {
        if (request.top_k) return bound_of(std::max(request.top_k, request.num_tops));
        // All tokens with a smaller share have together less than what top-p leaves out.
        double share = (1 - request.top_p) * scores.total / scores.size;
        float bound = share > 0 ? std::log(share / ONE) - 1e-3 : EXCLUDED;
        bound = std::max(bound, request.lowest);
        return request.num_tops ? std::min(bound, bound_of(request.num_tops)) : bound;
    }

    // A score that at least `count` reach.
    float bound_of(int count) {
        maxima.resize(scores.padded() / 32);
        if (count > (int)maxima.size()) return EXCLUDED;
        for (int begin = 0; begin < scores.padded(); begin += STRETCH) {
            Floats best = splat(EXCLUDED);
            for (int i = begin; i < begin + STRETCH; i += LANES)
                best = larger(load(scores.begin() + i), best);
            store(&maxima[begin / 32], best);
        }
        std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
        return maxima[count - 1];
    }
};

// This thread's sampler, whose memory grows and is kept.
inline RowSampler& thread_sampler() {
    static thread_local RowSampler sampler;
    return sampler;
}
