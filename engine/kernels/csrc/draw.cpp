// Batches of some clients, as batches.py says: each pass over a client's rows shuffled by counted draws.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

namespace {

// SplitMix64's finaliser and how keys are folded, as in workloads/counted.py
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t folded(uint64_t key, uint64_t part) { return mixed((key ^ part) + 0x9E3779B97F4A7C15); }

enum Status { DONE = 0, NO_CLASS = 1, NO_MEMORY = 2 };

// What f returns, or NO_MEMORY: an exception that left a function called from Python would end the process.
template <class F>
int32_t guarded(F f) {
  try {
    return f();
  } catch (const std::exception&) {
    return NO_MEMORY;
  }
}

}  // namespace

extern "C" {

// For each of c clients, which have a row at least: offset of its rows, their number, visits before, steps of a visit.
// order, step: keys of the purposes. rows (c, K, B), weight (c, K, B), keys (c, K) are written, and to `full` whether
// all batches are full.
int32_t draw(const int64_t* clients, const int64_t* offsets, const int64_t* sizes, const int64_t* visits,
             const int64_t* steps, const int64_t* all, int64_t* rows, double* weight, int64_t* keys, int64_t* full,
             int64_t c, int64_t K, int64_t B, int64_t batch, int64_t order, int64_t step) {
  return guarded([&] {
    std::vector<std::pair<uint64_t, int64_t>> pass;  // a draw of 43 bits, the place that it is for
    *full = 1;
    for (int64_t i = 0; i < c; i++) {
      const int64_t n = sizes[i], passes = (n + batch - 1) / batch, first = visits[i] * steps[i];
      int64_t shuffled = -1;
      pass.resize(n);
      for (int64_t k = 0; k < K; k++, rows += B, weight += B) {
        const int64_t number = first + std::min(k, steps[i] - 1), begin = number % passes * batch;
        if (number / passes != shuffled) {
          shuffled = number / passes;
          const uint64_t key = folded(0, folded(folded(order, clients[i]), shuffled));
          for (int64_t place = 0; place < n; place++) pass[place] = {folded(key, place) >> 21, place};
          std::sort(pass.begin(), pass.end());
        }
        const int64_t real = std::min(batch, n - begin);
        for (int64_t b = 0; b < B; b++) {
          rows[b] = all[offsets[i] + pass[b < real ? begin + b : begin].second];
          weight[b] = b < real ? 1.0 / double(real) : 0.0;
        }
        if (real < B) *full = 0;
        *keys++ = int64_t(folded(folded(step, clients[i]), first + k));
      }
    }
    return DONE;
  });
}
}
