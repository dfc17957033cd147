// One decoder layer, all threads through all of it: between its parts they wait for each other, and nothing else happens.
#pragma once
#include <cmath>
#include "attention.h"
#include "products.h"

template <class T> void normalise(const Norm& norm, const T* from, int size, T* to) {
    Floats squares = {};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(from + i) * load(from + i);
    for (; i < size; i++) rest += load_one(from + i) * load_one(from + i);
    float scale = 1 / std::sqrt((sum(squares) + rest) / size + norm.epsilon);
    for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(from + i) * scale * load(norm.weight + i));
    for (; i < size; i++) store_one(to + i, load_one(from + i) * scale * norm.weight[i]);
}

template <class T> void rotate(const T* cosines, const T* sines, int size, T* head) {
    int half = size / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load(head + i), b = load(head + half + i);
        store(head + i, a * load(cosines + i) - b * load(sines + i));
        store(head + half + i, b * load(cosines + half + i) + a * load(sines + half + i));
    }
    for (; i < half; i++) {
        float a = load_one(head + i), b = load_one(head + half + i);
        store_one(head + i, a * load_one(cosines + i) - b * load_one(sines + i));
        store_one(head + half + i, b * load_one(cosines + half + i) + a * load_one(sines + half + i));
    }
}

// Memory for what lies between the parts; it grows and stays.
template <class T> struct Between {
    std::vector<T> normed, projected, attended, gated;
    void fit(int64_t rows, const Layer& layer) {
        auto grow = [](std::vector<T>& to, int64_t size) { if ((int64_t)to.size() < size) to.resize(size); };
        grow(normed, rows * layer.q.inputs);
        grow(projected, rows * (layer.q.outputs + layer.k.outputs + layer.v.outputs));
        grow(attended, rows * layer.o.inputs);
        grow(gated, rows * layer.gate.outputs);
    }
};

// Q and K of a token's heads are normed and rotated, K and V written to their page.
template <class T> void place(const Step& step, const Layer& layer, int token, const T* cosines, const T* sines, T* query) {
    const Cache& cache = layer.cache;
    T *key = query + layer.q.outputs, *value = key + layer.k.outputs;
    auto ready = [&](T* head, const Norm& norm) {
        if (norm.weight) normalise(norm, head, cache.key_dim, head);
        if (layer.rotary) rotate(cosines + (int64_t)token * layer.rotary, sines + (int64_t)token * layer.rotary, layer.rotary, head);
    };
    for (int h = 0; h < cache.kv_heads * cache.group; h++) ready(query + h * cache.key_dim, layer.of_query);
    for (int h = 0; h < cache.kv_heads; h++) {
        ready(key + h * cache.key_dim, layer.of_key);
        write<T>(step, cache, token, h, key + h * cache.key_dim, value + h * cache.value_dim);
    }
}

// in [tokens][hidden], cosines and sines [tokens][rotary] → out [tokens][hidden]
template <class T> void run_layer(const Step& step, const Layer& layer, const T* in, const T* cosines, const T* sines, T* out) {
    static Between<T> between;
    between.fit(step.num_tokens, layer);
    T *normed = between.normed.data(), *projected = between.projected.data(), *attended = between.attended.data();
    T* gated = between.gated.data();
    int rows = step.num_tokens, hidden = layer.q.inputs, stride = layer.q.outputs + layer.k.outputs + layer.v.outputs;
    int q_panels = num_panels(layer.q), k_panels = num_panels(layer.k), v_panels = num_panels(layer.v);
#pragma omp parallel num_threads(step.threads)
    {
        int thread = thread_number(), threads = step.threads;
        for (int row = thread; row < rows; row += threads)
            normalise(layer.before_attention, in + (int64_t)row * hidden, hidden, normed + (int64_t)row * hidden);
#pragma omp barrier
        own_panels(q_panels + k_panels + v_panels, thread, threads, [&](int panel) {
            const Linear& linear = panel < q_panels ? layer.q : panel < q_panels + k_panels ? layer.k : layer.v;
            T* to = projected + (&linear == &layer.q ? 0 : &linear == &layer.k ? layer.q.outputs : layer.q.outputs + layer.k.outputs);
            panel -= &linear == &layer.q ? 0 : &linear == &layer.k ? q_panels : q_panels + k_panels;
            panel_product<T>(normed, rows, linear, panel, to, stride, nullptr);
        });
#pragma omp barrier
        for (int row = thread; row < rows; row += threads) place(step, layer, row, cosines, sines, projected + (int64_t)row * stride);
#pragma omp barrier
#pragma omp for collapse(2) schedule(dynamic)
        for (int tile = 0; tile < step.num_tiles; tile++)
            for (int head = 0; head < layer.cache.kv_heads; head++)
                attend<T>(step, layer.cache, tile, head, {projected, stride, layer.cache.key_dim}, attended);
        own_panels(num_panels(layer.o), thread, threads,
                   [&](int panel) { panel_product(attended, rows, layer.o, panel, out, hidden, in); });
#pragma omp barrier
        for (int row = thread; row < rows; row += threads)
            normalise(layer.before_mlp, out + (int64_t)row * hidden, hidden, normed + (int64_t)row * hidden);
#pragma omp barrier
        own_panels(num_panels(layer.gate), thread, threads, [&](int panel) { panel_gated(normed, rows, layer.gate, layer.up, panel, gated); });
#pragma omp barrier
        own_panels(num_panels(layer.down), thread, threads,
                   [&](int panel) { panel_product(gated, rows, layer.down, panel, out, hidden, out); });
    }
}
