#include "cuda/nccl.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "common/check.h"

namespace far {
namespace cuda {
namespace {

using nccl::Result;

constexpr double farewell_s = 5;  // how long a destructor waits for the other ranks

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

NcclLibrary find_library() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const char* slash = std::strrchr(info->dlpi_name, '/');
        const char* name = slash ? slash + 1 : info->dlpi_name;
        // Not libnccl-net.so and the like, which are NCCL's plugins.
        if (std::strncmp(name, "libnccl.so", 10) == 0)
          static_cast<std::vector<std::string>*>(found)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  FAR_REQUIRE(!paths.empty(),
              "NCCL is not loaded: torch was built without it, or holds it inside itself; use torch's own NCCL group");
  // Two would each have their own communicators, plugins and environment, and which one torch uses is a guess.
  FAR_REQUIRE(paths.size() == 1, "two NCCL libraries are loaded, ", paths[0], " and ", paths[1],
              ": start Python so that only torch's own is");
  NcclLibrary library{paths[0], 0, {}};
  void* handle = dlopen(library.path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  FAR_REQUIRE(handle, library.path, " cannot be opened: ", dlerror());
#define FAR_LOOK_UP(member, name, arguments)                                        \
  library.api.member = reinterpret_cast<decltype(library.api.member)>(dlsym(handle, #name)); \
  FAR_REQUIRE(library.api.member, library.path, " has no " #name ": NCCL ", version_text(nccl::oldest_version), \
              " or newer is needed");
  FAR_NCCL_FUNCTIONS(FAR_LOOK_UP)
  FAR_NCCL_TEXTS(FAR_LOOK_UP)
#undef FAR_LOOK_UP
  FAR_REQUIRE(library.api.get_version(&library.version) == Result::success, library.path, " does not tell its version");
  FAR_REQUIRE(library.version >= nccl::oldest_version, library.path, " is NCCL ", version_text(library.version), ": ",
              version_text(nccl::oldest_version), " or newer is needed");
  return library;
}

size_t size_of(nccl::Type type) {
  using nccl::Type;
  return type == Type::uint8 ? 1 : type == Type::float16 || type == Type::bfloat16 ? 2 : type == Type::float32 ? 4 : 8;
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FAR_CUDA_CHECK(cudaGetDevice(&before_));
    FAR_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceGuard() { cudaSetDevice(before_); }

 private:
  int before_;
};

}  // namespace

const NcclLibrary& nccl_library() {
  static const NcclLibrary library = find_library();  // a failure is looked up again next time
  return library;
}

nccl::UniqueId nccl_unique_id() {
  const nccl::Api& api = nccl_library().api;
  nccl::UniqueId id;
  const Result result = api.get_unique_id(&id);
  FAR_REQUIRE(result == Result::success, "ncclGetUniqueId: ", api.get_error_string(result));
  return id;
}

NcclOperation::NcclOperation(std::string name) : label(std::move(name)), queued(std::chrono::steady_clock::now()) {
  FAR_CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
}

NcclOperation::~NcclOperation() { cudaEventDestroy(done); }

// Delegating, so that the destructor tidies up when the second half throws.
NcclCommunicator::NcclCommunicator(int rank, int world, int device, double timeout_s)
    : api_(nccl_library().api), rank_(rank), world_(world), device_(device), timeout_s_(timeout_s) {
  FAR_REQUIRE(0 <= rank && rank < world, "nccl: rank ", rank, " of ", world);
  FAR_REQUIRE(timeout_s > 0, "nccl: a timeout of ", timeout_s, " s");
}

NcclCommunicator::NcclCommunicator(const nccl::UniqueId& id, int rank, int world, int device, double timeout_s)
    : NcclCommunicator(rank, world, device, timeout_s) {
  DeviceGuard guard(device);
  int least, greatest;
  FAR_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  FAR_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  FAR_CUDA_CHECK(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming));
  nccl::Config config;
  config.blocking = 0;
  settle(api_.comm_init_rank_config(&comm_, world, id, rank, &config), "joining the communicator", timeout_s);
  watcher_ = std::thread([this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() {
  try {
    shut(std::min(timeout_s_, farewell_s));
  } catch (const std::exception&) {  // shut has aborted it
  }
  if (before_) cudaEventDestroy(before_);
  if (stream_) cudaStreamDestroy(stream_);
}

std::string NcclCommunicator::text(Result result) const {
  const char* last = api_.get_last_error(comm_);
  std::string words = api_.get_error_string(result);
  return last && *last ? words + ": " + last : words;
}

void NcclCommunicator::give_up(const std::string& reason) {
  failure_ = "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + ": " + reason;
  if (comm_) api_.comm_abort(comm_);
  comm_ = nullptr;
  wake_.notify_all();
}

void NcclCommunicator::fail(const std::string& what, const std::string& why) {
  give_up(what + ": " + why);
  throw NcclError(failure_);
}

void NcclCommunicator::require_open() const {
  if (!failure_.empty()) throw NcclError(failure_);
  FAR_REQUIRE(comm_, "nccl: the communicator of rank ", rank_, " has been closed");
}

Result NcclCommunicator::state() const {
  Result state = Result::success;
  const Result asked = api_.comm_get_async_error(comm_, &state);
  return asked == Result::success ? state : asked;
}

// Nothing on a non-blocking communicator has been done before its state leaves "in progress". After the first
// operations, which connect ranks, it does so at once.
void NcclCommunicator::settle(Result result, const std::string& what, double timeout_s) {
  const auto end = Clock::now() + std::chrono::duration<double>(timeout_s);
  while (result == Result::in_progress) {
    if (Clock::now() > end) {
      std::ostringstream words;
      words << "not all ranks have come within " << timeout_s << " s";
      fail(what, words.str());
    }
    result = state();
    if (result == Result::in_progress) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (result != Result::success) fail(what, text(result));
}

std::string NcclCommunicator::examine() {
  while (!running_.empty() && cudaEventQuery(running_.front()->done) == cudaSuccess) running_.pop_front();
  const std::string oldest = running_.empty() ? "between operations" : running_.front()->label;
  const Result now = state();
  if (now != Result::success && now != Result::in_progress) return oldest + ": " + text(now);
  const auto limit = std::chrono::duration<double>(timeout_s_);
  if (running_.empty() || Clock::now() - running_.front()->queued < limit) return {};
  std::ostringstream words;
  words << oldest << ": not finished within " << timeout_s_ << " s, a rank may be gone or behind";
  return words.str();
}

void NcclCommunicator::watch() {
  auto mode = cudaStreamCaptureModeRelaxed;  // or asking for an event would break a capture that goes on elsewhere
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto pause = std::chrono::duration<double>(std::min(timeout_s_ / 4, 1.0));
  while (!wake_.wait_for(lock, pause, [this] { return !comm_; })) {
    const std::string trouble = examine();
    if (!trouble.empty()) give_up(trouble);
  }
}

NcclCommunicator::Operation NcclCommunicator::start(const char* kind, std::string label, cudaStream_t cuda_stream,
                                                    const std::function<Result()>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_open();
  ++count_;
  if (label.empty()) label = std::string(kind) + " " + std::to_string(count_);
  DeviceGuard guard(device_);
  auto operation = std::make_shared<NcclOperation>(std::move(label));
  FAR_CUDA_CHECK(cudaEventRecord(before_, cuda_stream));
  FAR_CUDA_CHECK(cudaStreamWaitEvent(stream_, before_, 0));
  settle(call(), operation->label, timeout_s_);
  FAR_CUDA_CHECK(cudaEventRecord(operation->done, stream_));
  running_.push_back(operation);
  return operation;
}

NcclCommunicator::Operation NcclCommunicator::all_reduce(void* data, size_t count, nccl::Type type, nccl::Op op,
                                                         std::string label, cudaStream_t cuda_stream) {
  return start("all-reduce", std::move(label), cuda_stream,
               [=] { return api_.all_reduce(data, data, count, type, op, comm_, stream_); });
}

NcclCommunicator::Operation NcclCommunicator::all_gather(const void* sent, void* received, size_t count,
                                                         nccl::Type type, std::string label,
                                                         cudaStream_t cuda_stream) {
  return start("all-gather", std::move(label), cuda_stream,
               [=] { return api_.all_gather(sent, received, count, type, comm_, stream_); });
}

NcclCommunicator::Operation NcclCommunicator::reduce_scatter(const void* sent, void* received, size_t count,
                                                             nccl::Type type, nccl::Op op, std::string label,
                                                             cudaStream_t cuda_stream) {
  return start("reduce-scatter", std::move(label), cuda_stream,
               [=] { return api_.reduce_scatter(sent, received, count, type, op, comm_, stream_); });
}

NcclCommunicator::Operation NcclCommunicator::all_to_all(const void* sent, void* received,
                                                         const std::vector<size_t>& counts, nccl::Type type,
                                                         std::string label, cudaStream_t cuda_stream) {
  FAR_REQUIRE(counts.size() == size_t(world_), "nccl: ", counts.size(), " counts for ", world_, " ranks");
  const size_t element = size_of(type);
  return start("all-to-all", std::move(label), cuda_stream, [&] {
    Result first = api_.group_start();
    if (first != Result::success) return first;
    const char* from = static_cast<const char*>(sent);
    char* to = static_cast<char*>(received);
    for (int peer = 0; peer < world_ && first == Result::success; ++peer) {
      if (counts[peer]) first = api_.send(from, counts[peer], type, peer, comm_, stream_);
      if (counts[rank_] && first == Result::success) first = api_.recv(to, counts[rank_], type, peer, comm_, stream_);
      from += counts[peer] * element;
      to += counts[rank_] * element;
    }
    const Result last = api_.group_end();  // also after a failure: an open group would swallow everybody's calls
    return first == Result::success ? last : first;
  });
}

void NcclCommunicator::wait(const NcclOperation& operation, cudaStream_t cuda_stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (comm_) {
    const Result now = state();
    if (now != Result::success && now != Result::in_progress) fail(operation.label, text(now));
  } else if (!failure_.empty()) {
    throw NcclError(failure_);
  }
  FAR_CUDA_CHECK(cudaStreamWaitEvent(cuda_stream, operation.done, 0));
}

void NcclCommunicator::order(const NcclOperation& operation, cudaStream_t cuda_stream) noexcept {
  cudaStreamWaitEvent(cuda_stream, operation.done, 0);
}

void NcclCommunicator::check(const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_open();
  const std::string trouble = examine();
  if (!trouble.empty()) fail(what.empty() ? "check" : what, trouble);
}

void NcclCommunicator::enroll(void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_open();
  DeviceGuard guard(device_);
  void* handle = nullptr;
  settle(api_.comm_register(comm_, data, bytes, &handle), "registering a buffer", timeout_s_);
  enrolled_.push_back(handle);
}

void NcclCommunicator::close() { shut(timeout_s_); }

void NcclCommunicator::shut(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::thread watcher = std::move(watcher_);
  std::exception_ptr error;
  if (comm_) {
    try {
      DeviceGuard guard(device_);
      for (void* handle : enrolled_) settle(api_.comm_deregister(comm_, handle), "deregistering a buffer", timeout_s);
      settle(api_.comm_finalize(comm_), "closing the communicator", timeout_s);
      api_.comm_destroy(std::exchange(comm_, nullptr));  // frees it, so there is nothing left to ask for its result
    } catch (const std::exception&) {
      error = std::current_exception();
      if (comm_) give_up("closing the communicator failed");
    }
  }
  enrolled_.clear();
  running_.clear();
  wake_.notify_all();
  lock.unlock();
  if (watcher.joinable()) watcher.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace cuda
}  // namespace far
