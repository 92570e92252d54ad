#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "cuda/nccl.h"

namespace nb = nanobind;
using namespace nb::literals;
using far::cuda::NcclCommunicator;
using far::cuda::NcclOperation;
namespace nccl = far::cuda::nccl;

namespace {

using Flat = nb::ndarray<nb::ndim<1>, nb::c_contig>;  // any type: see type_of

#ifdef FAR_EMULATE_CUDA
constexpr int gpu = nb::device::cpu::value;
#else
constexpr int gpu = nb::device::cuda::value;
#endif

nccl::Type type_of(const Flat& array) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<uint8_t>()) return nccl::Type::uint8;
  if (type == nb::dtype<int64_t>()) return nccl::Type::int64;
  if (type == nb::dtype<float>()) return nccl::Type::float32;
  if (type == nb::dtype<double>()) return nccl::Type::float64;
  if (type.bits == 16 && type.lanes == 1) {
    if (type.code == uint8_t(nb::dlpack::dtype_code::Float)) return nccl::Type::float16;
    if (type.code == uint8_t(nb::dlpack::dtype_code::Bfloat)) return nccl::Type::bfloat16;
  }
  FAR_REQUIRE(false, "nccl: arrays are uint8, int64, float16, bfloat16, float32 or float64; this one has ",
              int(type.bits), " bits and DLPack's type code ", int(type.code));
}

nccl::Op op_of(const std::string& name) {
  if (name == "sum") return nccl::Op::sum;
  FAR_REQUIRE(name == "max", "nccl: op is \"sum\" or \"max\", not \"", name, "\"");
  return nccl::Op::max;
}

cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// A collective on its way. It keeps the arrays; when it is dropped before anyone waited, the stream that it came from
// waits, so that the arrays' memory is not used again too early.
class Handle {
 public:
  Handle(std::shared_ptr<NcclCommunicator> communicator, NcclCommunicator::Operation operation,
         std::vector<Flat> arrays, uintptr_t cuda_stream)
      : communicator_(std::move(communicator)), operation_(std::move(operation)), arrays_(std::move(arrays)),
        cuda_stream_(cuda_stream) {}
  Handle(const Handle&) = delete;
  ~Handle() {
    if (!waited_) communicator_->order(*operation_, stream_of(cuda_stream_));
  }

  void wait(uintptr_t cuda_stream) {
    nb::gil_scoped_release release;
    communicator_->wait(*operation_, stream_of(cuda_stream));
    waited_ = true;
  }

 private:
  std::shared_ptr<NcclCommunicator> communicator_;
  NcclCommunicator::Operation operation_;
  std::vector<Flat> arrays_;
  uintptr_t cuda_stream_;
  bool waited_ = false;
};

class Communicator {
 public:
  Communicator(nb::bytes id, int rank, int world, int device, double timeout_s) {
    nccl::UniqueId unique;
    FAR_REQUIRE(id.size() == sizeof unique, "nccl: an id of ", id.size(), " bytes, not ", sizeof unique);
    std::memcpy(&unique, id.c_str(), sizeof unique);
    nb::gil_scoped_release release;
    own_ = std::make_shared<NcclCommunicator>(unique, rank, world, device, timeout_s);
  }
  ~Communicator() {
    nb::gil_scoped_release release;
    own_.reset();
  }

  std::unique_ptr<Handle> all_reduce(Flat array, const std::string& op, const std::string& label,
                                     uintptr_t cuda_stream) {
    const nccl::Type type = checked(array);
    const nccl::Op reduction = op_of(op);
    return queue({array}, cuda_stream, [&] {
      return own_->all_reduce(array.data(), array.size(), type, reduction, label, stream_of(cuda_stream));
    });
  }

  std::unique_ptr<Handle> all_gather(Flat received, Flat sent, const std::string& label, uintptr_t cuda_stream) {
    const nccl::Type type = pair(received, sent);
    require_size(received, "received", sent.size() * own_->world());
    return queue({received, sent}, cuda_stream, [&] {
      return own_->all_gather(sent.data(), received.data(), sent.size(), type, label, stream_of(cuda_stream));
    });
  }

  std::unique_ptr<Handle> reduce_scatter(Flat received, Flat sent, const std::string& op, const std::string& label,
                                         uintptr_t cuda_stream) {
    const nccl::Type type = pair(received, sent);
    const nccl::Op reduction = op_of(op);
    require_size(sent, "sent", received.size() * own_->world());
    return queue({received, sent}, cuda_stream, [&] {
      return own_->reduce_scatter(sent.data(), received.data(), received.size(), type, reduction, label,
                                  stream_of(cuda_stream));
    });
  }

