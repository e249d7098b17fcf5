// What the functions that Python calls return.

#pragma once

#include <cstdint>
#include <exception>

namespace {

enum Status { DONE = 0, NO_CLASS = 1, NO_MEMORY = 2 };

// Returns what f returns, or NO_MEMORY if f raises an exception. An exception that leaves a function called from Python
// would end the process.
template <class F>
int32_t guarded(F f) {
  try {
    return f();
  } catch (const std::exception&) {
    return NO_MEMORY;
  }
}

}  // namespace
