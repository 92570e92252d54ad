#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "common/check.h"
#include "launch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Images = nb::ndarray<nb::ro, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Flow = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

void tvl1(Images prev, Images next, Flow flow, float tau, float lam, float theta, int scales, double scale_step,
          int warps, int iterations, int median, int threads) {
  const bool bytes = prev.dtype() == nb::dtype<uint8_t>();
  FAR_REQUIRE(bytes || prev.dtype() == nb::dtype<float>(), "tvl1: images are neither uint8 nor float32");
  FAR_REQUIRE(next.dtype() == prev.dtype(), "tvl1: prev and next differ in type");
  const size_t pairs = prev.shape(0), height = prev.shape(1), width = prev.shape(2);
  FAR_REQUIRE(next.shape(0) == pairs && next.shape(1) == height && next.shape(2) == width,
              "tvl1: prev is ", pairs, "x", height, "x", width, ", next ", next.shape(0), "x", next.shape(1), "x",
              next.shape(2));
  FAR_REQUIRE(flow.shape(0) == pairs && flow.shape(1) == 2 && flow.shape(2) == height && flow.shape(3) == width,
              "tvl1: flow does not have the shape of prev");
  FAR_REQUIRE(height > 0 && width > 0 && height < (1 << 15) && width < (1 << 15),
              "tvl1: images of ", width, "x", height, " pixels; sides are 1 to 32767");
  FAR_REQUIRE(median <= 1 || median == 3 || median == 5, "tvl1: no median filter of side ", median);
  const far::Tvl1Args args{prev.data(),    next.data(), flow.data(), bytes, int64_t(pairs),
                           int64_t(height), int64_t(width), tau, lam, theta,
                           scales,          scale_step,     warps, iterations,      median};
  nb::gil_scoped_release release;
  far::cpu::tvl1(args, threads);
}

}  // namespace

void bind_tvl1(nb::module_& m) {
  m.def("tvl1", &tvl1, "prev"_a.noconvert(), "next"_a.noconvert(), "flow"_a.noconvert(), "tau"_a, "lam"_a, "theta"_a,
        "scales"_a, "scale_step"_a, "warps"_a, "iterations"_a, "median"_a, "threads"_a);
}
