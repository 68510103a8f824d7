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
// quarter of the time to read. It is converted to float32, so that the result is bit-identical to that
// of a float32 copy, multiplied by the scales. Or w is int8 in groups of four values along E, if the
// processor has an instruction for it: each row of x is then rounded to integers of 16 bits with a
// scale, and sums are integers, so that only x and the final products are rounded.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define SPECDEC_HAS_BFLOAT16  // and the instruction for groups of four int8 values
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
struct Quad {  // four int8 values, consecutive along E
  int8_t four[4];
};

// Panels of a tile, for which registers must hold M sums and the vectors of w per panel, and one of x;
// for Quad each sum has two parts, and w two constants.
template <typename W>
constexpr int NumPanels(int M) {
  constexpr bool quad = std::is_same_v<W, Quad>;
  return std::clamp((kRegisters - (quad ? 4 : 2)) / (((quad ? 2 : 1) * M + 1) * kVectors), 1, 8);
}

template <typename W>
constexpr bool kScaled = std::is_same_v<W, int8_t> || std::is_same_v<W, Quad>;

#if defined(SPECDEC_HAS_BFLOAT16)
struct Pair {  // two bfloat16 values, consecutive along E
  uint32_t both;
};
inline __m512bh Load(const Pair* w) { return (__m512bh)_mm512_loadu_si512(w); }
inline void Add(Vector& sum, Pair x, __m512bh w) {
  sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x.both), w);
}
// x [rows, depth] rounded to pairs of bfloat16; if depth is odd, with a zero at the end.
std::vector<Pair> InPairs(const float* x, int64_t rows, int64_t depth) {
  const int64_t width = 2 * Ratio(depth, 2);
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

// Four values of x, rounded to integers 256 high + low.
struct Quads {
  int32_t high, low;  // four int8 each
};
typedef int32_t Ints __attribute__((vector_size(64)));
typedef Ints Sums[2];  // of a vector of columns, for the high and the low parts of x
struct Unsigned {  // w + 128, as the instruction needs unsigned values for one of its factors
  __m512i bytes;
};
inline Unsigned Load(const Quad* w) {
  return {_mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128))};
}
inline void Add(Sums& sum, Quads x, Unsigned w) {
  sum[0] = (Ints)_mm512_dpbusd_epi32((__m512i)sum[0], w.bytes, _mm512_set1_epi32(x.high));
  sum[1] = (Ints)_mm512_dpbusd_epi32((__m512i)sum[1], w.bytes, _mm512_set1_epi32(x.low));
}

// A row of x is about `scale` times integers; `high` and `low` are 128 times the sums of their parts.
struct RowTerms {
  int32_t high, low;
  float scale;
};
struct InQuads {
  std::vector<Quads> x;
  std::vector<RowTerms> terms;
};
constexpr float kLargest = 127 * 256;
constexpr int64_t kMaxDepth = 1 << 16;  // larger sums might overflow

// x [rows, depth] rounded to integers, with zeros up to a multiple of 4. The largest magnitude of a row
// becomes kLargest. A row with a value that is not finite has such a scale.
InQuads Round(const float* x, int64_t rows, int64_t depth) {
  const int64_t steps = Ratio(depth, 4);
  InQuads rounded{std::vector<Quads>(rows * steps), std::vector<RowTerms>(rows)};
  const auto mask = [](int64_t left) { return __mmask16(left < 16 ? (1u << left) - 1 : 0xffff); };
  for (int64_t row = 0; row < rows; ++row, x += depth) {
    __m512i bits = _mm512_setzero_si512();  // of magnitudes, whose order is that of integers
    for (int64_t e = 0; e < depth; e += 16) {
      const __m512 values = _mm512_maskz_loadu_ps(mask(depth - e), x + e);
      bits = _mm512_max_epi32(bits, (__m512i)_mm512_abs_ps(values));
    }
    const float largest = _mm512_cvtss_f32((__m512)_mm512_set1_epi32(_mm512_reduce_max_epi32(bits)));
    const __m512 inverse = _mm512_set1_ps(largest < 1e-30f ? 0 : kLargest / largest);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    for (int64_t e = 0; e < depth; e += 16) {
      const __m512 values = _mm512_maskz_loadu_ps(mask(depth - e), x + e);
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
      high_sum = _mm512_add_epi32(high_sum, high);
      low_sum = _mm512_add_epi32(low_sum, low);
      alignas(16) int32_t high_bytes[4], low_bytes[4];
      _mm_store_si128((__m128i*)high_bytes, _mm512_cvtepi32_epi8(high));
      _mm_store_si128((__m128i*)low_bytes, _mm512_cvtepi32_epi8(low));
      for (int64_t i = 0; i < std::min<int64_t>(4, steps - e / 4); ++i)
        rounded.x[row * steps + e / 4 + i] = {high_bytes[i], low_bytes[i]};
    }
    rounded.terms[row] = {128 * _mm512_reduce_add_epi32(high_sum),
                          128 * _mm512_reduce_add_epi32(low_sum), largest / kLargest};
  }
  return rounded;
}

