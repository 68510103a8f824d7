// Shared by both kernels: vectors of the width of this processor, and work shared by threads.

#ifndef SPECDEC_JAX_KERNELS_VECTORS_H_
#define SPECDEC_JAX_KERNELS_VECTORS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vector Load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void Store(float* x, Vector v) { *reinterpret_cast<Vector*>(x) = v; }

constexpr int64_t Ratio(int64_t a, int64_t b) { return (a + b - 1) / b; }  // a / b, rounded up

// Blocks of work that threads take one at a time until none is left.
template <typename F>
struct Blocks {
  F run;
  int64_t num_blocks;
  std::atomic<int64_t> next{0}, done{0};

  Blocks(F run, int64_t num_blocks) : run(std::move(run)), num_blocks(num_blocks) {}

  void Run() {
    for (int64_t b; (b = next.fetch_add(1)) < num_blocks; done.fetch_add(1)) run(b);
  }
};

// Calls run(0) to run(num_blocks - 1), each once, on at most `threads` threads.
template <typename F>
void Share(xla::ffi::ThreadPool& pool, int64_t threads, int64_t num_blocks, F run) {
  auto work = std::make_shared<Blocks<F>>(std::move(run), num_blocks);
  // A helper that starts late, possibly after this call has returned, finds no block left to take.
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load() < num_blocks) std::this_thread::yield();
}

// The number of threads to use for an amount of work `all` if a thread should get at least `each`.
inline int64_t Threads(xla::ffi::ThreadPool& pool, int64_t all, int64_t each) {
  return std::clamp<int64_t>(all / each, 1, std::max<int64_t>(1, pool.num_threads()));
}

#endif  // SPECDEC_JAX_KERNELS_VECTORS_H_
