// Stream compaction of a list of tensors: one parallel pass over all chunks of all tensors, then a copy of what changed.
//
// Traffic: source and target once, written where changed; each change is written to a slab and copied once more, which
// at a few per cent is small beside the pass. Output is sorted and does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "runner.h"
#include "state_digest.h"

namespace pulse {

constexpr int64_t kCompactChunk = 1 << 16;  // elements: a task; positions inside it fit 16 bits

class Compaction {
 public:
  Compaction(std::vector<CompactItem> items, CompactFn kernel, int value_bytes, bool keep_old)
      : items_(std::move(items)), kernel_(kernel), value_bytes_(value_bytes), keep_old_(keep_old) {}

  // Also take by how much every target's digest changes, under one key each, and, given a kernel, what it was. Needs
  // keep_old.
  void keep_digests(const std::vector<uint64_t>& keys, DigestFn kernel) {
    for (const uint64_t key : keys) digest_keys_.push_back(std::make_unique<DigestKey>(key));
    digests_ = std::vector<std::atomic<uint64_t>>(kDigestSums * keys.size());
    digest_kernel_ = kernel;
  }
  static constexpr int kDigestSums = 4;  // lanes of the digest before (0 without a kernel), lanes of its change
  uint64_t digest(size_t item, int sum) const { return digests_[kDigestSums * item + sum]; }

  // Returns false if memory for the changes ran out; every tensor is then as it was.
  bool run(Runner& runner, bool update) {
    for (size_t k = 0; k < items_.size(); ++k) {
      for (int64_t begin = 0; begin < items_[k].numel; begin += kCompactChunk) {
        pieces_.push_back({static_cast<int64_t>(k), begin, 0, {}, 0});
      }
    }
    slabs_.resize(runner.threads() < 1 ? 1 : runner.threads());
    std::atomic<bool> failed{false};
    runner.for_each(static_cast<int64_t>(pieces_.size()), [&](int worker, int64_t k) {
      if (failed.load(std::memory_order_relaxed)) return;
      Piece& piece = pieces_[k];
      const CompactItem& item = items_[piece.item];
      const int64_t end = item.numel < piece.begin + kCompactChunk ? item.numel : piece.begin + kCompactChunk;
      CompactSink sink;
      if (!reserve(slabs_[worker], end - piece.begin, &sink)) {
        failed = true;
        return;
      }
      sink.origin = piece.begin;
      piece.sink = sink;
      piece.count = digest_keys_.empty() ? kernel_(item, piece.begin, end, sink, update)
                                         : compact_and_digest(piece, end, update);
      slabs_[worker].back().used += piece.count;
    });
    totals_.assign(items_.size(), 0);
    for (Piece& piece : pieces_) {
      piece.at = totals_[piece.item];
      totals_[piece.item] += piece.count;
    }
    if (failed && update) undo();
    return !failed;
  }

  int64_t total(size_t item) const { return totals_[item]; }

  struct Output {
    void* indices;
    bool wide;  // int64 indices, else int32
    void* values;
    void* old_values;  // may be null
  };

  void write(Runner& runner, const std::vector<Output>& outputs) const {
    runner.for_each(static_cast<int64_t>(pieces_.size()), [&](int, int64_t k) {
      const Piece& piece = pieces_[k];
      if (piece.count == 0) return;
      const Output& out = outputs[piece.item];
      if (out.wide) {
        int64_t* indices = static_cast<int64_t*>(out.indices) + piece.at;
        for (int64_t j = 0; j < piece.count; ++j) indices[j] = piece.begin + piece.sink.positions[j];
      } else {
        int32_t* indices = static_cast<int32_t*>(out.indices) + piece.at;
        const int32_t begin = static_cast<int32_t>(piece.begin);
        for (int64_t j = 0; j < piece.count; ++j) indices[j] = begin + piece.sink.positions[j];
      }
      copy(out.values, piece.at, piece.sink.values, piece.count);
      if (out.old_values != nullptr) copy(out.old_values, piece.at, piece.sink.old_values, piece.count);
    });
  }

