// Loss and gradient of a chain of layers. The layers are convolutions and linear layers; ReLU may follow each of them,
// and 2 x 2 max pooling may follow a convolution. Convolutions compute rows of images (native.h), or all examples of
// the batch at once if these fill vectors (batched.h). The loss is the cross-entropy of the last layer's outputs. Clients
// are computed one after another, so that the data of one client stay in the processor's caches, and no step allocates
// memory. One thread, float32.
//
// B: examples of a batch. P: parameters of the model. n: layers. C: clients. K: local steps, or the side of a kernel.

#pragma once

#include <cmath>
#include <map>
#include <memory>

#include "batched.h"

namespace {

enum Kind { CONV, LINEAR };

// The description of one layer, in the layout in which engine/kernels/fused_chain.py writes it: int64 numbers only.
struct Layer {
  int64_t kind, weight, bias;  // weight, bias: offsets in the vector of parameters; bias is -1 if the layer has none
  int64_t I, O, h, w, p, K;    // inputs, outputs, height, width, padding, kernel side; a linear layer has only I and O
  int64_t relu, pool;          // 1 if ReLU or pooling follows
  int64_t oh() const { return h + 2 * p - K + 1; }
  int64_t ow() const { return w + 2 * p - K + 1; }
  int64_t in() const { return kind == CONV ? I * h * w : I; }
  int64_t out() const { return kind == LINEAR ? O : O * (pool ? (oh() / 2) * (ow() / 2) : oh() * ow()); }
};

// The inputs of a batch of examples, each of `size` floats.
struct Examples {
  const float* x;
  int64_t size;
  const float* operator[](int64_t b) const { return x + b * size; }
};

inline Lanes rectified(Lanes v) { return v < 0 ? Lanes{} : v; }  // NaN stays NaN

// --- linear layers ------------------------------------------------------------------------------------------------

// y (R, T) += x (R, n) . w (T, n)'. Consecutive rows of x, w and y are xs, ws and ys floats apart. T is 4 or 1.
template <int R, int T>
void dots(const float* x, int64_t xs, const float* w, int64_t ws, int64_t n, float* y, int64_t ys) {
  Lanes a[R][T];
UNROLL
  for (int m = 0; m < R * T; m++) a[m / T][m % T] = Lanes{};
  const auto step = [&](auto loaded, int64_t v) __attribute__((always_inline)) {
    Lanes q[T];
UNROLL
    for (int t = 0; t < T; t++) q[t] = held(loaded(w + t * ws + v));
UNROLL
    for (int r = 0; r < R; r++) {
      const Lanes p = held(loaded(x + r * xs + v));
UNROLL
      for (int t = 0; t < T; t++) a[r][t] += p * q[t];
    }
  };
  int64_t v = 0;
  for (; v + LANES <= n; v += LANES) step([](const float* from) { return fetched(from); }, v);
  if (v < n) {
    const Mask rest = first(n - v);
    step([rest](const float* from) { return load_of(from, rest); }, v);
  }
UNROLL
  for (int r = 0; r < R; r++)
    if constexpr (T == 4) {
      const Four total = sums(a[r][0], a[r][1], a[r][2], a[r][3]);
      for (int t = 0; t < T; t++) y[r * ys + t] += total[t];
    } else {
      y[r * ys] += sum(a[r][0]);
    }
}

// What is stored for a product: scale * product + share * z, or the product itself if there is no z. It is called with
// vectors of a tile: of row r, from column v on, at a place in the layout of the result.
struct Plus {
  float scale = 1, share = 0;
  const float* z = nullptr;  // has the layout of the result
  Lanes operator()(Lanes product, int64_t r, int64_t v, int64_t place, Mask m) const {
    return z ? product * scale + load_of(z + place, m) * share : product;
  }
};

// What a step of a product adds to its sums: w * g, of numbers of float32.
struct Singles {
  static Lanes add(Lanes sum, Lanes w, Lanes g) { return sum + w * g; }
};

// y (R, V vectors) = g (R, O) . w (O, V vectors). Only the entries `last` of the last vector are stored. Entries of g
// are gs floats apart within a row, and its rows gr floats; rows of w and y are ws and ys floats apart. Terms: how
// entries of g and w are multiplied and added. plus: what is stored for a product, see Plus. more: the sums begin with y.
template <int R, int V, class Terms = Singles, class After = Plus>
void spread(const float* g, int64_t gr, int64_t gs, const float* w, int64_t ws, int64_t O, Mask last, float* y,
            int64_t ys, const After& plus = {}, bool more = false) {
  Lanes a[R][V];
UNROLL
  for (int m = 0; m < R * V; m++) {
    const Mask of = m % V < V - 1 ? first(LANES) : last;
    a[m / V][m % V] = more ? load_of(y + m / V * ys + m % V * LANES, of) : Lanes{};
  }
  for (int64_t o = 0; o < O; o++) {
    Lanes q[V];
UNROLL
    for (int v = 0; v < V; v++) q[v] = held(v < V - 1 ? load(w + o * ws + v * LANES) : load_of(w + o * ws + v * LANES, last));
UNROLL
    for (int r = 0; r < R; r++) {
      const Lanes d = repeated(g + r * gr + o * gs);
UNROLL
      for (int v = 0; v < V; v++) a[r][v] = Terms::add(a[r][v], q[v], d);
    }
  }
UNROLL
  for (int r = 0; r < R; r++) {
UNROLL
    for (int v = 0; v < V; v++) {
      const int64_t to = r * ys + v * LANES;
      const Mask m = v < V - 1 ? first(LANES) : last;
      store_of(y + to, plus(a[r][v], r, v * LANES, to, m), m);
    }
  }
}

#define BY_ROWS(n, call)      \
  switch (n) {                \
    case 1: call(1); break;   \
    case 2: call(2); break;   \
    case 3: call(3); break;   \
    case 4: call(4); break;   \
    default: call(5);         \
  }
#define BY_VECTORS(n, call)                           \
  switch (n) {                                        \
    case 1: call(1); break;                           \
    case 2: call(2); break;                           \
    case 3: call(std::min(3, SPREAD_VECTORS)); break; \
    default: call(SPREAD_VECTORS);                    \
  }

template <int R>
void spread_row(const float* g, int64_t gr, int64_t gs, const float* w, int64_t ws, int64_t O, float* y, int64_t ys,
                int64_t n) {
  constexpr int64_t most = SPREAD_VECTORS * LANES;
  for (int64_t v = 0; v < n; v += most) {
    const int64_t left = std::min(n - v, most), V = (left + LANES - 1) / LANES;
    const Mask last = first(left - (V - 1) * LANES);
#define CALL(k) spread<R, k>(g, gr, gs, w + v, ws, O, last, y + v, ys)
    BY_VECTORS(V, CALL)
#undef CALL
  }
}

// y (rows, n) = g (rows, O) . w (O, n); strides as in `spread`. With g as it is stored this is the gradient of a linear
// layer's inputs, with g transposed (gr and gs exchanged) that of its weights.
void product(const float* g, int64_t gr, int64_t gs, const float* w, int64_t ws, int64_t O, float* y, int64_t ys,
             int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r += SPREAD_ROWS) {
#define CALL(k) spread_row<k>(g + r * gr, gr, gs, w, ws, O, y + r * ys, ys, n)
    BY_ROWS(rows - r, CALL)
#undef CALL
  }
}

