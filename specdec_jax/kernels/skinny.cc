// x [M, E] times a matrix [E, F], float32, above all for the few rows M of a decoding step or of a
// verification, which should take as long as reading the matrix takes.
//
// The matrix comes in panels of kPanel columns, w [F / kPanel, E, kPanel], so that it is read in
// the order in which it lies; general kernels rearrange it at each call, which costs more than a
// product of few rows. A tile of the result stays in registers. Each of its elements is one chain
// of multiply-adds over E, in order, whatever M is: a row does not depend on its neighbours.
//
// w may be bfloat16, which takes half the time to read, and is widened on the way: the result is
// that of a float32 copy, bit for bit. Or it is bfloat16 in pairs along E, and x is rounded to it,
// where the processor has an instruction for them: sums are float32, of two products, in order.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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
constexpr int64_t kMinBytes = 1 << 17;  // of w, for a thread of its own
constexpr int kAhead = 32;  // steps of E from a product to what is fetched meanwhile
constexpr int64_t kRowsAtOnce = 8 * kMaxRows;  // of x, so that a cache holds them

// Panels of a tile: with M sums for each, a vector of w for each, and one of x, all in registers.
constexpr int NumPanels(int M) {
  return std::clamp((kRegisters - 2) / ((M + 1) * kVectors), 1, 8);
}

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Bfloat16;  // the upper half of a float
typedef Bfloat16 Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

#if defined(__AVX512BF16__)
struct Pair {  // of bfloat16, one after the other along E
  uint32_t both;
};
inline __m512bh Load(const Pair* w) { return (__m512bh)_mm512_loadu_si512(w); }
inline void Add(Vector& sum, Pair x, __m512bh w) {
  sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x.both), w);
}
// x [rows, depth] rounded; the last of an odd depth goes with a zero.
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
#endif

inline void Add(Vector& sum, float x, Vector w) { sum += x * w; }
inline Vector Load(const Bfloat16* w) {
#if defined(__AVX512F__)  // as below, in two instructions where GCC takes five
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(w), Words) << 16);
#endif
}

template <typename X, typename W>
struct Product {
  const X* x;  // float, or Pair with Pair
  const W* w;
  float* out;
  int64_t rows, depth, panels;
};

// out[row : row + M, panel : panel + N].
template <int M, int N, typename X, typename W>
inline void Tile(const Product<X, W>& p, int64_t row, int64_t panel) {
  const int64_t depth = p.depth, width = p.panels * kPanel;
  const X* x = p.x + row * depth;
  const W* w = p.w + panel * depth * kPanel;
  float* out = p.out + row * width + panel * kPanel;
  // Behind the first rows w is in a cache, and there is time to fetch the next tile's.
  const int64_t ahead = row == 0 ? kAhead : N * depth;
  Vector sum[M][N * kVectors]{};
  for (int64_t e = 0; e < depth; ++e) {
    decltype(Load(w)) of_w[N * kVectors];
    // Panels lie apart, and hardware that fetches ahead stops at the end of each page.
    for (int n = 0; n < N; ++n) __builtin_prefetch(w + (n * depth + e + ahead) * kPanel);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < kVectors; ++v)
        of_w[n * kVectors + v] = Load(w + (n * depth + e) * kPanel + v * kLanes);
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N * kVectors; ++i) Add(sum[m][i], x[m * depth + e], of_w[i]);
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < N * kVectors; ++i) Store(out + m * width + i * kLanes, sum[m][i]);
}

// All rows, M at a time, of panels begin..end. The last rows may be done twice, to the same bits.
template <int M, typename X, typename W>
void Panels(const Product<X, W>& p, int rows, int64_t begin, int64_t end) {
  if constexpr (M > 1) {
    if (rows < M) return Panels<M - 1>(p, rows, begin, end);
  }
  constexpr int N = NumPanels(M);
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
  const int rows = Ratio(p.rows, Ratio(p.rows, kMaxRows));  // of a tile
  // At most four blocks a thread, of whole tiles.
  const int64_t tile = NumPanels(rows);
  const int64_t block = threads == 1 ? p.panels : tile * Ratio(p.panels, tile * 4 * threads);
  Share(pool, threads, Ratio(p.panels, block), [=](int64_t b) {
    Panels<kMaxRows>(p, rows, b * block, std::min((b + 1) * block, p.panels));
  });
}

// All rows of x [rows, depth], some at a time.
template <typename X, typename W>
ffi::Error MultiplyAll(ffi::ThreadPool& pool, const X* x, const W* w, float* out, int64_t rows,
                       int64_t depth, int64_t panels) {
  for (int64_t row = 0; row < rows; row += kRowsAtOnce)
    Multiply<X, W>(pool, {x + row * depth, w, out + row * panels * kPanel,
                          std::min(kRowsAtOnce, rows - row), depth, panels});
  return ffi::Error::Success();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions(), panels = w.dimensions();
  const bool pairs = panels.size() == 3 && panels[2] == 2 * kPanel;
  const int64_t each = pairs ? 2 : 1;
  if (in.size() != 2 || panels.size() != 3 || panels[1] != Ratio(in[1], each) ||
      panels[2] != kPanel * each)
    return ffi::Error::InvalidArgument("x [M, E] goes with panels [N, E, 16], or of pairs, "
                                       "[N, ceil(E / 2), 32]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto multiply = [&](const auto* rows, const auto* weights) {
    return MultiplyAll(pool, rows, weights, out->typed_data(), in[0], panels[1], panels[0]);
  };
  const bool halved = w.element_type() == ffi::BF16;
#if defined(__AVX512BF16__)
  if (pairs && halved)
    return multiply(InPairs(x.typed_data(), in[0], in[1]).data(),
                    static_cast<const Pair*>(w.untyped_data()));
#endif
  if (!pairs && halved)
    return multiply(x.typed_data(), static_cast<const Bfloat16*>(w.untyped_data()));
  if (!pairs && w.element_type() == ffi::F32)
    return multiply(x.typed_data(), static_cast<const float*>(w.untyped_data()));
  return ffi::Error::InvalidArgument("panels are float32 or bfloat16; in pairs, bfloat16, where the "
                                     "processor has products of that");
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
