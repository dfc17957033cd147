// Fused layers, for Python.
#include "layer.h"
#include "types.h"

extern "C" void tf_layers(int type, const Step* step, const Layer* layers, int count, const void* cosines,
    const void* sines, void* states) {
    with_product_type(type, [=](auto number) {
        typedef decltype(number) T;
        run_layers(*step, layers, count, (const T*)cosines, (const T*)sines, (T*)states);
    });
}
