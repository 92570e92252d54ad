#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>
#include <vector>

#include "common/check.h"
#include "launch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Flat = nb::ndarray<nb::ndim<1>, nb::c_contig>;                           // any type: see type_of
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig>;                 // rows of a table
using HostBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using First = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig>;
using Scalar = nb::ndarray<const float, nb::c_contig>;
using Squares = nb::ndarray<const double, nb::c_contig>;
using Partials = nb::ndarray<double, nb::ndim<1>, nb::c_contig>;

far::Dtype type_of(const Flat& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<float>()) return far::Dtype::f32;
  if (type.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && type.bits == 16 && type.lanes == 1)
    return far::Dtype::bf16;
  if (type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16 && type.lanes == 1)
    return far::Dtype::f16;
  FAR_REQUIRE(false, name, " is neither float32, bfloat16 nor float16");
}

bool on_cpu(int device) { return device == nb::device::cpu::value; }

// The arrays of some buckets of one device and the tables that belong to them; checked once, so that a step costs the
// host no more than its launches. Holds references to everything it points into.
class AdamPlan {
 public:
  // segments [S, sizeof(AdamSegment)] and groups [G, sizeof(AdamGroup)] lie on the buckets' device; `host_segments` is
  // a copy in host memory, to check.
  AdamPlan(Bytes segments, Bytes groups, HostBytes host_segments) : segments_(segments), groups_(groups) {
    FAR_REQUIRE(segments.shape(1) == sizeof(far::AdamSegment) && groups.shape(1) == sizeof(far::AdamGroup) &&
                    host_segments.shape(1) == sizeof(far::AdamSegment),
                "adam: rows of the tables have ", segments.shape(1), " and ", groups.shape(1), " bytes");
    FAR_REQUIRE(host_segments.shape(0) == segments.shape(0), "adam: the copy of the segment table has ",
                host_segments.shape(0), " rows, not ", segments.shape(0));
    device_ = segments.device_type();
    device_id_ = segments.device_id();
    require_here(groups, "groups");
    const auto* rows = reinterpret_cast<const far::AdamSegment*>(host_segments.data());
    host_segments_.assign(rows, rows + host_segments.shape(0));
    for (const auto& s : host_segments_)
      FAR_REQUIRE(s.group >= 0 && size_t(s.group) < groups.shape(0), "adam: a segment is of group ", s.group,
                  ", there are ", groups.shape(0));
  }

