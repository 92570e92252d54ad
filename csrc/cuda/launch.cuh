// The one place where a kernel is started: checks the launch, never uses <<<>>>, so that the same source can be
// compiled for the host and run thread by thread.
#pragma once

#ifdef FAR_EMULATE_CUDA
#include "testing/cuda_emulator.h"
#else
#include <cuda_runtime.h>
// Shared memory whose size the launch gives.
#define FAR_DYNAMIC_SHARED(type, name)                               \
  extern __shared__ __align__(16) unsigned char far_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(far_dynamic_shared)
#endif

#include "common/check.h"

namespace far {
namespace cuda {

struct SharedBytes {
  size_t count;  // for FAR_DYNAMIC_SHARED
};

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, SharedBytes shared, void* cuda_stream, Args... args) {
#ifdef FAR_EMULATE_CUDA
  (void)cuda_stream;
  emulator::launch(kernel, grid, block, shared.count, args...);
#else
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared.count;
  config.stream = static_cast<cudaStream_t>(cuda_stream);
  FAR_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
#endif
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, void* cuda_stream, Args... args) {
  launch(kernel, grid, block, SharedBytes{0}, cuda_stream, args...);
}

}  // namespace cuda
}  // namespace far