constexpr int64_t CHUNK = 768;  // floats of a row at a time, so that those of x and w stay in the first-level cache

void linear(const Layer& l, const float* p, const float* x, float* y, int64_t B) {
  for (int64_t b = 0; b < B; b++)
    for (int64_t o = 0; o < l.O; o++) y[b * l.O + o] = l.bias < 0 ? 0.0f : p[l.bias + o];
  for (int64_t i = 0; i < l.I; i += CHUNK) {
    const int64_t n = l.I - i < CHUNK + LANES * 8 ? l.I - i : CHUNK;
    for (int64_t o = 0; o < l.O; o += l.O - o >= 4 ? 4 : 1)
      for (int64_t b = 0; b < B; b += DOT_ROWS) {
        const float *from = x + b * l.I + i, *w = p + l.weight + o * l.I + i;
        float* to = y + b * l.O + o;
#define CALL(k) l.O - o >= 4 ? dots<k, 4>(from, l.I, w, l.I, n, to, l.O) : dots<k, 1>(from, l.I, w, l.I, n, to, l.O)
        BY_ROWS(std::min<int64_t>(B - b, DOT_ROWS), CALL)
#undef CALL
      }
    if (n > CHUNK) break;
  }
  if (l.relu)
    for (int64_t v = 0; v < B * l.O; v += LANES) store(y + v, rectified(load(y + v, B * l.O - v)), B * l.O - v);
}

