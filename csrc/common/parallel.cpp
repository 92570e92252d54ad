#include "common/parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace far {
namespace {

struct Job {
  const std::function<void(int64_t)>* body;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  int seats;       // workers that may still join; guarded by Pool::mutex
  int inside = 0;  // workers in run(); guarded by Pool::mutex
  std::exception_ptr error;
  std::mutex error_mutex;

  void run() {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      try {
        (*body)(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(tasks);
      }
    }
  }
};

thread_local bool in_task = false;

class Pool {
 public:
  void run(Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < job.seats) {
        workers_.emplace_back([this] { work(); });
        workers_.back().detach();
      }
      job_ = &job;
    }
    wake_.notify_all();
    in_task = true;
    job.run();
    in_task = false;
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    done_.wait(lock, [&] { return job.inside == 0; });
  }

 private:
  void work() {
    in_task = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ && job_->seats > 0; });
      Job& job = *job_;
      --job.seats;
      ++job.inside;
      lock.unlock();
      job.run();
      lock.lock();
      if (--job.inside == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
};

// torch's OpenMP threads, borrowed. They spin for milliseconds after each of torch's operations, and workers of our own
// would have to share the cores with them: an Adam step behind a backward pass then took 8 % longer (2 cores). On the
// same threads there is nobody to wait for. GOMP_parallel is the entry that compiled `#pragma omp parallel` calls.
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel find_gomp() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const char* name = info->dlpi_name;
        if (!std::strstr(name, "libgomp") || !std::strstr(name, "torch")) return 0;
        *static_cast<std::string*>(found) = name;
        return 1;
      },
      &path);
  if (path.empty()) return nullptr;
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel")) : nullptr;
}

// OpenMP's threads do not survive a fork, and libgomp waits for them for ever.
std::atomic<bool> forked{false};

GompParallel gomp() {
  static const GompParallel found = find_gomp();
  return forked ? nullptr : found;
}

// Leaked on purpose: workers are detached and may still wait in it when the process exits. A forked child has none of
// its parent's threads, so it starts with a new pool (the old one's locks may be held by threads that are gone).
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
      pool = new Pool;
      forked = true;
    });
  });
  return *pool.load();
}

}  // namespace

void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& body) {
  const int64_t useful = std::min<int64_t>(std::max(threads, 1), tasks);
  if (useful <= 1 || in_task) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  Job job;
  job.body = &body;
  job.tasks = tasks;
  job.seats = static_cast<int>(useful) - 1;
  Pool& own = the_pool();
  if (const GompParallel parallel = gomp())
    parallel(  // all threads, even for few tasks: libgomp ends those that a smaller team leaves out
        [](void* given) {
          in_task = true;
          static_cast<Job*>(given)->run();
          in_task = false;
        },
        &job, static_cast<unsigned>(threads), 0);
  else
    own.run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace far
