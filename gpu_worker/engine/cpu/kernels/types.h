// The types of numbers that Python names (cpu/native.py): 0 float32, 1 bfloat16, 2 float16.
#pragma once
#include "vector.h"

template <class F> void with_type(int type, F call) {
    if (type == 0) call(float{});
    if (type == 1) call(bfloat16{});
    if (type == 2) call(float16{});
}

// Types of weights that are multiplied here.
template <class F> void with_product_type(int type, F call) {
    if (type == 0) call(float{});
    if (type == 1) call(bfloat16{});
}