  std::unique_ptr<Handle> all_to_all(Flat received, Flat sent, const std::vector<size_t>& sizes,
                                     const std::string& label, uintptr_t cuda_stream) {
    const nccl::Type type = pair(received, sent);
    FAR_REQUIRE(sizes.size() == size_t(own_->world()), "nccl: ", sizes.size(), " sizes for ", own_->world(), " ranks");
    size_t total = 0;
    for (size_t size : sizes) total += size;
    require_size(sent, "sent", total);
    require_size(received, "received", sizes[own_->rank()] * own_->world());
    return queue({received, sent}, cuda_stream, [&] {
      return own_->all_to_all(sent.data(), received.data(), sizes, type, label, stream_of(cuda_stream));
    });
  }

  void enroll(Flat array) {
    checked(array);
    enrolled_.push_back(array);
    nb::gil_scoped_release release;
    own_->enroll(array.data(), array.nbytes());
  }

  void check(const std::string& what) {
    nb::gil_scoped_release release;
    own_->check(what);
  }

  void close() {
    {
      nb::gil_scoped_release release;
      own_->close();
    }
    enrolled_.clear();
  }

 private:
  nccl::Type checked(const Flat& array) const {
    FAR_REQUIRE(array.device_type() == gpu && array.device_id() == own_->device(), "nccl: an array lies on device ",
                array.device_id(), " of DLPack's type ", array.device_type(), ", the communicator's is device ",
                own_->device(), " of type ", gpu);
    return type_of(array);
  }

  nccl::Type pair(const Flat& received, const Flat& sent) const {
    const nccl::Type type = checked(received);
    FAR_REQUIRE(checked(sent) == type, "nccl: what is sent and what is received differ in type");
    return type;
  }

  static void require_size(const Flat& array, const char* name, size_t size) {
    FAR_REQUIRE(array.size() == size, "nccl: ", name, " has ", array.size(), " elements, not ", size);
  }

  template <class Call>
  std::unique_ptr<Handle> queue(std::vector<Flat> arrays, uintptr_t cuda_stream, const Call& call) {
    NcclCommunicator::Operation operation;
    {
      nb::gil_scoped_release release;
      operation = call();
    }
    return std::make_unique<Handle>(own_, std::move(operation), std::move(arrays), cuda_stream);
  }

  std::shared_ptr<NcclCommunicator> own_;
  std::vector<Flat> enrolled_;
};

}  // namespace

void bind_nccl(nb::module_& m) {
  nb::exception<far::cuda::NcclError>(m, "NcclError", PyExc_RuntimeError);
  m.attr("NCCL_OLDEST_VERSION") = nccl::oldest_version;
  m.def("nccl_library", [] {
    const auto& library = far::cuda::nccl_library();
    return nb::make_tuple(library.path, library.version);
  });
  m.def("nccl_unique_id", [] {
    const nccl::UniqueId id = far::cuda::nccl_unique_id();
    return nb::bytes(id.bytes, sizeof id);
  });
  nb::class_<Handle>(m, "NcclHandle").def("wait", &Handle::wait, "cuda_stream"_a);
  nb::class_<Communicator>(m, "NcclCommunicator")
      .def(nb::init<nb::bytes, int, int, int, double>(), "unique_id"_a, "rank"_a, "world"_a, "device"_a, "timeout_s"_a)
      .def("all_reduce", &Communicator::all_reduce, "array"_a.noconvert(), "op"_a, "label"_a, "cuda_stream"_a)
      .def("all_gather", &Communicator::all_gather, "received"_a.noconvert(), "sent"_a.noconvert(), "label"_a,
           "cuda_stream"_a)
      .def("reduce_scatter", &Communicator::reduce_scatter, "received"_a.noconvert(), "sent"_a.noconvert(), "op"_a,
           "label"_a, "cuda_stream"_a)
      .def("all_to_all", &Communicator::all_to_all, "received"_a.noconvert(), "sent"_a.noconvert(), "sizes"_a,
           "label"_a, "cuda_stream"_a)
      .def("enroll", &Communicator::enroll, "array"_a.noconvert())
      .def("check", &Communicator::check, "what"_a)
      .def("close", &Communicator::close);
}
