// The project's own NCCL communicator: what torch.distributed offers, minus its host synchronisation and its guesses.
//
// Unverified: the sequence of calls is tested against a stand-in for the library (tests/test_nccl.py); no run with the
// real one on GPUs is recorded yet.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef FAR_EMULATE_CUDA
#include "testing/cuda_streams.h"
#else
#include <cuda_runtime_api.h>
#endif

#include "cuda/nccl_api.h"

namespace far {
namespace cuda {

// Communication failed, and the communicator has been aborted. Names this rank, what was on its way, and NCCL's reason.
struct NcclError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NcclLibrary {
  std::string path;
  int version;  // as NCCL writes it: 23007 is 2.30.7
  nccl::Api api;
};

// The libnccl that is in this process already, for torch; throws if there is none, more than one, or one too old.
const NcclLibrary& nccl_library();
nccl::UniqueId nccl_unique_id();

// A collective that has been queued.
struct NcclOperation {
  explicit NcclOperation(std::string label);
  ~NcclOperation();
  NcclOperation(const NcclOperation&) = delete;
  std::string label;
  cudaEvent_t done;
  std::chrono::steady_clock::time_point queued;
};

// One rank's end. Collectives are queued on a stream of its own with high priority, behind what the caller's stream
// holds at that moment; every rank must start the same ones in the same order. A thread looks after errors and
// operations that do not end within the timeout, and aborts the communicator then: kernels that wait for a dead rank
// end, so that a host that waits for the GPU comes back and finds the error in wait() or check().
class NcclCommunicator {
 public:
  using Operation = std::shared_ptr<NcclOperation>;

  // Waits until all ranks have come, or throws NcclError after timeout_s.
  NcclCommunicator(const nccl::UniqueId& id, int rank, int world, int device, double timeout_s);
  ~NcclCommunicator();  // as close(), within 5 seconds
  NcclCommunicator(const NcclCommunicator&) = delete;

  // Counts are elements: of the array; of one rank's part; of one rank's part. An empty label gets a name and a number.
  Operation all_reduce(void* data, size_t count, nccl::Type, nccl::Op, std::string label, cudaStream_t);
  Operation all_gather(const void* sent, void* received, size_t count, nccl::Type, std::string label, cudaStream_t);
  Operation reduce_scatter(const void* sent, void* received, size_t count, nccl::Type, nccl::Op, std::string label,
                           cudaStream_t);
  // `sent` holds counts[r] elements for each rank r, `received` counts[rank] of each.
  Operation all_to_all(const void* sent, void* received, const std::vector<size_t>& counts, nccl::Type,
                       std::string label, cudaStream_t);

  void wait(const NcclOperation&, cudaStream_t);     // the stream waits, the host does not; throws NcclError
  void order(const NcclOperation&, cudaStream_t) noexcept;  // the same without looking for errors
  void check(const std::string& what);               // throws NcclError if anything has failed
  void enroll(void* data, size_t bytes);             // ncclCommRegister, until close(): `data` must live as long
  void close();                                      // twice is once

  int rank() const { return rank_; }
  int world() const { return world_; }
  int device() const { return device_; }

 private:
  using Clock = std::chrono::steady_clock;

  NcclCommunicator(int rank, int world, int device, double timeout_s);
  Operation start(const char* kind, std::string label, cudaStream_t, const std::function<nccl::Result()>& call);
  void require_open() const;
  nccl::Result state() const;
  std::string examine();  // why the communicator must be given up, or nothing
  void settle(nccl::Result result, const std::string& what, double timeout_s);
  void give_up(const std::string& reason);
  [[noreturn]] void fail(const std::string& what, const std::string& why);
  std::string text(nccl::Result result) const;
  void shut(double timeout_s);
  void watch();

  const nccl::Api& api_;
  const int rank_, world_, device_;
  const double timeout_s_;
  mutable std::mutex mutex_;  // of all below
  std::condition_variable wake_;
  nccl::Comm comm_ = nullptr;  // null: closed or given up. NCCL writes to this place while it initialises.
  std::string failure_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t before_ = nullptr;
  int64_t count_ = 0;
  std::deque<Operation> running_;
  std::vector<void*> enrolled_;
  std::thread watcher_;
};

}  // namespace cuda
}  // namespace far
