#include "kernels/quantise.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <optional>

#include "common/check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Array = nb::ndarray<>;  // checked below, where the sentence can say what is wrong

void require_bits(const char* op, int bits) {
  FAR_REQUIRE(bits == 16 || bits == 8 || bits == 4, op, ": no payload of ", bits, " bits; there are 16, 8 and 4");
}

// The arrays of one call; the first one says on which device all lie.
class Call {
 public:
  Call(const char* op, const Array& first) : op_(op), device_(first.device_type()), device_id_(first.device_id()) {
#ifndef FAR_WITH_CUDA
    FAR_REQUIRE(on_cpu(), op, ": this build has no kernel for DLPack device type ", device_);
#endif
  }

  bool on_cpu() const { return device_ == nb::device::cpu::value; }

  float* floats(const Array& array, const char* name, int64_t numel) const {
    require_here(array, name);
    FAR_REQUIRE(array.dtype() == nb::dtype<float>() && array.ndim() == 1 && (numel < 2 || array.stride(0) == 1), op_,
                ": ", name, " is not a float32 array of one dimension without gaps");
    FAR_REQUIRE(int64_t(array.shape(0)) == numel, op_, ": ", name, " has ", array.shape(0), " elements, not ", numel);
    return static_cast<float*>(array.data());
  }

  float* floats(const std::optional<Array>& array, const char* name, int64_t numel) const {
    return array ? floats(*array, name, numel) : nullptr;
  }

  // A payload, or rows of them.
  uint8_t* bytes(const Array& array, const char* name, size_t ndim, int64_t count) const {
    require_here(array, name);
    FAR_REQUIRE(array.dtype() == nb::dtype<uint8_t>() && array.ndim() == ndim, op_, ": ", name,
                " is not a uint8 array of ", ndim, " dimension", ndim > 1 ? "s" : "");
    const auto bytes = int64_t(array.shape(ndim - 1));
    FAR_REQUIRE(bytes == count, op_, ": ", name, " has ", bytes, " bytes, not ", count);
    if (array.size() == 0) return static_cast<uint8_t*>(array.data());
    FAR_REQUIRE(array.stride(ndim - 1) == 1, op_, ": ", name, " has gaps between its bytes");
    const bool aligned = reinterpret_cast<uintptr_t>(array.data()) % 16 == 0 &&
                         (ndim == 1 || array.shape(0) < 2 || array.stride(0) % 16 == 0);
    FAR_REQUIRE(aligned, op_, ": ", name, " does not begin at a multiple of 16 bytes");
    return static_cast<uint8_t*>(array.data());
  }

  // What is written must not lie in what is read, nor in what else is written.
  void require_apart(const void* written, int64_t written_bytes, const void* other, int64_t other_bytes,
                     const char* names) const {
    const auto a = reinterpret_cast<uintptr_t>(written), b = reinterpret_cast<uintptr_t>(other);
    FAR_REQUIRE(!written || !other || !written_bytes || !other_bytes || a + written_bytes <= b || b + other_bytes <= a,
                op_, ": ", names, " overlap");
  }

 private:
  void require_here(const Array& array, const char* name) const {
    FAR_REQUIRE(array.device_type() == device_ && array.device_id() == device_id_, op_, ": ", name,
                " lies on another device");
  }

  const char* op_;
  int device_, device_id_;
};

int64_t numel_of(const char* op, const Array& array, const char* name) {
  FAR_REQUIRE(array.ndim() == 1, op, ": ", name, " has ", array.ndim(), " dimensions, not one");
  return int64_t(array.shape(0));
}

void quantise(Array values, Array payload, int bits, double factor, std::optional<Array> reference,
              std::optional<Array> residual, int threads, uintptr_t cuda_stream) {
  constexpr const char* op = "quantise";
  require_bits(op, bits);
  FAR_REQUIRE(std::isfinite(factor), op, ": the factor is ", factor);
  const int64_t n = numel_of(op, values, "values"), count = far::payload_bytes(n, bits), size = 4 * n;
  const Call call(op, values);
  const far::QuantiseArgs args{call.floats(values, "values", n),
                               call.floats(reference, "reference", n),
                               call.floats(residual, "residual", n),
                               call.bytes(payload, "payload", 1, count),
                               float(factor),
                               bits,
                               n};
  call.require_apart(args.residual, size, args.values, size, "residual and values");
  call.require_apart(args.residual, size, args.reference, size, "residual and reference");
  call.require_apart(args.payload, count, args.values, size, "payload and values");
  call.require_apart(args.payload, count, args.reference, size, "payload and reference");
  call.require_apart(args.payload, count, args.residual, size, "payload and residual");
  nb::gil_scoped_release release;
  if (call.on_cpu()) return far::cpu::quantise(args, threads);
#ifdef FAR_WITH_CUDA
  far::cuda::quantise(args, reinterpret_cast<void*>(cuda_stream));
#endif
  (void)cuda_stream;
}

void dequantise_sum(Array payloads, Array out, int bits, std::optional<Array> base, int threads,
                    uintptr_t cuda_stream) {
  constexpr const char* op = "dequantise_sum";
  require_bits(op, bits);
  const int64_t n = numel_of(op, out, "out"), count = far::payload_bytes(n, bits), size = 4 * n;
  const Call call(op, out);
  const uint8_t* first = call.bytes(payloads, "payloads", 2, count);
  const int64_t rows = int64_t(payloads.shape(0)), stride = rows > 1 ? payloads.stride(0) : count;
  const far::DequantiseArgs args{
      first, rows, stride, call.floats(base, "base", n), call.floats(out, "out", n), bits, n};
  FAR_REQUIRE(stride >= 0, op, ": payloads are in reverse order");
  call.require_apart(args.out, size, first, rows ? (rows - 1) * stride + count : 0, "out and payloads");
  if (args.base != args.out) call.require_apart(args.out, size, args.base, size, "out and base");
  nb::gil_scoped_release release;
  if (call.on_cpu()) return far::cpu::dequantise_sum(args, threads);
#ifdef FAR_WITH_CUDA
  far::cuda::dequantise_sum(args, reinterpret_cast<void*>(cuda_stream));
#endif
  (void)cuda_stream;
}

}  // namespace

void bind_quantise(nb::module_& m) {
  m.def("payload_bytes", [](int64_t numel, int bits) {
    require_bits("payload_bytes", bits);
    FAR_REQUIRE(numel >= 0, "payload_bytes: ", numel, " elements");
    return far::payload_bytes(numel, bits);
  }, "numel"_a, "bits"_a);
  m.def("quantise", &quantise, "values"_a.noconvert(), "payload"_a.noconvert(), "bits"_a, "factor"_a,
        "reference"_a.noconvert().none(), "residual"_a.noconvert().none(), "threads"_a, "cuda_stream"_a);
  m.def("dequantise_sum", &dequantise_sum, "payloads"_a.noconvert(), "out"_a.noconvert(), "bits"_a,
        "base"_a.noconvert().none(), "threads"_a, "cuda_stream"_a);
}
