// Vectors of float32 for the instruction set that the compiler is told: sixteen lanes with AVX-512, eight with AVX2, and
// otherwise sixteen, which the compiler splits. Below are the sizes of the tiles, the sums that a loop keeps in
// registers: AVX-512 has 32 vector registers, AVX2 has 16. A tile that needs more is stored and loaded in each step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
#define EIGHT_LANES
constexpr int64_t LANES = 8;
constexpr char INSTRUCTIONS[] = "AVX2";
#else
constexpr int64_t LANES = 16;
#ifdef __AVX512BF16__
constexpr char INSTRUCTIONS[] = "AVX-512 with bfloat16";
#elif defined(__AVX512F__)
constexpr char INSTRUCTIONS[] = "AVX-512";
#else
constexpr char INSTRUCTIONS[] = "any";
#endif
#endif
// While it lives, numbers below the smallest normal one (1.2e-38) count as 0, on processors that have a switch for it. An
// operation on such a number takes a hundred times as long as on another one. They are frequent: the momentum of a dead
// unit is halved every seven steps, and products of it pass through them for thousands of steps.
class NoSubnormals {
#ifdef __SSE2__
 public:
  NoSubnormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(before); }

 private:
  const unsigned before;
#endif
};

// What the functions that Python calls return.
enum Status { DONE = 0, NO_CLASS = 1, NO_MEMORY = 2 };

// Returns what f returns, or NO_MEMORY if f raises an exception. An exception that leaves a function called from Python
// would end the process.
template <class F>
int32_t computed(F f) {
  const NoSubnormals none{};
  try {
    return f();
  } catch (const std::exception&) {
    return NO_MEMORY;
  }
}

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));

// The rows of a tile of products, for sums along rows (`dots`) and for sums of rows (`spread`), and the vectors of a
// row in the second kind.
#ifdef EIGHT_LANES
constexpr int DOT_ROWS = 2, SPREAD_ROWS = 5, SPREAD_VECTORS = 2;
#else
constexpr int DOT_ROWS = 5, SPREAD_ROWS = 5, SPREAD_VECTORS = 4;
#endif