  // `first`: on a GPU, for each chunk of adam_chunk elements the first segment that ends behind its begin.
  void add_bucket(Flat weight, Flat grad, Flat exp_avg, Flat exp_avg_sq, std::optional<Flat> max_exp_avg_sq,
                  std::optional<Flat> frozen_sq, std::optional<Flat> param, std::optional<First> first, int64_t row, int64_t rows) {
    const int64_t n = weight.shape(0);
    far::AdamBucket b{};
    b.numel = n;
    b.weight = static_cast<float*>(checked(weight, "weight", n));
    b.grad = checked(grad, "grad", n);
    b.exp_avg = checked(exp_avg, "exp_avg", n);
    b.exp_avg_sq = checked(exp_avg_sq, "exp_avg_sq", n);
    b.grad_type = type_of(grad, "grad");
    b.moment_type = type_of(exp_avg, "exp_avg");
    FAR_REQUIRE(type_of(weight, "weight") == far::Dtype::f32, "adam: weight is not float32");
    FAR_REQUIRE(type_of(exp_avg_sq, "exp_avg_sq") == b.moment_type, "adam: exp_avg and exp_avg_sq differ in type");
    FAR_REQUIRE(b.moment_type != far::Dtype::f16, "adam: moments are float32 or bfloat16");
    if (max_exp_avg_sq) {
      FAR_REQUIRE(type_of(*max_exp_avg_sq, "max_exp_avg_sq") == far::Dtype::f32, "adam: max_exp_avg_sq is not float32");
      b.max_exp_avg_sq = static_cast<float*>(checked(*max_exp_avg_sq, "max_exp_avg_sq", n));
    }
    if (frozen_sq) {
      FAR_REQUIRE(type_of(*frozen_sq, "frozen_sq") == far::Dtype::f32, "adam: frozen_sq is not float32");
      FAR_REQUIRE(!max_exp_avg_sq, "adam: amsgrad and a frozen second moment exclude each other");
      b.frozen_sq = static_cast<float*>(checked(*frozen_sq, "frozen_sq", n));
    }
    FAR_REQUIRE(bool(param) == (b.grad_type != far::Dtype::f32),
                "adam: a parameter beside its weight is for gradients smaller than float32, and needed there");
    if (param) {
      FAR_REQUIRE(type_of(*param, "param") == b.grad_type, "adam: param and grad differ in type");
      b.param = checked(*param, "param", n);
    }
    FAR_REQUIRE(row >= 0 && rows >= 0 && row + rows <= int64_t(segments_.shape(0)), "adam: rows ", row, " to ",
                row + rows, " of ", segments_.shape(0));
    for (int64_t i = row; i < row + rows; ++i) {
      const auto& s = host_segments_[i];
      FAR_REQUIRE(s.begin >= (i > row ? host_segments_[i - 1].end : 0) && s.begin <= s.end && s.end <= n &&
                      s.begin % 4 == 0,
                  "adam: segment ", i, " [", s.begin, ", ", s.end, ") is out of order, bounds or alignment");
    }
    b.segments = reinterpret_cast<const far::AdamSegment*>(segments_.data()) + row;
    b.count = rows;
    if (!on_cpu(device_)) {
      FAR_REQUIRE(first && int64_t(first->shape(0)) == (n + far::adam_chunk - 1) / far::adam_chunk,
                  "adam: one first segment per chunk of ", far::adam_chunk, " elements is needed");
      require_here(*first, "first");
      FAR_REQUIRE(n % 4 == 0, "adam: a bucket of ", n, " elements is not whole vectors of four");
      b.first = first->data();
      firsts_.push_back(*first);
    }
    buckets_.push_back(b);
  }

  void advance(std::optional<Scalar> grad_scale, std::optional<Scalar> found_inf, std::optional<Squares> squares,
               double max_norm, uintptr_t cuda_stream) {
    far::AdamScale scale{};
    scale.grad_scale = scalar(grad_scale, "grad_scale");
    scale.found_inf = scalar(found_inf, "found_inf");
    scale.squares = scalar(squares, "squares");
    scale.max_norm = max_norm;
    auto* segments = reinterpret_cast<far::AdamSegment*>(segments_.data());
    const auto* groups = reinterpret_cast<const far::AdamGroup*>(groups_.data());
    nb::gil_scoped_release release;
    if (on_cpu(device_)) return far::cpu::adam_advance(segments, segments_.shape(0), groups, scale);
#ifdef FAR_WITH_CUDA
    far::cuda::adam_advance(segments, segments_.shape(0), groups, scale, reinterpret_cast<void*>(cuda_stream));
#endif
    (void)cuda_stream;
  }

  // Buckets [begin, end). `outs`, if any, gets one array per bucket of this plan: a copy of the new weights.
  void update(int64_t begin, int64_t end, const std::vector<Flat>& outs, int threads, uintptr_t cuda_stream) {
    FAR_REQUIRE(0 <= begin && begin <= end && end <= int64_t(buckets_.size()), "adam: buckets ", begin, " to ", end,
                " of ", buckets_.size());
    FAR_REQUIRE(outs.empty() || outs.size() == buckets_.size(), "adam: ", outs.size(), " outputs for ",
                buckets_.size(), " buckets");
    std::vector<far::AdamBucket> chosen(buckets_.begin() + begin, buckets_.begin() + end);
    for (int64_t i = begin; !outs.empty() && i < end; ++i) {
      chosen[i - begin].out = checked(outs[i], "out", buckets_[i].numel, false);
      chosen[i - begin].out_type = type_of(outs[i], "out");
    }
    nb::gil_scoped_release release;
    if (on_cpu(device_)) return far::cpu::adam_update(chosen.data(), chosen.size(), threads);
#ifdef FAR_WITH_CUDA
    for (const auto& bucket : chosen) far::cuda::adam_update(bucket, reinterpret_cast<void*>(cuda_stream));
#endif
    (void)cuda_stream;
  }

