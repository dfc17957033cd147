// Decoder layers, computed by all threads. The parts of a layer are phases (phases.h).
#pragma once
#include <cmath>
#include "adapters.h"
#include "attention.h"
#include "phases.h"
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

// So few rows every thread normalises and rounds for itself: that is faster than waiting for others. A thread
// that comes late may read rows that change meanwhile; then no unit is left that would use them.
constexpr int FEW_ROWS = 8;

// Intermediate results of layers.
template <class T> struct LayerBuffers {
    Buffer<T> projected;
    Buffer<Input<T>> normed, attended, gated;
    Buffer<Grain> rounded;
    Buffer<float> shrunk;
    void fit(int64_t rows, int threads, const Layer& layer, const Adapters* adapters) {
        if (adapters) shrunk.fit(3 * rows * adapters->max_rank);
        projected.fit(rows * (layer.q->outputs + layer.k->outputs + layer.v->outputs));
        rows = rows_in_memory(rows);
        int64_t copies = std::max<int64_t>(rows, rows_in_memory(FEW_ROWS) * threads);
        normed.fit(copies * layer.q->inputs);
        if (layer.q->blocks.rounds)
            rounded.fit(copies * std::max({layer.q->inputs, layer.o->inputs, layer.down->inputs}) / GRAIN);
        attended.fit(rows * layer.o->inputs);
        gated.fit(rows * layer.gate->outputs);
    }
};

// Calls `make(row, to)` for all rows, `stride` numbers apart → the copy that the calling thread reads.
template <class N, class F> N* make_rows(Phases& phases, int rows, N* to, int64_t stride, F make) {
    auto one = [&](int row) { make(row, to + row * stride); };
    if (rows > FEW_ROWS) phases.run(rows, one);
    else {
        to += phases.number() * rows_in_memory(FEW_ROWS) * stride;
        for (int row = 0; row < rows; row++) one(row);
    }
    return to;
}

// Rows, rounded if one of the layers takes them so.
template <class T> Rows<T> round_rows(Phases& phases, const Input<T>* from, int rows,
    std::initializer_list<const Linear*> linears, Grain* to) {
    int inputs = (*linears.begin())->inputs;
    bool rounds = false;
    for (const Linear* linear : linears) rounds |= is_rounded<T>(*linear);
    if (!rounds) return {from};
    return {from, make_rows(phases, rows, to, inputs / GRAIN,
        [&](int row, Grain* grains) { round_row<T>(from + (int64_t)row * inputs, inputs, grains); })};
}

// For a token and a K head: norms and rotates Q and K, writes K and V to their page.
template <class T> void prepare_token(
    const Step& step, const Layer& layer, int token, int head, const T* cosines, const T* sines, T* query) {
    const Cache& cache = *layer.cache;
    T* key = query + layer.q->outputs + head * cache.key_dim;
    T* value = query + layer.q->outputs + layer.k->outputs + head * cache.value_dim;
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
template <class T> void run_layer(const Step& step, const Layer& layer, const T* cosines, const T* sines,
    T* states, LayerBuffers<T>& buffers, PartSums& parts, Phases& phases) {
    T* projected = buffers.projected.begin();
    Input<T>* attended = buffers.attended.begin();
    Input<T>* gated = buffers.gated.begin();
    bool independent = step.num_tiles == step.num_tokens && !step.num_parts;  // no token sees another's K
    int rows = step.num_tokens, heads = layer.cache->kv_heads, hidden = layer.q->inputs;
    int stride = layer.q->outputs + layer.k->outputs + layer.v->outputs;
    int q_panels = num_panels<T>(*layer.q), k_panels = num_panels<T>(*layer.k);
    int v_panels = num_panels<T>(*layer.v);
    auto shrink_for = [&](const Input<T>* from, std::initializer_list<const Linear*> linears) {
        return shrink<T>(phases, step.adapters, from, rows, linears, buffers.shrunk.begin());
    };
    auto normalized = [&](const Norm& norm) {
        return make_rows(phases, rows, buffers.normed.begin(), hidden, [&](int row, Input<T>* to) {
            normalize(norm, states + (int64_t)row * hidden, hidden, to);
        });
    };
    auto round_for = [&](const Input<T>* from, std::initializer_list<const Linear*> linears) {
        return round_rows<T>(phases, from, rows, linears, buffers.rounded.begin());
    };

    const Input<T>* normed = normalized(layer.before_attention);
    Rows<T> inputs = round_for(normed, {layer.q, layer.k, layer.v});
    Shrunk shrunk = shrink_for(normed, {layer.q, layer.k, layer.v});
    phases.run(q_panels + k_panels + v_panels, [&](int panel) {
        const Linear* linear = layer.q;
        T* to = projected;
        int place = 0;
        if (panel >= q_panels) linear = layer.k, panel -= q_panels, to += layer.q->outputs, place = 1;
        if (linear == layer.k && panel >= k_panels)
            linear = layer.v, panel -= k_panels, to += layer.k->outputs, place = 2;
        panel_product<T>(inputs, rows, *linear, panel, to, stride, nullptr, Expand<T>{shrunk.of(place)});
    });
    if (!independent)
        phases.run(rows, [&](int row) {
            for (int head = 0; head < heads; head++)
                prepare_token(step, layer, row, head, cosines, sines, projected + (int64_t)row * stride);
        });
    phases.run(step.num_tiles * heads, [&](int unit) {
        int64_t row = step.tiles[unit / heads].token;
        if (independent)
            prepare_token(step, layer, row, unit % heads, cosines, sines, projected + row * stride);
        attend<T>(
            step, *layer.cache, parts, unit, {projected, stride, layer.cache->key_dim}, attended);
    });
    inputs = round_for(attended, {layer.o});
    shrunk = shrink_for(attended, {layer.o});
    phases.run(num_panels<T>(*layer.o), [&](int panel) {
        panel_product<T>(inputs, rows, *layer.o, panel, states, hidden, states, Expand<T>{shrunk});
    });
    normed = normalized(layer.before_mlp);
    inputs = round_for(normed, {layer.gate, layer.up});
    shrunk = shrink_for(normed, {layer.gate, layer.up});
    phases.run(num_panels<T>(*layer.gate), [&](int panel) {
        Expand<T> to_gate{shrunk}, to_up{shrunk.of(1)};
        panel_gated<T>(inputs, rows, *layer.gate, *layer.up, panel, gated, to_gate, to_up);
    });
    inputs = round_for(gated, {layer.down});
    shrunk = shrink_for(gated, {layer.down});
    phases.run(num_panels<T>(*layer.down), [&](int panel) {
        panel_product<T>(inputs, rows, *layer.down, panel, states, hidden, states, Expand<T>{shrunk});
    });
}

// Layers that follow each other.
template <class T> void run_layers(
    const Step& step, const Layer* layers, int count, const T* cosines, const T* sines, T* states) {
    static LayerBuffers<T> buffers;
    int heads = 0;
    for (int i = 0; i < count; i++) {
        buffers.fit(step.num_tokens, step.threads, layers[i], step.adapters);
        heads = std::max(heads, layers[i].cache->kv_heads);
    }
    PartSums parts(step, heads);
    Progress progress(step.threads);
#pragma omp parallel num_threads(step.threads)
    {
        Tiles tiles;
        Phases phases(progress);
        for (int i = 0; i < count; i++)
            run_layer<T>(step, layers[i], cosines, sines, states, buffers, parts, phases);
    }
}
