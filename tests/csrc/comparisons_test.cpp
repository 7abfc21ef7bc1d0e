// The compaction and mask loops of one kernel table: gate, diff and residual, element by element against scalar code.
#include <cmath>
#include <cstring>

#include "../../csrc/bits/rounding.h"
#include "check.h"

using pulse::CompactFn;
using pulse::CompactItem;
using pulse::KernelTable;

namespace {

// FP32 patterns at which rounding, NaN handling or a float comparison in place of a bit comparison go wrong.
constexpr uint32_t kHard[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x00800000, 0x33000000,
    0x33000001, 0x33800000, 0x387FFFFF, 0x38800000, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000,
    0x3F801000, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,
    0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800000, 0xFF800001, 0xFFC12345, 0xFFFFFFFF, 0xBF808000};
constexpr size_t kHardCount = sizeof kHard / sizeof kHard[0];

uint32_t some_fp32(Random& random) {
  return random.below(4) == 0 ? kHard[random.below(kHardCount)] : static_cast<uint32_t>(random.bits());
}

// Sizes around the 64-element step, the 8192-element stretch and nothing at all.
constexpr int64_t kSizes[] = {0, 1, 63, 64, 65, 127, 128, 200, 8191, 8192, 8193, 8256, 20000};

// Per cent of changed elements.
constexpr int kDensities[] = {0, 1, 50, 100};

struct Expected {
  std::vector<uint16_t> positions;
  std::vector<uint64_t> values, old_values;
};

template <class Value>
uint64_t at(const void* data, int64_t k) {
  Value value;
  std::memcpy(&value, static_cast<const Value*>(data) + k, sizeof value);
  return value;
}

// Runs `kernel` over [begin, end), with and without update, and compares with `expected`. Positions count from the
// sink's origin: from `begin` itself, and from the item's start.
template <class Value>
void check_kernel(CompactFn kernel, const CompactItem& item, int64_t begin, const Expected& expected, bool can_update) {
  const int64_t n = item.numel - begin;
  const size_t found = expected.positions.size();
  std::vector<Value> before(item.numel);
  if (item.numel > 0) std::memcpy(before.data(), item.target, item.numel * sizeof(Value));
  for (const bool update : {false, true}) {
    if (update && !can_update) continue;
    for (const bool keep_old : {false, true}) {
      const int64_t origin = keep_old ? 0 : begin;
      const auto shift = static_cast<uint32_t>(begin - origin);
      std::vector<uint16_t> positions(n);
      std::vector<Value> values(n), old_values(n);
      const pulse::CompactSink sink{origin, positions.data(), values.data(), keep_old ? old_values.data() : nullptr};
      CHECK(kernel(item, begin, item.numel, sink, update) == static_cast<int64_t>(found));
      size_t wrong = 0, changed_elsewhere = 0;
      for (size_t k = 0; k < found; ++k) {
        wrong += positions[k] != expected.positions[k] + shift || values[k] != static_cast<Value>(expected.values[k]);
        wrong += keep_old && old_values[k] != static_cast<Value>(expected.old_values[k]);
      }
      std::vector<Value> after(before);
      if (update) {
        for (size_t k = 0; k < found; ++k) {
          after[begin + expected.positions[k]] = static_cast<Value>(expected.values[k]);
        }
      }
      for (int64_t k = 0; k < item.numel; ++k) changed_elsewhere += at<Value>(item.target, k) != after[k];
      CHECK(wrong == 0 && changed_elsewhere == 0);
      if (update && item.numel > 0) std::memcpy(item.target, before.data(), item.numel * sizeof(Value));  // next round
    }
  }
}

void check_gate(const KernelTable& table, bool bf16, Random& random, int64_t n, int density, int64_t begin) {
  const auto round = bf16 ? pulse::round_to_bf16 : pulse::round_to_fp16;
  std::vector<uint32_t> master(n);
  std::vector<uint16_t> weight(n);
  Expected expected;
  std::vector<uint8_t> mask(n, 2), wanted_mask(n);
  for (int64_t k = 0; k < n; ++k) {
    master[k] = some_fp32(random);
    weight[k] = round(master[k]);
    if (static_cast<int>(random.below(100)) < density) weight[k] ^= static_cast<uint16_t>(1u << random.below(16));
    const uint16_t rounded = round(master[k]);
    wanted_mask[k] = rounded != weight[k];
    if (k >= begin && wanted_mask[k]) {
      expected.positions.push_back(static_cast<uint16_t>(k - begin));
      expected.values.push_back(rounded);
      expected.old_values.push_back(weight[k]);
    }
  }
  const CompactItem item{master.data(), weight.data(), nullptr, n};
  check_kernel<uint16_t>(bf16 ? table.gate_bf16 : table.gate_fp16, item, begin, expected, true);
  (bf16 ? table.mask_bf16 : table.mask_fp16)(item, 0, n, mask.data());
  CHECK(mask == wanted_mask);
}

// Every hard value in every lane of a 64-element step, alone among unchanged neighbours.
void check_lanes(const KernelTable& table, bool bf16) {
  const auto round = bf16 ? pulse::round_to_bf16 : pulse::round_to_fp16;
  const CompactFn kernel = bf16 ? table.gate_bf16 : table.gate_fp16;
  for (const uint32_t hard : kHard) {
    for (int lane = 0; lane < 64; ++lane) {
      std::vector<uint32_t> master(64, 0x3F800000u);
      std::vector<uint16_t> weight(64, round(0x3F800000u));
      master[lane] = hard;
      weight[lane] = round(hard);
      const CompactItem item{master.data(), weight.data(), nullptr, 64};
      check_kernel<uint16_t>(kernel, item, 0, {}, true);
      weight[lane] ^= 0x8000u;  // another sign: +0 and -0 differ
      check_kernel<uint16_t>(kernel, item, 0, {{static_cast<uint32_t>(lane)}, {round(hard)}, {weight[lane]}}, true);
    }
  }
}

template <class Value>
void check_diff(CompactFn kernel, Random& random, int64_t n, int density, int64_t begin) {
  std::vector<Value> fresh(n), stale(n);
  Expected expected;
  for (int64_t k = 0; k < n; ++k) {
    fresh[k] = stale[k] = static_cast<Value>(random.bits());
    // A single flipped bit anywhere in the element counts.
    if (static_cast<int>(random.below(100)) < density) {
      fresh[k] ^= static_cast<Value>(uint64_t{1} << random.below(8 * sizeof(Value)));
    }
    if (k >= begin && fresh[k] != stale[k]) {
      expected.positions.push_back(static_cast<uint16_t>(k - begin));
      expected.values.push_back(fresh[k]);
      expected.old_values.push_back(stale[k]);
    }
  }
  check_kernel<Value>(kernel, {fresh.data(), stale.data(), nullptr, n}, begin, expected, true);
}

float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

uint32_t canonical(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return f != f ? 0x7FC00000u : u;
}

// Sums go through volatile so that no compiler option changes their rounding.
uint32_t pending(float theta, float local, float residual) {
  volatile float delta = theta - local;
  volatile float s = residual + delta;
  return canonical(s);
}

void check_residual(const KernelTable& table, bool bf16, Random& random, int64_t n, int density, int64_t begin) {
  const auto round = bf16 ? pulse::round_to_bf16 : pulse::round_to_fp16;
  std::vector<float> theta(n), local(n), residual(n), committed(n);
  Expected expected;
  for (int64_t k = 0; k < n; ++k) {
    if (static_cast<int>(random.below(100)) < density) {
      theta[k] = float_of(some_fp32(random));
      local[k] = random.below(2) == 0 ? theta[k] : float_of(some_fp32(random));
      residual[k] = float_of(some_fp32(random));
    } else {
      theta[k] = local[k] = 1.0f + static_cast<float>(random.below(1000)) / 1000;
      residual[k] = 0;
    }
    const uint32_t s = pending(theta[k], local[k], residual[k]);
    committed[k] = float_of(s);
    uint32_t t;
    std::memcpy(&t, &theta[k], 4);
    volatile float next = theta[k] - float_of(s);
    if (k >= begin && round(canonical(next)) != round(t)) {
      expected.positions.push_back(static_cast<uint16_t>(k - begin));
      expected.values.push_back(s);
      expected.old_values.push_back(0);
    }
  }
  const CompactItem item{theta.data(), local.data(), residual.data(), n};
  check_kernel<uint32_t>(bf16 ? table.residual_bf16 : table.residual_fp16, item, begin, expected, false);
  table.commit(theta.data(), local.data(), residual.data(), 0, n);
  CHECK(n == 0 || std::memcmp(residual.data(), committed.data(), 4 * n) == 0);
}

}  // namespace

void test_comparisons(const KernelTable& table) {
  Random random(2602'03839);
  for (const bool bf16 : {true, false}) check_lanes(table, bf16);
  for (const int64_t n : kSizes) {
    for (const int density : kDensities) {
      for (const int64_t begin : {int64_t{0}, n / 3}) {
        check_gate(table, true, random, n, density, begin);
        check_gate(table, false, random, n, density, begin);
        check_diff<uint8_t>(table.diff1, random, n, density, begin);
        check_diff<uint16_t>(table.diff2, random, n, density, begin);
        check_diff<uint32_t>(table.diff4, random, n, density, begin);
        check_diff<uint64_t>(table.diff8, random, n, density, begin);
        check_residual(table, true, random, n, density, begin);
        check_residual(table, false, random, n, density, begin);
      }
    }
  }
}
