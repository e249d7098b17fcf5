// Newton-Schulz iterations, x <- a x + (b G + c G^2) x with G = x x^T. One thread.
//
// Some iterations in a row, a group, are done in the space of the m x m matrices: there all matrices are polynomials of
// the first G, so that they are symmetric and commute. With P = b G + c G^2, an iteration is Q <- a Q + P Q and
// G <- (a I + P)^2 G, and at the end of the group x <- Q x. So x, which is longer than it is high, takes part in two
// products of a group, and not in two of each iteration.
//
// In the directions of small singular values, a rounding error of G grows by a^2 in each iteration. A G that is computed
// from x has no such error. Therefore a group ends where errors could have grown by more than a limit. Products have P as
// their factor and not a I + P, since P is small in those directions, and so is what rounding P changes there.
//
// Only the lower half of a symmetric product is computed; the upper half is copied from it. A column of tiles is
// completed before the next one begins, while the numbers that it reads are in the first-level cache.
//
// Products are of float32, or, if the processor has instructions for it, of bfloat16 with sums in float32. A factor of a
// product consists of words of 32 bits: a float, or two numbers of bfloat16 that follow each other along the sum.

#pragma once

#include <utility>

#include "chain.h"

namespace {

// The largest number of terms of a sum that are added at a time. The columns of w for a tile then fill half of a
// second-level cache of 512 KB.
constexpr int64_t TERMS = 1024;

// A factor of a product: rows of words, whose beginnings are `stride` words apart.
struct Words {
  const float* p;
  int64_t stride;
};

// What is stored for products, called as Plus in chain.h. `at` gives that of the tile at row r and column v of a result
// whose rows are n floats apart.

struct Itself {
  Itself at(int64_t r, int64_t v, int64_t n) const { return {}; }
  Lanes operator()(Lanes product, int64_t r, int64_t v, int64_t place, Mask m) const { return product; }
};

// scale * (product + l_rv d_v) + share * z, without l if d is null. z and l have the layout of the result.
struct OfSquare {
  float scale, share;
  const float *z, *l, *d;
  OfSquare at(int64_t r, int64_t v, int64_t n) const {
    return {scale, share, z + r * n + v, l + r * n + v, d ? d + v : nullptr};
  }
  Lanes operator()(Lanes product, int64_t r, int64_t v, int64_t place, Mask m) const {
    if (d) product += load_of(l + place, m) * load_of(d + v, m);
    return product * scale + load_of(z + place, m) * share;
  }
};

// scale * (product + shares_r z) + keep * w, without w if it is null. z and w have the layout of the result.
struct OfRows {
  float scale;
  const float *shares, *z;
  float keep;
  const float* w;
  OfRows at(int64_t r, int64_t v, int64_t n) const {
    return {scale, shares + r, z + r * n + v, keep, w ? w + r * n + v : nullptr};
  }
  Lanes operator()(Lanes product, int64_t r, int64_t v, int64_t place, Mask m) const {
    const Lanes sum = (product + load_of(z + place, m) * shares[r]) * scale;
    return w ? sum + load_of(w + place, m) * keep : sum;
  }
};

template <int R, class Terms, class After>
void columns(int64_t V, Words g, Words w, int64_t O, Mask last, float* y, int64_t n, const After& after, bool more) {
#define CALL(k) spread<R, k, Terms>(g.p, g.stride, 1, w.p, w.stride, O, last, y, n, after, more)
  BY_VECTORS(V, CALL)
#undef CALL
}

// Columns v to v + `most` of y in `times`. more: the sums begin with what y is.
template <class Terms, class After>
void column_of_tiles(Words g, Words w, float* y, int64_t rows, int64_t O, int64_t n, int64_t v, const After& after,
                     bool symmetric, bool more) {
  constexpr int64_t most = SPREAD_VECTORS * LANES;
  for (int64_t r = symmetric ? v / SPREAD_ROWS * SPREAD_ROWS : 0; r < rows; r += SPREAD_ROWS) {
    const int64_t end = symmetric ? std::min(n, r + SPREAD_ROWS) : n;
    const int64_t left = std::min(end - v, most), V = (left + LANES - 1) / LANES;
    const Mask last = first(left - (V - 1) * LANES);
    const Words rows_of_g{g.p + r * g.stride, g.stride};
#define CALL(k) columns<k, Terms>(V, rows_of_g, w, O, last, y + r * n + v, n, after.at(r, v, n), more)
    BY_ROWS(rows - r, CALL)
#undef CALL
  }
}

// y (rows, n) = after(g (rows, O words) . w (O words, n)); if symmetric, only its lower half is computed. Long sums
// are computed in parts, each of which reads a contiguous copy of its part of w: rows of w that are a power of two apart
// displace each other in the caches. The bits are those of whole sums.
template <class Terms, class After>
void times(Words g, Words w, float* y, int64_t rows, int64_t O, int64_t n, const After& after, bool symmetric) {
  constexpr int64_t most = SPREAD_VECTORS * LANES;
  for (int64_t v = 0; v < n; v += most) {
    if (O < TERMS) {
      column_of_tiles<Terms>(g, {w.p + v, w.stride}, y, rows, O, n, v, after, symmetric, false);
      continue;
    }
    const int64_t width = std::min(n - v, most);
    float* together = scratch(3, TERMS * most);
    for (int64_t o = 0; o < O; o += TERMS) {
      const int64_t terms = std::min(O - o, TERMS);
      for (int64_t k = 0; k < terms; k++) std::copy_n(w.p + (o + k) * w.stride + v, width, together + k * most);
      const Words part_of_g{g.p + o, g.stride}, part_of_w{together, most};
      if (o + terms < O)
        column_of_tiles<Terms>(part_of_g, part_of_w, y, rows, terms, n, v, Itself{}, symmetric, o > 0);
      else
        column_of_tiles<Terms>(part_of_g, part_of_w, y, rows, terms, n, v, after, symmetric, o > 0);
    }
  }
}

// The transpose of a square of LANES vectors. Each of the log2(LANES) rounds moves one bit of the number of a vector to
// the number of a lane.
inline void transpose(Lanes (&a)[LANES]) {
UNROLL
  for (int64_t done = 1; done < LANES; done *= 2) {
    Lanes b[LANES];
UNROLL
    for (int64_t i = 0; i < LANES / 2; i++) {
      b[2 * i] = LOW(a[i], a[i + LANES / 2]);
      b[2 * i + 1] = HIGH(a[i], a[i + LANES / 2]);
    }
UNROLL
    for (int64_t i = 0; i < LANES; i++) a[i] = b[i];
  }
}

// y (columns, rows) = x (rows, columns) transposed. Rows of x and y are xs and ys words apart. At most LANES rows and
// columns.
inline void transpose(const float* x, int64_t xs, float* y, int64_t ys, int64_t rows, int64_t columns) {
  Lanes a[LANES];
  if (rows == LANES && columns == LANES) {
UNROLL
    for (int64_t r = 0; r < LANES; r++) a[r] = load(x + r * xs);
    transpose(a);
UNROLL
    for (int64_t c = 0; c < LANES; c++) store(y + c * ys, a[c]);
    return;
  }
  const Mask across = first(columns), down = first(rows);
UNROLL
  for (int64_t r = 0; r < LANES; r++) a[r] = r < rows ? load_of(x + r * xs, across) : Lanes{};
  transpose(a);
UNROLL
  for (int64_t c = 0; c < LANES; c++)
    if (c < columns) store_of(y + c * ys, a[c], down);
}

// y (columns, rows) = x (rows, columns) transposed.
void turn(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES)
      transpose(x + r * columns + c, columns, y + c * rows + r, rows, std::min(rows - r, LANES),
                std::min(columns - c, LANES));
}

