// Convolutions of one client in which the examples of a batch lie in the lanes of vectors: a vector has one number of
// each of LANES examples, which are a group. All lanes are used, whatever the width of an image, and all loads are
// aligned, so that this is faster than rows of images (native.h) for batches that fill their groups.
//
// In memory a group is (planes, rows, columns, LANES). The last group of a batch may have fewer examples. Its other
// lanes repeat an example in the forward pass; in the backward pass they are zeros.
//
// B: examples. I, O: input and output channels. K: side of the kernel. row, plane: floats from row to row and from plane
// to plane.

#pragma once

#include "native.h"

namespace {

// Floats that begin at a multiple of 64 bytes, at first zeros.
class Aligned {
 public:
  explicit Aligned(int64_t size = 0) : kept(size + 16) {}
  float* data() { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64); }

 private:
  std::vector<float> kept;
};

// Images of a group. at: the first number of the first plane.
struct Planes {
  float* at;
  int64_t row, plane;
  float* entry(int64_t channel, int64_t r, int64_t c) const { return at + channel * plane + r * row + c * LANES; }
};

// The number of output channels of the next tile of a convolution, if `left` channels are left.
inline int64_t channels(int64_t left) {
#ifndef EIGHT_LANES
  if (left >= 6) return 6;
  if (left >= 4) return 4;
#endif
  return left >= 2 ? 2 : 1;
}

#ifdef EIGHT_LANES
#define BY_CHANNELS(n, call) n == 2 ? call(2) : call(1)
#else
#define BY_CHANNELS(n, call) n == 6 ? call(6) : n == 4 ? call(4) : n == 2 ? call(2) : call(1)
#endif

// Copies the weights of a convolution in the order in which `taps` reads them. turned: as in `pack`.
void pack_channels(const float* w, float* to, int64_t O, int64_t I, int64_t K, bool turned) {
  for (int64_t first = 0; first < O; first += channels(O - first))
    for (int64_t i = 0; i < I; i++)
      for (int64_t k = 0; k < K * K; k++)
        for (int64_t o = first; o < first + channels(O - first); o++)
          *to++ = turned ? w[(i * O + o) * K * K + K * K - 1 - k] : w[(o * I + i) * K * K + k];
}

// Adds to a[t][p] the products of the weights of output channel t, of the rows `top` to `bottom` - 1 of its kernels, with
// the inputs around place p. x: the first of these inputs for the first place and row 0, in planes with the strides `row`
// and `plane`. at: how many floats the places are from the first one. w: (I, K, K, T).
template <int T, int P>
inline __attribute__((always_inline)) void taps(const float* x, const Planes& strides, const int64_t (&at)[P],
                                                const float* w, int64_t I, int64_t K, int64_t top, int64_t bottom,
                                                Lanes (&a)[T][P]) {
  for (int64_t i = 0; i < I; i++, w += K * K * T)
    for (int64_t kh = top; kh < bottom; kh++) {
      const float *from = x + i * strides.plane + kh * strides.row, *weight = w + kh * K * T;
      for (int64_t kw = 0; kw < K; kw++, from += LANES, weight += T) {
        Lanes q[P];
UNROLL
        for (int p = 0; p < P; p++) q[p] = fetched(from + at[p]);
UNROLL
        for (int t = 0; t < T; t++) {
          const Lanes shared = repeated(weight + t);
UNROLL
          for (int p = 0; p < P; p++) a[t][p] += q[p] * shared;
        }
      }
    }
}

// A convolution of a group. x: the inputs, with `zeros` rows of zeros above and below them, and as many columns beside
// them. w: from `pack_channels`. bias: (O,) or null. relu: whether ReLU follows. y: the outputs, of oh rows and ow columns.
struct Convolution {
  Planes x;
  int64_t zeros;
  const float *w, *bias;
  int64_t I, O, K, oh, ow;
  bool relu;
  Planes y;

  // The rows of the kernels that meet inputs other than these zeros, for output row r: from `top` to `bottom` - 1.
  int64_t top(int64_t r) const { return std::max<int64_t>(zeros - r, 0); }
  int64_t bottom(int64_t r) const { return std::min(K, oh + K - 1 - zeros - r); }

  template <int T, int P>
  void start(int64_t o, Lanes (&a)[T][P]) const {
UNROLL
    for (int t = 0; t < T; t++)
UNROLL
      for (int p = 0; p < P; p++) a[t][p] = Lanes{} + (bias ? bias[o + t] : 0.0f);
  }

  // P places beside each other, of T output channels from o on. of: as in `all`.
  template <int T, int P>
  void beside(int64_t o, int64_t r, int64_t c, const float* packed, const Planes* of) const {
    int64_t at[P];
    for (int p = 0; p < P; p++) at[p] = p * LANES;
    Lanes a[T][P];
    start<T, P>(o, a);
    taps<T, P>(x.entry(0, r, c), x, at, packed, I, K, top(r), bottom(r), a);
UNROLL
    for (int t = 0; t < T; t++)
UNROLL
      for (int p = 0; p < P; p++) {
        Lanes v = a[t][p];
        if (relu) v = v < 0 ? Lanes{} : v;  // NaN stays NaN
        if (of) v = load(of->entry(o + t, r, c + p)) <= 0 ? Lanes{} : v;
        store(y.entry(o + t, r, c + p), v);
      }
  }

  template <int T>
  void rows(int64_t o, const float* packed, const Planes* of) const {
    for (int64_t r = 0; r < oh; r++) {
      int64_t c = 0;
      for (; c + 4 <= ow; c += 4) beside<T, 4>(o, r, c, packed, of);
      for (; c + 2 <= ow; c += 2) beside<T, 2>(o, r, c, packed, of);
      if (c < ow) beside<T, 1>(o, r, c, packed, of);
    }
  }

