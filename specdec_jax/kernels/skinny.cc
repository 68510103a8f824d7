// x [M, E] times a matrix [E, F], float32, above all for the few rows M of a decoding step or of a
// verification, which should take as long as reading the matrix takes.
//
// The matrix comes in panels of kPanel columns, w [F / kPanel, E, kPanel], so that it is read in
// the order in which it lies; general kernels rearrange it at each call, which costs more than a
// product of few rows. A tile of the result stays in registers. Each of its elements is one chain
// of multiply-adds over E, in order, whatever M is: a row does not depend on its neighbours.
//
// w may be bfloat16, which takes half the time to read, and is widened on the way: the result is
// that of a float32 copy, bit for bit. Or x and w are both bfloat16 and lie in pairs along E, where
// the processor has an instruction for them: sums are float32, of two products at a time, in order.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kPanel = 16;
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16, kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32, kMaxRows = 6;
#else
constexpr int kLanes = 4, kRegisters = 16, kMaxRows = 2;
#endif
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kMinBytes = 1 << 17;  // of w, for a thread of its own
constexpr int kAhead = 32;  // steps of E from a product to what is fetched meanwhile
constexpr int64_t kRowsAtOnce = 8 * kMaxRows;  // of x, so that a cache holds them

constexpr int64_t Ratio(int64_t a, int64_t b) { return (a + b - 1) / b; }  // rounded up

// Panels of a tile: with M sums for each, a vector of w for each, and one of x, all in registers.
constexpr int NumPanels(int M) {
  return std::clamp((kRegisters - 2) / ((M + 1) * kVectors), 1, 8);
}

typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
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
#endif

inline void Add(Vector& sum, float x, Vector w) { sum += x * w; }
inline Vector Load(const float* w) { return *reinterpret_cast<const Vector*>(w); }
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
    for (int i = 0; i < N * kVectors; ++i)
      *reinterpret_cast<Vector*>(out + m * width + i * kLanes) = sum[m][i];
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

// Blocks of panels that threads take until none is left.
template <typename X, typename W>
struct Work {
  Product<X, W> product;
  int64_t block, num_blocks;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    const int rows = Ratio(product.rows, Ratio(product.rows, kMaxRows));  // of a tile
    for (int64_t b; (b = next.fetch_add(1)) < num_blocks; done.fetch_add(1))
      Panels<kMaxRows>(product, rows, b * block, std::min((b + 1) * block, product.panels));
  }
};

template <typename X, typename W>
void Multiply(ffi::ThreadPool& pool, const Product<X, W>& p) {
  const int64_t bytes = p.depth * p.panels * kPanel * sizeof(W);
  const int64_t most = std::max<int64_t>(1, pool.num_threads());
  const int64_t threads = std::clamp<int64_t>(bytes / kMinBytes, 1, most);
  auto work = std::make_shared<Work<X, W>>();
  work->product = p;
  // At most four blocks a thread, of whole tiles.
  const int64_t tile = NumPanels(Ratio(p.rows, Ratio(p.rows, kMaxRows)));
  work->block = threads == 1 ? p.panels : tile * Ratio(p.panels, tile * 4 * threads);
  work->num_blocks = Ratio(p.panels, work->block);
  // A helper that comes late finds nothing left to take, and only then may this call have returned.
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load() < work->num_blocks) std::this_thread::yield();
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

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions(), panels = w.dimensions();
  const bool pairs = x.element_type() == ffi::BF16;
  const int64_t each = pairs ? 2 : 1;
  if (in.size() != 2 || panels.size() != 3 || panels[1] * each != in[1] ||
      panels[2] != kPanel * each)
    return ffi::Error::InvalidArgument("x [M, E] goes with panels [N, E, 16]; bfloat16 x with "
                                       "panels of pairs, [N, E / 2, 32]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto multiply = [&](const auto* rows, const auto* weights) {
    return MultiplyAll(pool, rows, weights, out->typed_data(), in[0], panels[1], panels[0]);
  };
#if defined(__AVX512BF16__)
  if (pairs && w.element_type() == ffi::BF16)
    return multiply(static_cast<const Pair*>(x.untyped_data()),
                    static_cast<const Pair*>(w.untyped_data()));
#endif
  if (x.element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("x is float32, or bfloat16 with panels of pairs in it where "
                                       "the processor has products of bfloat16");
  const float* rows = static_cast<const float*>(x.untyped_data());
  if (w.element_type() == ffi::BF16)
    return multiply(rows, static_cast<const Bfloat16*>(w.untyped_data()));
  if (w.element_type() == ffi::F32)
    return multiply(rows, static_cast<const float*>(w.untyped_data()));
  return ffi::Error::InvalidArgument("panels are float32 or bfloat16");
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
