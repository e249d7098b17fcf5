// Convolutions of a block of clients, each with weights of its own, and sums of messages. One thread, float32.
//
// A convolution (stride 1) computes a vector of places of an output row at a time. Each number that is loaded of the
// input serves a tile of several output channels, and each weight serves two rows. The gradient in the input is the same
// convolution, of the gradient in the outputs with rotated weights. The gradient in the weights is summed in the lanes
// of vectors, which are added at the end.
//
// C: clients. B: examples. I, O: input and output channels. h, w (or wd): height and width. p: padding. K: side of the
// kernel. hp: height with padding. oh, ow: height and width of the output. stride, gs: floats from row to row.

#pragma once

#include "vectors.h"

namespace {

// n rounded up to a multiple of LANES.
inline int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// One of this thread's four buffers, `which`, with space for `size` floats, aligned to 64 bytes.
float* scratch(int which, int64_t size) {
  static thread_local std::vector<float> kept[4];
  constexpr int64_t skipped = 64 / sizeof(float);  // at most this many floats come before the aligned one
  if (int64_t(kept[which].size()) < size + skipped) kept[which].resize(size + skipped);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept[which].data()) + 63) / 64 * 64);
}

// Copies planes x, (planes, h, w), whose rows are `from` floats apart (0: w), to padded planes (planes, h + 2 p,
// stride). The padding, and the rest of each row, are zeros.
void pad(const float* x, float* to, int64_t planes, int64_t h, int64_t w, int64_t p, int64_t stride, int64_t from = 0) {
  from = from ? from : w;
  std::memset(to, 0, sizeof(float) * planes * (h + 2 * p) * stride);
  for (int64_t n = 0; n < planes; n++)
    for (int64_t r = 0; r < h; r++)
      std::memcpy(to + (n * (h + 2 * p) + r + p) * stride + p, x + (n * h + r) * from, sizeof(float) * w);
}

// Computes T output channels of one example. x: the padded input. w: (I, K, K, T). Calls out(t, r, v, a, b, lanes) for
// each pair of rows: a and b are `lanes` outputs of channel t in the rows r and r + 1, from column v on.
template <int K, int T, class Out>
void tile(const float* x, const float* w, const float* bias, int64_t I, int64_t hp, int64_t stride, int64_t oh,
          int64_t ow, const Out& out) {
  for (int64_t v = 0; v < ow; v += LANES) {
    const int64_t lanes = std::min(LANES, ow - v);
    for (int64_t r = 0; r < oh; r += 2) {
      const bool pair = r + 1 < oh;
      Lanes a[T], b[T];
      for (int t = 0; t < T; t++) a[t] = b[t] = Lanes{} + (bias ? bias[t] : 0.0f);
      const float* weight = w;
      for (int64_t i = 0; i < I; i++)
        for (int kh = 0; kh < K; kh++) {
          const float* row = x + (i * hp + r + kh) * stride + v;
          const float* next = pair ? row + stride : row;
          for (int kw = 0; kw < K; kw++, weight += T) {
            const Lanes p = load(row + kw), q = load(next + kw);
            for (int t = 0; t < T; t++) {
              a[t] += p * weight[t];
              b[t] += q * weight[t];
            }
          }
        }
      for (int t = 0; t < T; t++) out(t, r, v, a[t], b[t], lanes);
    }
  }
}

// An output of `example`: stores the rows unchanged in planes (oh, ow).
struct Plain {
  float* y;
  int64_t oh, ow;
  Plain at(int64_t plane) const { return {y + plane * oh * ow, oh, ow}; }
  void operator()(int64_t t, int64_t r, int64_t v, Lanes a, Lanes b, int64_t lanes) const {
    float* to = y + (t * oh + r) * ow + v;
    store(to, a, lanes);
    if (r + 1 < oh) store(to + ow, b, lanes);
  }
};

// Copies the weights of T output channels, from channel `first` on, in the order in which `tile` reads them. turned: w
// is (I, O, K, K) and its kernels are rotated by 180 degrees, for the gradient in the input. Returns the number of
// floats.
template <int K, int T>
int64_t pack(const float* w, float* to, int64_t first, int64_t O, int64_t I, bool turned) {
  for (int64_t i = 0; i < I; i++)
    for (int k = 0; k < K * K; k++)
      for (int t = 0; t < T; t++)
        *to++ = turned ? w[(i * O + first + t) * K * K + K * K - 1 - k] : w[((first + t) * I + i) * K * K + k];
  return I * K * K * T;
}

#define BY_WIDTH(n, call)     \
  switch (n) {                \
    case 8: call(8); break;   \
    case 6: call(6); break;   \
    case 4: call(4); break;   \
    case 2: call(2); break;   \
    default: call(1);         \
  }

