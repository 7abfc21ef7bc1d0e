// digest and digest_update (bits/digest.h). Traffic: the tensor once; the changed entries once.
#pragma once

#include <cstdint>

#include "../bits/digest.h"
#include "digest_key.h"
#include "kernels.h"
#include "runner.h"

namespace pulse {

constexpr int64_t kDigestTask = 1 << 18;  // elements
constexpr int64_t kUpdateTask = 1 << 14;  // changed entries

template <class T>
void add_weighted(const DigestKey& key, uint64_t position, T bits, uint64_t sums[2]) {
  for (int lane = 0; lane < 2; ++lane) {
    sums[lane] += static_cast<uint64_t>(bits) * (block_factor(key.seeds[lane], position / kDigestBlock) *
                                                 key.slots[lane * kDigestBlock + position % kDigestBlock]);
  }
}

// Adds elements [0, n) of data, the first of which has position `start`; whole blocks by the vector kernel.
template <class T>
void add_range(const DigestKey& key, DigestFn blocks_fn, const T* data, int64_t n, uint64_t start, uint64_t sums[2]) {
  const int64_t to_boundary = (kDigestBlock - start % kDigestBlock) % kDigestBlock;
  const int64_t head = n < to_boundary ? n : to_boundary;
  const int64_t blocks = (n - head) / kDigestBlock;
  for (int64_t k = 0; k < head; ++k) add_weighted(key, start + k, data[k], sums);
  blocks_fn(data + head, blocks, (start + head) / kDigestBlock, key, sums);
  for (int64_t k = head + blocks * kDigestBlock; k < n; ++k) add_weighted(key, start + k, data[k], sums);
}

inline DigestFn digest_kernel(const KernelTable& k, int64_t element_size) {
  return element_size == 1 ? k.digest1 : element_size == 2 ? k.digest2 : element_size == 4 ? k.digest4 : k.digest8;
}

inline DigestChangesFn digest_changes_kernel(const KernelTable& k, int64_t element_size, bool wide) {
  const int row = element_size == 1 ? 0 : element_size == 2 ? 1 : element_size == 4 ? 2 : 3;
  return k.digest_changes[row][wide];
}

// add_range for elements of a size known at run time.
inline void add_bytes(const DigestKey& key, DigestFn fn, const void* data, int64_t size, int64_t n, uint64_t start,
                      uint64_t sums[2]) {
  by_element_size(size, [&](auto type) {
    add_range(key, fn, static_cast<const decltype(type)*>(data), n, start, sums);
  });
}

inline void digest(Runner& runner, DigestFn fn, const void* data, int64_t size, int64_t n, uint64_t key_value,
                   uint64_t start, uint64_t result[2]) {
  const DigestKey key(key_value);
  std::atomic<uint64_t> total0{0}, total1{0};
  runner.for_each((n + kDigestTask - 1) / kDigestTask, [&](int, int64_t task) {
    const int64_t first = task * kDigestTask;
    const int64_t count = n < first + kDigestTask ? n - first : kDigestTask;
    uint64_t sums[2] = {0, 0};
    add_bytes(key, fn, static_cast<const uint8_t*>(data) + first * size, size, count, start + first, sums);
    total0 += sums[0];
    total1 += sums[1];
  });
  result[0] = total0;
  result[1] = total1;
}

// Adds (new - old) * K over n changed entries among up to kBlocks blocks from `origin`, a block's beginning, on: sums by
// block first, without a branch to mispredict at every new block.
template <int kBlocks, class T>
void add_changes_near(const DigestKey& key, uint64_t origin, const uint16_t* positions, const T* old_values,
                      const T* new_values, int64_t n, uint64_t sums[2]) {
  uint64_t by_block[kBlocks][2] = {};
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t slot = positions[k] % kDigestBlock;
    const uint64_t change = static_cast<uint64_t>(new_values[k]) - static_cast<uint64_t>(old_values[k]);
    uint64_t* block_sums = by_block[positions[k] / kDigestBlock];
    block_sums[0] += change * key.slots[slot];
    block_sums[1] += change * key.slots[kDigestBlock + slot];
  }
  if (n == 0) return;
  for (int block = positions[0] / kDigestBlock; block <= positions[n - 1] / kDigestBlock; ++block) {
    for (int lane = 0; lane < 2; ++lane) {
      sums[lane] += block_factor(key.seeds[lane], origin / kDigestBlock + block) * by_block[block][lane];
    }
  }
}

// `fn` is digest_changes_kernel's.
inline void digest_update(Runner& runner, DigestChangesFn fn, const Changed& changed, int64_t n, uint64_t key_value,
                          uint64_t result[2]) {
  const DigestKey key(key_value);
  std::atomic<uint64_t> total0{0}, total1{0};
  runner.for_each((n + kUpdateTask - 1) / kUpdateTask, [&](int, int64_t task) {
    const int64_t first = task * kUpdateTask, count = n - first < kUpdateTask ? n - first : kUpdateTask;
    uint64_t sums[2] = {0, 0};
    fn(changed, first, first + count, key, sums);
    total0 += sums[0];
    total1 += sums[1];
  });
  result[0] += total0;
  result[1] += total1;
}

}  // namespace pulse
