// LoRA adapters: rows that have one get (row * down) * up on top of a product. Both sums of a row are taken
// in the same order, whatever other rows there are.
#pragma once
#include "phases.h"
#include "products.h"

constexpr int RANKS = 4;  // ranks are multiples of it: so many sums of a row are taken at once
constexpr int TOGETHER = 4;  // rows that share what is read of an adapter

// Products that are summed in lanes: of numbers as they are widened, or of pairs of bfloat16.
template <class T, class F> struct Lanes {
    static constexpr int COUNT = LANES;
    typedef Floats Numbers;
    template <class N> static Numbers numbers(const N* from) { return load(from); }
    static Floats add(Floats sum, Numbers a, Numbers b) { return sum + a * b; }
};
#if defined(__AVX512BF16__)
template <> struct Lanes<bfloat16, bfloat16> {
    static constexpr int COUNT = 2 * LANES;
    typedef __m512bh Numbers;
    static Numbers numbers(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Floats add(Floats sum, Numbers a, Numbers b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b);
    }
};
#endif

// Of rows and ranks [N][RANKS]: the sums over all inputs.
template <int N, class T, class F>
void shrink_ranks(const F* const* rows, int inputs, const T* down, float (*to)[RANKS]) {
    typedef Lanes<T, F> L;
    Floats total[N][RANKS] = {};
    float rest[N][RANKS] = {};
    int k = 0;
    for (; k + L::COUNT <= inputs; k += L::COUNT) {
        typename L::Numbers weights[RANKS];
        for (int r = 0; r < RANKS; r++) weights[r] = L::numbers(down + (int64_t)r * inputs + k);
        for (int n = 0; n < N; n++) {
            typename L::Numbers numbers = L::numbers(rows[n] + k);
            for (int r = 0; r < RANKS; r++) total[n][r] = L::add(total[n][r], numbers, weights[r]);
        }
    }
    for (; k < inputs; k++)
        for (int n = 0; n < N; n++)
            for (int r = 0; r < RANKS; r++)
                rest[n][r] += load_one(rows[n] + k) * load_one(down + (int64_t)r * inputs + k);
    for (int n = 0; n < N; n++)
        for (int r = 0; r < RANKS; r++) to[n][r] = sum(total[n][r]) + rest[n][r];
}

// rows [all tokens][inputs] → shrunk [all tokens][max_rank], of the rows of a run.
template <int N, class T, class F> void shrink_some(const Adapters& adapters, const int32_t* tokens,
    const F* rows, int inputs, const LowRank& matrices, float* shrunk) {
    const F* own[N];
    float sums[N][RANKS];
    for (int n = 0; n < N; n++) own[n] = rows + (int64_t)tokens[n] * inputs;
    for (int r = 0; r < matrices.rank; r += RANKS) {
        shrink_ranks<N>(own, inputs, (const T*)matrices.down + (int64_t)r * inputs, sums);
        for (int n = 0; n < N; n++)
            std::copy(sums[n], sums[n] + RANKS, shrunk + (int64_t)tokens[n] * adapters.max_rank + r);
    }
}

template <class T, class F> void shrink_run(
    const Adapters& adapters, const Run& run, const F* rows, const Linear& linear, float* shrunk) {
    const LowRank& matrices = adapters.matrices[run.slot * adapters.num_linears + linear.number];
    const int32_t* tokens = adapters.order + run.first;
    int left = run.count;
    for (; left >= TOGETHER; left -= TOGETHER, tokens += TOGETHER)
        shrink_some<TOGETHER, T>(adapters, tokens, rows, linear.inputs, matrices, shrunk);
    for (; left >= 2; left -= 2, tokens += 2)
        shrink_some<2, T>(adapters, tokens, rows, linear.inputs, matrices, shrunk);
    if (left) shrink_some<1, T>(adapters, tokens, rows, linear.inputs, matrices, shrunk);
}

// What linear layers with the same input, one after the other, add to their products.
struct Shrunk {
    const Adapters* adapters = nullptr;  // null: nothing
    float* numbers = nullptr;  // [linear layers][tokens][max_rank]
    int64_t stride = 0;  // from one layer to the next
    Shrunk of(int place) const { return {adapters, numbers + place * stride, stride}; }
};

inline bool is_used(const Adapters& adapters, std::initializer_list<const Linear*> linears) {
    for (const Linear* linear : linears)
        if (adapters.used[linear->number]) return true;
    return false;
}

template <class T, class F> Shrunk shrink(Phases& phases, const Adapters* adapters, const F* rows,
    int num_rows, std::initializer_list<const Linear*> linears, float* numbers) {
    if (!adapters || !is_used(*adapters, linears)) return {};
    Shrunk shrunk{adapters, numbers, (int64_t)num_rows * adapters->max_rank};
    int count = linears.size();
    phases.run(adapters->num_runs * count, [&](int unit) {
        const Linear& linear = *linears.begin()[unit % count];
        shrink_run<T>(*adapters, adapters->runs[unit / count], rows, linear, shrunk.of(unit % count).numbers);
    });
    return shrunk;
}

