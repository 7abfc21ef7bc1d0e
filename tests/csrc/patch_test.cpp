// scatter and gather at positions of contiguous and strided weights.
#include "../../csrc/cpu/scatter.h"

#include "check.h"

namespace {

// Every `step`-th position of a weight of the given sizes, laid out with the given strides in `memory` elements.
template <class Value, class Index>
void check_scatter(std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t memory, int64_t step) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  const pulse::Strided offset{sizes, strides};
  for (const int threads : {1, 3}) {
    ThreadRunner runner(threads);
    std::vector<Value> weight(memory), values, old_values;
    for (int64_t k = 0; k < memory; ++k) weight[k] = static_cast<Value>(k);
    std::vector<Index> indices;
    std::vector<Value> expected(weight), expected_old;
    for (int64_t position = step - 1; position < numel; position += step) {
      // The place by its definition: the position's coordinates, last dimension fastest, times the strides.
      int64_t rest = position, place = 0;
      for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) place += rest % sizes[d] * strides[d];
      indices.push_back(static_cast<Index>(position));
      values.push_back(static_cast<Value>(position + 77));
      expected_old.push_back(expected[place]);
      expected[place] = values.back();
    }
    old_values.resize(indices.size());
    const auto n = static_cast<int64_t>(indices.size());
    pulse::scatter(runner, weight.data(), indices.data(), values.data(), old_values.data(), n, offset);
    CHECK(weight == expected && old_values == expected_old);
    // Writing the old values back undoes it, this time without keeping any.
    std::vector<Value> original(memory);
    for (int64_t k = 0; k < memory; ++k) original[k] = static_cast<Value>(k);
    pulse::scatter<Value>(runner, weight.data(), indices.data(), old_values.data(), nullptr, n, offset);
    CHECK(weight == original);
  }
}

template <class Value>
void check_contiguous(int64_t numel, int64_t step) {
  ThreadRunner runner(4);
  std::vector<Value> weight(numel), values, picked;
  std::vector<int32_t> indices;
  for (int64_t k = 0; k < numel; k += step) {
    indices.push_back(static_cast<int32_t>(k));
    values.push_back(static_cast<Value>(k + 1));
  }
  const auto n = static_cast<int64_t>(indices.size());
  pulse::scatter<Value>(runner, weight.data(), indices.data(), values.data(), nullptr, n, pulse::Contiguous{});
  picked.resize(indices.size());
  pulse::gather(weight.data(), indices.data(), picked.data(), n);
  CHECK(picked == values);
}

template <class Value>
void check_all() {
  check_scatter<Value, int32_t>({5}, {3}, 13, 1);
  check_scatter<Value, int64_t>({4, 6}, {1, 4}, 24, 2);                // transposed
  check_scatter<Value, int32_t>({3, 4, 5}, {100, 11, 2}, 242, 3);      // gaps everywhere
  check_scatter<Value, int64_t>({2, 1, 7}, {7, 999, 1}, 14, 1);        // a dimension of one, whose stride is idle
  check_scatter<Value, int32_t>({200, 300}, {1, 200}, 60000, 1);       // several tasks
  check_contiguous<Value>(1, 1);
  check_contiguous<Value>(100000, 3);
}

}  // namespace

void test_patch(const pulse::KernelTable&) {
  check_all<uint8_t>();
  check_all<uint16_t>();
  check_all<uint32_t>();
  check_all<uint64_t>();
}
