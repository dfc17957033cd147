// Attention of any step, for Python.
#include "attention.h"
#include "types.h"

extern "C" void tf_attend(int type, const Step* step, const Cache* cache, const Heads* query,
    const Heads* key, const Heads* value, void* out) {
    with_type(type,
        [=](auto number) { write_and_attend(*step, *cache, *query, *key, *value, (decltype(number)*)out); });
}