  // Puts the overwritten values back. Needs keep_old.
  void undo() const {
    for (const Piece& piece : pieces_) {
      auto* target = static_cast<uint8_t*>(items_[piece.item].target) + piece.begin * value_bytes_;
      const auto* old = static_cast<const uint8_t*>(piece.sink.old_values);
      for (int64_t j = 0; j < piece.count; ++j) {
        std::memcpy(target + piece.sink.positions[j] * static_cast<int64_t>(value_bytes_), old + j * value_bytes_,
                    value_bytes_);
      }
    }
  }

 private:
  struct Piece {
    int64_t item, begin, count;
    CompactSink sink;
    int64_t at;
  };

  // The digest brings the chunk into the L2 cache, where the comparison finds it.
  int64_t compact_and_digest(const Piece& piece, int64_t end, bool update) {
    const CompactItem& item = items_[piece.item];
    const DigestKey& key = *digest_keys_[piece.item];
    uint64_t sums[kDigestSums] = {0};
    if (digest_kernel_ != nullptr) {
      const auto* target = static_cast<const uint8_t*>(item.target) + piece.begin * value_bytes_;
      add_bytes(key, digest_kernel_, target, value_bytes_, end - piece.begin, piece.begin, sums);
    }
    const CompactSink& sink = piece.sink;
    const int64_t found = kernel_(item, piece.begin, end, sink, update);
    by_element_size(value_bytes_, [&](auto type) {
      const auto *old_values = static_cast<const decltype(type)*>(sink.old_values),
                 *values = static_cast<const decltype(type)*>(sink.values);
      constexpr int blocks = kCompactChunk / kDigestBlock;
      add_changes_near<blocks>(key, piece.begin, sink.positions, old_values, values, found, sums + 2);
    });
    for (int k = 0; k < kDigestSums; ++k) digests_[kDigestSums * piece.item + k] += sums[k];
    return found;
  }

  // Untouched pages of a slab cost nothing, so each holds many chunks at a few per cent and one at 100%.
  struct Slab {
    std::unique_ptr<uint16_t[]> positions;
    std::unique_ptr<uint8_t[]> values, old_values;
    int64_t used = 0;
  };
  static constexpr int64_t kSlab = 8 * kCompactChunk;

  bool reserve(std::vector<Slab>& slabs, int64_t room, CompactSink* sink) {
    if (slabs.empty() || slabs.back().used + room > kSlab) {
      Slab slab;
      slab.positions.reset(new (std::nothrow) uint16_t[kSlab]);
      slab.values.reset(new (std::nothrow) uint8_t[kSlab * value_bytes_]);
      if (keep_old_) slab.old_values.reset(new (std::nothrow) uint8_t[kSlab * value_bytes_]);
      if (!slab.positions || !slab.values || (keep_old_ && !slab.old_values)) return false;
      slabs.push_back(std::move(slab));
    }
    Slab& slab = slabs.back();
    const int64_t at = slab.used * value_bytes_;
    *sink = {0, slab.positions.get() + slab.used, slab.values.get() + at,
             keep_old_ ? slab.old_values.get() + at : nullptr};
    return true;
  }

  void copy(void* to, int64_t at, const void* from, int64_t count) const {
    std::memcpy(static_cast<uint8_t*>(to) + at * value_bytes_, from, count * value_bytes_);
  }

  std::vector<CompactItem> items_;
  CompactFn kernel_;
  int value_bytes_;
  bool keep_old_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<Slab>> slabs_;
  std::vector<int64_t> totals_;
  std::vector<std::unique_ptr<DigestKey>> digest_keys_;
  std::vector<std::atomic<uint64_t>> digests_;
  DigestFn digest_kernel_ = nullptr;
};

}  // namespace pulse