// Copies the lower half of y (m, m) to the upper half.
void mirror(float* y, int64_t m) {
  for (int64_t r = 0; r < m; r += LANES) {
    const int64_t rows = std::min(m - r, LANES);
    for (int64_t c = 0; c < r; c += LANES) transpose(y + r * m + c, m, y + c * m + r, m, rows, LANES);
    for (int64_t i = r; i < r + rows; i++)
      for (int64_t o = r; o < i; o++) y[o * m + i] = y[i * m + o];
  }
}

// Factors of float32 are the matrices themselves.
struct Float32 {
  using Terms = Singles;
  static constexpr int64_t PER_WORD = 1;
  static Lanes rounded(Lanes v) { return v; }
  static Words left(const float* x, int64_t, int64_t n, float*) { return {x, n}; }
  static Words right(const float* x, int64_t, int64_t n, float*) { return {x, n}; }
};

#ifdef __AVX512BF16__
struct BFloat16 {
  struct Terms {
    static Lanes add(Lanes sum, Lanes w, Lanes g) {
      return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)g);
    }
  };
  static constexpr int64_t PER_WORD = 2;

  // The numbers of bfloat16 that are nearest to v, as float32.
  static Lanes rounded(Lanes v) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
    return (Lanes)_mm512_slli_epi32(wide, 16);
  }

  // The numbers of a and then of b as bfloat16.
  static Lanes pairs(Lanes a, Lanes b) { return (Lanes)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

  // Numbers of a and b as bfloat16 in turn.
  static Lanes in_turn(Lanes a, Lanes b) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Lanes)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)pairs(a, b));
  }

  // x (m, n) with pairs of columns.
  static Words left(const float* x, int64_t m, int64_t n, float* to) {
    const int64_t O = (n + 1) / 2;
    for (int64_t r = 0; r < m; r++, x += n) {
      int64_t c = 0;
      for (; c + 2 * LANES <= n; c += 2 * LANES) store(to + r * O + c / 2, pairs(load(x + c), load(x + c + LANES)));
      if (c < n) store(to + r * O + c / 2, pairs(load(x + c, n - c), load(x + c + LANES, n - c - LANES)), O - c / 2);
    }
    return {to, O};
  }

  // x (m, n) with pairs of rows.
  static Words right(const float* x, int64_t m, int64_t n, float* to) {
    const float* begin = to;
    const int64_t stride = up(n), full = n / LANES * LANES;
    const Mask rest = first(n - full);
    for (int64_t r = 0; r + 1 < m; r += 2, x += 2 * n, to += stride) {
      for (int64_t c = 0; c < full; c += LANES) store(to + c, in_turn(load(x + c), load(x + n + c)));
      if (full < n) store(to + full, in_turn(load_of(x + full, rest), load_of(x + n + full, rest)));
    }
    if (m % 2)
      for (int64_t c = 0; c < n; c += LANES) store(to + c, in_turn(load(x + c, n - c), Lanes{}));
    return {begin, stride};
  }
};
#endif

