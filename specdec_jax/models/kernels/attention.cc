// The operations between the matmuls of a decoder, in one call each where XLA makes ten: attention
// of a few queries over a cache, RMSNorm and LayerNorm. All in float32.
//
// A query reads only the slots that are not masked, in order, and sums run over these slots. Its
// result is bit-identical for any other queries and any placement of masked slots in the cache.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kMinWork = 1 << 17;  // multiply-adds per thread
constexpr int kDim = 64;  // usual size of a head
constexpr int64_t kMinNormed = 1 << 16;  // elements per thread

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline float Sum(Vector v) {
  float lanes[kLanes];
  Store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The lanes 0, 2, 4, ... of the result are those of a, half of them added to the other half, and the
// others are those of b.
inline Vector Fold(Vector a, Vector b) {
  constexpr int kHalf = kLanes / 2;
#ifdef __clang__
  Vector low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i % 2 ? b[i / 2] : a[i / 2];
    high[i] = i % 2 ? b[i / 2 + kHalf] : a[i / 2 + kHalf];
  }
  return low + high;
#else
  Ints low;
  for (int i = 0; i < kLanes; ++i) low[i] = i / 2 + i % 2 * kLanes;
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + kHalf);
#endif
}

// Lane i of the result is Sum(v[i]).
inline Vector Sums(Vector (&v)[kLanes]) {
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) v[i] = Fold(v[i], v[i + n]);
  return v[0];
}

inline float Total(const float* a, int64_t size) {
  Vector sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += Load(a + i);
  float total = Sum(sum);
  for (; i < size; ++i) total += a[i];
  return total;
}

inline float Dot(const float* a, const float* b, int64_t size) {
  Vector sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += Load(a + i) * Load(b + i);
  float dot = Sum(sum);
  for (; i < size; ++i) dot += a[i] * b[i];
  return dot;
}

struct Scaled {
  Vector power, fraction;  // stands for power * (1 + fraction)
};

// e^x for -87 <= x <= 0, as a power of 2 and e^r - 1 for a remainder r.
inline Scaled Reduce(Vector x) {
  const Vector magic = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (x * 1.44269504f + magic) - magic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts
  Vector p = r * (1.0f / 5040) + 1.0f / 720;  // Taylor's series; |r| < 0.35
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return {(Vector)power, p * r * r + r};
}

// e^x for x <= 0, accurate to a few units in the last place; 0 where e^x is not a normal float32.
inline Vector Exp(Vector x) {
  const Scaled e = Reduce(x);
  const Ints tiny = x < -87.0f;  // false for NaN, which is kept
  return (Vector)((Ints)((e.fraction + 1.0f) * e.power) & ~tiny);
}

// tanh x, accurate to a few units in the last place: |tanh x| = -m / (2 + m), m = e^(-2|x|) - 1.
inline Vector Tanh(Vector x) {
  const Ints sign = (Ints)x & INT32_MIN;
  const Vector size = (Vector)((Ints)x ^ sign);
  const Ints large = size > 10.0f;  // m is set to -1; false for NaN, which is kept
  const Scaled e = Reduce((Vector)((Ints)(size * -2.0f) & ~large));
  const Vector power = (Vector)((Ints)e.power & ~large);
  const Vector m = e.fraction * power + (power - 1.0f);
  return (Vector)(((Ints)(m / (m + 2.0f)) & INT32_MAX) | sign);
}

struct Heads {
  const float *queries, *keys, *values, *bias;  // [B, K, H, D], [B, G, T, D] twice, [B, H, K, T]
  float* out;                                   // [B, K, H, D]
  int64_t block, heads, groups, slots, dim;
  int64_t row_stride, head_stride, query_stride;  // of the bias, 0 for an axis of size 1
  float masked, cap;  // a cap of 0 is none
};

// The logits of a query in kLanes slots, with the same result as Dot for each of them.
__attribute__((always_inline)) inline Vector Dots(const float* query, const float* keys,
                                                  const int32_t* visible, int64_t dim) {
  Vector sums[kLanes];
  const int64_t whole = dim / kLanes * kLanes;
  for (int i = 0; i < kLanes; ++i) {
    const float* key = keys + visible[i] * dim;
    sums[i] = Vector{};
    for (int64_t d = 0; d < whole; d += kLanes) sums[i] += Load(query + d) * Load(key + d);
  }
  Vector dots = Sums(sums);
  for (int64_t d = whole; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) dots[i] += query[d] * keys[visible[i] * dim + d];
  return dots;
}