void linear_back(const Layer& l, const float* p, const float* x, const float* g, float* gp, float* gx, int64_t B) {
  product(g, 1, l.O, x, l.I, B, gp + l.weight, l.I, l.O, l.I);
  if (l.bias >= 0)
    for (int64_t o = 0; o < l.O; o++) {
      float total = 0;
      for (int64_t b = 0; b < B; b++) total += g[b * l.O + o];
      gp[l.bias + o] = total;
    }
  if (gx) product(g, l.O, 1, p + l.weight, l.I, l.O, gx, l.I, B, l.I);
}

// --- convolutions -------------------------------------------------------------------------------------------------

// An output of `example`: stores the rows after ReLU.
struct Rectified {
  Plain plain;
  Rectified at(int64_t plane) const { return {plain.at(plane)}; }
  void operator()(int64_t t, int64_t r, int64_t v, Lanes a, Lanes b, int64_t lanes) const {
    plain(t, r, v, rectified(a), rectified(b), lanes);
  }
};

// An output of `example`: stores the maxima of 2 x 2 windows, and in `place` which of the four entries was the largest.
// ReLU follows the maximum, which gives the same as ReLU before it.
struct Pooled {
  float* y;
  int32_t* place;
  int64_t oh, ow, relu;  // oh, ow: the sides of the pooled planes
  Pooled at(int64_t plane) const { return {y + plane * oh * ow, place + plane * oh * ow, oh, ow, relu}; }
  void operator()(int64_t t, int64_t r, int64_t v, Lanes a, Lanes b, int64_t lanes) const {
    if (r / 2 >= oh) return;
    Lanes top = EVEN(a, a);
    Places at = {};
    larger(top, at, ODD(a, a), 1);
    larger(top, at, EVEN(b, b), 2);
    larger(top, at, ODD(b, b), 3);
    const int64_t to = (t * oh + r / 2) * ow + v / 2, n = std::min(lanes / 2, ow - v / 2);
    store(y + to, relu ? rectified(top) : top, n);
    store(reinterpret_cast<float*>(place + to), (Lanes)at, n);
  }
};

template <int K>
void convolve(const Layer& l, const float* p, const Examples& x, float* y, int32_t* place, int64_t B) {
  const int64_t hp = l.h + 2 * l.p, oh = l.oh(), ow = l.ow(), stride = up(ow) + K - 1;
  float *padded = scratch(0, l.I * hp * stride + LANES), *packed = scratch(1, l.O * l.I * K * K);
  const float* bias = l.bias < 0 ? nullptr : p + l.bias;
  pack_all<K>(p + l.weight, packed, l.O, l.I, false);
  for (int64_t b = 0; b < B; b++) {
    pad(x[b], padded, l.I, l.h, l.w, l.p, stride);
    const Plain plain{y + b * l.out(), oh, ow};
    const Pooled pooled{y + b * l.out(), l.pool ? place + b * l.out() : nullptr, oh / 2, ow / 2, l.relu};
    if (l.pool)
      example<K>(padded, packed, bias, l.I, l.O, hp, stride, oh, ow, pooled);
    else if (l.relu)
      example<K>(padded, packed, bias, l.I, l.O, hp, stride, oh, ow, Rectified{plain});
    else
      example<K>(padded, packed, bias, l.I, l.O, hp, stride, oh, ow, plain);
  }
}