// Newton-Schulz iterations of matrices (m, n), with products by Factors, and groups in which rounding errors grow at
// most by `limit`.
template <class Factors>
class Iterations {
 public:
  Iterations(const float* triples, int64_t count, int64_t m, int64_t n, float limit)
      : triples(triples), count(count), m(m), n(n), limit(limit) {
    const int64_t square = m * up(m), whole = m * up(n);
    float* next = scratch(0, 8 * square + 3 * whole + n * up(m) + 3 * up(m));
    for (float** part : {&g, &p, &q, &other_q, &w, &of_left, &of_g, &of_right}) *part = next, next += square;
    for (float** part : {&x, &other_x, &wide}) *part = next, next += whole;
    for (float** part : {&diagonal_of_g, &diagonal, &shares}) *part = next, next += up(m);
    turned = next;
  }

  // Where the matrix to iterate is put. Its content is lost.
  float* input() { return x; }

  // Writes keep w + share o to y for the last iterate o. w may be null. y is not the input.
  void operator()(float* y, const float* w, float keep, float share) {
    for (int64_t k = 0; k < count;) {
      group(k);
      without_diagonal(q, shares);
      const Words left = Factors::left(q, m, m, of_left), right = Factors::right(x, m, n, wide);
      const OfRows next{1, shares, x, 0, nullptr}, last{share, shares, x, keep, w};
      times<Terms>(left, right, k < count ? other_x : y, m, words(m), n, k < count ? next : last, false);
      std::swap(x, other_x);
    }
  }

 private:
  using Terms = typename Factors::Terms;

