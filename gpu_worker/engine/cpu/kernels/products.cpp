// Linear layers that no fused layer has, for Python; and how their weights are packed.
#include "phases.h"
#include "products.h"
#include "types.h"

template void multiply_rounded_rows<float>(int, const Grain*, const Linear&, int, float*);
template void multiply_rounded_rows<bfloat16>(int, const Grain*, const Linear&, int, float*);

// Whether products of this type are computed here: where they were measured to be no slower than oneDNN's, at
// any number of rows. On Arm float32 is, which was not measured; oneDNN has instructions for bfloat16 there.
extern "C" int tf_multiplies(int type) {
#if defined(__AVX2__)
    return type == 0 || type == 1;
#elif defined(__aarch64__)
    return type == 0;
#else
    return 0;
#endif
}

// So few rows are multiplied with blocks where plain weights are beside them.
extern "C" int tf_block_rows(int type) {
    int rows = 0;
    with_product_type(type, [&](auto number) { rows = FEW<decltype(number)>; });
    return rows;
}

// Whether rows can be rounded for blocks of integers.
extern "C" int tf_rounds(int type) {
    int rounds = 0;
    with_product_type(type, [&](auto number) { rounds = ROUNDS<decltype(number)>; });
    return rounds && tf_multiplies(type);
}

extern "C" int tf_panel(int type) {
    int panel = 0;
    with_product_type(type, [&](auto number) { panel = PANEL<decltype(number)>; });
    return panel;
}

// Words next to each other of one output's quants in blocks.
extern "C" int tf_words(int type) {
    int words = 0;
    with_product_type(type, [&](auto number) { words = Pairs<decltype(number)>::P; });
    return words;
}

extern "C" void tf_pack(int type, const void* weight, int outputs, int inputs, void* packed) {
    with_product_type(type, [=](auto number) {
        pack((const decltype(number)*)weight, outputs, inputs, (decltype(number)*)packed);
    });
}

template <class T, class U>
void product(int threads, const T* rows, int num_rows, const Linear& linear, U* out) {
    // Rows are copied where the product takes another type, or whole tiles of rows. One caller at a time.
    constexpr bool copies = !std::is_same_v<T, Input<T>> || BY_TILES<T>;
    static Buffer<Input<T>> copied;
    static Buffer<Grain> bytes;
    int inputs = linear.inputs;
    Input<T>* copy = copies ? copied.fit(rows_in_memory(num_rows) * inputs) : nullptr;
    int64_t stride = inputs / GRAIN;
    Grain* rounded = is_rounded<T>(linear) ? bytes.fit(num_rows * stride) : nullptr;
    Progress progress(threads);
#pragma omp parallel num_threads(threads)
    {
        Tiles tiles;
        Phases phases(progress);
        const Input<T>* factors = copy;
        if constexpr (!copies) factors = rows;
        if (copies || rounded)
            phases.run(num_rows, [&](int row) {
                int64_t first = (int64_t)row * inputs;
                if constexpr (copies) convert_all(rows + first, inputs, copy + first);
                if (rounded) round_row<T>(factors + first, inputs, rounded + row * stride);
            });
        phases.run(num_panels<T>(linear), [&](int panel) {
            panel_product<T, U>({factors, rounded}, num_rows, linear, panel, out, linear.outputs, nullptr);
        });
    }
}

// `whole`: the outputs are the unrounded sums, in float32.
extern "C" void tf_product(
    int type, int threads, const void* rows, int num_rows, const Linear* linear, int whole, void* out) {
    with_product_type(type, [=](auto number) {
        typedef decltype(number) T;
        if (whole) product(threads, (const T*)rows, num_rows, *linear, (float*)out);
        else product(threads, (const T*)rows, num_rows, *linear, (T*)out);
    });
}
