// Declares an operation once per instruction set and calls the copy that fits this CPU.
#pragma once

#include "launch.h"

#if defined(__x86_64__)
#define FAR_DECLARE_PER_ISA(name, parameters) \
  namespace base { void name parameters; }    \
  namespace avx2 { void name parameters; }    \
  namespace avx512 { void name parameters; }
#define FAR_CALL_PER_ISA(name, ...)                              \
  switch (cpu::isa()) {                                          \
    case cpu::Isa::avx512: return avx512::name(__VA_ARGS__);     \
    case cpu::Isa::avx2: return avx2::name(__VA_ARGS__);         \
    default: return base::name(__VA_ARGS__);                     \
  }
#else
#define FAR_DECLARE_PER_ISA(name, parameters) \
  namespace base { void name parameters; }
#define FAR_CALL_PER_ISA(name, ...) return base::name(__VA_ARGS__)
#endif
