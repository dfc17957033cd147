// The sampler, for Python.
#include "sampler.h"
#include "types.h"

// Rows that lie `stride` numbers apart, all greedy but for those of the `count` requests.
extern "C" void tf_sample(int type, int threads, const void* logits, int rows, int size, int64_t stride,
    int count, const SamplingArguments* arguments, const SamplerOutput* out) {
    std::vector<int> requests(rows, -1);
    for (int n = 0; n < count; n++) requests[arguments->place[n]] = n;
    with_type(type, [&](auto number) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1)
        for (int row = 0; row < rows; row++) {
            auto* own = (const decltype(number)*)logits + row * stride;
            if (requests[row] >= 0)
                thread_sampler().sample(
                    own, size, SampleRequest(*arguments, requests[row]), RowOutput{*out, rows, row});
            else argmax(own, size, out->ids + row, out->logprobs + row);
        }
    });
}

// The log-probability of `out->ids` of each row, and the likeliest tokens.
extern "C" void tf_logprobs(
    int type, int threads, const void* logits, int rows, int size, int64_t stride, const SamplerOutput* out) {
    with_type(type, [=](auto number) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
        for (int row = 0; row < rows; row++)
            thread_sampler().write_logprobs((const decltype(number)*)logits + row * stride, size,
                out->ids[row], out->tops, RowOutput{*out, rows, row});
    });
}