  // The right factor of a product of squares. Its diagonal may be large, and rounding it would be an error of the same
  // sign in many places. So it is left out if it would be rounded, and OfSquare adds its product.
  struct Right {
    Words words;
    const float* diagonal;  // null if it is in the words
  };

  static int64_t words(int64_t length) { return (length + Factors::PER_WORD - 1) / Factors::PER_WORD; }

  // Moves the diagonal of y (m, m) to d, which has zeros then.
  void without_diagonal(float* y, float* d) const {
    for (int64_t i = 0; i < m; i++) d[i] = std::exchange(y[i * (m + 1)], 0.0f);
  }

  Right right(float* y, float* to, float* d) const {
    if (Factors::PER_WORD == 1) return {{y, m}, nullptr};
    without_diagonal(y, d);
    const Words found = Factors::right(y, m, m, to);
    for (int64_t i = 0; i < m; i++) y[i * (m + 1)] = d[i];
    return {found, d};
  }

  // y (m, m) = scale * g . right + share * z, symmetric. left: g as a factor.
  void square(const float* g, Words left, const Right& right, float* y, float scale, float share, const float* z) const {
    times<Terms>(left, right.words, y, m, words(m), m, OfSquare{scale, share, z, g, right.diagonal}, true);
    mirror(y, m);
  }

  // g = x x^T
  void gram() {
    const Words rows = Factors::left(x, m, n, wide);
    turn(rows.p, turned, m, words(n));
    times<Terms>(rows, {turned, m}, g, m, words(n), m, Itself{}, true);
    mirror(g, m);
  }

  // A group of iterations from k on, which is set to the number of the next one. They multiply x by q.
  void group(int64_t& k) {
    float growth = 1;
    gram();
    for (bool begins = true;; begins = false) {
      const float a = triples[3 * k], b = triples[3 * k + 1], c = triples[3 * k + 2];
      const Right right_g = right(g, of_g, diagonal_of_g);
      square(g, Factors::left(g, m, m, of_left), right_g, p, c, b, g);
      growth *= a * a, k++;
      const bool ends = k == count || growth * triples[3 * k] * triples[3 * k] > limit;
      const Words left_p = Factors::left(p, m, m, of_left);
      if (begins) {
        std::copy(p, p + m * m, q);
        for (int64_t i = 0; i < m; i++) q[i * (m + 1)] += a;
      } else {
        square(p, left_p, right(q, of_right, diagonal), other_q, 1, a, q);
        std::swap(q, other_q);
      }
      if (ends) return;
      square(p, left_p, right_g, w, 1, a, g);
      square(p, left_p, right(w, of_right, diagonal), g, 1, a, w);
    }
  }

  const float* triples;
  const int64_t count, m, n;
  const float limit;
  float *g, *p, *q, *other_q, *w, *x, *other_x;
  float *of_left, *of_g, *of_right, *wide, *turned;  // factors of products
  float *diagonal_of_g, *diagonal, *shares;          // of m numbers
};

// What a matrix is divided by before its iterations: |M| (1 + cushion) + eps, or |M| but at least `least` if eps is 0.
struct Divisor {
  float cushion, eps, least;
  float operator()(float norm) const {
    return eps ? norm * (1 + cushion) + eps : std::max(norm * (1 + cushion), least);
  }
};

float norm(const float* x, int64_t n) {
  Lanes a = {}, b = {};
  int64_t v = 0;
  for (; v + 2 * LANES <= n; v += 2 * LANES) {
    const Lanes p = load(x + v), q = load(x + v + LANES);
    a += p * p, b += q * q;
  }
  for (; v < n; v += LANES) {
    const Lanes p = load(x + v, n - v);
    a += p * p;
  }
  return std::sqrt(sum(a + b));
}

// A part of vectors: y = keep w + share o, without w if it is null, where o is v or, if rows is not 0, the matrix v
// (rows, columns) orthogonalised.
struct Part {
  const float *v, *w;
  float* y;
  int64_t rows, columns;
  float keep, share;
};

void add(const Part& part) {
  for (int64_t i = 0; i < part.columns; i += LANES) {
    const int64_t left = part.columns - i;
    const Lanes o = load(part.v + i, left) * part.share;
    store(part.y + i, part.w ? o + load(part.w + i, left) * part.keep : o, left);
  }
}