template <class T, int N> void expand_some(
    const float* const* shrunk, const T* up, int rank, float* const* sums) {
    Floats total[N][WIDTH<T>];
    for (int n = 0; n < N; n++)
        for (int w = 0; w < WIDTH<T>; w++) total[n][w] = load(sums[n] + w * LANES);
    for (int r = 0; r < rank; r++, up += PANEL<T>)
        for (int w = 0; w < WIDTH<T>; w++) {
            Floats weights = load(up + w * LANES);
            for (int n = 0; n < N; n++) total[n][w] += shrunk[n][r] * weights;
        }
    for (int n = 0; n < N; n++)
        for (int w = 0; w < WIDTH<T>; w++) store(sums[n] + w * LANES, total[n][w]);
}

// Calls `each(matrices, up)` for the adapters of a step that change a layer: what `up` has for a panel.
template <class T, class F>
void for_panel(const Adapters& adapters, const Linear& linear, int panel, F each) {
    if (!adapters.used[linear.number]) return;
    for (int i = 0; i < adapters.num_runs; i++) {
        const Run& run = adapters.runs[i];
        const LowRank& matrices = adapters.matrices[run.slot * adapters.num_linears + linear.number];
        if (matrices.rank)
            each(run, matrices.rank, (const T*)matrices.up + (int64_t)panel * matrices.rank * PANEL<T>);
    }
}

// Adds to the sums [count][PANEL<T>] of rows from `first` on what their adapters give to a panel.
template <class T>
void expand(const Shrunk& shrunk, const Linear& linear, int panel, int first, int count, float* sums) {
    const Adapters& adapters = *shrunk.adapters;
    for_panel<T>(adapters, linear, panel, [&](const Run& run, int rank, const T* up) {
        const int32_t *token = adapters.order + run.first, *end = token + run.count;
        while (token < end && *token < first) token++;
        while (token < end && *token < first + count) {
            const float* own[TOGETHER];
            float* to[TOGETHER];
            int some = 0;
            for (; some < TOGETHER && token < end && *token < first + count; some++, token++) {
                own[some] = shrunk.numbers + (int64_t)*token * adapters.max_rank;
                to[some] = sums + (*token - first) * PANEL<T>;
            }
            if (some == 4) expand_some<T, 4>(own, up, rank, to);
            else if (some == 3) expand_some<T, 3>(own, up, rank, to);
            else if (some == 2) expand_some<T, 2>(own, up, rank, to);
            else expand_some<T, 1>(own, up, rank, to);
        }
    });
}

// What `panel_product` adds.
template <class T> struct Expand {
    Shrunk shrunk;
    void operator()(const Linear& linear, int panel, int first, int count, float* sums) const {
        if (shrunk.adapters) expand<T>(shrunk, linear, panel, first, count, sums);
    }
    // What lies scattered in memory comes while the product is computed.
    void prefetch(const Linear& linear, int panel) const {
        if (!shrunk.adapters) return;
        int slot = -1;
        for_panel<T>(*shrunk.adapters, linear, panel, [&](const Run& run, int rank, const T* up) {
            if (run.slot == slot) return;
            slot = run.slot;
            int size = rank * PANEL<T> * (int)sizeof(T);
            for (int i = 0; i < size; i += 64) __builtin_prefetch((const char*)up + i);
        });
    }
};

// Adds to the outputs [rows][outputs] of a linear layer what the rows' adapters give.
template <class T, class U>
void adapt(int threads, const T* rows, int num_rows, const Linear& linear, const Adapters& adapters, U* out) {
    static Buffer<float> numbers;
    numbers.fit((int64_t)num_rows * adapters.max_rank);
    Progress progress(threads);
#pragma omp parallel num_threads(threads)
    {
        Phases phases(progress);
        Shrunk shrunk = shrink<T>(phases, &adapters, rows, num_rows, {&linear}, numbers.begin());
        phases.run(num_panels<T>(linear), [&](int panel) {
            alignas(64) float sums[GROUP * PANEL<T>];
            int width = std::min(PANEL<T>, linear.outputs - panel * PANEL<T>);
            for (int row = 0; row < num_rows; row += GROUP) {
                int count = std::min(GROUP, num_rows - row);
                std::fill(sums, sums + count * PANEL<T>, 0.f);
                expand<T>(shrunk, linear, panel, row, count, sums);
                for (int n = 0; n < count; n++) {
                    if (adapters.slots[row + n] < 0) continue;
                    U* to = out + (int64_t)(row + n) * linear.outputs + panel * PANEL<T>;
                    float* own = sums + n * PANEL<T>;
                    for (int j = 0; j < width; j++) own[j] += load_one(to + j);
                    store_row(to, own, width);
                }
            }
        });
    }
}
