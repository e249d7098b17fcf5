// Convolutions with kernels of 3 x 3 by Winograd's minimal filtering, F(2 x 2, 3 x 3): four outputs beside each other take
// 16 products where the definition has 36. Images have their channels last in memory, so that the transforms, which only
// add, work on whole vectors of channels. One thread, float32.
//
//     y = A' [(G w G') * (B' x B)] A      Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural Networks"
//
// x: a tile of 4 x 4 inputs; tiles overlap by two. w: a kernel. y: 2 x 2 outputs. *: entry by entry, and a sum over input
// channels, which makes 16 products of matrices of all tiles. The gradient in the inputs is the same convolution of the
// gradient in the outputs, with kernels turned by 180 degrees. The gradient in the kernels is G' [(B' x B) * (A y A')] G.
//
// N: images. I, O: input and output channels. h, wd: height and width. p: padding.

#pragma once

#include "chain.h"

namespace {

// y (rows, n) = g (rows, O) . w (O, n), or y + that product if `more`. Entries of g are gs floats apart within a row, its
// rows gr floats. A column of tiles of w stays in the first-level cache until all rows have used it.
void multiply(const float* g, int64_t gr, int64_t gs, const float* w, int64_t O, float* y, int64_t rows, int64_t n,
              bool more) {
  constexpr int64_t most = SPREAD_VECTORS * LANES;
  for (int64_t v = 0; v < n; v += most) {
    const int64_t left = std::min(n - v, most), V = (left + LANES - 1) / LANES;
    const Mask last = first(left - (V - 1) * LANES);
    for (int64_t r = 0; r < rows; r += SPREAD_ROWS) {
      const Plus plus{1, 1, more ? y + r * n + v : nullptr};
#define BY_V(k) spread<R_, k>(g + r * gr, gr, gs, w + v, n, O, last, y + r * n + v, n, plus)
#define CALL(rows_)              \
  {                              \
    constexpr int R_ = rows_;    \
    BY_VECTORS(V, BY_V)          \
  }
      BY_ROWS(rows - r, CALL)
#undef CALL
#undef BY_V
    }
  }
}

// The tiles of the outputs of a convolution.
struct Tiles {
  int64_t h, w, p, oh, ow, rows, columns;  // of images, their padding, outputs, and tiles of an image
  Tiles(int64_t h, int64_t w, int64_t p)
      : h(h), w(w), p(p), oh(h + 2 * p - 2), ow(w + 2 * p - 2), rows((oh + 1) / 2), columns((ow + 1) / 2) {}
  int64_t image(int64_t t) const { return t / (rows * columns); }
  int64_t row(int64_t t) const { return t / columns % rows; }
  int64_t column(int64_t t) const { return t % columns; }
};

// Runs f(channel, mask) for all vectors of C channels.
template <class F>
inline void by_vectors(int64_t C, F f) {
  for (int64_t c = 0; c < C; c += LANES) f(c, first(C - c));
}

// B' a: of four rows.
inline void input_rows(const Lanes a[4], Lanes to[4]) {
  to[0] = a[0] - a[2];
  to[1] = a[1] + a[2];
  to[2] = a[2] - a[1];
  to[3] = a[1] - a[3];
}

// v (16, count, C): the transformed inputs B' x B of the tiles from `first_tile` on. x: (N, h, w, C).
void transform_inputs(const float* x, float* v, const Tiles& tiles, int64_t first_tile, int64_t count, int64_t C) {
  for (int64_t t = 0; t < count; t++) {
    const int64_t all = first_tile + t, top = 2 * tiles.row(all) - tiles.p, left = 2 * tiles.column(all) - tiles.p;
    const float* image = x + tiles.image(all) * tiles.h * tiles.w * C;
    by_vectors(C, [&](int64_t c, Mask m) {
      Lanes d[4][4], half[4][4];
UNROLL
      for (int k = 0; k < 16; k++) {
        const int64_t r = top + k / 4, s = left + k % 4;
        const bool inside = r >= 0 && r < tiles.h && s >= 0 && s < tiles.w;
        d[k % 4][k / 4] = inside ? load_of(image + (r * tiles.w + s) * C + c, m) : Lanes{};
      }
UNROLL
      for (int s = 0; s < 4; s++) {
        Lanes column[4];
        input_rows(d[s], column);
UNROLL
        for (int r = 0; r < 4; r++) half[r][s] = column[r];
      }
UNROLL
      for (int r = 0; r < 4; r++) {
        Lanes row[4];
        input_rows(half[r], row);
UNROLL
        for (int s = 0; s < 4; s++) store_of(v + ((4 * r + s) * count + t) * C + c, row[s], m);
      }
    });
  }
}

// y (N, oh, ow, O): the outputs A' m A of the tiles from `first_tile` on. m: (16, count, O).
void transform_outputs(const float* m, float* y, const Tiles& tiles, int64_t first_tile, int64_t count, int64_t O) {
  for (int64_t t = 0; t < count; t++) {
    const int64_t all = first_tile + t, r = 2 * tiles.row(all), s = 2 * tiles.column(all);
    float* to = y + ((tiles.image(all) * tiles.oh + r) * tiles.ow + s) * O;
    const bool below = r + 1 < tiles.oh, beside = s + 1 < tiles.ow;
    by_vectors(O, [&](int64_t o, Mask mask) {
      Lanes top[4], bottom[4];
UNROLL
      for (int k = 0; k < 4; k++) {
        const auto at = [&](int row) { return load_of(m + ((4 * row + k) * count + t) * O + o, mask); };
        const Lanes a = at(1), b = at(2);
        top[k] = at(0) + a + b;
        bottom[k] = a - b - at(3);
      }
      store_of(to + o, top[0] + top[1] + top[2], mask);
      if (beside) store_of(to + O + o, top[1] - top[2] - top[3], mask);
      if (!below) return;
      store_of(to + tiles.ow * O + o, bottom[0] + bottom[1] + bottom[2], mask);
      if (beside) store_of(to + (tiles.ow + 1) * O + o, bottom[1] - bottom[2] - bottom[3], mask);
    });
  }
}

// m (16, count, O): A y A' of the tiles from `first_tile` on, of the gradient y (N, oh, ow, O) in the outputs.
void transform_gradients(const float* y, float* m, const Tiles& tiles, int64_t first_tile, int64_t count, int64_t O) {
  for (int64_t t = 0; t < count; t++) {
    const int64_t all = first_tile + t, r = 2 * tiles.row(all), s = 2 * tiles.column(all);
    const float* from = y + ((tiles.image(all) * tiles.oh + r) * tiles.ow + s) * O;
    const bool below = r + 1 < tiles.oh, beside = s + 1 < tiles.ow;
    by_vectors(O, [&](int64_t o, Mask mask) {
      const Lanes zero = {};
      const Lanes a = load_of(from + o, mask), b = beside ? load_of(from + O + o, mask) : zero;
      const Lanes c = below ? load_of(from + tiles.ow * O + o, mask) : zero;
      const Lanes d = below && beside ? load_of(from + (tiles.ow + 1) * O + o, mask) : zero;
      const Lanes left[4] = {a, a + c, a - c, -c}, right[4] = {b, b + d, b - d, -d};
UNROLL
      for (int k = 0; k < 4; k++) {
        float* to = m + (4 * k * count + t) * O + o;
        store_of(to, left[k], mask);
        store_of(to + count * O, left[k] + right[k], mask);
        store_of(to + 2 * count * O, left[k] - right[k], mask);
        store_of(to + 3 * count * O, -right[k], mask);
      }
    });
  }
}

// G a, of three vectors.
inline void kernel_rows(const Lanes a[3], Lanes to[4]) {
  const Lanes ends = 0.5f * (a[0] + a[2]), middle = 0.5f * a[1];
  to[0] = a[0];
  to[1] = ends + middle;
  to[2] = ends - middle;
  to[3] = a[2];
}

// The weights of a convolution in memory: floats from one output channel, input channel and place in a kernel to the next.
struct Kernels {
  const float* w;
  int64_t output, input, place;
};

// u (16, I, O): the transformed kernels G w G', O output channels in the lanes of vectors. turned: output channels are input
// channels and the other way round, and kernels are turned by 180 degrees.
void transform_kernels(const Kernels& of, float* u, int64_t I, int64_t O, bool turned) {
  const int64_t along = turned ? of.input : of.output, other = turned ? of.output : of.input;
  for (int64_t o = 0; o < O; o += LANES) {
    const int64_t lanes = std::min(LANES, O - o);
    const Mask mask = first(lanes);
    for (int64_t i = 0; i < I; i++) {
      float numbers[9][LANES] = {};
      const float* from = of.w + o * along + i * other;
      for (int64_t lane = 0; lane < lanes; lane++, from += along)
        for (int k = 0; k < 9; k++) numbers[k][lane] = from[(turned ? 8 - k : k) * of.place];
      Lanes half[4][3], whole[4];
UNROLL
      for (int r = 0; r < 3; r++) {
        const Lanes row[3] = {load(numbers[3 * r]), load(numbers[3 * r + 1]), load(numbers[3 * r + 2])};
        kernel_rows(row, whole);
UNROLL
        for (int s = 0; s < 4; s++) half[s][r] = whole[s];
      }
UNROLL
      for (int s = 0; s < 4; s++) {
        kernel_rows(half[s], whole);
UNROLL
        for (int r = 0; r < 4; r++) store_of(u + ((4 * r + s) * I + i) * O + o, whole[r], mask);
      }
    }
  }
}

// G' a, of four vectors.
inline void gradient_rows(const Lanes a[4], Lanes to[3]) {
  const Lanes sum = 0.5f * (a[1] + a[2]);
  to[0] = a[0] + sum;
  to[1] = 0.5f * (a[1] - a[2]);
  to[2] = sum + a[3];
}

// gw (O, I, 3, 3): the gradients G' u G in the kernels. u: (16, I, O).
void transform_kernel_gradients(const float* u, float* gw, int64_t I, int64_t O) {
  for (int64_t o = 0; o < O; o += LANES) {
    const int64_t lanes = std::min(LANES, O - o);
    const Mask mask = first(lanes);
    for (int64_t i = 0; i < I; i++) {
      Lanes half[3][4], whole[3];
UNROLL
      for (int r = 0; r < 4; r++) {
        Lanes row[4];
UNROLL
        for (int s = 0; s < 4; s++) row[s] = load_of(u + ((4 * r + s) * I + i) * O + o, mask);
        gradient_rows(row, whole);
UNROLL
        for (int s = 0; s < 3; s++) half[s][r] = whole[s];
      }
      float numbers[9][LANES];
UNROLL
      for (int s = 0; s < 3; s++) {
        gradient_rows(half[s], whole);
UNROLL
        for (int r = 0; r < 3; r++) store(numbers[3 * r + s], whole[r]);
      }
      float* to = gw + (o * I + i) * 9;
      for (int64_t lane = 0; lane < lanes; lane++, to += 9 * I)
        for (int k = 0; k < 9; k++) to[k] = numbers[k][lane];
    }
  }
}

// How many tiles are computed at once: as many as leave their transformed inputs and outputs in the second-level cache, but
// enough to make up for reading all transformed kernels.
inline int64_t tiles_at_once(int64_t I, int64_t O) { return std::max<int64_t>(96, 12288 / (I + O)); }

}  // namespace

