// Threads for the CPU loops: torch's own OpenMP threads where torch is loaded, else a small pool of std::thread.
// Nothing is linked against OpenMP: the extension works, and has no second OpenMP runtime, with any torch or none.
#pragma once

#include <cstdint>
#include <functional>

namespace far {

// Calls body(task) once for each task in [0, tasks), on the calling thread and up to threads - 1 others, and
// returns when all have finished. Tasks are handed out in increasing order, to whichever thread is free; results must
// not depend on which thread runs a task. The first exception is rethrown. Safe to call from several threads (calls
// then take turns), from inside a body (runs there serially) and after fork (the child starts workers of its own).
void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& body);

}  // namespace far
