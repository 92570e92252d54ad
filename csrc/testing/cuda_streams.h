// Stands in for the part of the CUDA runtime that csrc/cuda/nccl.cpp calls, so that it runs without a GPU: device
// memory is host memory, and streams and events are numbers. tests/emulated/nccl_module.cpp defines the functions and
// records their calls.
#pragma once

#include <cstddef>

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101, cudaErrorNotReady = 600 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
constexpr unsigned cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
