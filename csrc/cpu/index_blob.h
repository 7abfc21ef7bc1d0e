// pack_indices and unpack_indices over the block layout of bits/index_block.h, parallel over blocks.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../bits/index_block.h"
#include "kernels.h"
#include "runner.h"

namespace pulse {

constexpr int64_t kBlocksPerTask = 256;

inline bool gaps_of(const KernelTable& kernels, const int32_t* i, int n, uint32_t* gaps, uint32_t* all) {
  return kernels.gaps32(i, n, gaps, all);
}
inline bool gaps_of(const KernelTable& kernels, const int64_t* i, int n, uint32_t* gaps, uint32_t* all) {
  return kernels.gaps64(i, n, gaps, all);
}

// Two steps, so that the caller can allocate: widths (one pass over the indices), then the bytes.
// Traffic: the indices twice, the blob once.
template <class Index>
class Packer {
 public:
  Packer(const KernelTable& kernels, const Index* indices, int64_t count, uint64_t numel)
      : kernels_(kernels), indices_(indices), count_(count), numel_(numel), tables_(index_tables(count, numel)) {}

  uint64_t measure(Runner& runner) {
    widths_.resize(tables_.blocks);
    offsets_.resize(tables_.blocks);
    runner.for_each(tasks(), [&](int, int64_t task) {
      uint32_t gaps[kIndexBlock], all;
      for (int64_t b = task * kBlocksPerTask; b < last_block(task); ++b) {
        const Index* block = indices_ + b * kIndexBlock;
        widths_[b] = gaps_of(kernels_, block, used(b), gaps, &all) ? bit_width(all) : wide_width(block, used(b));
      }
    });
    uint64_t sum = 0;
    for (uint64_t b = 0; b < tables_.blocks; ++b) {
      offsets_[b] = static_cast<uint32_t>(sum);
      sum += widths_[b];
    }
    offsets_fit_ = tables_.blocks == 0 || sum - widths_[tables_.blocks - 1] <= UINT32_MAX;
    const uint64_t last = tables_.blocks - 1;
    payload_ = tables_.blocks == 0 ? 0 : (sum - widths_[last]) * 32 + block_bytes(used(last), widths_[last]);
    return tables_.payload_at + payload_;
  }

  bool offsets_fit() const { return offsets_fit_; }

  void write(Runner& runner, uint8_t* blob) const {
    const IndexHeader header{kIndexMagic, 1, static_cast<uint8_t>(tables_.base_bytes), 0, numel_,
                             static_cast<uint64_t>(count_), payload_};
    std::memcpy(blob, &header, sizeof header);
    if (tables_.blocks == 0) return;
    std::memcpy(blob + tables_.offsets_at, offsets_.data(), 4 * tables_.blocks);
    std::memset(blob + tables_.widths_at, 0, tables_.payload_at - tables_.widths_at);
    std::memcpy(blob + tables_.widths_at, widths_.data(), tables_.blocks);
    runner.for_each(tasks(), [&](int, int64_t task) {
      uint32_t gaps[kIndexBlock], all;
      for (int64_t b = task * kBlocksPerTask; b < last_block(task); ++b) {
        const Index* block = indices_ + b * kIndexBlock;
        const uint64_t base = static_cast<uint64_t>(block[0]);
        std::memcpy(blob + tables_.bases_at + b * tables_.base_bytes, &base, tables_.base_bytes);
        uint8_t* words = blob + tables_.payload_at + uint64_t{32} * offsets_[b];
        const int n = used(b), width = widths_[b];
        if (n == kIndexBlock && width <= 32) {
          gaps_of(kernels_, block, n, gaps, &all);
          pack_by_width[width](gaps, words);
        } else {
          std::memset(words, 0, block_bytes(n, width));
          for (int k = 1; k < n; ++k) put_gap(words, k, width, gap(block, k));
        }
      }
    });
  }

 private:
  static uint64_t gap(const Index* block, int k) {
    return static_cast<uint64_t>(block[k]) - static_cast<uint64_t>(block[k - 1]) - 1;
  }
  static int wide_width(const Index* block, int n) {
    uint64_t all = 0;
    for (int k = 1; k < n; ++k) all |= gap(block, k);
    return bit_width(all);
  }
  int64_t tasks() const { return (tables_.blocks + kBlocksPerTask - 1) / kBlocksPerTask; }
  int64_t last_block(int64_t task) const {
    const int64_t end = (task + 1) * kBlocksPerTask, blocks = tables_.blocks;
    return end < blocks ? end : blocks;
  }
  int used(int64_t block) const {
    const int64_t left = count_ - block * kIndexBlock;
    return static_cast<int>(left < kIndexBlock ? left : kIndexBlock);
  }

