// The CPU side of cuda_emulator.h: a kernel launch whose threads are fibers on one OS thread.
//
// Each fiber runs until it meets a barrier, a warp collective or, at random, an atomic. Who runs next is drawn from a
// seed, and so is the order of the blocks: a missing barrier shows as a wrong result that depends on the seed, a
// barrier that some threads never reach as an exception. Two plain accesses of one thread are never torn apart, so that
// a missing atomic does not show. A loop that waits for another block hangs: blocks run one after the other.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;  // of the fiber that runs
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace far {
namespace emulator {

inline uint64_t seed = 0;

// splitmix64: the same orders with every standard library.
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  template <class T>
  void shuffle(std::vector<T>& items, size_t first = 0) {
    for (size_t n = items.size() - first; n > 1; --n) std::swap(items[first + n - 1], items[first + (*this)() % n]);
  }
};

constexpr size_t stack_bytes = 64 << 10;
constexpr size_t shared_limit = 48 << 10;  // what every device gives without asking
enum class State { ready, waiting, done };

// A place in the source where threads meet. CUDA allows a barrier in a branch only if all threads of the block take
// the branch, so that two barriers in different lines are two meetings.
struct Meeting {
  std::string_view what, file;
  int line;
  bool warp;      // else the whole block
  unsigned mask;  // lanes of the warp that are to come
  bool operator==(const Meeting& o) const {
    return what == o.what && file == o.file && line == o.line && warp == o.warp && mask == o.mask;
  }
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[stack_bytes]};
  State state;
  Meeting meeting{};
  uint64_t given = 0;  // to the meeting
  std::array<uint64_t, 32> received{};  // from the lanes of a warp's meeting that came
  unsigned came = 0;
  uint3 index{};
  void* fake_stack = nullptr;
};

// One kernel launch.
class Launch {
 public:
  Launch(std::function<void()> body, void* kernel, size_t shared_bytes)
      : body_(std::move(body)), kernel_(kernel), shared_bytes_(shared_bytes), random_{seed},
        fibers_(size_t(blockDim.x) * blockDim.y * blockDim.z) {}

