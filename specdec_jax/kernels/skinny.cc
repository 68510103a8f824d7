// Matmul of x [M, E] and a matrix [E, F] in float32, for the few rows M of a decoding step or of a
// verification, which should take no longer than reading the matrix.
//
// The matrix is stored in panels of kPanel columns, w [F / kPanel, E, kPanel], so that it is read
// in memory order. General kernels rearrange it in each call, which costs more than a matmul of few
// rows. A tile of the result stays in registers. Each of its elements is accumulated over E in
// order for any M, so a row does not depend on the other rows.
//
// w may be bfloat16, which takes half the time to read and is converted to float32 in registers:
// the result is bit-identical to that of a float32 copy. Or w is bfloat16 in pairs along E, if the
// processor has an instruction for it: x is then rounded to bfloat16, and sums of two products are
// accumulated in float32, in order.
//
// w may also be int8 with a scale per column, by which the sums are multiplied at the end. It takes a
// quarter of the time to read, and is converted to float32 or, in pairs, to bfloat16; both conversions
// are exact. So the result is bit-identical to that of a converted copy, multiplied by the scales.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

using ::Load;

constexpr int kPanel = 16;
#if defined(__AVX512F__)
constexpr int kRegisters = 32, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kRegisters = 16, kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int kRegisters = 32, kMaxRows = 6;
#else
constexpr int kRegisters = 16, kMaxRows = 2;
#endif
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kMinBytes = 1 << 17;  // bytes of w per thread
// Distance along E from the multiplied to the prefetched values: at least 1 KiB of a panel.
template <typename W>
constexpr int kAhead = std::max<int>(32, 1024 / (kPanel * sizeof(W)));
constexpr int64_t kRowsAtOnce = 8 * kMaxRows;  // rows of x at a time, so that they stay in a cache

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Bfloat16;  // the upper half of a float
typedef Bfloat16 Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
// Four int8 values, consecutive along E. In the 64 bytes of a step, each group of four columns has its
// first two values of each column, then the other two.
struct ByteQuad {
  int8_t four[4];
};

// Panels of a tile, for which registers must hold M sums and the vectors of w per panel, and one of x;
// for ByteQuad also the tables of its conversion.
template <typename W>
constexpr int NumPanels(int M) {
  constexpr bool quad = std::is_same_v<W, ByteQuad>;
  return std::clamp((kRegisters - (quad ? 7 : 2)) / ((M + (quad ? 2 : 1)) * kVectors), 1, 8);
}

template <typename W>
constexpr bool kScaled = std::is_same_v<W, int8_t> || std::is_same_v<W, ByteQuad>;

#if defined(__AVX512BF16__)
struct Pair {  // two bfloat16 values, consecutive along E
  uint32_t both;
};
inline __m512bh Load(const Pair* w) { return (__m512bh)_mm512_loadu_si512(w); }
inline void Add(Vector& sum, Pair x, __m512bh w) {
  sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x.both), w);
}
struct PairOfPairs {
  Pair first, second;
};
struct TwoSteps {  // of 16 columns
  __m512bh first, second;
};
inline void Add(Vector& sum, PairOfPairs x, TwoSteps w) {
  Add(sum, x.first, w.first);
  Add(sum, x.second, w.second);
}
#if defined(__AVX512VBMI__)
// The two bytes of bfloat16 for each value from 0 to 127.
struct Bfloat16Bytes {
  alignas(64) uint8_t low[128]{}, high[128]{};
  constexpr Bfloat16Bytes() {
    for (int value = 1, exponent = 0; value < 128; ++value) {
      while (value >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (value << (7 - exponent) & 0x7f);
      low[value] = bits & 0xff, high[value] = bits >> 8;
    }
  }
};
constexpr Bfloat16Bytes kBytes;
inline TwoSteps Load(const ByteQuad* w) {
  const auto lookup = [](const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  const __m512i bytes = _mm512_loadu_si512(w), magnitude = _mm512_abs_epi8(bytes);
  const __m512i low = lookup(kBytes.low, magnitude), high = lookup(kBytes.high, magnitude);
  const __m512i with_sign = _mm512_or_si512(high, _mm512_and_si512(bytes, _mm512_set1_epi8(-128)));
  return {(__m512bh)_mm512_unpacklo_epi8(low, with_sign),
          (__m512bh)_mm512_unpackhi_epi8(low, with_sign)};
}
#else
inline TwoSteps Load(const ByteQuad* w) {
  const auto floats = [](__m256i words) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words));
  };
  const auto halves = [&](__m512i high_bytes) {
    const __m512i words = _mm512_srai_epi16(high_bytes, 8);
    return _mm512_cvtne2ps_pbh(floats(_mm512_extracti64x4_epi64(words, 1)),
                               floats(_mm512_castsi512_si256(words)));
  };
  const __m512i bytes = _mm512_loadu_si512(w), zero = _mm512_setzero_si512();
  return {halves(_mm512_unpacklo_epi8(zero, bytes)), halves(_mm512_unpackhi_epi8(zero, bytes))};
}
#endif
// x [rows, depth] rounded to pairs of bfloat16, with zeros up to a multiple of `multiple` values.
std::vector<Pair> InPairs(const float* x, int64_t rows, int64_t depth, int64_t multiple) {
  const int64_t width = multiple * Ratio(depth, multiple);
  const auto mask = [](int64_t left) { return __mmask16(left < 16 ? (1u << left) - 1 : 0xffff); };
  std::vector<Pair> pairs(rows * width / 2);
  auto* out = reinterpret_cast<Bfloat16*>(pairs.data());
  for (int64_t row = 0; row < rows; ++row, x += depth, out += width)
    for (int64_t e = 0; e < depth; e += 16) {
      const __m512 floats = _mm512_maskz_loadu_ps(mask(depth - e), x + e);
      _mm256_mask_storeu_epi16(out + e, mask(width - e), (__m256i)_mm512_cvtneps_pbh(floats));
    }
  return pairs;
}
#endif