  const KernelTable& kernels_;
  const Index* indices_;
  int64_t count_;
  uint64_t numel_;
  IndexTables tables_;
  std::vector<uint8_t> widths_;
  std::vector<uint32_t> offsets_;
  uint64_t payload_ = 0;
  bool offsets_fit_ = true;
};

// Reads a blob that nobody vouches for. `error` says what is wrong; empty when all is well.
class Unpacker {
 public:
  Unpacker(const uint8_t* blob, uint64_t size) : blob_(blob), error_(check(size)) {}

  const std::string& error() const { return error_; }
  uint64_t count() const { return header_.count; }
  uint64_t numel() const { return header_.numel; }

  // Traffic: the blob once, the indices once.
  template <class Index>
  void unpack(Runner& runner, Index* indices) {
    std::atomic<int64_t> bad{-1};
    const int64_t tasks = (tables_.blocks + kBlocksPerTask - 1) / kBlocksPerTask;
    runner.for_each(tasks, [&](int, int64_t task) {
      const int64_t blocks = tables_.blocks, end = (task + 1) * kBlocksPerTask;
      for (int64_t b = task * kBlocksPerTask; b < (end < blocks ? end : blocks); ++b) {
        if (!unpack_one(b, indices + b * kIndexBlock)) bad = b;
      }
    });
    for (uint64_t b = 1; b < tables_.blocks && bad < 0; ++b) {
      if (indices[b * kIndexBlock] <= indices[b * kIndexBlock - 1]) bad = b;
    }
    if (bad >= 0) error_ = "block " + std::to_string(bad.load()) + " has positions out of range or order, or stray bits";
  }

 private:
  std::string check(uint64_t size) {
    if (size < kHeaderBytes) return "too short for a header";
    std::memcpy(&header_, blob_, sizeof header_);
    if (header_.magic != kIndexMagic || header_.version != 1 || header_.zero != 0) return "not a version 1 header";
    if (header_.numel > kMaxNumel || header_.count > header_.numel) return "count or numel out of range";
    tables_ = index_tables(header_.count, header_.numel);
    if (header_.base_bytes != tables_.base_bytes) return "wrong base size for its numel";
    if (tables_.payload_at > size || size - tables_.payload_at != header_.payload_bytes) return "sizes disagree";
    uint64_t sum = 0;
    for (uint64_t b = 0; b < tables_.blocks; ++b) {
      if (width(b) > kMaxWidth) return "a block width over 63";
      if (load_word(blob_ + tables_.offsets_at, b) != sum) return "offsets are not the running sum of widths";
      if (b + 1 < tables_.blocks) sum += width(b);
    }
    for (uint64_t at = tables_.widths_at + tables_.blocks; at < tables_.payload_at; ++at) {
      if (blob_[at] != 0) return "a non-zero pad byte";
    }
    const uint64_t last = tables_.blocks - 1;
    const uint64_t payload = tables_.blocks == 0 ? 0 : sum * 32 + block_bytes(used(last), width(last));
    if (payload != header_.payload_bytes) return "the payload is not what the widths need";
    return "";
  }

  template <class Index>
  bool unpack_one(uint64_t b, Index* out) const {
    const int n = used(b), w = width(b);
    const uint8_t* words = blob_ + tables_.payload_at + uint64_t{32} * load_word(blob_ + tables_.offsets_at, b);
    uint64_t position = 0;
    std::memcpy(&position, blob_ + tables_.bases_at + b * tables_.base_bytes, tables_.base_bytes);
    if (position >= header_.numel) return false;
    if (n == kIndexBlock && w <= 32) {
      // 256 gaps under 2^32 cannot wrap 64 bits, so the last position bounds them all.
      return get_gap(words, 0, w) == 0 && unpack_full(words, w, position, out) < header_.numel;
    }
    if (get_gap(words, 0, w) != 0) return false;
    out[0] = static_cast<Index>(position);
    for (int k = 1; k < n; ++k) {
      const uint64_t gap = get_gap(words, k, w);
      if (gap >= header_.numel - position - 1) return false;  // the next position would not be below numel
      position += gap + 1;
      out[k] = static_cast<Index>(position);
    }
    // Bits behind the last entry are zero: one blob a set of indices.
    const uint64_t bits = block_bytes(n, w) * 8;
    for (uint64_t bit = static_cast<uint64_t>(n) * w; bit < bits; ++bit) {
      if (load_word(words, bit / 32) >> (bit % 32) & 1) return false;
    }
    return true;
  }
  static uint64_t unpack_full(const uint8_t* words, int width, uint64_t base, int32_t* out) {
    return unpack32_by_width[width](words, base, out);
  }
  static uint64_t unpack_full(const uint8_t* words, int width, uint64_t base, int64_t* out) {
    return unpack64_by_width[width](words, base, out);
  }
  int width(uint64_t b) const { return blob_[tables_.widths_at + b]; }
  int used(uint64_t b) const {
    const uint64_t left = header_.count - b * kIndexBlock;
    return static_cast<int>(left < kIndexBlock ? left : kIndexBlock);
  }

  const uint8_t* blob_;
  IndexHeader header_{};
  IndexTables tables_{};
  std::string error_;
};

}  // namespace pulse
