// A block of 256 threads as kernel bodies see it, so that each body is written once and also runs on the host.
//
// each(f) calls f(thread) for every thread of the block; what a thread keeps from one each() to the next lives in an
// Each<T>. Threads meet in between: at barrier(), which orders shared memory, or in an operation of a warp or the block.
// Under nvcc a thread calls f once with its own number and CUB does the operations; on the host HostBlock loops over all
// threads, one after the other, under whatever sanitizer the tests chose.
#pragma once

#include <cstdint>

#include "../bits/host_device.h"

#if defined(__CUDACC__)
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>
#define PULSE_BODY __device__ __forceinline__
#define PULSE_UNROLL _Pragma("unroll")
#else
#define PULSE_BODY inline
#define PULSE_UNROLL
#endif

namespace pulse {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;

PULSE_HD int warp_of(int thread) { return thread / kLanes; }
PULSE_HD int lane_of(int thread) { return thread % kLanes; }

PULSE_HD int popcount(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

PULSE_HD int lowest_set(uint32_t word) {  // of a word that is not 0
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

// The memory behind an address from a table.
template <class T>
PULSE_HD T* memory(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// Reads what no thread of the launch writes. nvcc cannot know that an address from a table is of global memory, and reads
// it by the slower generic instructions but for this.
template <class T>
PULSE_HD T read_only(const T* from) {
#if defined(__CUDA_ARCH__)
  return __ldg(from);
#else
  return *from;
#endif
}

#if defined(__CUDACC__)

class CudaBlock {
  using Sum = cub::BlockReduce<int, kThreads>;
  using Scan = cub::BlockScan<int, kThreads>;
  using WarpScan = cub::WarpScan<uint64_t>;

 public:
  union Storage {
    typename Sum::TempStorage sum;
    typename Scan::TempStorage scan;
    typename WarpScan::TempStorage warp_scan[kWarps];
  };
  template <class T>
  struct Each {
    T own;
    __device__ __forceinline__ T& operator[](int) { return own; }
  };

  __device__ explicit CudaBlock(Storage& storage) : storage_(storage) {}

  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    f(static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void barrier() { __syncthreads(); }

  // x[t] of lane t ^ k of the same warp.
  __device__ __forceinline__ Each<uint32_t> exchanged(Each<uint32_t>& x, int k) {
    return {__shfl_xor_sync(~0u, x.own, k)};
  }
  // In every lane: bit k tells whether x of lane k of its warp is not 0.
  __device__ __forceinline__ Each<uint32_t> ballot(Each<uint32_t>& x) { return {__ballot_sync(~0u, x.own != 0)}; }
  // In every lane: OR over the warp.
  __device__ __forceinline__ Each<uint64_t> warp_or(Each<uint64_t>& x) {
    const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(x.own));
    const uint32_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(x.own >> 32));
    return {static_cast<uint64_t>(high) << 32 | low};
  }
  // f over the lanes before, 0 for lane 0; f is associative and f(0, x) is x.
  template <class F>
  __device__ __forceinline__ void warp_exclusive_scan(Each<uint64_t>& x, const F& f) {
    const uint64_t in = x.own;
    WarpScan(storage_.warp_scan[warp_of(threadIdx.x)]).ExclusiveScan(in, x.own, uint64_t{0}, f);
  }
  // The sum over the block; only thread 0 gets it.
  __device__ __forceinline__ Each<int> sum(Each<int>& x) { return {Sum(storage_.sum).Sum(x.own)}; }
  // Sums over the threads before.
  __device__ __forceinline__ void exclusive_sum(Each<int>& x) { Scan(storage_.scan).ExclusiveSum(x.own, x.own); }

  __device__ __forceinline__ void atomic_min(int64_t* where, int64_t value) {
    atomicMin(reinterpret_cast<long long*>(where), static_cast<long long>(value));
  }

 private:
  Storage& storage_;
};

#endif

class HostBlock {
 public:
  template <class T>
  struct Each {
    T own[kThreads];
    T& operator[](int thread) { return own[thread]; }
  };

  template <class F>
  void each(const F& f) {
    for (int t = 0; t < kThreads; ++t) f(t);
  }
  void barrier() {}
  Each<uint32_t> exchanged(Each<uint32_t>& x, int k) {
    Each<uint32_t> result;
    for (int t = 0; t < kThreads; ++t) result[t] = x[t ^ k];
    return result;
  }
  Each<uint32_t> ballot(Each<uint32_t>& x) {
    Each<uint32_t> result{};
    for (int t = 0; t < kThreads; ++t) {
      for (int lane = 0; lane < kLanes; ++lane) {
        result[t] |= static_cast<uint32_t>(x[t - lane_of(t) + lane] != 0) << lane;
      }
    }
    return result;
  }
  Each<uint64_t> warp_or(Each<uint64_t>& x) {
    Each<uint64_t> result{};
    for (int t = 0; t < kThreads; ++t) {
      for (int lane = 0; lane < kLanes; ++lane) result[t] |= x[t - lane_of(t) + lane];
    }
    return result;
  }
  template <class F>
  void warp_exclusive_scan(Each<uint64_t>& x, const F& f) {
    uint64_t before = 0;
    for (int t = 0; t < kThreads; ++t) {
      if (lane_of(t) == 0) before = 0;
      const uint64_t own = x[t];
      x[t] = before;
      before = f(before, own);
    }
  }
  Each<int> sum(Each<int>& x) {
    Each<int> result{};
    for (int t = 0; t < kThreads; ++t) result[0] += x[t];
    return result;
  }
  void exclusive_sum(Each<int>& x) {
    int before = 0;
    for (int t = 0; t < kThreads; ++t) {
      const int own = x[t];
      x[t] = before;
      before += own;
    }
  }
  void atomic_min(int64_t* where, int64_t value) {
    if (value < *where) *where = value;
  }
};

}  // namespace pulse