// The gradient in the outputs of the convolution itself, from the gradient in the outputs of its pooling. to: planes
// (O, oh, ow) whose rows are gs floats apart.
void unpooled(const Layer& l, const float* g, const int32_t* place, float* to, int64_t gs) {
  const int64_t oh = l.oh(), ow = l.ow(), ph = oh / 2, pw = ow / 2;
  std::memset(to, 0, sizeof(float) * l.O * oh * gs);
  for (int64_t o = 0; o < l.O; o++)
    for (int64_t r = 0; r < ph; r++)
      for (int64_t v = 0; v < pw; v += LANES) {
        const int64_t from = (o * ph + r) * pw + v, lanes = std::min(LANES, pw - v);
        const Lanes d = load(g + from, lanes);
        const Places at = (Places)load(reinterpret_cast<const float*>(place + from), lanes);
        for (int k = 0; k < 2; k++) {
          const Lanes even = at == 2 * k ? d : Lanes{}, odd = at == 2 * k + 1 ? d : Lanes{};
          float* row = to + (o * oh + 2 * r + k) * gs + 2 * v;
          store(row, LOW(even, odd), 2 * lanes);
          store(row + LANES, HIGH(even, odd), 2 * lanes - LANES);
        }
      }
}

// Writes the gradients of a convolution: gp, in its weights and bias, and gx, in its inputs (unless gx is null). g: the
// gradient in the outputs of its ReLU and pooling, already set to 0 where ReLU gave 0.
template <int K>
void convolve_back(const Layer& l, const float* p, const Examples& x, const float* g, const int32_t* place, float* gp,
                   float* gx, int64_t B) {
  const int64_t hp = l.h + 2 * l.p, oh = l.oh(), ow = l.ow(), gs = up(ow), stride = gs + K - 1;
  const int64_t rest = K - 1 - l.p, back = up(l.w) + K - 1;
  const int64_t each = l.I * hp * stride + l.O * oh * gs, most = std::max<int64_t>(1, 65536 / each);
  float* xs = scratch(2, most * l.I * hp * stride + LANES);
  float* grads = scratch(3, most * l.O * oh * gs + LANES);
  float* padded = scratch(0, l.O * (oh + 2 * rest) * back + LANES);
  float* packed = scratch(1, l.O * l.I * K * K);
  float* gw = gp + l.weight;
  std::memset(gw, 0, sizeof(float) * l.O * l.I * K * K);
  if (l.bias >= 0) std::memset(gp + l.bias, 0, sizeof(float) * l.O);
  if (gx) pack_all<K>(p + l.weight, packed, l.I, l.O, true);
  for (int64_t b = 0; b < B; b += most) {
    const int64_t n = std::min(most, B - b);
    for (int64_t e = 0; e < n; e++) {
      const float* mine = g + (b + e) * l.out();
      float* full = grads + e * l.O * oh * gs;
      pad(x[b + e], xs + e * l.I * hp * stride, l.I, l.h, l.w, l.p, stride);
      if (l.pool)
        unpooled(l, mine, place + (b + e) * l.out(), full, gs);
      else
        pad(mine, full, l.O, oh, ow, 0, gs);
      if (gx) {
        pad(full, padded, l.O, oh, ow, rest, back, gs);
        const Plain out{gx + (b + e) * l.in(), l.h, l.w};
        example<K>(padded, packed, nullptr, l.O, l.I, oh + 2 * rest, back, l.h, l.w, out);
      }
      for (int64_t o = 0; l.bias >= 0 && o < l.O; o++) {
        Lanes total = {};
        for (int64_t v = 0; v < oh * gs; v += LANES) total += load(full + o * oh * gs + v);
        gp[l.bias + o] += sum(total);
      }
    }
    weigh_all<K>(xs, grads, gw, n, l.I, l.O, hp, stride, oh, gs);
  }
}

#define BY_SIDE(K, call) \
  switch (K) {             \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(7);       \
  }

// --- convolutions with the examples in lanes ------------------------------------------------------------------------

// The number of layers from the first one on that are computed with the examples in lanes: all convolutions, or none. It
// depends on shapes alone, so that the same run has the same bits wherever vectors have the same width. Three quarters of
// the lanes have to be used, about as many as of rows of images of 28 x 28 that become 10 x 10.
int64_t layers_in_lanes(const Layer* layers, int64_t n, int64_t B) {
  constexpr int64_t most = 1 << 20;  // floats of a layer of a group: 4 MiB, about the size of a second-level cache
  if (!B || 4 * B < 3 * up(B)) return 0;
  int64_t count = 0;
  for (; count < n && layers[count].kind == CONV; count++) {
    const Layer& l = layers[count];
    if (std::max(l.I * (l.h + 2 * l.p) * (l.w + 2 * l.p), l.O * l.oh() * l.ow()) * LANES > most) return 0;
  }
  return count;
}

