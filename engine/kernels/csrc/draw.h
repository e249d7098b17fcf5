// The batches of clients, as engine/clients/batches.py defines them: the rows of a client are shuffled for each pass
// over them, by counted draws.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "guarded.h"

namespace {

// The finaliser of SplitMix64, and below it how a key takes in another number; both as in workloads/counted.py.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t folded(uint64_t key, uint64_t part) { return mixed((key ^ part) + 0x9E3779B97F4A7C15); }

}  // namespace

extern "C" {

// Draws the batches of c clients for K local steps each. Every client has at least one row.
// clients, offsets, sizes, visits, steps: (c,) the client's number, where its rows begin in `all`, how many it has, in
// how many rounds it took part before, and its local steps in each of them. all: the row numbers of all clients. B: the
// length of the batches that are written. batch: the number of rows that a batch takes. order, step: the keys of the
// purposes "order of rows" and "step".
// Written: rows (c, K, B), row numbers; weight (c, K, B), 0 for padding; keys (c, K), the key of each step; full, 1 if
// no batch has padding.
int32_t draw(const int64_t* clients, const int64_t* offsets, const int64_t* sizes, const int64_t* visits,
             const int64_t* steps, const int64_t* all, int64_t* rows, double* weight, int64_t* keys, int64_t* full,
             int64_t c, int64_t K, int64_t B, int64_t batch, int64_t order, int64_t step) {
  return guarded([&] {
    std::vector<std::pair<uint64_t, int64_t>> pass;  // (draw of 43 bits, place of a row); their order is the pass
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