inline Vector Result(const Sums& sum, const RowTerms& row) {
  const auto floats = [](Ints ints) { return (Vector)_mm512_cvtepi32_ps((__m512i)ints); };
  return (floats(sum[0] - row.high) * 256 + floats(sum[1] - row.low)) * row.scale;
}
#else
struct RowTerms {};
#endif

inline Vector Result(const Vector& sum, const RowTerms&) { return sum; }
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

#if defined(SPECDEC_HAS_BFLOAT16)
template <typename W>
using SumOf = std::conditional_t<std::is_same_v<W, Quad>, Sums, Vector>;
#else
template <typename W>
using SumOf = Vector;
#endif

template <typename X, typename W>
struct Product {
  const X* x;  // float; Pair if W is Pair; Quads if W is Quad
  const W* w;
  const float* scale;  // of each column if kScaled<W>
  const RowTerms* terms;  // of each row if W is Quad
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
  SumOf<W> sum[M][N * kVectors]{};
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
      Vector result = Result(sum[m][i], p.terms ? p.terms[row + m] : RowTerms{});
      if constexpr (kScaled<W>) result *= Load(p.scale + panel * kPanel + i * kLanes);
      Store(out + m * width + i * kLanes, result);
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
ffi::Error MultiplyAll(ffi::ThreadPool& pool, Product<X, W> all) {
  for (int64_t row = 0; row < all.rows; row += kRowsAtOnce) {
    Product<X, W> p = all;
    p.x += row * p.depth, p.out += row * p.panels * kPanel, p.terms += p.terms ? row : 0;
    p.rows = std::min(kRowsAtOnce, all.rows - row);
    Multiply(pool, p);
  }
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
  const auto multiply = [&](const auto* x_values, const auto* weights,
                            const RowTerms* terms = nullptr) {
    using X = std::decay_t<decltype(*x_values)>;
    using W = std::decay_t<decltype(*weights)>;
    return MultiplyAll<X, W>(pool, {x_values, weights, scale, terms, out->typed_data(), in[0],
                                    panels[1], panels[0]});
  };
  const bool is_bfloat16 = w.element_type() == ffi::BF16;
  const bool is_int8 = w.element_type() == ffi::S8;
  if (is_int8 != (scale != nullptr))
    return ffi::Error::InvalidArgument("int8 panels, and no others, need a scale");
#if defined(SPECDEC_HAS_BFLOAT16)
  if (is_bfloat16 && rows_per_step == 2)
    return multiply(InPairs(x.typed_data(), in[0], in[1]).data(),
                    static_cast<const Pair*>(w.untyped_data()));
  if (is_int8 && rows_per_step == 4) {
    if (in[1] > kMaxDepth) return ffi::Error::InvalidArgument("int8 needs E of at most 65,536");
    const InQuads rounded = Round(x.typed_data(), in[0], in[1]);
    return multiply(rounded.x.data(), static_cast<const Quad*>(w.untyped_data()),
                    rounded.terms.data());
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
#if defined(SPECDEC_HAS_BFLOAT16)
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
