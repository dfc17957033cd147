// Adapters of linear layers that no fused layer has, for Python.
#include "adapters.h"
#include "types.h"

// Adds to outputs, `whole` as in tf_product, what the adapters of rows give.
extern "C" void tf_adapt(int type, int threads, const void* rows, int num_rows, const Linear* linear,
    const Adapters* adapters, int whole, void* out) {
    with_product_type(type, [=](auto number) {
        typedef decltype(number) T;
        if (whole) adapt(threads, (const T*)rows, num_rows, *linear, *adapters, (float*)out);
        else adapt(threads, (const T*)rows, num_rows, *linear, *adapters, (T*)out);
    });
}
