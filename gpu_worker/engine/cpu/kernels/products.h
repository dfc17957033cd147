// Products of rows with weights that are packed in panels of PANEL outputs: [panels][inputs / P][PANEL][P].
// An output is one sum over its inputs in their order, however many rows there are: so its bits depend on its
// own row only.
#pragma once
#include <algorithm>
#include "blocks.h"
#include "rounded.h"
#include "structs.h"
#include "vector.h"

template <class T> constexpr int PANEL = WIDTH<T> * LANES;
constexpr int AHEAD = 4096;  // bytes of weights prefetched in advance
// So few rows are multiplied faster with blocks than plain weights; of float32, which are eight times as many
// bytes, any number is.
template <class T> constexpr int FEW = std::is_same_v<T, float> ? INT32_MAX : BY_TILES<T> ? TILE : 4;
// So few with blocks expanded in registers: where there are 16 of these, the sums of more rows do not fit.
template <class T> constexpr int FEWEST = BY_TILES<T> || LANES == 8 ? 1 : 4;
constexpr int GROUP = 128;  // rows for which a chunk of blocks is expanded once
static_assert(GROUP % ROWS == 0 && GROUP % (2 * TILE) == 0);

// Rows as they are multiplied: tiles take them as they are, and need whole tiles of rows in memory.
template <class T> using Input = std::conditional_t<BY_TILES<T>, T, Factor<T>>;

// Rows of a layer, and the same rounded to 8 bits where the layer takes them so.
template <class T> struct Rows {
    const Input<T>* numbers;
    const Grain* rounded = nullptr;
    Rows from(int64_t row, int inputs) const {
        return {numbers + row * inputs, rounded + row * (inputs / GRAIN)};
    }
};
inline int64_t rows_in_memory(int64_t rows) { return HAS_TILES ? (rows + TILE - 1) / TILE * TILE : rows; }

// Memory of rows, which grows and is kept.
template <class N> struct Buffer {
    Numbers<N> numbers;
    N* fit(int64_t count) {
        if ((int64_t)numbers.size() < count) numbers.resize(count);
        return numbers.data();
    }
    N* begin() { return numbers.data(); }
};

template <class T> int num_panels(const Linear& linear) { return (linear.outputs + PANEL<T> - 1) / PANEL<T>; }

template <class T> void pack(const T* weight, int outputs, int inputs, T* packed) {
    constexpr int P = Pairs<T>::P;
    int panels = (outputs + PANEL<T> - 1) / PANEL<T>;
#pragma omp parallel for
    for (int panel = 0; panel < panels; panel++) {
        T* to = packed + (int64_t)panel * PANEL<T> * inputs;
        for (int j = 0; j < PANEL<T>; j++) {
            int output = panel * PANEL<T> + j;
            for (int k = 0; k < inputs; k++)
                to[(int64_t)(k / P * PANEL<T> + j) * P + k % P] =
                    output < outputs ? weight[(int64_t)output * inputs + k] : T{};
        }
    }
}

// Adds the products of N rows, `stride` numbers apart, and `inputs` inputs of a panel to sums [N][PANEL<T>].
// WEIGHTS_AHEAD: bytes of weights prefetched in advance.
template <class T, int WEIGHTS_AHEAD, int N>
void multiply(const Factor<T>* rows, int stride, int inputs, const T* panel, float* sums) {
    constexpr int P = Pairs<T>::P;
    Floats total[N][WIDTH<T>];
    for (int n = 0; n < N; n++)
        for (int w = 0; w < WIDTH<T>; w++) total[n][w] = load(sums + n * PANEL<T> + w * LANES);
    for (int k = 0; k < inputs; k += P, panel += PANEL<T> * P) {
        if (WEIGHTS_AHEAD)
            for (int w = 0; w < WIDTH<T>; w++)
                __builtin_prefetch((const char*)(panel + w * LANES * P) + WEIGHTS_AHEAD);
#pragma GCC unroll 2
        for (int part = 0; part < Pairs<T>::PARTS; part++) {
            decltype(Pairs<T>::part(panel, part)) weights[WIDTH<T>];
            for (int w = 0; w < WIDTH<T>; w++) {
                weights[w] = Pairs<T>::part(panel + w * LANES * P, part);
                keep_in_register(weights[w]);
            }
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
#pragma GCC unroll 3
                for (int w = 0; w < WIDTH<T>; w++)
                    total[n][w] = Pairs<T>::multiply(
                        total[n][w], weights[w], rows + (int64_t)n * stride + k + part);
        }
    }
    for (int n = 0; n < N; n++)
        for (int w = 0; w < WIDTH<T>; w++) store(sums + n * PANEL<T> + w * LANES, total[n][w]);
}