// Memory of one convolution of B examples in groups.
struct Images {
  const Layer& layer;
  const int64_t size, gradients, hp, wp, rest, fh, fw;  // floats of a group; sides of the planes of x and of full
  Aligned x, g, full, place;  // inputs with padding; gradient in what leaves the layer; gradient in the convolution
  Images(const Layer& l, int64_t groups)
      : layer(l), size(l.I * (l.h + 2 * l.p) * (l.w + 2 * l.p) * LANES), gradients(l.out() * LANES), hp(l.h + 2 * l.p),
        wp(l.w + 2 * l.p), rest(l.K - 1 - l.p), fh(l.oh() + 2 * rest), fw(l.ow() + 2 * rest), x(groups * size),
        g(groups * gradients), full(l.O * fh * fw * LANES), place(l.pool ? groups * gradients : 0) {}
  // Group k of the inputs with their padding, and without it.
  Planes padded(int64_t k) { return {x.data() + k * size, wp * LANES, hp * wp * LANES}; }
  Planes inputs(int64_t k) { return {padded(k).entry(0, layer.p, layer.p), wp * LANES, hp * wp * LANES}; }
  int32_t* places(int64_t k) { return reinterpret_cast<int32_t*>(place.data()) + k * gradients; }
  float* gradient(int64_t k) { return g.data() + k * gradients; }
  // The gradient in the outputs of the convolution, with zeros around it for the gradient in the inputs, and without.
  Planes around() { return {full.data(), fw * LANES, fh * fw * LANES}; }
  Planes outputs() { return {around().entry(0, rest, rest), fw * LANES, fh * fw * LANES}; }
};

// Copies examples of a group to lanes, (I, h, w) of each. B: the examples of the batch; others repeat the last one.
void to_lanes(const Examples& x, int64_t group, int64_t B, int64_t I, int64_t h, int64_t w, const Planes& to) {
  for (int64_t lane = 0; lane < LANES; lane++) {
    const float* from = x[std::min(group * LANES + lane, B - 1)];
    for (int64_t i = 0; i < I; i++)
      for (int64_t r = 0; r < h; r++) {
        float* row = to.entry(i, r, 0) + lane;
        for (int64_t c = 0; c < w; c++) row[c * LANES] = *from++;
      }
  }
}

// The convolutions of a chain with the examples of a batch in lanes.
struct Batched {
  std::vector<Images> images;  // one for each convolution
  const int64_t B, groups, over;  // over: the examples of the last group, if they do not fill it, else 0
  Aligned last;                // the outputs of the last convolution, of one group
  Batched(const Layer* layers, int64_t count, int64_t B) : B(B), groups((B + LANES - 1) / LANES), over(B % LANES) {
    for (int64_t l = 0; l < count; l++) images.emplace_back(layers[l], groups);
    if (count) last = Aligned(layers[count - 1].out() * LANES);
  }

  // Writes the outputs of the last convolution of examples x to y (B, ...).
  void forward(const float* p, const Examples& x, float* y) {
    for (int64_t l = 0; l < int64_t(images.size()); l++) {
      Images& own = images[l];
      const Layer& of = own.layer;
      const int64_t oh = of.oh(), ow = of.ow(), h = of.pool ? oh / 2 : oh, w = of.pool ? ow / 2 : ow;
      float* packed = scratch(1, of.O * of.I * of.K * of.K);
      pack_channels(p + of.weight, packed, of.O, of.I, of.K, false);
      for (int64_t k = 0; k < groups; k++) {
        if (!l) to_lanes(x, k, B, of.I, of.h, of.w, own.inputs(k));
        const bool inner = l + 1 < int64_t(images.size());
        const Planes to = inner ? images[l + 1].inputs(k) : Planes{last.data(), w * LANES, h * w * LANES};
        const float* bias = of.bias < 0 ? nullptr : p + of.bias;
        const Convolution made{own.padded(k), of.p, packed, bias, of.I, of.O, of.K, oh, ow, of.relu != 0, to};
        of.pool ? made.pooled(own.places(k)) : made.all();
        if (!inner) from_lanes(y, k, of.out());
      }
    }
  }

