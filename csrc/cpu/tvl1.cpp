#include "kernels/tvl1.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <thread>

#include "common/parallel.h"
#include "launch.h"

// The rows a loop writes are not among those it reads, but where it reads and writes one element: too many pointers
// for the compiler to check that by itself.
#ifdef __clang__
#define FAR_VECTORISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define FAR_VECTORISE _Pragma("GCC ivdep")
#endif

namespace far {
namespace FAR_ISA {

namespace {

constexpr int64_t lanes = 16;  // floats of the widest vector; rows hold whole ones, and one to the left
constexpr int64_t max_scales = 32;

int64_t whole(int64_t n) { return (n + lanes - 1) / lanes * lanes; }

// Memory aligned to a cache line, not initialised.
struct Buffer {
  float* data;
  explicit Buffer(int64_t n) : data(static_cast<float*>(::operator new(n * sizeof(float), std::align_val_t(64)))) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
};

// Flow that fades out over a flat region ends in denormal numbers, whose arithmetic takes a hundred times as long: they
// count as zero while this object lives, whatever the calling thread's mode.
struct FlushDenormals {
#ifdef __x86_64__
  static constexpr unsigned inputs_and_results = 0x8040;
  const unsigned saved = __builtin_ia32_stmxcsr();
  FlushDenormals() { __builtin_ia32_ldmxcsr(saved | inputs_and_results); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(saved); }
#endif
};

struct Plane {
  float* data;
  int64_t height, width, step;
  float* row(int64_t y) const { return data + y * step; }
};

// An image with a replicated border of two pixels, for the taps of tvl1_warp and the windows of the median.
constexpr int64_t border = 2;
int64_t image_step(int64_t width) { return whole(width) + 2 * lanes; }
int64_t image_size(int64_t height, int64_t width) { return image_step(width) * (height + 2 * border); }

Plane image_in(float* memory, int64_t height, int64_t width) {
  return {memory + border * image_step(width) + lanes, height, width, image_step(width)};
}

void replicate_border(const Plane& image) {
  for (int64_t y = 0; y < image.height; ++y) {
    float* row = image.row(y);
    for (int64_t i = 1; i <= border; ++i) {
      row[-i] = row[0];
      row[image.width - 1 + i] = row[image.width - 1];
    }
  }
  const size_t bytes = (image.width + 2 * border) * sizeof(float);
  for (int64_t i = 1; i <= border; ++i) {
    std::memcpy(image.row(-i) - border, image.row(0) - border, bytes);
    std::memcpy(image.row(image.height - 1 + i) - border, image.row(image.height - 1) - border, bytes);
  }
}

// What the iterations work on. The fields of one row lie side by side, so that a row is one stretch of memory and
// rows of different fields do not fall on the same cache sets. Row -1 is zero: no dual flow enters from above.
enum Field { U1, U2, P11, P12, P21, P22, IX, IY, RHO, INV, fields };

struct State {
  int64_t height, width, pitch;
  float* data;

