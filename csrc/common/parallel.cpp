#include "common/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
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

// Leaked on purpose: workers are detached and may still wait in it when the process exits. A forked child has none of
// its parent's threads, so it starts with a new pool (the old one's locks may be held by threads that are gone).
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
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
  the_pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace far
