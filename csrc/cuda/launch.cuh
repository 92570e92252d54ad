// The one place where a kernel is started: checks the launch, never uses <<<>>>, so that the same source can be
// compiled for the host and run thread by thread.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"

namespace far {
namespace cuda {

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, void* cuda_stream, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(cuda_stream);
  FAR_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace cuda
}  // namespace far
