// Batch normalisation, ReLU and 2 x 2 max pooling of images whose channels are last in memory: (N, h, w, C). One thread,
// float32.
//
// torch does these one after the other, and each of them reads and writes all images. Here ReLU and pooling are done
// while the normalised numbers of a window are in registers, and of the backward pass only the gradient in the images is
// written. A window is 2 x 2 pixels. Pixels at the right and lower edge that fill no window take part in the mean and
// the variance only.
//
// C: channels. N: images. h, w: their height and width. oh, ow: the same in windows. code: for each window the number of
// its largest pixel, row by row, or DEAD.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// The code of a window whose largest number ReLU sets to 0.
constexpr int32_t DEAD = 255;
// So many pixels are summed in float32 for the moments; such sums are joined in float64. Sums of gradients are those of
// rows.
constexpr int64_t SUMMED = 64;

// A code is widened and narrowed in two steps, for which processors have instructions. GCC takes one step number by number.
typedef uint8_t Codes __attribute__((vector_size(LANES)));
typedef uint16_t WiderCodes __attribute__((vector_size(2 * LANES)));

inline Places load_codes(const uint8_t* p, int64_t n) {
  Codes codes = {};
  std::memcpy(&codes, p, std::min(n, LANES));
  return __builtin_convertvector(__builtin_convertvector(codes, WiderCodes), Places);
}

inline void store_codes(uint8_t* p, Places places, int64_t n) {
  const Codes codes = __builtin_convertvector(__builtin_convertvector(places, WiderCodes), Codes);
  std::memcpy(p, &codes, std::min(n, LANES));
}

// Calls f(c, n) for each vector of channels: its first channel, and the number of its channels. For whole vectors n is a
// constant, so that the compiler needs no masks.
template <class F>
inline void over_channels(int64_t C, F f) {
  int64_t c = 0;
  for (; c + LANES <= C; c += LANES) f(c, std::integral_constant<int64_t, LANES>{});
  if (c < C) f(c, C - c);
}

struct Windows {
  int64_t N, h, w, C, oh = h / 2, ow = w / 2;

  // Calls f(pixel, window) for each row of windows: where the numbers of its first pixel begin, and those of its first
  // window.
  template <class F>
  void each_row(F f) const {
    for (int64_t n = 0; n < N; n++)
      for (int64_t r = 0; r < oh; r++) f((n * h + 2 * r) * w * C, (n * oh + r) * ow * C);
  }

  // Where the numbers of pixel k of a window begin, from those of its first pixel on.
  int64_t place(int k) const { return ((k / 2) * w + k % 2) * C; }
};

void forward_of(Windows in, const float* x, const float* scale, const float* shift, float* y, uint8_t* code) {
  in.each_row([&](int64_t pixel, int64_t window) {
    over_channels(in.C, [&](int64_t c, auto n) {
      const Lanes by = load(scale + c, n), plus = load(shift + c, n);
      for (int64_t v = 0; v < in.ow; v++) {
        const float* from = x + pixel + 2 * v * in.C + c;
        const int64_t to = window + v * in.C + c;
        Lanes top = load(from, n) * by + plus;
        Places at = {};
        UNROLL for (int k = 1; k < 4; k++) larger(top, at, load(from + in.place(k), n) * by + plus, k);
        const Places dead = top <= 0;
        store(y + to, dead ? Lanes{} : top, n);
        store_codes(code + to, dead ? Places{} + DEAD : at, n);
      }
    });
  });
}

// The sums over all windows that are not dead, for each channel: of g, and of g times what the window's largest pixel is
// above the mean.
void sums_of(Windows in, const float* x, const float* g, const uint8_t* code, const float* mean, double* of_g,
             double* of_product) {
  std::vector<float> some(2 * in.C);
  float *first = some.data(), *second = first + in.C;
  in.each_row([&](int64_t pixel, int64_t window) {
    over_channels(in.C, [&](int64_t c, auto n) {
      const Lanes middle = load(mean + c, n);
      Lanes sum = {}, product = {};
      for (int64_t v = 0; v < in.ow; v++) {
        const float* from = x + pixel + 2 * v * in.C + c;
        const int64_t to = window + v * in.C + c;
        const Places at = load_codes(code + to, n);
        Lanes top = load(from, n);
        UNROLL for (int k = 1; k < 4; k++) top = at == k ? load(from + in.place(k), n) : top;
        const Lanes d = at == DEAD ? Lanes{} : load(g + to, n);
        sum += d;
        product += d * (top - middle);
      }
      store(first + c, sum, n);
      store(second + c, product, n);
    });
    for (int64_t c = 0; c < in.C; c++) of_g[c] += first[c], of_product[c] += second[c];
  });
}

