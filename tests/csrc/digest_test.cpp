// The state digest of every element size against its definition, one element at a time.
#include "../../csrc/cpu/state_digest.h"

#include "check.h"

namespace {

// Elements of random bits, or all of them `fill`.
template <class Value>
void check_digest(const pulse::KernelTable& table, int64_t n, uint64_t key, uint64_t start, const uint64_t* fill = nullptr) {
  const pulse::DigestFn blocks = pulse::digest_kernel(table, sizeof(Value));
  Random random(n + start);
  std::vector<Value> data(n);
  for (Value& value : data) value = static_cast<Value>(fill != nullptr ? *fill : random.bits());
  uint64_t expected[2] = {0, 0};
  for (int64_t k = 0; k < n; ++k) {
    for (int lane = 0; lane < 2; ++lane) {
      expected[lane] += data[k] * pulse::digest_weight(pulse::digest_seed(key, lane), start + k);
    }
  }
  for (const int threads : {1, 4}) {
    ThreadRunner runner(threads);
    uint64_t result[2];
    pulse::digest(runner, blocks, data.data(), sizeof(Value), n, key, start, result);
    CHECK(result[0] == expected[0] && result[1] == expected[1]);

    // Every third element becomes another: the update gives what a new digest gives.
    std::vector<int32_t> indices;
    std::vector<Value> old_values, new_values, changed(data);
    for (int64_t k = 0; k < n; k += 3) {
      indices.push_back(static_cast<int32_t>(k));
      old_values.push_back(data[k]);
      new_values.push_back(static_cast<Value>(random.bits()));
      changed[k] = new_values.back();
    }
    if (start != 0) continue;  // updates count from the tensor's start
    uint64_t recomputed[2];
    pulse::digest(runner, blocks, changed.data(), sizeof(Value), n, key, start, recomputed);
    const std::vector<int64_t> wide(indices.begin(), indices.end());
    for (const bool is_wide : {false, true}) {
      const void* positions = is_wide ? static_cast<const void*>(wide.data()) : indices.data();
      uint64_t updated[2] = {result[0], result[1]};
      pulse::digest_update(runner, pulse::digest_changes_kernel(table, sizeof(Value), is_wide),
                           {positions, old_values.data(), new_values.data()}, static_cast<int64_t>(indices.size()), key,
                           updated);
      CHECK(updated[0] == recomputed[0] && updated[1] == recomputed[1]);
    }
  }
}

}  // namespace

void test_digest(const pulse::KernelTable& table) {
  // The largest sums there are, of either sign, whatever partial sums a kernel keeps.
  for (const uint64_t fill : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x8000800080008000}, uint64_t{0x7FFF7FFF7FFF7FFF}}) {
    for (uint64_t key = 0; key < 50; ++key) {
      check_digest<uint8_t>(table, 512, key, 0, &fill);
      check_digest<uint16_t>(table, 512, key, 0, &fill);
      check_digest<uint32_t>(table, 512, key, 0, &fill);
      check_digest<uint64_t>(table, 512, key, 0, &fill);
    }
  }
  for (const int64_t n : {0, 1, 255, 256, 257, 1000, 1024 * 256 + 300}) {
    for (const uint64_t start : {uint64_t{0}, uint64_t{1}, uint64_t{255}, uint64_t{256}, (uint64_t{1} << 40) + 5}) {
      check_digest<uint8_t>(table, n, 1, start);
      check_digest<uint16_t>(table, n, 0, start);
      check_digest<uint32_t>(table, n, ~uint64_t{0}, start);
      check_digest<uint64_t>(table, n, 0x0123456789ABCDEFull, start);
    }
  }
}
