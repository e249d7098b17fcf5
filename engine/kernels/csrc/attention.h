// Attention of short sequences: y = softmax(mask(q k^T / sqrt(d))) v for each head of each sequence, and its gradients.
// All numbers of a head, (T, T) weights with (T, d) queries, keys and values, fit into the processor's nearer caches, so
// that a head is computed from its first product to its last one before the next head begins. Weights are kept for the
// gradients. Where a mask leaves no place for a row to see, as those behind it, products end before. One thread, float32.
//
// N: sequences. T: places. H: heads. d: the width of a head.

#pragma once

#include <cmath>
#include <limits>

#include "orthogonal.h"

namespace {

// Numbers (N, T, H, d) of which those of a head at a place lie next to each other; strides in floats.
struct Heads {
  float* p;
  int64_t sequence, place, head;
  float* at(int64_t n, int64_t h) const { return p + n * sequence + h * head; }
};

// exp(x) for x <= 0, within two roundings; 0 below the logarithm of the smallest normal number. NaN stays NaN.
inline Lanes exponential(Lanes x) {
  const Lanes low = Lanes{} - 87.33654f, bounded = x < low ? low : x;
  const Lanes shifted = bounded * 1.44269504f + 12582912.0f;  // its last bits are the nearest whole number
  const Lanes whole = shifted - 12582912.0f;
  const Lanes r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Places scaled = (Places)y + ((Places)shifted << 23);
  return x < low ? Lanes{} : x != x ? x : (Lanes)scaled;
}

// The largest lane, where NaN counts as nothing.
inline float largest(Lanes v) {
  float top = v[0];
  for (int64_t i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
  return top;
}

// What the places of a sequence see. `hidden` (T, up(T)): all bits where a place does not see another one, and behind the
// last one. `end` (T): behind the last place that a place sees. `begin` (T): the first place that sees a place.
struct Sight {
  std::vector<int32_t> hidden;
  std::vector<int64_t> end, begin;

  explicit Sight(int64_t T) : hidden(T * up(T)), end(T), begin(T) {}

  void read(const uint8_t* unseen, int64_t T) {
    std::fill(hidden.begin(), hidden.end(), -1);
    std::fill(end.begin(), end.end(), 0);
    std::fill(begin.begin(), begin.end(), T);
    for (int64_t i = 0; i < T; i++) {
      const uint8_t* row = unseen + i * T;
      const bool nothing = std::all_of(row, row + T, [](uint8_t each) { return each; });  // its weights are NaN
      for (int64_t j = 0; j < T; j++)
        if (nothing || !row[j]) {
          hidden[i * up(T) + j] = row[j] ? -1 : 0;
          end[i] = j + 1;
          begin[j] = std::min(begin[j], i);
        }
    }
  }

  // The end of what some places see, from the i-th one on, and the first one that sees some of them.
  int64_t end_of(int64_t i, int64_t rows) const { return *std::max_element(end.begin() + i, end.begin() + i + rows); }
  int64_t begin_of(int64_t j, int64_t rows) const {
    return *std::min_element(begin.begin() + j, begin.begin() + j + rows);
  }
};

// to (T, up(d)) = rows of a head next to each other, and to (d, up(T)) = their transpose. What is behind T is 0.
void together(const float* from, int64_t stride, float* to, int64_t T, int64_t d) {
  for (int64_t i = 0; i < T; i++) std::memcpy(to + i * up(d), from + i * stride, sizeof(float) * d);
}
void turned(const float* from, int64_t stride, float* to, int64_t T, int64_t d) {
  for (int64_t c = 0; c < d; c++) store(to + c * up(T) + up(T) - LANES, Lanes{});
  for (int64_t i = 0; i < T; i += LANES)
    for (int64_t c = 0; c < d; c += LANES)
      transpose(from + i * stride + c, stride, to + c * up(T) + i, up(T), std::min(T - i, LANES),
                std::min(d - c, LANES));
}

// The weights of a place from its scores (up to `end`, of which there are whole vectors), in their place.
inline void weigh_scores(float* row, const int32_t* hidden, float scale, int64_t end, int64_t all) {
  const Lanes nothing = Lanes{} - std::numeric_limits<float>::infinity();
  Lanes top = nothing, sum_of = {};
  for (int64_t j = 0; j < end; j += LANES) {
    const Places hide = (Places)load(reinterpret_cast<const float*>(hidden + j));
    const Lanes score = hide ? nothing : load(row + j) * scale;
    store(row + j, score);
    top = score > top ? score : top;
  }
  const float most = largest(top);
  for (int64_t j = 0; j < end; j += LANES) {
    const Lanes e = exponential(load(row + j) - most);
    store(row + j, e);
    sum_of += e;
  }
  const float share = 1 / sum(sum_of);
  for (int64_t j = 0; j < end; j += LANES) store(row + j, load(row + j) * share);
  for (int64_t j = up(end); j < all; j += LANES) store(row + j, Lanes{});
}

// The gradient in the scores of a place before they are scaled, in the place of that in its weights.
inline void scores_back(float* row, const float* weights, float scale, int64_t end, int64_t all) {
  Lanes sum_of = {};
  for (int64_t j = 0; j < end; j += LANES) sum_of += load(row + j) * load(weights + j);
  const float mean = sum(sum_of);
  for (int64_t j = 0; j < end; j += LANES) store(row + j, load(weights + j) * (load(row + j) - mean) * scale);
  for (int64_t j = up(end); j < all; j += LANES) store(row + j, Lanes{});
}

void attend(const Heads& q, const Heads& k, const Heads& v, const uint8_t* unseen, int64_t apart, const Heads& y,
            float* weights, int64_t N, int64_t T, int64_t H, int64_t d) {
  const int64_t across = up(T), wide = up(d);
  const float scale = 1 / std::sqrt(static_cast<double>(d));
  Sight sight(T);
  float *keys = scratch(0, d * across), *values = scratch(1, T * wide);
  for (int64_t n = 0; n < N; n++) {
    if (n == 0 || apart) sight.read(unseen + n * apart, T);
    for (int64_t h = 0; h < H; h++, weights += T * across) {
      const float* queries = q.at(n, h);
      turned(k.at(n, h), k.place, keys, T, d);
      together(v.at(n, h), v.place, values, T, d);
      for (int64_t i = 0; i < T; i += SPREAD_ROWS) {
        const int64_t rows = std::min<int64_t>(T - i, SPREAD_ROWS), end = sight.end_of(i, rows);
        float* own = weights + i * across;
        product(queries + i * q.place, q.place, 1, keys, across, d, own, across, rows, up(end));
        for (int64_t r = 0; r < rows; r++)
          weigh_scores(own + r * across, sight.hidden.data() + (i + r) * across, scale, end, across);
        product(own, across, 1, values, wide, end, y.at(n, h) + i * y.place, y.place, rows, d);
      }
    }
  }
}

// gq, gk, gv: where their p is null, the gradient is not asked for.
void attend_back(const Heads& q, const Heads& k, const Heads& v, const uint8_t* unseen, int64_t apart, const Heads& gy,
                 const float* weights, const Heads& gq, const Heads& gk, const Heads& gv, int64_t N, int64_t T,
                 int64_t H, int64_t d) {
  const int64_t across = up(T), wide = up(d);
  const float scale = 1 / std::sqrt(static_cast<double>(d));
  Sight sight(T);
  float *values = scratch(0, d * across), *keys = scratch(1, T * wide), *queries = scratch(2, T * wide);
  float *given = scratch(3, T * (wide + across)), *scores = given + T * wide;
  for (int64_t n = 0; n < N; n++) {
    if (n == 0 || apart) sight.read(unseen + n * apart, T);
    for (int64_t h = 0; h < H; h++, weights += T * across) {
      together(gy.at(n, h), gy.place, given, T, d);
      if (gq.p || gk.p) {
        turned(v.at(n, h), v.place, values, T, d);
        if (gq.p) together(k.at(n, h), k.place, keys, T, d);
        if (gk.p) together(q.at(n, h), q.place, queries, T, d);
        for (int64_t i = 0; i < T; i += SPREAD_ROWS) {
          const int64_t rows = std::min<int64_t>(T - i, SPREAD_ROWS), end = sight.end_of(i, rows);
          float* own = scores + i * across;
          product(given + i * wide, wide, 1, values, across, d, own, across, rows, up(end));
          for (int64_t r = 0; r < rows; r++)
            scores_back(own + r * across, weights + (i + r) * across, scale, end, across);
          if (gq.p) product(own, across, 1, keys, wide, end, gq.at(n, h) + i * gq.place, gq.place, rows, d);
        }
      }
      for (int64_t j = 0; j < T; j += SPREAD_ROWS) {
        const int64_t rows = std::min<int64_t>(T - j, SPREAD_ROWS), begin = sight.begin_of(j, rows), left = T - begin;
        const int64_t from = begin * across + j;
        if (gk.p)
          product(scores + from, 1, across, queries + begin * wide, wide, left, gk.at(n, h) + j * gk.place, gk.place,
                  rows, d);
        if (gv.p)
          product(weights + from, 1, across, given + begin * wide, wide, left, gv.at(n, h) + j * gv.place, gv.place,
                  rows, d);
      }
    }
  }
}

}  // namespace

extern "C" {

// y (N, T, H, d), weights (N, H, T, up(T)); q, k, v: (N, T, H, d) with three strides each; unseen: (T, T), or (N, T, T)
// with apart = T T. Other arrays have no gaps.
int32_t attention(const float* q, const float* k, const float* v, const uint8_t* unseen, float* y, float* weights,
                  int64_t apart, int64_t N, int64_t T, int64_t H, int64_t d, int64_t qn, int64_t qt, int64_t qh,
                  int64_t kn, int64_t kt, int64_t kh, int64_t vn, int64_t vt, int64_t vh) {
  return computed([&] {
    const Heads own{y, T * H * d, H * d, d};
    attend({const_cast<float*>(q), qn, qt, qh}, {const_cast<float*>(k), kn, kt, kh}, {const_cast<float*>(v), vn, vt, vh},
           unseen, apart, own, weights, N, T, H, d);
    return DONE;
  });
}

// gq, gk, gv: (N, T, H, d), null where they are not asked for; gy: (N, T, H, d).
int32_t attention_back(const float* q, const float* k, const float* v, const uint8_t* unseen, const float* gy,
                       const float* weights, float* gq, float* gk, float* gv, int64_t apart, int64_t N, int64_t T,
                       int64_t H, int64_t d, int64_t qn, int64_t qt, int64_t qh, int64_t kn, int64_t kt, int64_t kh,
                       int64_t vn, int64_t vt, int64_t vh) {
  return computed([&] {
    const auto own = [&](const float* p) { return Heads{const_cast<float*>(p), T * H * d, H * d, d}; };
    attend_back({const_cast<float*>(q), qn, qt, qh}, {const_cast<float*>(k), kn, kt, kh},
                {const_cast<float*>(v), vn, vt, vh}, unseen, apart, own(gy), weights, own(gq), own(gk), own(gv), N, T, H,
                d);
    return DONE;
  });
}

}  // extern "C"