  // All outputs. of: if not null, outputs are set to 0 where this is not positive, as in the backward pass of ReLU.
  void all(const Planes* of = nullptr) const {
    const float* packed = w;
    for (int64_t o = 0, n; o < O; o += n, packed += n * I * K * K) {
      n = channels(O - o);
#define CALL(t) rows<t>(o, packed, of)
      BY_CHANNELS(n, CALL);
#undef CALL
    }
  }

  template <int T>
  void windows(int64_t o, const float* packed, int32_t* place) const {
    const int64_t at[4] = {0, LANES, x.row, x.row + LANES};
    for (int64_t r = 0; r < oh / 2; r++)
      for (int64_t c = 0; c < ow / 2; c++) {
        Lanes a[T][4];
        start<T, 4>(o, a);
        taps<T, 4>(x.entry(0, 2 * r, 2 * c), x, at, packed, I, K, top(2 * r + 1), bottom(2 * r), a);
UNROLL
        for (int t = 0; t < T; t++) {
          Lanes top = a[t][0];
          Places which = {};
          larger(top, which, a[t][1], 1);
          larger(top, which, a[t][2], 2);
          larger(top, which, a[t][3], 3);
          store(y.entry(o + t, r, c), relu ? (top < 0 ? Lanes{} : top) : top);
          int32_t* to = place + (((o + t) * (oh / 2) + r) * (ow / 2) + c) * LANES;
          store(reinterpret_cast<float*>(to), (Lanes)which);
        }
      }
  }

  // The maxima of 2 x 2 windows of the outputs, in y, and in place (O, oh / 2, ow / 2, LANES) which of the four was the
  // largest. ReLU follows the maximum, which gives the same as ReLU before it.
  void pooled(int32_t* place) const {
    const float* packed = w;
    for (int64_t o = 0, n; o < O; o += n, packed += n * I * K * K) {
      n = channels(O - o);
#define CALL(t) windows<t>(o, packed, place)
      BY_CHANNELS(n, CALL);
#undef CALL
    }
  }
};

// The gradient in the outputs of a convolution, from g (O, ph, pw, LANES), that in the maxima of their windows.
void unpool(const float* g, const int32_t* place, const Planes& to, int64_t O, int64_t ph, int64_t pw) {
  for (int64_t o = 0; o < O; o++)
    for (int64_t r = 0; r < ph; r++)
      for (int64_t c = 0; c < pw; c++, g += LANES, place += LANES) {
        const Lanes d = load(g);
        const Places at = (Places)load(reinterpret_cast<const float*>(place));
        for (int k = 0; k < 4; k++) store(to.entry(o, 2 * r + k / 2, 2 * c + k % 2), at == k ? d : Lanes{});
      }
}

// Adds the gradient in the weights of T output channels, over the examples of a group, to gw (T, I, K, K). x: padded
// inputs. g: the gradient in the outputs, of oh rows and ow columns, from the first of the T channels on.
template <int K, int T>
void weigh_group(const Planes& x, const Planes& g, float* gw, int64_t I, int64_t oh, int64_t ow) {
  for (int64_t i = 0; i < I; i++)
    for (int kh = 0; kh < K; kh++) {
      Lanes acc[T][K];
UNROLL
      for (int n = 0; n < T * K; n++) acc[n / K][n % K] = Lanes{};
      for (int64_t r = 0; r < oh; r++) {
        const float *from = x.entry(i, r + kh, 0), *grad = g.entry(0, r, 0);
        for (int64_t c = 0; c < ow; c++, from += LANES, grad += LANES) {
          Lanes d[T];
UNROLL
          for (int t = 0; t < T; t++) d[t] = fetched(grad + t * g.plane);
UNROLL
          for (int kw = 0; kw < K; kw++) {
            const Lanes p = fetched(from + kw * LANES);
UNROLL
            for (int t = 0; t < T; t++) acc[t][kw] += p * d[t];
          }
        }
      }
      add_row<K, T>(acc, gw + i * K * K + kh * K, I);
    }
}

template <int K>
void weigh_groups(const Planes& x, Planes g, float* gw, int64_t I, int64_t O, int64_t oh, int64_t ow) {
  constexpr int T = weighed(K), HALF = (T + 1) / 2;
  for (int64_t o = 0; o < O;) {
    const int64_t left = O - o, n = left >= T ? T : left >= HALF ? HALF : 1;
    if (n == T)
      weigh_group<K, T>(x, g, gw, I, oh, ow);
    else if (n == HALF)
      weigh_group<K, HALF>(x, g, gw, I, oh, ow);
    else
      weigh_group<K, 1>(x, g, gw, I, oh, ow);
    o += n, gw += n * I * K * K, g.at += n * g.plane;
  }
}

// Adds the sums of each channel of g (O, places, LANES) to gb (O,).
void add_places(const float* g, float* gb, int64_t O, int64_t places) {
  for (int64_t o = 0; o < O; o++) {
    Lanes total = {};
    for (int64_t v = 0; v < places; v++, g += LANES) total += load(g);
    gb[o] += sum(total);
  }
}

// Sets the lanes from n on of `vectors` vectors to 0.
void clear_lanes(float* x, int64_t vectors, int64_t n) {
  const Mask kept = first(n);
  for (int64_t v = 0; v < vectors; v++, x += LANES) store(x, load_of(x, kept));
}

}  // namespace
