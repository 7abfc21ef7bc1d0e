// digest and digest_update (bits/digest.h). Traffic: the tensor once; the changed entries once.
#pragma once

#include <cstdint>

#include "../bits/digest.h"
#include "kernels.h"
#include "runner.h"

namespace pulse {

constexpr int64_t kDigestTask = 1 << 10;  // blocks of 256 elements
constexpr int64_t kUpdateTask = 1 << 14;  // changed entries

struct DigestKey {
  uint64_t seeds[2];
  uint32_t slots[2 * kDigestBlock + 1];  // one more: a vector load of the odd factors ends on it
  explicit DigestKey(uint64_t key) {
    slots[2 * kDigestBlock] = 0;
    for (int lane = 0; lane < 2; ++lane) {
      seeds[lane] = digest_seed(key, lane);
      for (int k = 0; k < kDigestBlock; ++k) slots[lane * kDigestBlock + k] = slot_factor(seeds[lane], k);
    }
  }
};

template <class T>
void add_weighted(const DigestKey& key, uint64_t position, T bits, uint64_t sums[2]) {
  for (int lane = 0; lane < 2; ++lane) {
    sums[lane] += static_cast<uint64_t>(bits) * (block_factor(key.seeds[lane], position / kDigestBlock) *
                                                 key.slots[lane * kDigestBlock + position % kDigestBlock]);
  }
}

template <class T>
void digest(Runner& runner, DigestFn blocks_fn, const T* data, int64_t n, uint64_t key_value, uint64_t start,
            uint64_t result[2]) {
  const DigestKey key(key_value);
  const int64_t to_boundary = (kDigestBlock - start % kDigestBlock) % kDigestBlock;
  const int64_t head = n < to_boundary ? n : to_boundary;
  const int64_t blocks = (n - head) / kDigestBlock;
  std::atomic<uint64_t> total0{0}, total1{0};
  runner.for_each((blocks + kDigestTask - 1) / kDigestTask, [&](int, int64_t task) {
    const int64_t first = task * kDigestTask;
    const int64_t count = blocks < first + kDigestTask ? blocks - first : kDigestTask;
    uint64_t sums[2] = {0, 0};
    blocks_fn(data + head + first * kDigestBlock, count, (start + head) / kDigestBlock + first, key.seeds, key.slots,
              sums);
    total0 += sums[0];
    total1 += sums[1];
  });
  uint64_t sums[2] = {total0, total1};
  for (int64_t k = 0; k < head; ++k) add_weighted(key, start + k, data[k], sums);
  for (int64_t k = head + blocks * kDigestBlock; k < n; ++k) add_weighted(key, start + k, data[k], sums);
  result[0] = sums[0];
  result[1] = sums[1];
}

template <class T, class Index>
void digest_update(Runner& runner, const Index* indices, const T* old_values, const T* new_values, int64_t n,
                   uint64_t key_value, uint64_t result[2]) {
  const DigestKey key(key_value);
  std::atomic<uint64_t> total0{0}, total1{0};
  runner.for_each((n + kUpdateTask - 1) / kUpdateTask, [&](int, int64_t task) {
    const int64_t end = n < (task + 1) * kUpdateTask ? n : (task + 1) * kUpdateTask;
    uint64_t sums[2] = {0, 0};
    for (int64_t k = task * kUpdateTask; k < end; ++k) {
      const uint64_t change = static_cast<uint64_t>(new_values[k]) - static_cast<uint64_t>(old_values[k]);
      add_weighted(key, static_cast<uint64_t>(indices[k]), change, sums);
    }
    total0 += sums[0];
    total1 += sums[1];
  });
  result[0] += total0;
  result[1] += total1;
}

}  // namespace pulse