// out[q * stride : q * stride + N * kLanes] for Q queries: the weighted sums of the values in the
// visible slots.
template <int N, int Q>
inline void Mix(const float* weights, int64_t width, const int32_t* visible, int64_t count,
                const float* values, int64_t dim, const float* scales, float* out,
                int64_t stride) {
  Vector sum[Q][N]{};
  for (int64_t i = 0; i < count; ++i)
    for (int n = 0; n < N; ++n) {
      const Vector value = Load(values + visible[i] * dim + n * kLanes);
      for (int q = 0; q < Q; ++q) sum[q][n] += weights[q * width + i] * value;
    }
  for (int q = 0; q < Q; ++q)
    for (int n = 0; n < N; ++n) Store(out + q * stride + n * kLanes, sum[q][n] * scales[q]);
}

// Attention of the queries k to k + Q - 1 of one head of one row, which see the same slots. The size
// of a head is D, or any if D is 0.
template <int Q, int D>
void Attend(const Heads& h, int64_t row, int64_t head, int64_t k) {
  const int64_t dim = D ? D : h.dim, group = row * h.groups + head / (h.heads / h.groups);
  const float* keys = h.keys + group * h.slots * dim;
  const float* values = h.values + group * h.slots * dim;
  const int64_t width = Ratio(h.slots, kLanes) * kLanes, stride = h.heads * dim;
  const int64_t offset = ((row * h.block + k) * h.heads + head) * dim;
  const float* bias = h.bias + row * h.row_stride + head * h.head_stride + k * h.query_stride;
  std::vector<float> weights(Q * width), biases(width, -INFINITY);
  std::vector<int32_t> visible(width);
  int64_t count = 0;
  for (int64_t t = 0; t < h.slots; ++t)
    if (!(bias[t] < h.masked / 2)) visible[count++] = t;
  if (count == 0)  // padding queries, whose results are not used
    for (; count < h.slots; ++count) visible[count] = count;
  for (int64_t i = 0; i < count; ++i) biases[i] = bias[visible[i]];

  Vector largest[Q];
  for (Vector& each : largest) each = Vector{} - INFINITY;
  for (int64_t i = 0; i < count; i += kLanes)
    for (int q = 0; q < Q; ++q) {
      const float* query = h.queries + offset + q * stride;
      Vector logits = Dots(query, keys, &visible[i], dim);
      if (h.cap != 0) logits = Tanh(logits / h.cap) * h.cap;
      logits += Load(&biases[i]);
      largest[q] = logits > largest[q] ? logits : largest[q];
      Store(&weights[q * width + i], logits);
    }
  float scales[Q];
  for (int q = 0; q < Q; ++q) {
    float* own = &weights[q * width];
    float max_logit = -INFINITY;
    for (int i = 0; i < kLanes; ++i) max_logit = std::max(max_logit, largest[q][i]);
    Vector sum{};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vector e = Exp(Load(own + i) - max_logit);
      Store(own + i, e);
      sum += e;
    }
    scales[q] = 1 / Sum(sum);
  }
  constexpr int N = std::clamp(kLanes / Q, 1, 4);  // so that Q * N sums fit in registers
  float* out = h.out + offset;
  const auto mix = [&](auto mixed, int64_t d) {
    mixed(weights.data(), width, visible.data(), count, values + d, dim, scales, out + d, stride);
  };
  int64_t d = 0;
  for (; d + N * kLanes <= dim; d += N * kLanes) mix(Mix<N, Q>, d);
  for (; d + kLanes <= dim; d += kLanes) mix(Mix<1, Q>, d);
  for (; d < dim; ++d)
    for (int q = 0; q < Q; ++q) {
      float mixed = 0;
      for (int64_t i = 0; i < count; ++i)
        mixed += weights[q * width + i] * values[visible[i] * dim + d];
      out[q * stride + d] = mixed * scales[q];
    }
}

