// The thread that runs, among those of an OpenMP region. Its header is not everywhere where the runtime is.
#pragma once
#if defined(_OPENMP)
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
inline int this_thread() { return omp_get_thread_num(); }
inline int all_threads() { return omp_get_num_threads(); }
#else
inline int this_thread() { return 0; }
inline int all_threads() { return 1; }
#endif