extern "C" {

// The convolution y (N, oh, ow, O) of images x (N, h, wd, I). output, input, place: floats from one output channel, input
// channel and place in a kernel of the weights w to the next. turned: y is the convolution with turned kernels, whose input
// channels are the output channels of w. Returns a Status.
int32_t winograd_forward(const float* x, const float* w, float* y, int64_t N, int64_t I, int64_t O, int64_t h, int64_t wd,
                         int64_t p, int64_t output, int64_t input, int64_t place, int64_t turned) {
  return computed([&] {
    const Tiles tiles(h, wd, p);
    const int64_t most = tiles_at_once(I, O), total = N * tiles.rows * tiles.columns;
    float *v = scratch(0, 16 * most * I), *m = scratch(1, 16 * most * O), *u = scratch(2, 16 * I * O);
    transform_kernels({w, output, input, place}, u, I, O, turned);
    for (int64_t t = 0; t < total; t += most) {
      const int64_t count = std::min(most, total - t);
      transform_inputs(x, v, tiles, t, count, I);
      for (int64_t k = 0; k < 16; k++)
        multiply(v + k * count * I, I, 1, u + k * I * O, I, m + k * count * O, count, O, false);
      transform_outputs(m, y, tiles, t, count, O);
    }
    return DONE;
  });
}

// The gradient gw (O, I, 3, 3) in the kernels. x: images (N, h, wd, I). g: (N, oh, ow, O), the gradient in the outputs.
// Returns a Status.
int32_t winograd_weights(const float* x, const float* g, float* gw, int64_t N, int64_t I, int64_t O, int64_t h, int64_t wd,
                         int64_t p) {
  return computed([&] {
    const Tiles tiles(h, wd, p);
    const int64_t most = tiles_at_once(I, O), total = N * tiles.rows * tiles.columns;
    float *v = scratch(0, 16 * most * I), *m = scratch(1, 16 * most * O), *u = scratch(2, 16 * I * O);
    std::memset(u, 0, sizeof(float) * 16 * I * O);
    for (int64_t t = 0; t < total; t += most) {
      const int64_t count = std::min(most, total - t);
      transform_inputs(x, v, tiles, t, count, I);
      transform_gradients(g, m, tiles, t, count, O);
      for (int64_t k = 0; k < 16; k++)
        multiply(v + k * count * I, 1, I, m + k * count * O, count, u + k * I * O, I, O, true);
    }
    transform_kernel_gradients(u, gw, I, O);
    return DONE;
  });
}
}