// gx = factor g + slope x + constant, where g is 0 for pixels that are not the largest of a window.
void gradient_of(Windows in, const float* x, const float* g, const uint8_t* code, const float* factor,
                 const float* slope, const float* constant, float* gx) {
  auto plain = [&](int64_t pixel) {
    over_channels(in.C, [&](int64_t c, auto n) {
      store(gx + pixel + c, load(x + pixel + c, n) * load(slope + c, n) + load(constant + c, n), n);
    });
  };
  in.each_row([&](int64_t pixel, int64_t window) {
    over_channels(in.C, [&](int64_t c, auto n) {
      const Lanes by = load(slope + c, n), plus = load(constant + c, n), times = load(factor + c, n);
      for (int64_t v = 0; v < in.ow; v++) {
        const int64_t from = window + v * in.C + c;
        const Places at = load_codes(code + from, n);
        const Lanes d = load(g + from, n) * times;
        UNROLL for (int k = 0; k < 4; k++) {
          const int64_t to = pixel + 2 * v * in.C + in.place(k) + c;
          store(gx + to, (at == k ? d : Lanes{}) + (load(x + to, n) * by + plus), n);
        }
      }
    });
  });
  for (int64_t n = 0; n < in.N; n++)
    for (int64_t r = 0; r < in.h; r++)
      for (int64_t v = r < 2 * in.oh ? 2 * in.ow : 0; v < in.w; v++) plain(((n * in.h + r) * in.w + v) * in.C);
}

void backward_of(Windows in, const float* x, const float* g, const uint8_t* code, const float* mean,
                 const float* inverse, const float* weight, float* gx, float* gw, float* gb) {
  const int64_t C = in.C;
  std::vector<double> of_g(C), of_product(C);
  sums_of(in, x, g, code, mean, of_g.data(), of_product.data());
  std::vector<float> factor(C), slope(C), constant(C);
  const double pixels = double(in.N) * in.h * in.w;
  for (int64_t c = 0; c < C; c++) {
    const double by = double(weight[c]) * inverse[c], tilt = by * of_product[c] * inverse[c] * inverse[c] / pixels;
    gb[c] = of_g[c];
    gw[c] = of_product[c] * inverse[c];
    factor[c] = by;
    slope[c] = -tilt;
    constant[c] = tilt * mean[c] - by * of_g[c] / pixels;
  }
  gradient_of(in, x, g, code, factor.data(), slope.data(), constant.data(), gx);
}

}  // namespace

extern "C" {

// The mean and the variance (divided by the number of pixels) of each channel. The moments of SUMMED pixels are joined by
// the formula of Chan, Golub and LeVeque, which loses nothing where the mean is large against the deviation.
int32_t channel_moments(const float* x, float* mean, float* variance, int64_t pixels, int64_t C) {
  return computed([&] {
    std::vector<double> means(C), squares(C);
    std::vector<float> some(2 * C);
    float *middle = some.data(), *square = middle + C;
    for (int64_t begin = 0; begin < pixels; begin += SUMMED) {
      const int64_t many = std::min(SUMMED, pixels - begin);
      const float* from = x + begin * C;
      over_channels(C, [&](int64_t c, auto n) {
        Lanes sum = {}, away = {};
        for (int64_t i = 0; i < many; i++) sum += load(from + i * C + c, n);
        sum /= float(many);
        for (int64_t i = 0; i < many; i++) {
          const Lanes d = load(from + i * C + c, n) - sum;
          away += d * d;
        }
        store(middle + c, sum, n);
        store(square + c, away, n);
      });
      const double share = double(many) / (begin + many);
      for (int64_t c = 0; c < C; c++) {
        const double d = middle[c] - means[c];
        squares[c] += square[c] + d * d * share * begin;
        means[c] += d * share;
      }
    }
    for (int64_t c = 0; c < C; c++) mean[c] = means[c], variance[c] = squares[c] / pixels;
    return DONE;
  });
}

// y (N, oh, ow, C) and code: ReLU and max pooling of scale x + shift.
int32_t pooled_forward(const float* x, const float* scale, const float* shift, float* y, uint8_t* code, int64_t N,
                       int64_t h, int64_t w, int64_t C) {
  forward_of(Windows{N, h, w, C}, x, scale, shift, y, code);
  return DONE;
}

// The gradients in x, weight and bias from g, the gradient in y. inverse: 1 / the standard deviation of each channel.
int32_t pooled_backward(const float* x, const float* g, const uint8_t* code, const float* mean, const float* inverse,
                        const float* weight, float* gx, float* gw, float* gb, int64_t N, int64_t h, int64_t w,
                        int64_t C) {
  return computed([&] {
    backward_of(Windows{N, h, w, C}, x, g, code, mean, inverse, weight, gx, gw, gb);
    return DONE;
  });
}
}