// Attention of all queries of one head of one row. Keys and values are read once for several ones.
template <int D>
void Head(const Heads& h, int64_t row, int64_t head) {
  int64_t k = 0;
  if (h.query_stride == 0) {
    for (; k + 4 <= h.block; k += 4) Attend<4, D>(h, row, head, k);
    for (; k + 2 <= h.block; k += 2) Attend<2, D>(h, row, head, k);
  }
  for (; k < h.block; ++k) Attend<1, D>(h, row, head, k);
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries,
                     ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                     ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> out, float masked,
                     float cap) {
  const auto q = queries.dimensions(), k = keys.dimensions(), b = bias.dimensions();
  const auto v = values.dimensions();
  const bool four = q.size() == 4 && k.size() == 4 && b.size() == 4;
  if (!four || !std::equal(k.begin(), k.end(), v.begin(), v.end()) || k[0] != q[0] ||
      k[1] == 0 || q[2] % k[1] != 0 || k[3] != q[3] || b[3] != k[2] ||
      (b[0] != 1 && b[0] != q[0]) || (b[1] != 1 && b[1] != q[2]) || (b[2] != 1 && b[2] != q[1]))
    return ffi::Error::InvalidArgument("queries [B, K, H, D] need keys and values [B, G, T, D] "
                                       "where G divides H, and a bias [B or 1, H or 1, K or 1, T]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t slots = k[2];
  const Heads heads{queries.typed_data(),
                    keys.typed_data(),
                    values.typed_data(),
                    bias.typed_data(),
                    out->typed_data(),
                    q[1],
                    q[2],
                    k[1],
                    slots,
                    q[3],
                    b[0] == 1 ? 0 : b[1] * b[2] * slots,
                    b[1] == 1 ? 0 : b[2] * slots,
                    b[2] == 1 ? 0 : slots,
                    masked,
                    cap};
  const auto head = heads.dim == kDim ? Head<kDim> : Head<0>;
  const int64_t work = 2 * q[0] * q[1] * q[2] * q[3] * slots;
  Share(pool, Threads(pool, work, kMinWork), q[0] * q[2],
        [heads, head](int64_t i) { head(heads, i / heads.heads, i % heads.heads); });
  return ffi::Error::Success();
}

ffi::Error RMSNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                   ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions();
  if (in.size() != 2 || scale.dimensions().size() != 1 || scale.dimensions()[0] != in[1])
    return ffi::Error::InvalidArgument("x [M, E] needs a scale [E]");
  const float *rows = x.typed_data(), *scales = scale.typed_data();
  float* result = out->typed_data();
  const int64_t size = in[1];
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto norm = [=](int64_t row) {
    const float* in_row = rows + row * size;
    const float inverse = 1 / std::sqrt(Dot(in_row, in_row, size) / size + 1e-6f);
    for (int64_t e = 0; e < size; ++e) result[row * size + e] = in_row[e] * inverse * scales[e];
  };
  Share(pool, Threads(pool, x.element_count(), kMinNormed), in[0], norm);
  return ffi::Error::Success();
}

ffi::Error LayerNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                     ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> out) {
  const auto in = x.dimensions(), s = scale.dimensions(), b = bias.dimensions();
  if (in.size() != 2 || s.size() != 1 || b.size() != 1 || s[0] != in[1] || b[0] != in[1])
    return ffi::Error::InvalidArgument("x [M, E] needs a scale [E] and a bias [E]");
  const float *rows = x.typed_data(), *scales = scale.typed_data(), *biases = bias.typed_data();
  float* result = out->typed_data();
  const int64_t size = in[1];
  if (out->element_count() == 0) return ffi::Error::Success();
  const auto norm = [=](int64_t row) {
    const float* in_row = rows + row * size;
    float* out_row = result + row * size;
    const float mean = Total(in_row, size) / size;
    for (int64_t e = 0; e < size; ++e) out_row[e] = in_row[e] - mean;
    const float inverse = 1 / std::sqrt(Dot(out_row, out_row, size) / size + 1e-5f);
    for (int64_t e = 0; e < size; ++e) out_row[e] = out_row[e] * inverse * scales[e] + biases[e];
  };
  Share(pool, Threads(pool, x.element_count(), kMinNormed), in[0], norm);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("masked")
                                  .Attr<float>("cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyRMSNorm, RMSNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SkinnyLayerNorm, LayerNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
