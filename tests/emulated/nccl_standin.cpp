// A libnccl that records its calls and carries bytes through files: built as libnccl.so.2 and loaded before torch.
// Collectives are done when they are called (in a group: when it ends). standin_set(name, value) makes it misbehave.
#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/nccl_api.h"
#include "emulated/nccl_log.h"

using namespace far::cuda::nccl;

namespace far {
namespace cuda {
namespace nccl {
struct OpaqueComm {
  std::string folder;
  int rank, world, sequence = 0, polls = 0;
  bool joined = false, finalized = false;
};
}  // namespace nccl
}  // namespace cuda
}  // namespace far

namespace {

std::map<std::string, int>& settings() {
  static std::map<std::string, int> values;
  return values;
}
int setting(const char* name) { return settings().count(name) ? settings()[name] : 0; }

int depth = 0;
struct Message {
  bool out;
  void* data;
  size_t bytes;
  int peer;
};
std::vector<Message> grouped;
Comm group_comm = nullptr;

size_t size_of(Type type) {
  return type == Type::uint8 ? 1 : type == Type::float32 ? 4 : type == Type::int64 || type == Type::float64 ? 8 : 2;
}

void put(const std::string& path, const void* data, size_t bytes) {
  std::ofstream(path + ".part", std::ios::binary).write(static_cast<const char*>(data), bytes);
  std::rename((path + ".part").c_str(), path.c_str());
}

bool get(const std::string& path, void* data, size_t bytes) {
  for (int i = 0; i < 4000; ++i) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (file && size_t(file.tellg()) == bytes) {
      file.seekg(0);
      file.read(static_cast<char*>(data), bytes);
      return true;
    }
    if (file) return false;  // another size: ranks do not agree
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Everybody's `bytes` bytes, by rank.
bool exchange(Comm comm, const void* mine, size_t bytes, std::vector<char>& all) {
  const std::string base = comm->folder + "/" + std::to_string(comm->sequence++) + ".";
  put(base + std::to_string(comm->rank), mine, bytes);
  all.resize(bytes * comm->world);
  for (int r = 0; r < comm->world; ++r)
    if (!get(base + std::to_string(r), all.data() + r * bytes, bytes)) return false;
  return true;
}

template <class T>
void fold(const std::vector<char>& all, int world, size_t count, Op op, T* out) {
  const T* values = reinterpret_cast<const T*>(all.data());
  for (size_t i = 0; i < count; ++i) {
    T total = values[i];
    for (int r = 1; r < world; ++r) {
      const T next = values[r * count + i];
      total = op == Op::sum ? T(total + next) : next > total ? next : total;
    }
    out[i] = total;
  }
}

bool reduce(Comm comm, const void* sent, size_t count, Type type, Op op, void* out) {
  std::vector<char> all;
  if (!exchange(comm, sent, count * size_of(type), all)) return false;
  if (type == Type::float32) fold(all, comm->world, count, op, static_cast<float*>(out));
  else if (type == Type::float64) fold(all, comm->world, count, op, static_cast<double*>(out));
  else if (type == Type::int64) fold(all, comm->world, count, op, static_cast<int64_t*>(out));
  else if (type == Type::uint8) fold(all, comm->world, count, op, static_cast<uint8_t*>(out));
  else return false;
  return true;
}

Result done(Comm comm, bool well) {
  comm->polls = setting("in_progress");
  return !well ? Result::internal_error : comm->polls ? Result::in_progress : Result::success;
}

// Once per named fault: the call fails.
bool fault(const char* name) { return setting(name) && --settings()[name] == 0; }

}  // namespace

extern "C" {

void standin_set(const char* name, int value) { settings()[name] = value; }

Result ncclGetVersion(int* version) {
  *version = setting("version") ? setting("version") : 23007;
  return Result::success;
}

Result ncclGetUniqueId(UniqueId* id) {
  record("GetUniqueId");
  std::memset(id, 'x', sizeof *id);  // no byte is zero, and all must travel
  char folder[] = "/tmp/nccl-standin-XXXXXX";
  const char* root = std::getenv("FAR_NCCL_FOLDER");
  std::string path = root ? std::string(root) + "/XXXXXX" : folder;
  if (path.size() + 2 > sizeof id->bytes || !mkdtemp(&path[0])) return Result::system_error;
  std::memcpy(id->bytes, path.c_str(), path.size() + 1);
  return Result::success;
}

Result ncclCommInitRankConfig(Comm* comm, int world, UniqueId id, int rank, Config* config) {
  record("CommInitRankConfig rank=%d world=%d blocking=%d size=%zu version=%u tail=%c", rank, world, config->blocking,
         config->size, config->version, id.bytes[127]);
  if (config->magic != 0xcafebeef) return Result::invalid_argument;
  if (fault("fail_init")) return Result::system_error;
  *comm = new OpaqueComm{id.bytes, rank, world};
  put((*comm)->folder + "/joined." + std::to_string(rank), "", 0);
  return Result::in_progress;
}

Result ncclCommGetAsyncError(Comm comm, Result* state) {
  if (setting("async_error")) {
    *state = Result(setting("async_error"));
    return Result::success;
  }
  if (!comm->joined) {
    struct stat found;
    comm->joined = true;
    for (int r = 0; r < comm->world; ++r)
      if (stat((comm->folder + "/joined." + std::to_string(r)).c_str(), &found)) comm->joined = false;
  }
  const bool waiting = !comm->joined || setting("never") || (comm->finalized && setting("never_finalize"));
  *state = waiting || comm->polls > 0 ? Result::in_progress : Result::success;
  if (comm->polls > 0) --comm->polls;
  return Result::success;
}

Result ncclCommFinalize(Comm comm) {
  record("CommFinalize");
  comm->finalized = true;
  return Result::in_progress;
}
Result ncclCommDestroy(Comm comm) {
  record("CommDestroy");
  delete comm;
  return Result::success;
}
Result ncclCommAbort(Comm comm) {
  record("CommAbort");
  delete comm;
  return Result::success;
}
Result ncclCommRegister(Comm, void* data, size_t bytes, void** handle) {
  record("CommRegister bytes=%zu", bytes);
  *handle = data;
  return Result::success;
}
Result ncclCommDeregister(Comm, void*) {
  record("CommDeregister");
  return Result::success;
}

Result ncclAllReduce(const void* sent, void* received, size_t count, Type type, Op op, Comm comm, Stream) {
  record("AllReduce count=%zu type=%d op=%d inplace=%d", count, int(type), int(op), sent == received);
  if (fault("fail_all_reduce")) return Result::unhandled_cuda_error;
  return done(comm, reduce(comm, sent, count, type, op, received));
}

Result ncclReduceScatter(const void* sent, void* received, size_t count, Type type, Op op, Comm comm, Stream) {
  record("ReduceScatter count=%zu type=%d op=%d", count, int(type), int(op));
  std::vector<char> whole(count * size_of(type) * comm->world);
  const bool well = reduce(comm, sent, count * comm->world, type, op, whole.data());
  std::memcpy(received, whole.data() + comm->rank * count * size_of(type), count * size_of(type));
  return done(comm, well);
}

Result ncclAllGather(const void* sent, void* received, size_t count, Type type, Comm comm, Stream) {
  record("AllGather count=%zu type=%d", count, int(type));
  std::vector<char> all;
  const bool well = exchange(comm, sent, count * size_of(type), all);
  std::memcpy(received, all.data(), all.size());
  return done(comm, well);
}

Result ncclGroupStart() {
  record("GroupStart");
  ++depth;
  return Result::success;
}

Result ncclSend(const void* data, size_t count, Type type, int peer, Comm comm, Stream) {
  record("Send count=%zu type=%d peer=%d", count, int(type), peer);
  if (!depth) return Result::invalid_usage;  // here, since they are meant to be in a group
  if (fault("fail_send")) return Result::invalid_argument;
  grouped.push_back({true, const_cast<void*>(data), count * size_of(type), peer});
  group_comm = comm;
  return Result::success;
}
Result ncclRecv(void* data, size_t count, Type type, int peer, Comm comm, Stream) {
  record("Recv count=%zu type=%d peer=%d", count, int(type), peer);
  if (!depth) return Result::invalid_usage;
  grouped.push_back({false, data, count * size_of(type), peer});
  group_comm = comm;
  return Result::success;
}

Result ncclGroupEnd() {
  record("GroupEnd");
  if (--depth) return Result::invalid_usage;
  if (!group_comm) return Result::success;
  Comm comm = std::exchange(group_comm, nullptr);
  const std::string base = comm->folder + "/" + std::to_string(comm->sequence++) + ".";
  const std::string own = std::to_string(comm->rank);
  bool well = true;
  for (const Message& m : grouped)
    if (m.out) put(base + own + "." + std::to_string(m.peer), m.data, m.bytes);
  for (const Message& m : grouped)
    if (!m.out) well = get(base + std::to_string(m.peer) + "." + own, m.data, m.bytes) && well;
  grouped.clear();
  return done(comm, well);
}

const char* ncclGetErrorString(Result result) {
  return result == Result::remote_error ? "remote process exited" : "broken";
}
const char* ncclGetLastError(Comm) { return "the stand-in was told so"; }

}  // extern "C"