template <class T, int WEIGHTS_AHEAD, int N = ROWS>
void multiply_few(int count, const Factor<T>* rows, int stride, int inputs, const T* panel, float* sums) {
    if (count == N) return multiply<T, WEIGHTS_AHEAD, N>(rows, stride, inputs, panel, sums);
    if constexpr (N > 1)
        multiply_few<T, WEIGHTS_AHEAD, N - 1>(count, rows, stride, inputs, panel, sums);
}

// As `multiply`, for up to 2 * TILE rows.
template <int WEIGHTS_AHEAD>
void multiply_by_tiles(
    int count, const bfloat16* rows, int stride, int inputs, const bfloat16* panel, float* sums) {
    constexpr int C = WIDTH<bfloat16>, OUTPUTS = PANEL<bfloat16>;
    auto prefetch = [=](int k) {
        const bfloat16* ahead = panel + k * OUTPUTS + WEIGHTS_AHEAD / sizeof(bfloat16);
        if (WEIGHTS_AHEAD)
            for (int i = 0; i < TILE_INPUTS * OUTPUTS; i += TILE_INPUTS) __builtin_prefetch(ahead + i);
    };
    auto add = count > TILE ? add_product<2, C, decltype(prefetch)> : add_product<1, C, decltype(prefetch)>;
    add({rows, stride}, inputs, {panel, 2 * OUTPUTS}, {sums, OUTPUTS}, prefetch);
}

template <class T, int WEIGHTS_AHEAD>
void multiply_rows(int count, const Input<T>* rows, int stride, int inputs, const T* panel, float* sums) {
    constexpr int SOME = BY_TILES<T> ? 2 * TILE : ROWS;
    for (int row = 0; row < count; row += SOME) {
        int some = std::min(SOME, count - row);
        const Input<T>* from = rows + (int64_t)row * stride;
        float* to = sums + row * PANEL<T>;
        if constexpr (!BY_TILES<T>) multiply_few<T, WEIGHTS_AHEAD>(some, from, stride, inputs, panel, to);
        else if (row == 0) multiply_by_tiles<WEIGHTS_AHEAD>(some, from, stride, inputs, panel, to);
        else multiply_by_tiles<0>(some, from, stride, inputs, panel, to);
    }
}

template <class T, int N = FEWEST<T>>
void multiply_few_expanding(
    int count, const Factor<T>* rows, const Linear& linear, int panel, float* sums) {
    if (count == N) return multiply_expanding<T, N>(rows, linear.inputs, linear, panel, sums);
    if constexpr (N > 1) multiply_few_expanding<T, N - 1>(count, rows, linear, panel, sums);
}

// More rows share a chunk of weights, expanded into memory that stays in the first cache.
template <class T>
void multiply_blocks(const Input<T>* rows, int count, const Linear& linear, int panel, float* sums) {
    if (count <= FEWEST<T>) {
        if constexpr (BY_TILES<T>) return multiply_expanding_in_runs(rows, linear, panel, sums);
        else return multiply_few_expanding<T>(count, rows, linear, panel, sums);
    }
    alignas(64) T weights[EXPANDED<T> * PANEL<T>];
    for (int k = 0; k < linear.inputs; k += EXPANDED<T>) {
        int some = std::min(EXPANDED<T>, linear.inputs - k);
        expand(linear, panel, k, some, weights);
        multiply_rows<T, 0>(count, rows + k, linear.inputs, some, weights, sums);
    }
}