template <int K>
void pack_all(const float* w, float* to, int64_t O, int64_t I, bool turned) {
  for (int64_t o = 0; o < O; o += width(O - o)) {
#define CALL(t) to += pack<K, t>(w, to, o, O, I, turned)
    BY_WIDTH(width(O - o), CALL)
#undef CALL
  }
}

// Computes all output channels of one example. x: the padded input. packed: the weights, from `pack_all`.
template <int K, class Out>
void example(const float* x, const float* packed, const float* bias, int64_t I, int64_t O, int64_t hp, int64_t stride,
             int64_t oh, int64_t ow, const Out& out) {
  for (int64_t o = 0; o < O;) {
    const int64_t n = width(O - o);
    const float* add = bias ? bias + o : nullptr;
#define CALL(t) tile<K, t>(x, packed, add, I, hp, stride, oh, ow, out.at(o))
    BY_WIDTH(n, CALL)
#undef CALL
    packed += n * I * K * K;
    o += n;
  }
}

template <int K>
void conv(const float* x, const float* w, const float* bias, float* y, int64_t C, int64_t B, int64_t I, int64_t O,
          int64_t h, int64_t wd, int64_t p, bool turned) {
  const int64_t hp = h + 2 * p, oh = hp - K + 1, ow = wd + 2 * p - K + 1, stride = up(ow) + K - 1;
  float* padded = scratch(0, I * hp * stride + LANES);
  float* packed = scratch(1, O * I * K * K);
  for (int64_t c = 0; c < C; c++) {
    pack_all<K>(w + c * O * I * K * K, packed, O, I, turned);
    for (int64_t b = 0; b < B; b++) {
      pad(x + (c * B + b) * I * h * wd, padded, I, h, wd, p, stride);
      const Plain out{y + (c * B + b) * O * oh * ow, oh, ow};
      example<K>(padded, packed, bias ? bias + c * O : nullptr, I, O, hp, stride, oh, ow, out);
    }
  }
}

// Adds the sums of the lanes of acc to a row of the kernels of T output channels: gw, which is where the row of the first
// of them begins in weights (T, I, K, K).
template <int K, int T>
inline __attribute__((always_inline)) void add_row(const Lanes (&acc)[T][K], float* gw, int64_t I) {
UNROLL
  for (int n = 0; n < T * K; n += 4) {
    const auto part = [&](int m) { return m < T * K ? acc[m / K][m % K] : Lanes{}; };
    const Four total = sums(part(n), part(n + 1), part(n + 2), part(n + 3));
    for (int m = n; m < n + 4 && m < T * K; m++) gw[m / K * I * K * K + m % K] += total[m - n];
  }
}

// Adds the gradient in the weights of T output channels, over n examples, to gw (T, I, K, K). x: padded inputs. g:
// (n, O, oh, gs), the gradient in the outputs.
template <int K, int T>
void weigh(const float* x, const float* g, float* gw, int64_t n, int64_t I, int64_t O, int64_t hp, int64_t stride,
           int64_t oh, int64_t gs) {
  for (int64_t i = 0; i < I; i++)
    for (int kh = 0; kh < K; kh++) {
      Lanes acc[T][K];
      for (int t = 0; t < T; t++)
        for (int kw = 0; kw < K; kw++) acc[t][kw] = Lanes{};
      for (int64_t b = 0; b < n; b++)
        for (int64_t r = 0; r < oh; r++) {
          const float* row = x + ((b * I + i) * hp + r + kh) * stride;
          const float* grad = g + (b * O * oh + r) * gs;
          for (int64_t v = 0; v < gs; v += LANES) {
            Lanes d[T];
            for (int t = 0; t < T; t++) d[t] = held(load(grad + t * oh * gs + v));
            for (int kw = 0; kw < K; kw++) {
              const Lanes p = held(load(row + v + kw));
              for (int t = 0; t < T; t++) acc[t][kw] += p * d[t];
            }
          }
        }
      add_row<K, T>(acc, gw + i * K * K + kh * K, I);
    }
}

template <int K>
void weigh_all(const float* x, const float* g, float* gw, int64_t n, int64_t I, int64_t O, int64_t hp, int64_t stride,
               int64_t oh, int64_t gs) {
  constexpr int T = weighed(K);
  int64_t o = 0;
#define CALL(t) weigh<K, t>(x, g + o * oh * gs, gw + o * I * K * K, n, I, O, hp, stride, oh, gs)
  for (; o + T <= O; o += T) CALL(T);
  for (; o + 2 <= O; o += 2) CALL(2);
  for (; o < O; o++) CALL(1);
#undef CALL
}

