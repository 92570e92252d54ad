// Compiles only where csrc/cuda/nccl_api.h says what NVIDIA's nccl.h says.
#include <nccl.h>

#include <tuple>
#include <type_traits>

#include "cuda/nccl_api.h"

namespace own = far::cuda::nccl;

static_assert(int(own::Result::success) == ncclSuccess);
static_assert(int(own::Result::unhandled_cuda_error) == ncclUnhandledCudaError);
static_assert(int(own::Result::system_error) == ncclSystemError);
static_assert(int(own::Result::internal_error) == ncclInternalError);
static_assert(int(own::Result::invalid_argument) == ncclInvalidArgument);
static_assert(int(own::Result::invalid_usage) == ncclInvalidUsage && int(own::Result::remote_error) == ncclRemoteError);
static_assert(int(own::Result::in_progress) == ncclInProgress);
static_assert(int(own::Op::sum) == ncclSum && int(own::Op::max) == ncclMax);
static_assert(int(own::Type::uint8) == ncclUint8 && int(own::Type::int64) == ncclInt64);
static_assert(int(own::Type::float16) == ncclFloat16 && int(own::Type::bfloat16) == ncclBfloat16);
static_assert(int(own::Type::float32) == ncclFloat32 && int(own::Type::float64) == ncclFloat64);
static_assert(sizeof(own::UniqueId) == sizeof(ncclUniqueId) && alignof(own::UniqueId) == alignof(ncclUniqueId));
static_assert(own::oldest_version == NCCL_VERSION(2, 19, 0) && own::oldest_version <= NCCL_VERSION_CODE);

#define SAME_PLACE(mine, theirs) \
  static_assert(offsetof(own::Config, mine) == offsetof(ncclConfig_t, theirs) && \
                sizeof(own::Config::mine) == sizeof(ncclConfig_t::theirs))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
static_assert(sizeof(own::Config) <= sizeof(ncclConfig_t));

// What a register or a stack slot holds: pointers are alike, and so are enumerations of one size.
template <class A, class B>
constexpr bool alike = std::is_same_v<A, B> || (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                       (sizeof(A) == sizeof(B) && ((std::is_enum_v<A> && std::is_enum_v<B>) ||
                                                   (std::is_class_v<A> && std::is_class_v<B>)));
template <class A, class B>
constexpr bool same_call = false;
template <class R, class S, class... A, class... B>
constexpr bool same_call<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) return alike<R, S> && (alike<A, B> && ...);
  return false;
}();

#define SAME_CALL(member, name, arguments) \
  static_assert(same_call<decltype(own::Api::member), decltype(&name)>, #name " is declared otherwise in nccl.h");
FAR_NCCL_FUNCTIONS(SAME_CALL)
FAR_NCCL_TEXTS(SAME_CALL)

const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
int main() {
  const own::Config mine;
  const bool same = mine.magic == theirs.magic && mine.blocking == theirs.blocking && mine.max_ctas == theirs.maxCTAs &&
                    mine.min_ctas == theirs.minCTAs && mine.cga_cluster_size == theirs.cgaClusterSize &&
                    mine.net_name == theirs.netName && mine.split_share == theirs.splitShare;
  return same ? 0 : 1;
}