  // Writes the gradients in the parameters to gp. g: the gradient (B, ...) in the outputs of the last convolution, 0
  // where its ReLU gave 0. Calls after(layer) as soon as the gradient of a layer is complete.
  template <class After>
  void backward(const float* p, const float* g, float* gp, After after) {
    for (int64_t l = images.size() - 1; l >= 0; l--) {
      Images& own = images[l];
      const Layer& of = own.layer;
      const bool outer = l + 1 == int64_t(images.size());
      float *gw = gp + of.weight, *packed = scratch(1, of.O * of.I * of.K * of.K);
      std::memset(gw, 0, sizeof(float) * of.O * of.I * of.K * of.K);
      if (of.bias >= 0) std::memset(gp + of.bias, 0, sizeof(float) * of.O);
      if (l) pack_channels(p + of.weight, packed, of.I, of.O, of.K, true);
      for (int64_t k = 0; k < groups; k++) {
        const bool partial = over && k == groups - 1;
        if (outer) to_lanes({g, of.out()}, k, B, 1, 1, of.out(), {own.gradient(k), 0, 0});
        if (partial) clear_lanes(own.gradient(k), of.out(), over);
        if (partial) clear_lanes(own.padded(k).at, own.size / LANES, over);
        spread_gradient(own, k);
        if (of.bias >= 0) add_places(own.gradient(k), gp + of.bias, of.O, of.out() / of.O);
#define CALL(k_) weigh_groups<k_>(own.padded(k), own.outputs(), gw, of.I, of.O, of.oh(), of.ow())
        BY_SIDE(of.K, CALL)
#undef CALL
        if (!l) continue;
        const Planes to{images[l - 1].gradient(k), of.w * LANES, of.h * of.w * LANES}, inputs = own.inputs(k);
        const Convolution back{own.around(), own.rest, packed, nullptr, of.O, of.I, of.K, of.h, of.w, false, to};
        back.all(images[l - 1].layer.relu ? &inputs : nullptr);
      }
      after(of);
    }
  }

 private:
  void from_lanes(float* y, int64_t group, int64_t size) {
    for (int64_t b = group * LANES; b < std::min(B, (group + 1) * LANES); b++)
      for (int64_t v = 0; v < size; v++) y[b * size + v] = last.data()[v * LANES + b % LANES];
  }

  // Writes the gradient in the outputs of a convolution from that in what leaves its layer.
  void spread_gradient(Images& own, int64_t k) {
    const Layer& of = own.layer;
    const int64_t oh = of.oh(), ow = of.ow();
    if (of.pool) return unpool(own.gradient(k), own.places(k), own.outputs(), of.O, oh / 2, ow / 2);
    for (int64_t o = 0; o < of.O; o++)
      for (int64_t r = 0; r < oh; r++)
        std::memcpy(own.outputs().entry(o, r, 0), own.gradient(k) + (o * oh + r) * ow * LANES, sizeof(float) * ow * LANES);
  }
};

// --- loss ---------------------------------------------------------------------------------------------------------

// The cross-entropy of logits z (B, n), summed with the weight share[b] of each example, or 1 / B if share is null. The
// logits are replaced by the gradient in them.
float entropy(float* z, const int64_t* label, const float* share, int64_t B, int64_t n) {
  float total = 0;
  for (int64_t b = 0; b < B; b++, z += n) {
    const float part = share ? share[b] : 1.0f / B, top = *std::max_element(z, z + n);
    const float mine = z[label[b]];
    float all = 0;
    for (int64_t i = 0; i < n; i++) all += z[i] = std::exp(z[i] - top);
    for (int64_t i = 0; i < n; i++) z[i] *= part / all;
    z[label[b]] -= part;
    total += part * (std::log(all) + top - mine);
  }
  return total;
}

// Sets the gradient g to 0 where the output y of ReLU is 0.
void masked(const float* y, float* g, int64_t size) {
  for (int64_t v = 0; v < size; v += LANES) {
    const Lanes d = load(g + v, size - v);
    store(g + v, load(y + v, size - v) <= 0 ? Lanes{} : d, size - v);
  }
}

