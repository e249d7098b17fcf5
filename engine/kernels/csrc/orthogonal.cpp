// Newton-Schulz iterations of small matrices, x <- a x + (b G + c G^2) x with G = x x^T. One thread, float32. Only the
// lower half of a symmetric product is computed; the upper half is copied from it. A column of tiles is completed
// before the next one begins, while the numbers that it reads are in the first-level cache.

#include "chain.cpp"

namespace {

template <int R>
void columns(int64_t V, const float* g, const float* w, int64_t O, Mask last, float* y, int64_t n, const Plus& plus) {
#define CALL(k) spread<R, k>(g, O, 1, w, n, O, last, y, n, plus)
  BY_VECTORS(V, CALL)
#undef CALL
}

// y (rows, n) = plus(g (rows, O) . w (O, n)), see Plus; if symmetric, only its lower half is computed.
void times(const float* g, const float* w, float* y, int64_t rows, int64_t O, int64_t n, const Plus& all, bool symmetric) {
  constexpr int64_t most = SPREAD_VECTORS * LANES;
  for (int64_t v = 0; v < n; v += most) {
    const int64_t left = std::min(n - v, most), V = (left + LANES - 1) / LANES;
    const Mask last = first(left - (V - 1) * LANES);
    for (int64_t r = symmetric ? v / SPREAD_ROWS * SPREAD_ROWS : 0; r < rows; r += SPREAD_ROWS) {
      Plus plus = all;
      if (plus.z) plus.z += r * n + v;
#define CALL(k) columns<k>(V, g + r * O, w + v, O, last, y + r * n + v, n, plus)
      BY_ROWS(rows - r, CALL)
#undef CALL
    }
  }
}

// The lower half of y (m, m) = x (m, n) . x^T
void gram(const float* x, float* y, int64_t m, int64_t n) {
  std::memset(y, 0, sizeof(float) * m * m);
  for (int64_t o = 0; o < m; o += m - o >= 4 ? 4 : 1)
    for (int64_t r = o / DOT_ROWS * DOT_ROWS; r < m; r += DOT_ROWS) {
      const float *from = x + r * n, *w = x + o * n;
      float* to = y + r * m + o;
#define CALL(k) m - o >= 4 ? dots<k, 4>(from, n, w, n, n, to, m) : dots<k, 1>(from, n, w, n, n, to, m)
      BY_ROWS(std::min<int64_t>(m - r, DOT_ROWS), CALL)
#undef CALL
    }
}

void mirror(float* y, int64_t m) {
  for (int64_t r = 0; r < m; r++)
    for (int64_t o = 0; o < r; o++) y[o * m + r] = y[r * m + o];
}

}  // namespace

extern "C" {

// Iterates C matrices x, (m, n) with m <= n, and writes the last iterates to y. triples: (iterations, 3), the numbers
// a, b and c of each iteration; there is at least one. Returns a Status.
int32_t newton_schulz(const float* x, float* y, const float* triples, int64_t iterations, int64_t C, int64_t m,
                      int64_t n) {
  return computed([&] {
    float *g = scratch(0, m * m), *p = scratch(1, m * m), *other = scratch(2, m * n);
    for (int64_t c = 0; c < C; c++) {
      const float* from = x + c * m * n;
      for (int64_t k = 0; k < iterations; k++) {
        const float* t = triples + 3 * k;
        float* to = (iterations - k) % 2 ? y + c * m * n : other;  // the last iteration writes to y
        gram(from, g, m, n);
        mirror(g, m);
        times(g, g, p, m, m, m, Plus{t[2], t[1], g}, true);
        mirror(p, m);
        times(p, from, to, m, m, n, Plus{1, t[0], from}, false);
        from = to;
      }
    }
    return DONE;
  });
}
}
