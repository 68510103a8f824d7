// x [M, E] times a matrix [E, F], float32, above all for the few rows M of a decoding step or of a
// verification, which should take as long as reading the matrix takes.
//
// The matrix comes in panels of kPanel columns, w [F / kPanel, E, kPanel], so that it is read in
// the order in which it lies; general kernels rearrange it at each call, which costs more than a
// product of few rows. A tile of the result stays in registers. Each of its elements is one chain
// of multiply-adds over E, in order, whatever M is: a row does not depend on its neighbours.
//
// w may be bfloat16, which takes half the time to read, and is widened on the way: the result is
// that of a float32 copy, bit for bit.

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

inline Vector Load(const float* w) { return *reinterpret_cast<const Vector*>(w); }
inline Vector Load(const Bfloat16* w) {
#if defined(__AVX512F__)  // as below, in two instructions where GCC takes five
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(w), Words) << 16);
#endif
}

template <typename W>
struct Product {
  const float* x;
  const W* w;
  float* out;
  int64_t rows, depth, panels;
};

// out[row : row + M, panel : panel + N].
template <int M, int N, typename W>
inline void Tile(const Product<W>& p, int64_t row, int64_t panel) {
  const int64_t depth = p.depth, width = p.panels * kPanel;
  const float* x = p.x + row * depth;
  const W* w = p.w + panel * depth * kPanel;
  float* out = p.out + row * width + panel * kPanel;
  Vector sum[M][N * kVectors]{};
  for (int64_t e = 0; e < depth; ++e) {
    Vector of_w[N * kVectors];
    // Panels lie apart, and hardware that fetches ahead stops at the end of each page.
    for (int n = 0; n < N; ++n) __builtin_prefetch(w + (n * depth + e + kAhead) * kPanel);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < kVectors; ++v)
        of_w[n * kVectors + v] = Load(w + (n * depth + e) * kPanel + v * kLanes);
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N * kVectors; ++i) sum[m][i] += x[m * depth + e] * of_w[i];
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < N * kVectors; ++i)
      *reinterpret_cast<Vector*>(out + m * width + i * kLanes) = sum[m][i];
}

// All rows, M at a time, of panels begin..end. The last rows may be done twice, to the same bits.
template <int M, typename W>
void Panels(const Product<W>& p, int rows, int64_t begin, int64_t end) {
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
template <typename W>
struct Work {
  Product<W> product;
  int64_t block, num_blocks;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    const int rows = Ratio(product.rows, Ratio(product.rows, kMaxRows));  // of a tile
    for (int64_t b; (b = next.fetch_add(1)) < num_blocks; done.fetch_add(1))
      Panels<kMaxRows>(product, rows, b * block, std::min((b + 1) * block, product.panels));
  }
};

template <typename W>
void Multiply(ffi::ThreadPool& pool, const Product<W>& p) {
  const int64_t bytes = p.depth * p.panels * kPanel * sizeof(W);
  const int64_t most = std::max<int64_t>(1, pool.num_threads());
  const int64_t threads = std::clamp<int64_t>(bytes / kMinBytes, 1, most);
  auto work = std::make_shared<Work<W>>();
  work->product = p;
  // At most two blocks a thread, of whole tiles of 2, 3 or 4 panels.
  work->block = threads == 1 ? p.panels : 12 * Ratio(p.panels, 12 * 2 * threads);
  work->num_blocks = Ratio(p.panels, work->block);
  // A helper that comes late finds nothing left to take, and only then may this call have returned.
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load() < work->num_blocks) std::this_thread::yield();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions(), panels = w.dimensions();
  if (in.size() != 2 || panels.size() != 3 || panels[1] != in[1] || panels[2] != kPanel)
    return ffi::Error::InvalidArgument("x [M, E] goes with panels [N, E, 16]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto multiply = [&](const auto* weights) {
    using W = std::decay_t<decltype(*weights)>;
    for (int64_t row = 0; row < in[0]; row += kRowsAtOnce)
      Multiply<W>(pool, {x.typed_data() + row * in[1], weights,
                         out->typed_data() + row * panels[0] * kPanel,
                         std::min(kRowsAtOnce, in[0] - row), in[1], panels[0]});
  };
  if (w.element_type() == ffi::BF16)
    multiply(static_cast<const Bfloat16*>(w.untyped_data()));
  else if (w.element_type() == ffi::F32)
    multiply(w.typed_data<float>());
  else
    return ffi::Error::InvalidArgument("panels are float32 or bfloat16");
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