// The number of output channels of the next tile of a convolution, if `left` channels are left.
inline int64_t width(int64_t left) {
#ifndef EIGHT_LANES
  if (left >= 8) return 8;
#endif
  return left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// The number of output channels of a tile of the gradient in weights of K x K.
constexpr int weighed(int K) {
#ifdef EIGHT_LANES
  return K >= 7 ? 1 : K >= 5 ? 2 : K >= 3 ? 3 : K == 2 ? 4 : 6;
#else
  return K >= 5 ? 4 : 6;
#endif
}

inline Lanes load(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline void store(float* p, Lanes v) { *reinterpret_cast<Lanes*>(p) = v; }

// Loads and stores of only the first n lanes; other lanes are loaded as 0. n may be negative or larger than LANES.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
inline Mask first(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }
inline Lanes load_of(const float* p, Mask m) { return (Lanes)_mm512_maskz_loadu_ps(m, p); }
inline void store_of(float* p, Lanes v, Mask m) { _mm512_mask_storeu_ps(p, m, (__m512)v); }
// Keeps v in a register. Without this, compilers load a value again for each of its uses.
inline Lanes held(Lanes v) {
  __asm__("" : "+v"(v));
  return v;
}
// A vector from memory, and a number from memory in all lanes, each by one instruction that loads. Compilers otherwise
// keep vectors that a later step will load again, for which the registers do not suffice, and repeat a number by an
// instruction that takes the place of a product.
inline Lanes fetched(const float* p) {
  Lanes v;
  __asm__("vmovups %1, %0" : "=v"(v) : "m"(*reinterpret_cast<const Lanes*>(p)));
  return v;
}
inline Lanes repeated(const float* p) {
  Lanes v;
  __asm__("vbroadcastss %1, %0" : "=v"(v) : "m"(*p));
  return v;
}
inline Lanes load(const float* p, int64_t n) { return load_of(p, first(n)); }
inline void store(float* p, Lanes v, int64_t n) { store_of(p, v, first(n)); }
#elif defined(EIGHT_LANES)
typedef __m256i Mask;
inline Mask first(int64_t n) {
  const int lanes = std::min(std::max<int64_t>(n, 0), LANES);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes load_of(const float* p, Mask m) { return (Lanes)_mm256_maskload_ps(p, m); }
inline Lanes load(const float* p, int64_t n) { return n >= LANES ? load(p) : load_of(p, first(n)); }
// Stores in parts of four, two and one lanes: stores with a mask are slow on many processors with AVX2.
inline void store(float* p, Lanes v, int64_t n) {
  if (n >= LANES) return store(p, v);
  if (n <= 0) return;
  __m128 part = _mm256_castps256_ps128((__m256)v);
  if (n & 4) {
    _mm_storeu_ps(p, part);
    p += 4;
    part = _mm256_extractf128_ps((__m256)v, 1);
  }
  if (n & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), part);
    p += 2;
    part = _mm_movehl_ps(part, part);
  }
  if (n & 1) _mm_store_ss(p, part);
}
inline void store_of(float* p, Lanes v, Mask m) { store(p, v, __builtin_popcount(_mm256_movemask_ps((__m256)m))); }
inline Lanes held(Lanes v) {
  __asm__("" : "+x"(v));
  return v;
}
inline Lanes fetched(const float* p) {
  Lanes v;
  __asm__("vmovups %1, %0" : "=x"(v) : "m"(*reinterpret_cast<const Lanes*>(p)));
  return v;
}
inline Lanes repeated(const float* p) {
  Lanes v;
  __asm__("vbroadcastss %1, %0" : "=x"(v) : "m"(*p));
  return v;
}
#else
typedef int64_t Mask;
inline Mask first(int64_t n) { return sizeof(float) * std::min(std::max<int64_t>(n, 0), LANES); }
inline Lanes load_of(const float* p, Mask m) {
  Lanes v = {};
  std::memcpy(&v, p, m);
  return v;
}
inline void store_of(float* p, Lanes v, Mask m) { std::memcpy(p, &v, m); }
inline Lanes held(Lanes v) { return v; }
inline Lanes fetched(const float* p) { return load(p); }
inline Lanes repeated(const float* p) { return Lanes{} + *p; }
inline Lanes load(const float* p, int64_t n) { return load_of(p, first(n)); }
inline void store(float* p, Lanes v, int64_t n) { store_of(p, v, first(n)); }
#endif

// A vector whose lanes are chosen by their numbers among the lanes of a and then of b. clang has only the first of
// these builtins, and g++ before 12 only the second.
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// The lanes with even numbers of a and then of b, those with odd numbers, and the first and second half of the lanes of
// a and b in turn.
#ifdef EIGHT_LANES
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define LOW(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif

// Before loops over arrays that must be in registers: the compiler has to unroll these loops.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

// The sum of all lanes, and the sums of the lanes of each of four vectors.
#ifdef EIGHT_LANES
inline Four sums(Lanes a, Lanes b, Lanes c, Lanes d) {
  const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  const __m256 all = _mm256_hadd_ps(ab, cd);
  return (Four)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

inline float sum(Lanes v) { return sums(v, v, v, v)[0]; }
#else
inline float sum(Lanes v) {
  v += PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
}

inline Four sums(Lanes a, Lanes b, Lanes c, Lanes d) {
#ifdef __AVX512F__
  const __m512 p = (__m512)a, q = (__m512)b, r = (__m512)c, s = (__m512)d;
  const __m512 pq = _mm512_add_ps(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q));
  const __m512 rs = _mm512_add_ps(_mm512_unpacklo_ps(r, s), _mm512_unpackhi_ps(r, s));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(pq, rs, 0x44), _mm512_shuffle_ps(pq, rs, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  return Four{sum(a), sum(b), sum(c), sum(d)};
#endif
}
#endif

// Puts `value`, which has the number `which`, in the lanes of `top` in which it is larger or not a number, and its number
// in those of `at`.
inline void larger(Lanes& top, Places& at, Lanes value, int32_t which) {
  const Places more = (value > top) | (value != value);
  top = more ? value : top;
  at = more ? Places{} + which : at;
}

}  // namespace