// The sums of up to GROUP rows and a panel, with the bias.
template <class T>
void panel_sums(Rows<T> rows, int count, const Linear& linear, int panel, float* sums) {
    int inputs = linear.inputs;
    std::fill(sums, sums + count * PANEL<T>, 0.f);
    if (is_rounded<T>(linear)) multiply_rounded_rows<T>(count, rows.rounded, linear, panel, sums);
    else if (linear.packed && !(linear.blocks.bits && count <= FEW<T>)) {
        const T* packed = (const T*)linear.packed + (int64_t)panel * PANEL<T> * inputs;
        multiply_rows<T, AHEAD>(count, rows.numbers, inputs, inputs, packed, sums);
    } else multiply_blocks<T>(rows.numbers, count, linear, panel, sums);
    if (linear.bias)
        for (int n = 0; n < count; n++)
            for (int w = 0; w < WIDTH<T>; w++)
                store(sums + n * PANEL<T> + w * LANES,
                    load(sums + n * PANEL<T> + w * LANES) + load(linear.bias + panel * PANEL<T> + w * LANES));
}

template <class T> void store_row(T* to, const float* sums, int count) {
    int j = 0;
    for (; j + LANES <= count; j += LANES) store(to + j, load(sums + j));
    for (; j < count; j++) store_one(to + j, sums[j]);
}

// Adds nothing to the sums of rows.
struct Nothing {
    void operator()(const Linear&, int /*panel*/, int /*first*/, int /*count*/, float*) const {}
    void prefetch(const Linear&, int /*panel*/) const {}
};

// rows [num_rows][inputs] → out [num_rows][stride], on top of `residual` where there is one. `add` adds to
// sums [count][PANEL<T>] of rows from `first` on.
template <class T, class U, class A = Nothing> void panel_product(Rows<T> rows, int num_rows,
    const Linear& linear, int panel, U* out, int64_t stride, const T* residual, A add = {}) {
    alignas(64) float sums[GROUP * PANEL<T>];
    int width = std::min(PANEL<T>, linear.outputs - panel * PANEL<T>);
    add.prefetch(linear, panel);
    for (int row = 0; row < num_rows; row += GROUP) {
        int count = std::min(GROUP, num_rows - row);
        panel_sums<T>(rows.from(row, linear.inputs), count, linear, panel, sums);
        add(linear, panel, row, count, sums);
        for (int n = 0; n < count; n++) {
            int64_t at = (row + n) * stride + panel * PANEL<T>;
            if (residual)
                for (int j = 0; j < width; j++) sums[n * PANEL<T> + j] += load_one(residual + at + j);
            store_row(out + at, sums + n * PANEL<T>, width);
        }
    }
}

inline Floats sigmoid_linear(Floats x) { return x / (1.f + exponential(-x)); }

// silu(gate) * up of a panel → out [num_rows][outputs]
template <class T, class A> void panel_gated(Rows<T> rows, int num_rows, const Linear& gate,
    const Linear& up, int panel, Input<T>* out, A add_to_gate, A add_to_up) {
    alignas(64) float gates[GROUP * PANEL<T>], ups[GROUP * PANEL<T>];
    int width = std::min(PANEL<T>, gate.outputs - panel * PANEL<T>);
    add_to_gate.prefetch(gate, panel);
    add_to_up.prefetch(up, panel);
    for (int row = 0; row < num_rows; row += GROUP) {
        int count = std::min(GROUP, num_rows - row);
        panel_sums<T>(rows.from(row, gate.inputs), count, gate, panel, gates);
        panel_sums<T>(rows.from(row, up.inputs), count, up, panel, ups);
        add_to_gate(gate, panel, row, count, gates);
        add_to_up(up, panel, row, count, ups);
        for (int n = 0; n < count; n++) {
            for (int j = n * PANEL<T>; j < (n + 1) * PANEL<T>; j += LANES)
                store(gates + j, sigmoid_linear(load(gates + j)) * load(ups + j));
            int64_t at = (int64_t)(row + n) * gate.outputs + panel * PANEL<T>;
            store_row(out + at, gates + n * PANEL<T>, width);
        }
    }
}
