// One decoder layer, computed by all threads: they wait for each other between its parts only.
#pragma once
#include <cmath>
#include "attention.h"
#include "products.h"

template <class T, class U> void normalize(const Norm& norm, const T* from, int size, U* to) {
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

constexpr int FEW_ROWS =
    8;  // so few rows every thread normalises for itself: that is faster than waiting for others

// Intermediate results of a layer.
template <class T> struct LayerBuffers {
    Buffer<T> projected;
    Buffer<Input<T>> normed, attended, gated;
};

// Normalizes all rows → the copy that the calling thread reads.
template <class T> const Input<T>* normalize_rows(
    const Norm& norm, const T* from, int rows, int size, int thread, int threads, Input<T>* to) {
    bool few = rows <= FEW_ROWS;
    if (few) to += thread * rows_in_memory(FEW_ROWS) * size;
    for (int row = few ? 0 : thread; row < rows; row += few ? 1 : threads)
        normalize(norm, from + (int64_t)row * size, size, to + (int64_t)row * size);
    if (!few) {
#pragma omp barrier
    }
    return to;
}

// For a token and a K head: norms and rotates Q and K, writes K and V to their page.
template <class T> void prepare_token(
    const Step& step, const Layer& layer, int token, int head, const T* cosines, const T* sines, T* query) {
    const Cache& cache = *layer.cache;
    T* key = query + layer.q.outputs + head * cache.key_dim;
    T* value = query + layer.q.outputs + layer.k.outputs + head * cache.value_dim;
    auto normalize_and_rotate = [&](T* one, const Norm& norm) {
        if (norm.weight) normalize(norm, one, cache.key_dim, one);
        if (layer.rotary)
            rotate(cosines + (int64_t)token * layer.rotary, sines + (int64_t)token * layer.rotary,
                layer.rotary, one);
    };
    for (int h = head * cache.group; h < (head + 1) * cache.group; h++)
        normalize_and_rotate(query + h * cache.key_dim, layer.of_query);
    normalize_and_rotate(key, layer.of_key);
    write<T>(step, cache, token, head, key, value);
}

// states [tokens][hidden] in and out, cosines and sines [tokens][rotary]
template <class T>
void run_layer(const Step& step, const Layer& layer, const T* cosines, const T* sines, T* states) {
    static LayerBuffers<T> buffers;
    Units units(step, *layer.cache);
    bool independent = step.num_tiles == step.num_tokens && !step.num_parts;  // no token sees another's K
    int rows = step.num_tokens, heads = layer.cache->kv_heads, hidden = layer.q.inputs;
    int stride = layer.q.outputs + layer.k.outputs + layer.v.outputs;
    int64_t room = rows_in_memory(rows), own_room = rows_in_memory(FEW_ROWS) * step.threads;
    T* projected = buffers.projected.fit((int64_t)rows * stride);
    Input<T>* normed_buffer = buffers.normed.fit(std::max(room, own_room) * hidden);
    Input<T>* attended = buffers.attended.fit(room * layer.o.inputs);
    Input<T>* gated = buffers.gated.fit(room * layer.gate.outputs);
    int q_panels = num_panels<T>(layer.q), k_panels = num_panels<T>(layer.k);
    int v_panels = num_panels<T>(layer.v);
#pragma omp parallel num_threads(step.threads)
    {
        Tiles tiles;
        int thread = this_thread(), threads = all_threads();
        const Input<T>* normed = normalize_rows<T>(
            layer.before_attention, states, rows, hidden, thread, threads, normed_buffer);
        for_own_panels(q_panels + k_panels + v_panels, thread, threads, [&](int panel) {
            const Linear* linear = &layer.q;
            T* to = projected;
            if (panel >= q_panels) linear = &layer.k, panel -= q_panels, to += layer.q.outputs;
            if (linear == &layer.k && panel >= k_panels)
                linear = &layer.v, panel -= k_panels, to += layer.k.outputs;
            panel_product<T>(normed, rows, *linear, panel, to, stride, nullptr);
        });
#pragma omp barrier
        if (!independent) {
            for (int row = thread; row < rows; row += threads)
                for (int head = 0; head < heads; head++)
                    prepare_token(step, layer, row, head, cosines, sines, projected + (int64_t)row * stride);
#pragma omp barrier
        }
        units.each([&](int unit, int next) {
            int64_t row = step.tiles[unit / heads].token;
            if (independent)
                prepare_token(step, layer, row, unit % heads, cosines, sines, projected + row * stride);
            attend<T>(step, *layer.cache, units, unit, next, {projected, stride, layer.cache->key_dim},
                attended);
        });
#pragma omp barrier
        for_own_panels(num_panels<T>(layer.o), thread, threads,
            [&](int panel) { panel_product<T>(attended, rows, layer.o, panel, states, hidden, states); });
#pragma omp barrier
        normed = normalize_rows<T>(layer.before_mlp, states, rows, hidden, thread, threads, normed_buffer);
        for_own_panels(num_panels<T>(layer.gate), thread, threads,
            [&](int panel) { panel_gated<T>(normed, rows, layer.gate, layer.up, panel, gated); });
#pragma omp barrier
        for_own_panels(num_panels<T>(layer.down), thread, threads,
            [&](int panel) { panel_product<T>(gated, rows, layer.down, panel, states, hidden, states); });
    }
}
