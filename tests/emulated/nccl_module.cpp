// csrc/cuda/nccl.cpp and its bindings as a Python module of its own, with a stand-in for the CUDA runtime.
#include <nanobind/nanobind.h>

#include <atomic>

#include "emulated/nccl_log.h"
#include "testing/cuda_streams.h"

void bind_nccl(nanobind::module_& m);

namespace {
std::atomic<long> made{0};
std::atomic<bool> stuck{false};  // events never happen
thread_local int current = 0;

long number(const void* handle) { return reinterpret_cast<long>(handle); }
const char* name(cudaStream_t stream) { return number(stream) > 1000 ? "own" : number(stream) ? "7" : "0"; }
}  // namespace

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid device"; }
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device > 7) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(1000 + ++made);
  record("cudaStreamCreate flags=%u priority=%d device=%d", flags, priority, current);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  record("cudaStreamDestroy");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  record("cudaStreamWaitEvent stream=%s event=%ld", name(stream), number(event));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(++made);
  record("cudaEventCreate event=%ld flags=%u", number(*event), flags);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  record("cudaEventDestroy event=%ld", number(event));
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return stuck ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record("cudaEventRecord event=%ld stream=%s", number(event), name(stream));
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

NB_MODULE(nccl_emulated, m) {
  bind_nccl(m);
  m.def("set_stuck", [](bool value) { stuck = value; });
}