template <int K>
void weights(const float* x, const float* g, float* gw, float* gb, int64_t C, int64_t B, int64_t I, int64_t O, int64_t h,
             int64_t wd, int64_t p) {
  const int64_t hp = h + 2 * p, oh = hp - K + 1, ow = wd + 2 * p - K + 1, gs = up(ow), stride = gs + K - 1;
  const int64_t each = I * hp * stride + O * oh * gs, most = std::max<int64_t>(1, 65536 / each);
  float* xs = scratch(2, most * I * hp * stride + LANES);
  float* grads = scratch(3, most * O * oh * gs + LANES);
  for (int64_t c = 0; c < C; c++) {
    float* mine = gw + c * O * I * K * K;
    std::memset(mine, 0, sizeof(float) * O * I * K * K);
    for (int64_t b = 0; b < B; b += most) {
      const int64_t n = std::min(most, B - b);
      for (int64_t e = 0; e < n; e++) pad(x + (c * B + b + e) * I * h * wd, xs + e * I * hp * stride, I, h, wd, p, stride);
      pad(g + (c * B + b) * O * oh * ow, grads, n * O, oh, ow, 0, gs);
      weigh_all<K>(xs, grads, mine, n, I, O, hp, stride, oh, gs);
    }
    if (gb)
      for (int64_t o = 0; o < O; o++) {
        Lanes lanes = {};
        float rest = 0;
        for (int64_t b = 0; b < B; b++) {
          const float* plane = g + ((c * B + b) * O + o) * oh * ow;
          int64_t at = 0;
          for (; at + LANES <= oh * ow; at += LANES) lanes += load(plane + at);
          for (; at < oh * ow; at++) rest += plane[at];
        }
        gb[c * O + o] = rest + sum(lanes);
      }
  }
}

}  // namespace

#define BY_KERNEL(call) \
  switch (K) {          \
    case 1: call(1);    \
    case 2: call(2);    \
    case 3: call(3);    \
    case 4: call(4);    \
    case 5: call(5);    \
    case 7: call(7);    \
  }

namespace {

// total <- (a + b) + (c + d), of the first N of these vectors; with MORE, this is added to the old total.
template <int N, bool MORE>
void add_up_of(const float* const* p, double* total, int64_t size) {
  const float *a = p[0], *b = p[1], *c = p[2], *d = p[3];
  for (int64_t i = 0; i < size; i++) {
    double sum = a[i];
    if (N > 1) sum += double(b[i]);
    if (N == 3) sum += double(c[i]);
    if (N == 4) sum += double(c[i]) + double(d[i]);
    total[i] = MORE ? total[i] + sum : sum;
  }
}

// The larger of two numbers as torch's pooling takes it: the first one of equal zeros, and NaN if one of them is.
inline float larger(float a, float b) { return (b > a) | (b != b) ? b : a; }

}  // namespace

extern "C" {

// The instruction set that vectors and tiles are for.
const char* instruction_set() { return INSTRUCTIONS; }

// The functions below return a Status.
int32_t conv_forward(const float* x, const float* w, const float* bias, float* y, int64_t C, int64_t B, int64_t I,
                     int64_t O, int64_t h, int64_t wd, int64_t p, int64_t K, int64_t turned) {
  return computed([&] {
#define CALL(k) return conv<k>(x, w, bias, y, C, B, I, O, h, wd, p, turned), DONE
    BY_KERNEL(CALL)
#undef CALL
    return DONE;
  });
}

int32_t conv_weights(const float* x, const float* g, float* gw, float* gb, int64_t C, int64_t B, int64_t I, int64_t O,
                     int64_t h, int64_t wd, int64_t p, int64_t K) {
  return computed([&] {
#define CALL(k) return weights<k>(x, g, gw, gb, C, B, I, O, h, wd, p), DONE
    BY_KERNEL(CALL)
#undef CALL
    return DONE;
  });
}

// The maxima of squares of 2 x 2 pixels of planes x (planes, h, w), without the last row or column of odd sides.
int32_t max_pool(const float* x, float* y, int64_t planes, int64_t h, int64_t w) {
  const int64_t oh = h / 2, ow = w / 2;
  for (int64_t plane = 0; plane < planes; plane++)
    for (int64_t i = 0; i < oh; i++) {
      const float *above = x + (plane * h + 2 * i) * w, *below = above + w;
      float* to = y + (plane * oh + i) * ow;
      for (int64_t j = 0; j < ow; j++)
        to[j] = larger(larger(larger(above[2 * j], above[2 * j + 1]), below[2 * j]), below[2 * j + 1]);
    }
  return DONE;
}

// Adds n vectors (1 to 4, the first of a, b, c, d) in float64. more: 1 to add their sum to the old total.
int32_t add_up(const float* a, const float* b, const float* c, const float* d, double* total, int64_t n, int64_t more,
            int64_t size) {
  const float* parts[] = {a, b, c, d};
  void (*const all[4][2])(const float* const*, double*, int64_t) = {{add_up_of<1, false>, add_up_of<1, true>},
                                                                    {add_up_of<2, false>, add_up_of<2, true>},
                                                                    {add_up_of<3, false>, add_up_of<3, true>},
                                                                    {add_up_of<4, false>, add_up_of<4, true>}};
  all[n - 1][more](parts, total, size);
  return DONE;
}
}
