// x [M, E] times w [E, F], float32, for the few rows M of a decoding step or of a verification.
//
// Such a product should take as long as reading w takes. General kernels rearrange w first, which
// costs more than the product; this one reads it once, in the order it lies in, a band of rows at a
// time, and keeps a tile of the result in registers. Each element of the result is one chain of
// multiply-adds over E, in order, whatever M is: a row does not depend on how many others there are.
//
// w may be bfloat16, which takes half the time to read, and is widened on the way: the result is that
// of a float32 copy, bit for bit.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kMaxRows = 12;
#else
constexpr int kLanes = 4, kMaxRows = 6;
#endif
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int64_t kMinBytes = 1 << 17;  // of w, for a thread of its own

typedef uint16_t Bfloat16;  // the upper half of a float
typedef Bfloat16 Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

inline Vector Load(const float* w) { return *reinterpret_cast<const Vector*>(w); }
inline Vector Load(const Bfloat16* w) {
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(w), Words) << 16);
}

inline float Widened(float w) { return w; }
inline float Widened(Bfloat16 w) {
  const uint32_t bits = uint32_t{w} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename W>
struct Product {
  const float* x;
  const W* w;
  float* out;
  int64_t rows, depth, width;
};

// Rows from..to of w, and for which of them the same place in the next band is fetched meanwhile.
struct Band {
  int64_t from, to, fetch_from, fetch_to;
};

// out[row : row + M, at : at + N lanes] += x[:, band] w[band]; begins at 0 with the first band.
template <int M, int N, typename W>
inline void Tile(const Product<W>& p, int64_t row, int64_t at, const Band& band) {
  Vector sum[M][N];
  const float* x = p.x + row * p.depth;
  float* out = p.out + row * p.width + at;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n)
      sum[m][n] = band.from ? *reinterpret_cast<Vector*>(out + m * p.width + n * kLanes) : Vector{};
  for (int64_t e = band.from; e < band.to; ++e) {
    const W* w = p.w + e * p.width + at;
    Vector of_w[N];
    for (int n = 0; n < N; ++n) {
      of_w[n] = Load(w + n * kLanes);
      // Rows lie too far apart for the processor to foresee the next.
      if (e >= band.fetch_from && e < band.fetch_to)
        __builtin_prefetch(w + (band.to - band.from) * p.width + n * kLanes, 0, 2);
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) sum[m][n] += x[m * p.depth + e] * of_w[n];
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) *reinterpret_cast<Vector*>(out + m * p.width + n * kLanes) = sum[m][n];
}

// A column too few for a vector.
template <typename W>
void Column(const Product<W>& p, int64_t row, int64_t num_rows, int64_t at, const Band& band) {
  for (int64_t m = row; m < row + num_rows; ++m) {
    float& out = p.out[m * p.width + at];
    float sum = band.from ? out : 0;
    for (int64_t e = band.from; e < band.to; ++e)
      sum = std::fma(p.x[m * p.depth + e], Widened(p.w[e * p.width + at]), sum);
    out = sum;
  }
}

// What a band of w adds to columns begin..end of num_rows <= M rows from `row` on.
template <int M, typename W>
void Add(const Product<W>& p, int64_t row, int64_t num_rows, int64_t begin, int64_t end,
         const Band& band) {
  if constexpr (M > 1) {
    if (num_rows < M) return Add<M - 1>(p, row, num_rows, begin, end, band);
  }
  constexpr int kVectors = M <= 2 ? 4 : 2;
  int64_t f = begin;
  for (; f + kVectors * kLanes <= end; f += kVectors * kLanes) Tile<M, kVectors>(p, row, f, band);
  for (; f + kLanes <= end; f += kLanes) Tile<M, 1>(p, row, f, band);
  for (; f < end; ++f) Column(p, row, M, f, band);
}

template <typename W>
void Columns(const Product<W>& p, int64_t begin, int64_t end) {
  const int64_t depth = p.rows <= 2 ? 16 : 64, chunks = (p.rows + kMaxRows - 1) / kMaxRows;
  for (int64_t from = 0; from < p.depth; from += depth)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t row = p.rows * c / chunks, num_rows = p.rows * (c + 1) / chunks - row;
      Add<kMaxRows>(p, row, num_rows, begin, end,
                    {from, std::min(from + depth, p.depth), from + depth * c / chunks,
                     from + depth * (c + 1) / chunks});
    }
}

// Blocks of columns that threads take until none is left.
template <typename W>
struct Work {
  Product<W> product;
  int64_t block, num_blocks;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    for (int64_t b; (b = next.fetch_add(1)) < num_blocks; done.fetch_add(1))
      Columns(product, b * block, std::min((b + 1) * block, product.width));
  }
};

template <typename W>
void Multiply(ffi::ThreadPool& pool, const Product<W>& p) {
  const int64_t bytes = p.depth * p.width * sizeof(W);
  const int64_t threads = std::min<int64_t>(pool.num_threads(), bytes / kMinBytes);
  if (threads < 2) return Columns(p, 0, p.width);
  auto work = std::make_shared<Work<W>>();
  work->product = p;
  work->block = (p.width / threads / 2 + 127) / 128 * 128;
  work->num_blocks = (p.width + work->block - 1) / work->block;
  // A helper that comes late finds nothing left to take, and only then may this call have returned.
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load() < work->num_blocks) std::this_thread::yield();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], depth = w.dimensions()[0], width = w.dimensions()[1];
  const auto multiply = [&](const auto* weights) {
    using W = std::decay_t<decltype(*weights)>;
    Multiply<W>(pool, {x.typed_data(), weights, out->typed_data(), rows, depth, width});
  };
  if (w.element_type() == ffi::BF16)
    multiply(static_cast<const Bfloat16*>(w.untyped_data()));
  else
    multiply(w.typed_data<float>());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