// Memory for the outputs y of all layers, the gradients g in them, and the places of the maxima of pooling; for
// convolutions with examples in lanes only for the outputs of the last.
struct Room {
  const std::vector<Layer> layers;
  std::vector<std::vector<float>> y, g;
  std::vector<std::vector<int32_t>> place;
  Batched batched;
  Room(const Layer* given, int64_t n, int64_t B)
      : layers(given, given + n), y(n), g(n), place(n), batched(layers.data(), layers_in_lanes(given, n, B), B) {
    for (int64_t l = std::max<int64_t>(batched.images.size() - 1, 0); l < n; l++) {
      y[l].resize(B * layers[l].out() + LANES);
      g[l].resize(B * layers[l].out() + LANES);
      if (layers[l].pool) place[l].resize(B * layers[l].out() + LANES);
    }
  }
};

// The inputs of a layer of one client. x: those of the network.
inline Examples inputs_of(const Layer* layers, const Room& room, const Examples& x, int64_t l) {
  return l ? Examples{room.y[l - 1].data(), layers[l].in()} : x;
}

// Writes the outputs of all layers of one client at the parameters p, and returns those of the last, (B, O). It is
// inlined, as local steps took 1.1 times as long on LeNet without it.
inline __attribute__((always_inline)) float* outputs(const Layer* layers, int64_t n, Room& room, const float* p,
                                                     const Examples& x, int64_t B) {
  const int64_t in_lanes = room.batched.images.size();
  if (in_lanes) room.batched.forward(p, x, room.y[in_lanes - 1].data());
  for (int64_t l = in_lanes; l < n; l++) {
    const Examples from = inputs_of(layers, room, x, l);
    if (layers[l].kind == LINEAR) {
      linear(layers[l], p, from.x, room.y[l].data(), B);
    } else {
#define CALL(k) convolve<k>(layers[l], p, from, room.y[l].data(), room.place[l].data(), B)
      BY_SIDE(layers[l].K, CALL)
#undef CALL
    }
  }
  return room.y[n - 1].data();
}

// Returns the loss of one client at the parameters p, and writes its gradient to gp. Calls after(layer) as soon as the
// gradient of a layer is complete and its parameters will not be read again, so that they may be updated there.
template <class After>
float client(const Layer* layers, int64_t n, Room& room, const float* p, const Examples& x, const int64_t* label,
             const float* share, float* gp, int64_t B, After after) {
  const int64_t in_lanes = room.batched.images.size();
  float* logits = outputs(layers, n, room, p, x, B);
  const float loss = entropy(logits, label, share, B, layers[n - 1].O);
  for (int64_t l = n - 1; l >= in_lanes; l--) {
    const Examples from = inputs_of(layers, room, x, l);
    const float* g = l == n - 1 ? logits : room.g[l].data();
    float* gx = l ? room.g[l - 1].data() : nullptr;
    if (layers[l].kind == LINEAR) {
      linear_back(layers[l], p, from.x, g, gp, gx, B);
    } else {
#define CALL(k) convolve_back<k>(layers[l], p, from, g, room.place[l].data(), gp, gx, B)
      BY_SIDE(layers[l].K, CALL)
#undef CALL
    }
    if (l && layers[l - 1].relu) masked(from.x, gx, B * layers[l].in());
    after(layers[l]);
  }
  if (in_lanes) room.batched.backward(p, room.g[in_lanes - 1].data(), gp, after);
  return loss;
}

// y <- y - lr (g + shift + lam (y - centre)), total <- total + g. shift, centre and total may be null.
void walk(float* y, const float* g, const float* shift, const float* centre, float* total, float lr, float lam,
          int64_t n) {
  if (centre)
    for (int64_t i = 0; i < n; i++) y[i] -= lr * (g[i] + (shift ? shift[i] : 0.0f) + lam * (y[i] - centre[i]));
  else if (shift)
    for (int64_t i = 0; i < n; i++) y[i] -= lr * (g[i] + shift[i]);
  else
    for (int64_t i = 0; i < n; i++) y[i] -= lr * g[i];
  if (total)
    for (int64_t i = 0; i < n; i++) total[i] += g[i];
}

