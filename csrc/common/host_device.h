// Marks functions shared by the CPU loops, the CUDA kernels and the tests. `static`: the same header is compiled
// once per instruction set, and a linker that merged the copies would keep an AVX-512 one for every machine.
#pragma once

#ifdef __CUDACC__
#define FAR_HD __host__ __device__ static inline
#else
#define FAR_HD static inline __attribute__((always_inline))
#endif