template <class Factors>
void orthogonalise(const Part& part, const float* triples, int64_t count, Divisor divisor, float limit) {
  const int64_t m = std::min(part.rows, part.columns), n = std::max(part.rows, part.columns);
  Iterations<Factors> iterations(triples, count, m, n, limit);
  const float factor = 1 / divisor(norm(part.v, m * n));
  float* x = iterations.input();
  // It is rounded here, so that x is the same in all products. The difference would be multiplied by Q, and would not be
  // small where the result is.
  const auto divided = [&](const float* from) {
    for (int64_t v = 0; v < m * n; v += LANES)
      store(x + v, Factors::rounded(load(from + v, m * n - v) * factor), m * n - v);
  };
  if (part.rows <= part.columns) {
    divided(part.v);
    iterations(part.y, part.w, part.keep, part.share);
    return;
  }
  turn(part.v, x, n, m);
  divided(x);
  float *o = scratch(1, m * n), *w = scratch(2, m * n);
  if (part.w) turn(part.w, w, n, m);
  iterations(o, part.w ? w : nullptr, part.keep, part.share);
  turn(o, part.y, m, n);
}

// Limits of the growth of rounding errors in a group. With GROWTH, errors of products of float32 are about twice those of
// torch after five iterations, and at most eight times. HALF_GROWTH is for products of float32 where bfloat16 is asked
// for; errors are some hundredths of those of bfloat16 at most. Products of bfloat16 are in one group. If the growth in
// all iterations is at most BFLOAT16_GROWTH and a at most BFLOAT16_SLOPE, their errors are mostly less than those of torch
// in bfloat16, and for all matrices that were tried less than its largest; for the schemes with larger a they would be
// four times as large. Matrices with fewer rows than BFLOAT16_ROWS are not worth the conversion. (`python
// benchmarks/newton_schulz.py`, tests/engine/test_own_orthogonal.py)
constexpr float GROWTH = 150, BFLOAT16_GROWTH = 1000, HALF_GROWTH = 1e4;
constexpr int64_t BFLOAT16_ROWS = 32;
constexpr float BFLOAT16_SLOPE = 2;

#ifdef __AVX512BF16__
bool bfloat16_products(const float* triples, int64_t count, int64_t m) {
  float growth = 1;
  for (int64_t k = 0; k < count; k++, triples += 3) {
    if (triples[0] > BFLOAT16_SLOPE) return false;
    growth *= triples[0] * triples[0];
  }
  return m >= BFLOAT16_ROWS && growth <= BFLOAT16_GROWTH;
}
#endif

}  // namespace

extern "C" {

// For `count` parts of vectors v, w and y, writes keep w + share o to y, or share o if w is null, where o is the part of
// v, orthogonalised if it is a matrix. parts: (count, 3), where the part starts, its rows, 0 if it is no matrix, and its
// columns. factors: (count, 2), keep and share. triples: (iterations, 3), the numbers a, b and c of each iteration; there
// is at least one. divisor: cushion, eps and least, see Divisor. half: 1 if rounding errors may be those of bfloat16.
// Returns a Status.
int32_t newton_schulz(const float* v, const float* w, float* y, const int64_t* parts, const float* factors,
                      const float* triples, const float* divisor, int64_t count, int64_t iterations, int64_t half) {
  return computed([&] {
    const Divisor by{divisor[0], divisor[1], divisor[2]};
    for (int64_t i = 0; i < count; i++, parts += 3, factors += 2) {
      const int64_t start = parts[0];
      const Part part{v + start, w ? w + start : nullptr, y + start, parts[1], parts[2], factors[0], factors[1]};
      if (part.rows == 0) {
        add(part);
        continue;
      }
#ifdef __AVX512BF16__
      if (half && bfloat16_products(triples, iterations, std::min(part.rows, part.columns))) {
        orthogonalise<BFloat16>(part, triples, iterations, by, BFLOAT16_GROWTH);
        continue;
      }
#endif
      orthogonalise<Float32>(part, triples, iterations, by, half ? HALF_GROWTH : GROWTH);
    }
    return DONE;
  });
}
}