// Whether all numbers are 0 to n - 1.
bool all_below(const int64_t* numbers, int64_t count, int64_t n) {
  return std::all_of(numbers, numbers + count, [n](int64_t each) { return each >= 0 && each < n; });
}

// This thread's memory for batches of B examples. It is kept for the last few kinds of batches: the batches of an epoch
// have one size but for the last one.
Room& room_of(const int64_t* layers, int64_t n, int64_t B) {
  static thread_local std::map<std::vector<int64_t>, std::unique_ptr<Room>> rooms;
  std::vector<int64_t> key(layers, layers + n * (sizeof(Layer) / sizeof(int64_t)));
  key.push_back(B);
  const auto found = rooms.find(key);
  if (found != rooms.end()) return *found->second;
  if (rooms.size() >= 4) rooms.clear();
  return *(rooms[key] = std::make_unique<Room>(reinterpret_cast<const Layer*>(layers), n, B));
}

}  // namespace

extern "C" {

// Writes the loss and the gradient gp of each of C clients. p, gp: (C, P); x: (C, B, ...); label, share: (C, B), share
// may be null; loss: (C,). Returns a Status.
int32_t chain_gradient(const float* p, const float* x, const int64_t* label, const float* share, float* gp, float* loss,
                       const int64_t* layers, int64_t n, int64_t C, int64_t B, int64_t P) {
  const Layer* all = reinterpret_cast<const Layer*>(layers);
  if (!all_below(label, C * B, all[n - 1].O)) return NO_CLASS;
  return computed([&] {
    Room& room = room_of(layers, n, B);
    for (int64_t c = 0; c < C; c++)
      loss[c] = client(all, n, room, p + c * P, Examples{x + c * B * all[0].in(), all[0].in()}, label + c * B,
                       share ? share + c * B : nullptr, gp + c * P, B, [](const Layer&) {});
    return DONE;
  });
}

// Writes the outputs of the last layer, (C, B, O), of C clients with the parameters p (C, P). x: (C, B, ...). Returns a
// Status.
int32_t chain_outputs(const float* p, const float* x, float* y, const int64_t* layers, int64_t n, int64_t C, int64_t B,
                      int64_t P) {
  const Layer* all = reinterpret_cast<const Layer*>(layers);
  const int64_t size = B * all[n - 1].O;
  return computed([&] {
    Room& room = room_of(layers, n, B);
    for (int64_t c = 0; c < C; c++) {
      const Examples own{x + c * B * all[0].in(), all[0].in()};
      std::copy_n(outputs(all, n, room, p + c * P, own, B), size, y + c * size);  // without examples, y may be null
    }
    return DONE;
  });
}

// Makes K local steps of one client: y <- y - lr (g + shift + lam (y - centre)), total <- total + g. y, shift, centre,
// total: (P,), the last three may be null; x: (K, B, ...); label, share: (K, B), share may be null; loss: (K,). Returns a
// Status.
int32_t chain_descend(float* y, const float* shift, const float* centre, float* total, const float* x,
                      const int64_t* label, const float* share, float* loss, const int64_t* layers, int64_t n,
                      int64_t K, int64_t B, int64_t P, float lr, float lam) {
  const Layer* all = reinterpret_cast<const Layer*>(layers);
  if (!all_below(label, K * B, all[n - 1].O)) return NO_CLASS;
  return computed([&] {
    Room& room = room_of(layers, n, B);
    static thread_local std::vector<float> gradient;
    gradient.resize(P);
    float* g = gradient.data();
    const auto part = [&](int64_t at, int64_t size) {
      walk(y + at, g + at, shift ? shift + at : nullptr, centre ? centre + at : nullptr, total ? total + at : nullptr,
           lr, lam, size);
    };
    for (int64_t k = 0; k < K; k++)
      loss[k] = client(all, n, room, y, Examples{x + k * B * all[0].in(), all[0].in()}, label + k * B,
                       share ? share + k * B : nullptr, g, B, [&](const Layer& l) {
                         part(l.weight, l.O * l.I * (l.kind == LINEAR ? 1 : l.K * l.K));
                         if (l.bias >= 0) part(l.bias, l.O);
                       });
    return DONE;
  });
}
}