  static int64_t pitch_of(int64_t width) { return lanes + whole(width + 1); }
  static int64_t size(int64_t height, int64_t width) { return pitch_of(width) * fields * (height + 1); }
  State(float* memory, int64_t h, int64_t w)
      : height(h), width(w), pitch(pitch_of(w)), data(memory + pitch * fields + lanes) {}
  float* row(Field field, int64_t y) const { return data + (y * fields + field) * pitch; }
  Plane plane(Field field) const { return {row(field, 0), height, width, pitch * fields}; }
};

struct Weights {
  float limit, tau, rate;
};

// The last column has no right neighbour: a copy of it beyond the edge makes its forward difference zero.
void close_row(const State& s, int64_t y) {
  for (Field field : {U1, U2}) s.row(field, y)[s.width] = s.row(field, y)[s.width - 1];
}

void primal_row(const State& s, int64_t y, Weights w) {
  float* u1 = s.row(U1, y);
  float* u2 = s.row(U2, y);
  const float* p11 = s.row(P11, y);
  const float* p12 = s.row(P12, y);
  const float* p21 = s.row(P21, y);
  const float* p22 = s.row(P22, y);
  const float* p12_above = s.row(P12, y - 1);
  const float* p22_above = s.row(P22, y - 1);
  const float* ix = s.row(IX, y);
  const float* iy = s.row(IY, y);
  const float* rho = s.row(RHO, y);
  const float* inv = s.row(INV, y);
  const int64_t n = whole(s.width);
  FAR_VECTORISE
  for (int64_t x = 0; x < n; ++x) {
    const float div1 = p11[x] - p11[x - 1] + p12[x] - p12_above[x];
    const float div2 = p21[x] - p21[x - 1] + p22[x] - p22_above[x];
    tvl1_primal(u1[x], u2[x], div1, div2, {ix[x], iy[x], rho[x], inv[x]}, w.limit);
  }
  close_row(s, y);
}

void dual_row(const State& s, int64_t y, Weights w) {
  const int64_t below = std::min(y + 1, s.height - 1);
  const float* u1 = s.row(U1, y);
  const float* u2 = s.row(U2, y);
  const float* u1_below = s.row(U1, below);
  const float* u2_below = s.row(U2, below);
  float* p11 = s.row(P11, y);
  float* p12 = s.row(P12, y);
  float* p21 = s.row(P21, y);
  float* p22 = s.row(P22, y);
  const int64_t n = whole(s.width);
  FAR_VECTORISE
  for (int64_t x = 0; x < n; ++x)
    tvl1_dual(p11[x], p12[x], p21[x], p22[x], u1[x + 1] - u1[x], u1_below[x] - u1[x], u2[x + 1] - u2[x],
              u2_below[x] - u2[x], w.tau, w.rate);
}

// Step y of an iteration: the primal update of row y, then the dual update of row y - 1, which needs it.
void iterate_row(const State& s, int64_t y, Weights w) {
  if (y < s.height) primal_row(s, y, w);
  if (y > 0) dual_row(s, y - 1, w);
}

void warp_row(const State& s, const Plane& prev, const Plane& next, int64_t y) {
  const float* from = prev.row(y);
  const float* to = next.data;
  const float* u1 = s.row(U1, y);
  const float* u2 = s.row(U2, y);
  float* ix = s.row(IX, y);
  float* iy = s.row(IY, y);
  float* rho = s.row(RHO, y);
  float* inv = s.row(INV, y);
  const int height = int(s.height), width = int(s.width), step = int(next.step);
  const int n = int(whole(s.width));
  FAR_VECTORISE
  for (int x = 0; x < n; ++x) {
    const Tvl1Data d = tvl1_warp(from[x], to, step, height, width, x, int(y), u1[x], u2[x]);
    ix[x] = d.ix;
    iy[x] = d.iy;
    rho[x] = d.rho;
    inv[x] = d.inv;
  }
}

// The median of side x side pixels, by forgetful selection: of the values kept, the least and the greatest cannot be
// the median, and make room for one that was not looked at yet.
void median_row(const Plane& from, float* out, int64_t y, int side) {
  typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));
  const int n = side * side;
  for (int64_t x = 0; x < from.width; x += lanes) {
    Lanes kept[14];
    const auto take = [&](int slot, int i) {
      std::memcpy(&kept[slot], from.row(y + i / side - side / 2) + x + i % side - side / 2, sizeof(Lanes));
    };
    const auto order = [](Lanes& low, Lanes& high) {
      const Lanes a = low, b = high;
      low = a < b ? a : b;
      high = a < b ? b : a;
    };
    int last = n / 2 + 1;
    for (int i = 0; i <= last; ++i) take(i, i);
    for (int next = last + 1;; take(0, next++), --last) {
      Lanes least = kept[0], greatest = kept[last];
      order(least, greatest);
      for (int i = 1; i < last; ++i) {
        order(least, kept[i]);
        order(kept[i], greatest);
      }
      if (next == n) break;
    }
    std::memcpy(out + x, &kept[1], sizeof(Lanes));
  }
}

void resize_row(const Plane& from, const Plane& to, int64_t y, float gain) {
  const float ratio_x = float(from.width) / float(to.width), ratio_y = float(from.height) / float(to.height);
  const Tvl1Sample v = tvl1_sample(int(y), ratio_y, int(from.height));
  const float* a = from.row(v.index);
  const float* b = from.row(v.next);
  float* out = to.row(y);
  const int width = int(from.width), n = int(to.width);
  FAR_VECTORISE
  for (int x = 0; x < n; ++x) {
    const Tvl1Sample h = tvl1_sample(x, ratio_x, width);
    const float above = tvl1_blend(a[h.index], a[h.next], h.part);
    const float below = tvl1_blend(b[h.index], b[h.next], h.part);
    out[x] = gain * tvl1_blend(above, below, v.part);
  }
}

// Rows in chunks, on `threads` threads.
template <class Body>
void for_rows(int64_t height, int threads, const Body& body) {
  constexpr int64_t chunk = 16;
  parallel_for((height + chunk - 1) / chunk, threads, [&](int64_t task) {
    [[maybe_unused]] const FlushDenormals mode;
    for (int64_t y = task * chunk; y < std::min(height, (task + 1) * chunk); ++y) body(y);
  });
}

// Note [Iterations in one sweep]: iteration k + 1 may follow iteration k one row behind it: its step y reads and writes
// rows up to y (u) and y - 1 (p), which step y + 1 of iteration k has finished, and no later step of iteration k looks
// at row y - 1 of p or row y - 1 of u again. So a block of iterations runs as one sweep over the rows, with a working
// set of that many rows, which stays in the L2 cache; and several threads run one block each, every thread one step
// behind the one before. The arithmetic and its order per pixel are the same whatever the blocks.
void iterate(const State& s, int64_t iterations, const Weights& weights, int threads) {
  constexpr int64_t cache_bytes = 400 << 10;
  const int64_t fitting = std::max<int64_t>(cache_bytes / int64_t(s.pitch * fields * sizeof(float)), 1);
  const int64_t blocks = std::min(std::max<int64_t>((iterations + fitting - 1) / fitting, threads), iterations);
  struct alignas(64) Progress {
    std::atomic<int64_t> steps{0};
  };
  constexpr int64_t slots = 64;
  for (int64_t first = 0; first < blocks; first += slots) {
    Progress progress[slots];
    parallel_for(std::min(slots, blocks - first), threads, [&](int64_t task) {
      [[maybe_unused]] const FlushDenormals mode;
      const int64_t begin = iterations * (first + task) / blocks, end = iterations * (first + task + 1) / blocks;
      const int64_t count = end - begin;
      for (int64_t sweep = 0; sweep <= s.height + count - 1; ++sweep) {
        const int64_t needed = std::min(sweep + 2, s.height + 1);  // steps of the last iteration before this block
        while (task > 0 && progress[task - 1].steps.load(std::memory_order_acquire) < needed)
          std::this_thread::yield();
        for (int64_t k = 0; k < count; ++k)
          if (sweep - k >= 0 && sweep - k <= s.height) iterate_row(s, sweep - k, weights);
        if (sweep >= count - 1) progress[task].steps.store(sweep - count + 2, std::memory_order_release);
      }
    });
  }
}

void filter(const State& s, int side, float* memory, int threads) {
  const Plane copy = image_in(memory, s.height, s.width);
  for (Field field : {U1, U2}) {
    for (int64_t y = 0; y < s.height; ++y) std::memcpy(copy.row(y), s.row(field, y), s.width * sizeof(float));
    replicate_border(copy);
    for_rows(s.height, threads, [&](int64_t y) { median_row(copy, s.row(field, y), y, side); });
  }
}

template <class Pixel>
void load_image(const void* pixels, int64_t pair, const Plane& image) {
  const Pixel* from = static_cast<const Pixel*>(pixels) + pair * image.height * image.width;
  for (int64_t y = 0; y < image.height; ++y, from += image.width)
    for (int64_t x = 0; x < image.width; ++x) image.row(y)[x] = float(from[x]);
  replicate_border(image);
}

struct Shape {
  int64_t height, width;
};

void solve(const Tvl1Args& a, int64_t pair, int threads) {
  Shape shapes[max_scales] = {{a.height, a.width}};
  int64_t scales = 1, pixels = image_size(a.height, a.width);
  for (; scales < std::min<int64_t>(a.scales, max_scales); ++scales) {
    const Shape last = shapes[scales - 1];
    const Shape shape{std::lrint(last.height * a.scale_step), std::lrint(last.width * a.scale_step)};
    if (shape.height < 16 || shape.width < 16) break;
    shapes[scales] = shape;
    pixels += image_size(shape.height, shape.width);
  }
  const Buffer images(2 * pixels);
  std::memset(images.data, 0, 2 * pixels * sizeof(float));  // rows are read to whole vectors, beyond their border
  Plane prev[max_scales], next[max_scales];
  float* memory = images.data;
  for (int64_t i = 0; i < scales; ++i)
    for (Plane* level : {&prev[i], &next[i]}) {
      *level = image_in(memory, shapes[i].height, shapes[i].width);
      memory += image_size(shapes[i].height, shapes[i].width);
    }
  (a.bytes ? load_image<uint8_t> : load_image<float>)(a.prev, pair, prev[0]);
  (a.bytes ? load_image<uint8_t> : load_image<float>)(a.next, pair, next[0]);
  for (int64_t i = 1; i < scales; ++i)
    for (Plane* pyramid : {prev, next}) {
      for_rows(shapes[i].height, threads, [&](int64_t y) { resize_row(pyramid[i - 1], pyramid[i], y, 1.f); });
      replicate_border(pyramid[i]);
    }

  const Buffer unfiltered(a.median > 1 ? image_size(a.height, a.width) : 0);
  const Weights weights{a.lam * a.theta, a.tau, a.tau / a.theta};
  const int64_t second = std::min<int64_t>(scales - 1, 1);
  const Buffer even(State::size(a.height, a.width)), odd(State::size(shapes[second].height, shapes[second].width));
  for (int64_t i = scales - 1; i >= 0; --i) {
    const State s((i % 2 ? odd : even).data, shapes[i].height, shapes[i].width);
    std::memset(s.data - s.pitch * fields - lanes, 0, State::size(s.height, s.width) * sizeof(float));
    if (i + 1 < scales) {
      const int64_t height = shapes[i + 1].height, width = shapes[i + 1].width;
      const State coarse((i % 2 ? even : odd).data, height, width);
      for_rows(s.height, threads, [&](int64_t y) {
        resize_row(coarse.plane(U1), s.plane(U1), y, float(s.width) / float(width));
        resize_row(coarse.plane(U2), s.plane(U2), y, float(s.height) / float(height));
        close_row(s, y);
      });
    }
    for (int warp = 0; warp < a.warps; ++warp) {
      if (a.median > 1) filter(s, a.median, unfiltered.data, threads);
      for_rows(s.height, threads, [&](int64_t y) { warp_row(s, prev[i], next[i], y); });
      iterate(s, a.iterations, weights, threads);
    }
  }
  const State s(even.data, a.height, a.width);
  float* flow = a.flow + pair * 2 * a.height * a.width;
  for (Field field : {U1, U2})
    for (int64_t y = 0; y < a.height; ++y, flow += a.width) std::memcpy(flow, s.row(field, y), a.width * sizeof(float));
}

}  // namespace

void tvl1(const Tvl1Args& a, int threads) {
  const int64_t alone = a.pairs < threads ? a.pairs : a.pairs % std::max(threads, 1);
  const int64_t together = a.pairs - alone;
  parallel_for(together, threads, [&](int64_t pair) { solve(a, pair, 1); });
  for (int64_t pair = together; pair < a.pairs; ++pair) solve(a, pair, std::max(threads, 1));
}

}  // namespace FAR_ISA
}  // namespace far
