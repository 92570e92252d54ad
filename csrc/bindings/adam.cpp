#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "common/check.h"
#include "launch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Flat = nb::ndarray<float, nb::ndim<1>, nb::c_contig>;
using FlatConst = nb::ndarray<const float, nb::ndim<1>, nb::c_contig>;
using Table = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig>;

void adam_step(Flat param, FlatConst grad, Flat exp_avg, Flat exp_avg_sq, Table segments, int threads,
               uintptr_t cuda_stream) {
  const size_t n = param.shape(0);
  FAR_REQUIRE(grad.shape(0) == n, "adam_step: grad has ", grad.shape(0), " elements, param ", n);
  FAR_REQUIRE(exp_avg.shape(0) == n, "adam_step: exp_avg has ", exp_avg.shape(0), " elements, param ", n);
  FAR_REQUIRE(exp_avg_sq.shape(0) == n, "adam_step: exp_avg_sq has ", exp_avg_sq.shape(0), " elements, param ", n);
  FAR_REQUIRE(segments.shape(0) % sizeof(far::AdamSegment) == 0, "adam_step: the segment table has ",
              segments.shape(0), " bytes, not a multiple of ", sizeof(far::AdamSegment));
  const int device = param.device_type(), id = param.device_id();
  for (const auto& pair : {std::pair{grad.device_type(), grad.device_id()},
                           std::pair{exp_avg.device_type(), exp_avg.device_id()},
                           std::pair{exp_avg_sq.device_type(), exp_avg_sq.device_id()},
                           std::pair{segments.device_type(), segments.device_id()}})
    FAR_REQUIRE(pair.first == device && pair.second == id, "adam_step: arrays lie on different devices");
  const far::AdamArgs args{param.data(), grad.data(), exp_avg.data(), exp_avg_sq.data(), int64_t(n)};
  const auto* table = reinterpret_cast<const far::AdamSegment*>(segments.data());
  const int64_t count = segments.shape(0) / sizeof(far::AdamSegment);
  nb::gil_scoped_release release;
  if (device == nb::device::cpu::value) {
    for (int64_t i = 0; i < count; ++i)
      FAR_REQUIRE(table[i].begin >= (i ? table[i - 1].end : 0) && table[i].begin <= table[i].end &&
                      table[i].end <= int64_t(n),
                  "adam_step: segment ", i, " [", table[i].begin, ", ", table[i].end, ") is out of order or bounds");
    far::cpu::adam_step(args, table, count, threads);
    return;
  }
#ifdef FAR_WITH_CUDA
  if (device == nb::device::cuda::value) {
    far::cuda::adam_step(args, table, count, reinterpret_cast<void*>(cuda_stream));
    return;
  }
#endif
  (void)cuda_stream;
  FAR_REQUIRE(false, "adam_step: this build has no kernel for DLPack device type ", device);
}

}  // namespace

void bind_adam(nb::module_& m) {
  m.attr("ADAM_SEGMENT_BYTES") = sizeof(far::AdamSegment);
  m.def("adam_step", &adam_step, "param"_a.noconvert(), "grad"_a.noconvert(), "exp_avg"_a.noconvert(),
        "exp_avg_sq"_a.noconvert(), "segments"_a.noconvert(), "threads"_a, "cuda_stream"_a);
}
