// Sums of sparse FP32 vectors over one range of positions, each element's in the order in which they are given.
//
// Traffic: the entries once, and each sum twice. A block of positions is summed in the L2 cache; no vector of all
// positions is ever there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "runner.h"

namespace pulse {

constexpr int64_t kSumBlock = 1 << 15;  // positions: a task

struct SparseVector {
  const int32_t* indices;  // sorted, unique, within the range
  const float* values;
  int64_t count;
};

class SparseSum {
 public:
  SparseSum(std::vector<SparseVector> vectors, int64_t numel) : vectors_(std::move(vectors)), numel_(numel) {}

  // Returns false if memory ran out.
  bool run(Runner& runner) {
    const int64_t blocks = (numel_ + kSumBlock - 1) / kSumBlock;
    int64_t entries = 0;
    for (const SparseVector& vector : vectors_) entries += vector.count;
    counts_.assign(blocks, 0);
    places_.assign(blocks, 0);
    indices_.reset(new (std::nothrow) int32_t[entries]);
    values_.reset(new (std::nothrow) float[entries]);
    const int workers = runner.threads() < 1 ? 1 : runner.threads();
    std::unique_ptr<Scratch[]> scratch(new (std::nothrow) Scratch[workers]());
    if (!indices_ || !values_ || !scratch) return false;
    runner.for_each(blocks, [&](int worker, int64_t block) { add(block, scratch[worker]); });
    for (const int64_t count : counts_) total_ += count;
    return true;
  }

  int64_t total() const { return total_; }

  void write(Runner& runner, int32_t* indices, float* values) const {
    std::vector<int64_t> starts(counts_.size());
    int64_t at = 0;
    for (size_t block = 0; block < counts_.size(); ++block) {
      starts[block] = at;
      at += counts_[block];
    }
    runner.for_each(static_cast<int64_t>(counts_.size()), [&](int, int64_t block) {
      if (counts_[block] == 0) return;
      std::memcpy(indices + starts[block], indices_.get() + places_[block], counts_[block] * sizeof(int32_t));
      std::memcpy(values + starts[block], values_.get() + places_[block], counts_[block] * sizeof(float));
    });
  }

 private:
  // Zero before and after a block.
  struct Scratch {
    float sums[kSumBlock];
    uint64_t touched[kSumBlock / 64];
  };

  void add(int64_t block, Scratch& scratch) {
    const int64_t begin = block * kSumBlock;
    const int64_t end = numel_ < begin + kSumBlock ? numel_ : begin + kSumBlock;
    int64_t place = 0;  // as many entries lie before this block, so that there is room for its own from here on
    for (const SparseVector& vector : vectors_) {
      const int32_t* last = vector.indices + vector.count;
      const int32_t* from = std::lower_bound(vector.indices, last, begin);
      place += from - vector.indices;
      const float* values = vector.values + (from - vector.indices);
      for (; from != last && *from < end; ++from, ++values) {
        const int64_t k = *from - begin;
        scratch.sums[k] += *values;
        scratch.touched[k / 64] |= uint64_t{1} << k % 64;
      }
    }
    places_[block] = place;
    int32_t* indices = indices_.get() + place;
    float* values = values_.get() + place;
    int64_t count = 0;
    for (int64_t word = 0; word < kSumBlock / 64; ++word) {
      for (uint64_t left = scratch.touched[word]; left != 0; left &= left - 1) {
        const int64_t k = word * 64 + __builtin_ctzll(left);
        indices[count] = static_cast<int32_t>(begin + k);
        values[count] = scratch.sums[k];
        count += scratch.sums[k] != 0;  // true of NaN
        scratch.sums[k] = 0;
      }
      scratch.touched[word] = 0;
    }
    counts_[block] = count;
  }

  std::vector<SparseVector> vectors_;
  int64_t numel_;
  std::vector<int64_t> counts_, places_;
  std::unique_ptr<int32_t[]> indices_;
  std::unique_ptr<float[]> values_;
  int64_t total_ = 0;
};

}  // namespace pulse
