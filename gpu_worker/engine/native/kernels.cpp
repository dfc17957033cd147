// What Python calls. Types of numbers: 0 float32, 1 bfloat16, 2 float16.
#include "attention.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num();  // its header is not everywhere where its runtime is
#endif

template <class T> void write_and_attend(const Step& step, const Cache& cache, Heads query, Heads key, Heads value, T* out) {
#pragma omp parallel num_threads(step.threads)
    {
#pragma omp for
        for (int token = 0; token < step.num_tokens; token++)
            for (int head = 0; head < cache.kv_heads; head++)
                write<T>(step, cache, token, head, (const T*)key.data + token * key.token + head * key.head,
                         (const T*)value.data + token * value.token + head * value.head);
#pragma omp for collapse(2) schedule(dynamic)
        for (int tile = 0; tile < step.num_tiles; tile++)
            for (int head = 0; head < cache.kv_heads; head++) attend<T>(step, cache, tile, head, query, out);
    }
}

extern "C" void tf_attend(int type, const Step* step, const Cache* cache, const Heads* query, const Heads* key, const Heads* value, void* out) {
    if (type == 0) write_and_attend(*step, *cache, *query, *key, *value, (float*)out);
    if (type == 1) write_and_attend(*step, *cache, *query, *key, *value, (bfloat16*)out);
    if (type == 2) write_and_attend(*step, *cache, *query, *key, *value, (float16*)out);
}
