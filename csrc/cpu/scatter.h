// apply_patch_ and exchange_patch_: write values at sorted positions.
//
// Traffic: 4 or 8 bytes an index, the value, and one cache line of the weight for every change (32 BF16 neighbours share
// one). Latency decides, so lines are prefetched for writing ahead of the store.
#pragma once

#include <cstdint>
#include <vector>

#include "runner.h"

namespace pulse {

constexpr int64_t kScatterChunk = 1 << 14;  // changes: a task
constexpr int64_t kPrefetch = 24;           // changes ahead

// The memory offset of a logical position of a strided tensor, in elements.
struct Strided {
  std::vector<int64_t> sizes, strides;
  int64_t operator()(int64_t position) const {
    int64_t offset = 0;
    for (size_t d = sizes.size(); d-- > 0;) {
      offset += position % sizes[d] * strides[d];
      position /= sizes[d];
    }
    return offset;
  }
};

struct Contiguous {
  int64_t operator()(int64_t position) const { return position; }
};

// `old_values` may be null. Positions were checked.
template <class Value, class Index, class Offset>
void scatter(Runner& runner, Value* weight, const Index* indices, const Value* values, Value* old_values, int64_t n,
             const Offset& offset) {
  runner.for_each((n + kScatterChunk - 1) / kScatterChunk, [&](int, int64_t task) {
    const int64_t begin = task * kScatterChunk;
    const int64_t end = n < begin + kScatterChunk ? n : begin + kScatterChunk;
    const int64_t ahead_end = end - kPrefetch;
    int64_t k = begin;
    for (; k < ahead_end; ++k) {
      __builtin_prefetch(weight + offset(indices[k + kPrefetch]), 1);
      Value* place = weight + offset(indices[k]);
      if (old_values != nullptr) old_values[k] = *place;
      *place = values[k];
    }
    for (; k < end; ++k) {
      Value* place = weight + offset(indices[k]);
      if (old_values != nullptr) old_values[k] = *place;
      *place = values[k];
    }
  });
}

// Serial: the codec runs one a segment, many at once.
template <class Value, class Index>
void gather(const Value* weight, const Index* indices, Value* values, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    if (k + kPrefetch < n) __builtin_prefetch(weight + indices[k + kPrefetch]);
    values[k] = weight[indices[k]];
  }
}

}  // namespace pulse
