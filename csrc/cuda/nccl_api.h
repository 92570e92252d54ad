// The part of NCCL's interface that this project calls, in its own declarations: nccl.h is not there when the extension
// is built, only the library that torch brings when it runs. tests/test_nccl.py compares them with nccl.h.
#pragma once

#include <climits>
#include <cstddef>

namespace far {
namespace cuda {
namespace nccl {

// ncclCommRegister came with 2.19; older libraries are refused.
constexpr int oldest_version = 21900;

enum class Result : int {
  success,
  unhandled_cuda_error,
  system_error,
  internal_error,
  invalid_argument,
  invalid_usage,
  remote_error,
  in_progress
};
enum class Op : int { sum = 0, max = 2 };
enum class Type : int { uint8 = 1, int64 = 4, float16 = 6, float32 = 7, float64 = 8, bfloat16 = 9 };

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in 2.19. Newer libraries read `size` bytes of it and give what `version` did not have yet its
// default (parseCommConfig in NCCL's init.cc).
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = oldest_version;
  int blocking = INT_MIN;  // INT_MIN, null: NCCL decides
  int cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

struct OpaqueComm;
using Comm = OpaqueComm*;
using Stream = void*;  // cudaStream_t

// X(member of Api, name in the library, arguments): all return a Result.
#define FAR_NCCL_FUNCTIONS(X)                                                                            \
  X(get_version, ncclGetVersion, (int*))                                                                 \
  X(get_unique_id, ncclGetUniqueId, (UniqueId*))                                                         \
  X(comm_init_rank_config, ncclCommInitRankConfig, (Comm*, int, UniqueId, int, Config*))                 \
  X(comm_get_async_error, ncclCommGetAsyncError, (Comm, Result*))                                        \
  X(comm_finalize, ncclCommFinalize, (Comm))                                                             \
  X(comm_destroy, ncclCommDestroy, (Comm))                                                               \
  X(comm_abort, ncclCommAbort, (Comm))                                                                   \
  X(comm_register, ncclCommRegister, (Comm, void*, size_t, void**))                                      \
  X(comm_deregister, ncclCommDeregister, (Comm, void*))                                                  \
  X(all_reduce, ncclAllReduce, (const void*, void*, size_t, Type, Op, Comm, Stream))                     \
  X(reduce_scatter, ncclReduceScatter, (const void*, void*, size_t, Type, Op, Comm, Stream))             \
  X(all_gather, ncclAllGather, (const void*, void*, size_t, Type, Comm, Stream))                         \
  X(send, ncclSend, (const void*, size_t, Type, int, Comm, Stream))                                      \
  X(recv, ncclRecv, (void*, size_t, Type, int, Comm, Stream))                                            \
  X(group_start, ncclGroupStart, ())                                                                     \
  X(group_end, ncclGroupEnd, ())
// The same, for those that return a text.
#define FAR_NCCL_TEXTS(X)                                \
  X(get_error_string, ncclGetErrorString, (Result))      \
  X(get_last_error, ncclGetLastError, (Comm))

struct Api {
#define FAR_MEMBER(member, name, arguments) Result(*member) arguments;
  FAR_NCCL_FUNCTIONS(FAR_MEMBER)
#undef FAR_MEMBER
#define FAR_MEMBER(member, name, arguments) const char*(*member)arguments;
  FAR_NCCL_TEXTS(FAR_MEMBER)
#undef FAR_MEMBER
};

}  // namespace nccl
}  // namespace cuda
}  // namespace far