inline void Add(Vector& sum, float x, Vector w) { sum += x * w; }
inline Vector Load(const Bfloat16* w) {
#if defined(__AVX512F__)  // the same as below, in two instructions where GCC emits five
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(w), Words) << 16);
#endif
}

inline Vector Load(const int8_t* w) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(w), Vector);
#endif
}

template <typename X, typename W>
struct Product {
  const X* x;  // float; Pair if W is Pair; PairOfPairs if W is ByteQuad
  const W* w;
  const float* scale;  // of each column if kScaled<W>
  float* out;
  int64_t rows, depth, panels;
};

// Computes rows row..row + M of panels panel..panel + N of the result.
template <int M, int N, typename X, typename W>
inline void Tile(const Product<X, W>& p, int64_t row, int64_t panel) {
  const int64_t depth = p.depth, width = p.panels * kPanel;
  const X* x = p.x + row * depth;
  const W* w = p.w + panel * depth * kPanel;
  float* out = p.out + row * width + panel * kPanel;
  // After the first rows, w is in a cache, and there is time to prefetch that of the next tile.
  const int64_t ahead = row == 0 ? kAhead<W> : N * depth;
  Vector sum[M][N * kVectors]{};
  for (int64_t e = 0; e < depth; ++e) {
    decltype(Load(w)) w_vectors[N * kVectors];
    // The hardware prefetcher stops at the end of each page, and panels are far apart.
    for (int n = 0; n < N; ++n) __builtin_prefetch(w + (n * depth + e + ahead) * kPanel);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < kVectors; ++v)
        w_vectors[n * kVectors + v] = Load(w + (n * depth + e) * kPanel + v * kLanes);
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N * kVectors; ++i) Add(sum[m][i], x[m * depth + e], w_vectors[i]);
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < N * kVectors; ++i) {
      if constexpr (kScaled<W>) sum[m][i] *= Load(p.scale + panel * kPanel + i * kLanes);
      Store(out + m * width + i * kLanes, sum[m][i]);
    }
}

// Computes all rows of panels begin..end, M rows at a time. The last rows may be computed twice,
// with the same result.
template <int M, typename X, typename W>
void Panels(const Product<X, W>& p, int rows, int64_t begin, int64_t end) {
  if constexpr (M > 1) {
    if (rows < M) return Panels<M - 1>(p, rows, begin, end);
  }
  constexpr int N = NumPanels<W>(M);
  int64_t panel = begin;
  for (; panel + N <= end; panel += N)
    for (int64_t row = 0; row < p.rows; row += M)
      Tile<M, N>(p, std::min(row, p.rows - M), panel);
  for (; panel < end; ++panel)
    for (int64_t row = 0; row < p.rows; row += M)
      Tile<M, 1>(p, std::min(row, p.rows - M), panel);
}