  void run() {
    running = this;
    std::vector<uint64_t> order(uint64_t(gridDim.x) * gridDim.y * gridDim.z);
    std::iota(order.begin(), order.end(), uint64_t(0));
    random_.shuffle(order);
    for (uint64_t block : order) {
      blockIdx = {unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y),
                  unsigned(block / gridDim.x / gridDim.y)};
      try {
        run_block();
      } catch (...) {
        running = nullptr;
        throw;
      }
    }
    running = nullptr;
  }

  // Called by a fiber: waits for the others of the block.
  const std::vector<uint64_t>& meet_block(const Meeting& meeting, uint64_t given) {
    wait(meeting, given);
    return received_;
  }

  // Called by a fiber: waits for the other lanes of the mask.
  const Fiber& meet_warp(const Meeting& meeting, uint64_t given) {
    FAR_REQUIRE(meeting.mask >> lane() & 1, describe(), ": ", meeting.what, " in line ", meeting.line, ", lane ",
                lane(), " is not in its own mask");
    wait(meeting, given);
    return *current_;
  }

  // Called by a fiber: others may come first.
  void pause() {
    if (random_() % 2) return;
    ready_.push_back(current_);
    std::swap(ready_.back(), ready_[random_() % ready_.size()]);
    give_way();
  }

  void* shared() { return shared_.get(); }
  unsigned lane() const { return unsigned(current_ - fibers_.data()) % warpSize; }

  std::string describe() const {
    Dl_info symbol;
    std::string name = "a kernel";
    if (dladdr(kernel_, &symbol) && symbol.dli_sname && symbol.dli_saddr == kernel_) {
      std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(symbol.dli_sname, nullptr, nullptr, nullptr),
                                                  std::free);
      name = text ? text.get() : symbol.dli_sname;
    }
    std::ostringstream text;
    text << name << ", block (" << blockIdx.x << ", " << blockIdx.y << ", " << blockIdx.z << ")";
    return text.str();
  }

  static inline Launch* running = nullptr;

 private:
  void run_block() {
    fill_shared();
    ready_.clear();
    for (size_t i = 0; i < fibers_.size(); ++i) {
      Fiber& f = fibers_[i];
      make_ready(f);
      f.index = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y),
                 unsigned(i / blockDim.x / blockDim.y)};
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = stack_bytes;
      f.context.uc_link = nullptr;
      makecontext(&f.context, &Launch::enter, 0);
    }
    random_.shuffle(ready_);
    const bool greedy = random_() % 2;  // a warp runs as far as it can before the next one starts; else all mix
    for (;;) {
      if (ready_.empty() && !release_block()) return;
      if (!greedy) std::swap(ready_.back(), ready_[random_() % ready_.size()]);
      Fiber& next = *ready_.back();
      ready_.pop_back();
      switch_to(next);
      if (error_) std::rethrow_exception(error_);
    }
  }

  void wait(const Meeting& meeting, uint64_t given) {
    Fiber& self = *current_;
    self.meeting = meeting;
    self.given = given;
    self.state = State::waiting;
    if (meeting.warp) release_warp(self);
    give_way();
  }

  // Nobody can go on: all threads are at one barrier, have returned, which counts as arrived, or wait in vain.
  bool release_block() {
    for (Fiber& f : fibers_)  // a lane may have returned after the others of its mask came
      if (f.state == State::waiting && f.meeting.warp) release_warp(f);
    if (!ready_.empty()) return true;
    const Fiber* one = nullptr;
    received_.clear();
    for (Fiber& f : fibers_) {
      if (f.state == State::done) continue;
      if (!one) one = &f;
      if (f.meeting.warp || !(f.meeting == one->meeting)) deadlock();
      received_.push_back(f.given);
    }
    for (Fiber& f : fibers_)
      if (f.state == State::waiting) make_ready(f);
    random_.shuffle(ready_);
    return !ready_.empty();
  }

  void release_warp(const Fiber& one) {
    const Meeting meeting = one.meeting;
    const size_t first = size_t(&one - fibers_.data()) / warpSize * warpSize;
    const size_t lanes = std::min<size_t>(warpSize, fibers_.size() - first);
    std::array<uint64_t, 32> received{};
    unsigned came = 0;
    for (size_t lane = 0; lane < lanes; ++lane) {
      const Fiber& f = fibers_[first + lane];
      if (!(meeting.mask >> lane & 1) || f.state == State::done) continue;
      if (f.state != State::waiting || !(f.meeting == meeting)) return;
      received[lane] = f.given;
      came |= 1u << lane;
    }
    const size_t before = ready_.size();
    for (size_t lane = 0; lane < lanes; ++lane) {
      if (!(came >> lane & 1)) continue;
      Fiber& f = fibers_[first + lane];
      f.received = received;
      f.came = came;
      make_ready(f);
    }
    random_.shuffle(ready_, before);
  }

  void make_ready(Fiber& f) {
    f.state = State::ready;
    ready_.push_back(&f);
  }

  [[noreturn]] void deadlock() {
    std::vector<std::pair<Meeting, size_t>> waiting;
    for (const Fiber& f : fibers_) {
      if (f.state != State::waiting) continue;
      auto known = std::find_if(waiting.begin(), waiting.end(), [&](auto& w) { return w.first == f.meeting; });
      if (known == waiting.end()) waiting.push_back({f.meeting, 1});
      else ++known->second;
    }
    std::ostringstream text;
    for (const auto& [meeting, count] : waiting) {
      text << "; " << count << " at " << meeting.what << " in line " << meeting.line;
      if (meeting.warp) text << ", mask 0x" << std::hex << meeting.mask << std::dec;
    }
    FAR_REQUIRE(false, describe(), ": its threads wait for each other", text.str());
  }

  static int fill_tls(dl_phdr_info* module, size_t, void* anchor) {
    for (int i = 0; i < module->dlpi_phnum; ++i) {
      if (module->dlpi_phdr[i].p_type != PT_TLS || !module->dlpi_tls_data) continue;
      char* begin = static_cast<char*>(module->dlpi_tls_data);
      const size_t bytes = module->dlpi_phdr[i].p_memsz;
      if (anchor < begin || anchor >= begin + bytes) continue;
      memset(begin, 0xff, bytes);
      return 1;
    }
    return 0;
  }

  void fill_shared() {
#ifndef __SANITIZE_ADDRESS__
    static thread_local volatile char anchor;  // writing to it gives this thread its copy of the storage
    anchor = 0;
    FAR_REQUIRE(dl_iterate_phdr(&fill_tls, const_cast<char*>(&anchor)), "shared memory was not found");
#endif
    shared_.reset(shared_bytes_ ? new char[shared_bytes_] : nullptr);
    if (shared_bytes_) memset(shared_.get(), 0xff, shared_bytes_);
  }

  void switch_to(Fiber& f) {
    current_ = &f;
    threadIdx = f.index;
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, f.stack.get(), stack_bytes);
#endif
    swapcontext(&main_, &f.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void give_way() {
    Fiber& self = *current_;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(self.state == State::done ? nullptr : &self.fake_stack, main_stack_, main_bytes_);
#endif
    swapcontext(&self.context, &main_);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(self.fake_stack, &main_stack_, &main_bytes_);
#endif
  }

  // An exception must not leave a fiber: it is kept, and thrown again where the launch was.
  static void enter() {
    Launch& self = *running;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &self.main_stack_, &self.main_bytes_);
#endif
    try {
      self.body_();
    } catch (...) {
      self.error_ = std::current_exception();
    }
    self.current_->state = State::done;
    self.give_way();
  }

  std::function<void()> body_;
  void* kernel_;
  size_t shared_bytes_;
  Random random_;
  std::vector<Fiber> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t main_{};
  const void* main_stack_ = nullptr;
  size_t main_bytes_ = 0;
  std::exception_ptr error_;
  std::unique_ptr<char[]> shared_;
  std::vector<Fiber*> ready_;       // the last one is next
  std::vector<uint64_t> received_;  // from the threads that came to the block's last barrier
};

inline Launch& here() {
  FAR_REQUIRE(Launch::running, "device code was called outside of a kernel");
  return *Launch::running;
}

// What a real launch would refuse.
inline void check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  const auto shape = [](dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  FAR_REQUIRE(grid.x && grid.y && grid.z && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535,
              "a grid of ", shape(grid), " blocks cannot be launched");
  FAR_REQUIRE(block.x && block.y && block.z && block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
                  uint64_t(block.x) * block.y * block.z <= 1024,
              "a block of ", shape(block), " threads cannot be launched");
  FAR_REQUIRE(shared_bytes <= shared_limit, shared_bytes, " bytes of shared memory are more than ", shared_limit);
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
  static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel arguments are copied as bytes");
  static_assert((sizeof(Params) + ... + 0) <= 4096, "kernel arguments take more than 4 KiB");
  FAR_REQUIRE(!Launch::running, "a kernel launches another one");
  check_launch(grid, block, shared_bytes);
  gridDim = grid;
  blockDim = block;
  Launch([=] { kernel(Params(args)...); }, reinterpret_cast<void*>(kernel), shared_bytes).run();
}

}  // namespace emulator
}  // namespace far
