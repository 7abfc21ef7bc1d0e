// The least a test needs: CHECK, a source of random bits, and threads to run kernels on.
//
// Buffers handed to kernels are std::vectors of exactly the size that the kernel may touch, so that AddressSanitizer
// sees the first byte read or written beyond it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../csrc/cpu/kernels.h"
#include "../../csrc/cpu/runner.h"

extern long checks_passed;

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition);    \
      std::exit(1);                                                                         \
    }                                                                                       \
    ++checks_passed;                                                                        \
  } while (0)

class Random {  // SplitMix64: the same numbers in every run
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return bits() % bound; }

 private:
  uint64_t state_;
};

class ThreadRunner final : public pulse::Runner {
 public:
  explicit ThreadRunner(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(int workers, const std::function<void(int)>& body) override {
    std::vector<std::thread> others;
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(body, worker);
    body(0);
    for (std::thread& other : others) other.join();
  }

 private:
  int threads_;
};

void test_rounding();
void test_comparisons(const pulse::KernelTable& table);
void test_compaction(const pulse::KernelTable& table);
void test_index_blob(const pulse::KernelTable& table);
void test_patch(const pulse::KernelTable& table);
void test_digest(const pulse::KernelTable& table);
void test_streams();
void test_sums();
void test_cuda_packing(const pulse::KernelTable& table);
void test_cuda_compaction();