template <typename X, typename W>
void Multiply(ffi::ThreadPool& pool, const Product<X, W>& p) {
  const int64_t bytes = p.depth * p.panels * kPanel * sizeof(W);
  const int64_t threads = Threads(pool, bytes, kMinBytes);
  const int rows = Ratio(p.rows, Ratio(p.rows, kMaxRows));  // rows of a tile
  // At most four blocks per thread, each of whole tiles.
  const int64_t tile = NumPanels<W>(rows);
  const int64_t block = threads == 1 ? p.panels : tile * Ratio(p.panels, tile * 4 * threads);
  Share(pool, threads, Ratio(p.panels, block), [=](int64_t b) {
    Panels<kMaxRows>(p, rows, b * block, std::min((b + 1) * block, p.panels));
  });
}

// Computes all rows of x [rows, depth], kRowsAtOnce at a time.
template <typename X, typename W>
ffi::Error MultiplyAll(ffi::ThreadPool& pool, const X* x, const W* w, const float* scale, float* out,
                       int64_t rows, int64_t depth, int64_t panels) {
  for (int64_t row = 0; row < rows; row += kRowsAtOnce)
    Multiply<X, W>(pool, {x + row * depth, w, scale, out + row * panels * kPanel,
                          std::min(kRowsAtOnce, rows - row), depth, panels});
  return ffi::Error::Success();
}

ffi::Error MatmulScaled(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                        const float* scale, ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions(), panels = w.dimensions();
  const int64_t rows_per_step = panels.size() == 3 ? panels[2] / kPanel : 0;
  const bool pairs = rows_per_step > 1;
  if (in.size() != 2 || rows_per_step < 1 || panels[1] != Ratio(in[1], rows_per_step) ||
      panels[2] != kPanel * rows_per_step)
    return ffi::Error::InvalidArgument("x [M, E] needs panels [N, E, 16], or in pairs "
                                       "[N, ceil(E / 2), 32] or, of int8, [N, ceil(E / 4), 64]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto multiply = [&](const auto* rows, const auto* weights) {
    return MultiplyAll(pool, rows, weights, scale, out->typed_data(), in[0], panels[1], panels[0]);
  };
  const bool is_bfloat16 = w.element_type() == ffi::BF16;
  const bool is_int8 = w.element_type() == ffi::S8;
  if (is_int8 != (scale != nullptr))
    return ffi::Error::InvalidArgument("int8 panels, and no others, need a scale");
#if defined(__AVX512BF16__)
  if ((is_bfloat16 && rows_per_step == 2) || (is_int8 && rows_per_step == 4)) {
    const auto rows = InPairs(x.typed_data(), in[0], in[1], rows_per_step);
    if (is_int8)
      return multiply(reinterpret_cast<const PairOfPairs*>(rows.data()),
                      static_cast<const ByteQuad*>(w.untyped_data()));
    return multiply(rows.data(), static_cast<const Pair*>(w.untyped_data()));
  }
#endif
  if (!pairs && is_int8)
    return multiply(x.typed_data(), static_cast<const int8_t*>(w.untyped_data()));
  if (!pairs && is_bfloat16)
    return multiply(x.typed_data(), static_cast<const Bfloat16*>(w.untyped_data()));
  if (!pairs && w.element_type() == ffi::F32)
    return multiply(x.typed_data(), static_cast<const float*>(w.untyped_data()));
  return ffi::Error::InvalidArgument("panels must be float32, bfloat16 or int8; in pairs, bfloat16 "
                                     "or int8, if the processor has an instruction for it");
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> out) {
  return MatmulScaled(pool, x, w, nullptr, out);
}

ffi::Error MatmulInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                      ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> out) {
  const auto panels = w.dimensions();
  if (panels.size() == 3 && scale.element_count() != panels[0] * kPanel)
    return ffi::Error::InvalidArgument("panels [N, ...] need a scale [16 N]");
  return MatmulScaled(pool, x, w, scale.typed_data(), out);
}

}  // namespace

extern "C" bool HasBfloat16() {
#if defined(__AVX512BF16__)
  return true;
#else
  return false;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyMatmulInt8, MatmulInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