 private:
  template <class Array>
  void require_here(const Array& array, const char* name) const {
    FAR_REQUIRE(array.device_type() == device_ && array.device_id() == device_id_, "adam: ", name,
                " lies on another device than the segment table");
#ifndef FAR_WITH_CUDA
    FAR_REQUIRE(on_cpu(array.device_type()), "adam: this build has no kernel for DLPack device type ",
                array.device_type());
#endif
  }

  void* checked(const Flat& array, const char* name, int64_t numel, bool keep = true) {
    require_here(array, name);
    FAR_REQUIRE(int64_t(array.shape(0)) == numel, "adam: ", name, " has ", array.shape(0), " elements, weight ", numel);
    FAR_REQUIRE(on_cpu(device_) || reinterpret_cast<uintptr_t>(array.data()) % 16 == 0, "adam: ", name,
                " does not begin at a multiple of 16 bytes");
    if (keep) kept_.push_back(array);
    return const_cast<void*>(array.data());
  }

  template <class Array>
  auto scalar(const std::optional<Array>& array, const char* name) const -> decltype(array->data()) {
    if (!array) return nullptr;
    require_here(*array, name);
    FAR_REQUIRE(array->size() == 1, "adam: ", name, " has ", array->size(), " elements, not one");
    return array->data();
  }

  Bytes segments_, groups_;
  std::vector<far::AdamSegment> host_segments_;
  std::vector<far::AdamBucket> buckets_;
  std::vector<Flat> kept_;
  std::vector<First> firsts_;
  int device_, device_id_;
};

void sum_squares(Flat values, Partials partials, int threads, uintptr_t cuda_stream) {
  const int64_t n = values.shape(0);
  FAR_REQUIRE(int64_t(partials.shape(0)) == (n + far::squares_chunk - 1) / far::squares_chunk,
              "sum_squares: ", partials.shape(0), " partial sums for ", n, " elements");
  FAR_REQUIRE(values.device_type() == partials.device_type() && values.device_id() == partials.device_id(),
              "sum_squares: arrays lie on different devices");
  const far::Dtype type = type_of(values, "values");
  nb::gil_scoped_release release;
  if (on_cpu(values.device_type())) return far::cpu::sum_squares(values.data(), type, n, partials.data(), threads);
#ifdef FAR_WITH_CUDA
  FAR_REQUIRE(reinterpret_cast<uintptr_t>(values.data()) % 16 == 0, "sum_squares: values do not begin at 16 bytes");
  return far::cuda::sum_squares(values.data(), type, n, partials.data(), reinterpret_cast<void*>(cuda_stream));
#endif
  (void)cuda_stream;
  FAR_REQUIRE(false, "sum_squares: this build has no kernel for DLPack device type ", values.device_type());
}

}  // namespace

void bind_adam(nb::module_& m) {
  m.attr("ADAM_SEGMENT_BYTES") = sizeof(far::AdamSegment);
  m.attr("ADAM_GROUP_BYTES") = sizeof(far::AdamGroup);
  m.attr("ADAM_CHUNK") = far::adam_chunk;
  m.attr("SQUARES_CHUNK") = far::squares_chunk;
  nb::class_<AdamPlan>(m, "AdamPlan")
      .def(nb::init<Bytes, Bytes, HostBytes>(), "segments"_a.noconvert(), "groups"_a.noconvert(),
           "host_segments"_a.noconvert())
      .def("add_bucket", &AdamPlan::add_bucket, "weight"_a.noconvert(), "grad"_a.noconvert(), "exp_avg"_a.noconvert(),
           "exp_avg_sq"_a.noconvert(), "max_exp_avg_sq"_a.noconvert().none(),
           "frozen_sq"_a.noconvert().none(), "param"_a.noconvert().none(),
           "first"_a.noconvert().none(), "row"_a, "rows"_a)
      .def("advance", &AdamPlan::advance, "grad_scale"_a.noconvert().none(), "found_inf"_a.noconvert().none(),
           "squares"_a.noconvert().none(), "max_norm"_a, "cuda_stream"_a)
      .def("update", &AdamPlan::update, "begin"_a, "end"_a, "outs"_a.noconvert(), "threads"_a, "cuda_stream"_a);
  m.def("sum_squares", &sum_squares, "values"_a.noconvert(), "partials"_a.noconvert(), "threads"_a, "cuda_stream"_a);
}
