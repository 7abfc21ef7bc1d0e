// Compaction in two passes over a bitmask, one block a tile of 8192 elements: mark, then, after a running sum of the
// counts, collect. The same buffers as the Triton kernels have, so that either can stand in for the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "../bits/residual.h"
#include "../bits/rounding.h"
#include "block.h"

namespace pulse {

constexpr int kTile = 8192;
constexpr int kTileWords = kTile / 32;
constexpr int kWarpElements = kTile / kWarps;
static_assert(kTileWords == kThreads, "a word a thread");

// Which tensors a launch serves: a table of int64 rows (source, target, third, numel, first tile) with the row of each
// tile, or, where table is null, the one row given by value, which a CUDA graph can capture.
struct CompactJob {
  const int64_t* table;
  const int32_t* tile_rows;
  int64_t row[5];
};

struct CompactRow {
  int64_t source, target, third, numel, first_tile;
};

PULSE_HD CompactRow compact_row(const CompactJob& job, int64_t tile) {
  if (job.table == nullptr) return {job.row[0], job.row[1], job.row[2], job.row[3], job.row[4]};
  const int64_t* row = job.table + 5 * static_cast<int64_t>(job.tile_rows[tile]);
  return {row[0], row[1], row[2], row[3], row[4]};
}

// ---- comparisons: what an element becomes, and whether that changes anything -----------------------------------------

template <uint16_t (*Round)(uint32_t)>
struct GateChange {
  using Source = uint32_t;
  using Target = uint16_t;
  static constexpr bool kHasThird = false, kWritable = true;
  static PULSE_HD Target value(Source master, Target, uint32_t) { return Round(master); }
  static PULSE_HD bool changed(Source master, Target weight, uint32_t) { return Round(master) != weight; }
};

template <class T>
struct DiffChange {
  using Source = T;
  using Target = T;
  static constexpr bool kHasThird = false, kWritable = true;
  static PULSE_HD Target value(Source fresh, Target, uint32_t) { return fresh; }
  static PULSE_HD bool changed(Source fresh, Target stale, uint32_t) { return fresh != stale; }
};

template <uint16_t (*Round)(uint32_t)>
struct ResidualChange {
  using Source = uint32_t;
  using Target = uint32_t;
  static constexpr bool kHasThird = true, kWritable = false;
  static PULSE_HD Target value(Source theta, Target local, uint32_t residual) {
    return pending_bits(float_of(theta), float_of(local), float_of(residual));
  }
  static PULSE_HD bool changed(Source theta, Target local, uint32_t residual) {
    return residual_fires<Round>(float_of(theta), value(theta, local, residual));
  }
};

// ---- mark ------------------------------------------------------------------------------------------------------------

// N elements at an address aligned to all of them, N * sizeof(T) being up to 16: one load of what nobody writes.
template <class T, int N>
struct Lot {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "one load");
  uint32_t words[kWords];

  static PULSE_HD Lot load(const T* from) {
    Lot lot;
#if defined(__CUDA_ARCH__)
    if constexpr (kWords == 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      lot.words[0] = v.x, lot.words[1] = v.y, lot.words[2] = v.z, lot.words[3] = v.w;
    } else if constexpr (kWords == 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
      lot.words[0] = v.x, lot.words[1] = v.y;
    } else {
      lot.words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
#else
    memcpy(lot.words, from, sizeof lot.words);
#endif
    return lot;
  }
  PULSE_HD T get(int k) const {  // k is known when the loop around it is unrolled
    if constexpr (sizeof(T) == 8) {
      return static_cast<T>(words[2 * k]) | static_cast<T>(words[2 * k + 1]) << 32;
    } else {
      constexpr int per_word = 4 / static_cast<int>(sizeof(T));
      return static_cast<T>(words[k / per_word] >> (k % per_word * 8 * static_cast<int>(sizeof(T))));
    }
  }
};

// The elements a lane takes at a time: 16 bytes of the widest input, so that a warp's request is contiguous.
template <class Change>
constexpr int kLot = 16 / static_cast<int>(sizeof(typename Change::Source));

template <class Change>
PULSE_HD bool all_aligned(const CompactRow& row) {
  constexpr int64_t target_bytes = kLot<Change> * static_cast<int64_t>(sizeof(typename Change::Target));
  return row.source % 16 == 0 && row.target % target_bytes == 0 && row.third % 16 == 0;
}

// Elements [begin + step * 32 * E + lane * E, ... + E) for every step of a warp's 1024: E bits each, step by step from
// the lowest. E elements a lane and step, 32 / E steps.
template <class Change>
PULSE_HD uint32_t wide_bits(const CompactRow& row, int64_t begin, int lane) {
  constexpr int E = kLot<Change>, kSteps = 32 / E, kAtOnce = kSteps < 4 ? kSteps : 4;
  using Source = typename Change::Source;
  using Target = typename Change::Target;
  const Source* source = memory<const Source>(row.source) + begin + lane * E;
  const Target* target = memory<const Target>(row.target) + begin + lane * E;
  const uint32_t* third = memory<const uint32_t>(row.third);
  if constexpr (Change::kHasThird) third += begin + lane * E;
  uint32_t bits = 0;
  PULSE_UNROLL
  for (int first = 0; first < kSteps; first += kAtOnce) {
    Lot<Source, E> sources[kAtOnce];
    Lot<Target, E> targets[kAtOnce];
    Lot<uint32_t, 4> thirds[kAtOnce];
    PULSE_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {  // all loads before the first use
      sources[k] = Lot<Source, E>::load(source + (first + k) * 32 * E);
      targets[k] = Lot<Target, E>::load(target + (first + k) * 32 * E);
      if constexpr (Change::kHasThird) thirds[k] = Lot<uint32_t, 4>::load(third + (first + k) * 32 * E);
    }
    PULSE_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      PULSE_UNROLL
      for (int e = 0; e < E; ++e) {
        uint32_t residual = 0;
        if constexpr (Change::kHasThird) residual = thirds[k].get(e);
        const bool changed = Change::changed(sources[k].get(e), targets[k].get(e), residual);
        bits |= static_cast<uint32_t>(changed) << ((first + k) * E + e);
      }
    }
  }
  return bits;
}

template <class Change>
PULSE_HD bool changed_at(const CompactRow& row, int64_t i) {
  uint32_t residual = 0;
  if constexpr (Change::kHasThird) residual = read_only(memory<const uint32_t>(row.third) + i);
  return Change::changed(read_only(memory<const typename Change::Source>(row.source) + i),
                         read_only(memory<const typename Change::Target>(row.target) + i), residual);
}

// Every other run of `width` bits, the lowest first.
PULSE_HD uint32_t even_fields(int width) {
  return width == 16 ? 0x0000FFFFu : width == 8 ? 0x00FF00FFu : width == 4 ? 0x0F0F0F0Fu : 0x33333333u;
}

// Pass one of a tile. mask: bit k of word j for element 32 j + k of the tile, 0 behind the tensor's end.
// Traffic: each element of the inputs once (6 bytes for the BF16 gate, 12 for the residual gate), one bit each and 4
// bytes a tile written. Whole tiles of aligned tensors are read 16 bytes a lane, contiguous over the warp.
template <class Change, class Block>
PULSE_BODY void mark_tile(Block& block, const CompactJob& job, int64_t tile, uint32_t* mask, int32_t* counts) {
  constexpr int E = kLot<Change>, kSteps = 32 / E;
  const CompactRow row = compact_row(job, tile);
  const int64_t begin = (tile - row.first_tile) * kTile, left = row.numel - begin;
  typename Block::template Each<uint32_t> word;
  typename Block::template Each<int> count;
  if (left >= kTile && all_aligned<Change>(row)) {
    block.each([&](int t) { word[t] = wide_bits<Change>(row, begin + warp_of(t) * kWarpElements, lane_of(t)); });
    // Lanes in groups of kSteps hold kSteps fields of E bits: transposed, a lane has one step's bits of its group, which
    // are 32 elements in a row.
    PULSE_UNROLL
    for (int k = kSteps / 2; k > 0; k /= 2) {
      typename Block::template Each<uint32_t> other = block.exchanged(word, k);
      block.each([&](int t) {
        const uint32_t even = even_fields(k * E);
        word[t] = (t & k) == 0 ? (word[t] & even) | (other[t] & even) << (k * E)
                               : (word[t] & ~even) | (other[t] & ~even) >> (k * E);
      });
    }
    block.each([&](int t) {
      const int step = lane_of(t) % kSteps, group = lane_of(t) / kSteps;
      mask[tile * kTileWords + warp_of(t) * 32 + step * E + group] = word[t];
    });
  } else {
    block.each([&](int t) { word[t] = 0; });
    for (int k = 0; k < 32; ++k) {
      typename Block::template Each<uint32_t> bit;
      block.each([&](int t) {
        const int64_t at = warp_of(t) * kWarpElements + k * 32 + lane_of(t);
        bit[t] = at < left && changed_at<Change>(row, begin + at);
      });
      typename Block::template Each<uint32_t> bits = block.ballot(bit);
      block.each([&](int t) {
        if (lane_of(t) == k) word[t] = bits[t];
      });
    }
    block.each([&](int t) { mask[tile * kTileWords + t] = word[t]; });
  }
  block.each([&](int t) { count[t] = popcount(word[t]); });
  typename Block::template Each<int> total = block.sum(count);
  block.each([&](int t) {
    if (t == 0) counts[tile] = total[t];
  });
}

// ---- collect ---------------------------------------------------------------------------------------------------------

struct CollectShared {
  uint16_t places[kTile];  // of the changed elements within the tile
};

// Where changes go. ends: running sum of the counts. old_values may be null.
struct CollectOutput {
  const int64_t* ends;
  int64_t tiles, capacity;
  void* indices;
  bool wide;
  void* values;
  void* old_values;
  bool update;
};

// Pass two of a tile: writes nothing where all changes together exceed the capacity.
// Traffic: a bit an element read; a change costs its position, value and old value written and a sector of each input,
// with update also one of the target written; changes that are neighbours share them.
template <class Change, class Block>
PULSE_BODY void collect_tile(Block& block, CollectShared& shared, const CompactJob& job, int64_t tile,
                             const uint32_t* mask, const CollectOutput& out) {
  using Target = typename Change::Target;
  if (out.ends[out.tiles - 1] > out.capacity) return;
  const int64_t start = tile == 0 ? 0 : out.ends[tile - 1];
  const int found = static_cast<int>(out.ends[tile] - start);
  if (found == 0) return;
  const CompactRow row = compact_row(job, tile);
  const int64_t begin = (tile - row.first_tile) * kTile;
  typename Block::template Each<uint32_t> word;
  typename Block::template Each<int> place;
  block.each([&](int t) {
    word[t] = mask[tile * kTileWords + t];
    place[t] = popcount(word[t]);
  });
  block.exclusive_sum(place);
  block.each([&](int t) {
    int at = place[t];
    for (uint32_t bits = word[t]; bits != 0; bits &= bits - 1) {
      shared.places[at++] = static_cast<uint16_t>(t * 32 + lowest_set(bits));
    }
  });
  block.barrier();
  block.each([&](int t) {
    for (int k = t; k < found; k += kThreads) {
      const int64_t i = begin + shared.places[k], to = start + k;
      Target* target = memory<Target>(row.target) + i;
      uint32_t residual = 0;
      if constexpr (Change::kHasThird) residual = read_only(memory<const uint32_t>(row.third) + i);
      const Target old = *target;
      const Target fresh = Change::value(read_only(memory<const typename Change::Source>(row.source) + i), old, residual);
      if (out.wide) {
        static_cast<int64_t*>(out.indices)[to] = i;
      } else {
        static_cast<int32_t*>(out.indices)[to] = static_cast<int32_t>(i);
      }
      static_cast<Target*>(out.values)[to] = fresh;
      if (out.old_values != nullptr) static_cast<Target*>(out.old_values)[to] = old;
      if constexpr (Change::kWritable) {
        if (out.update) *target = fresh;
      }
    }
  });
}

}  // namespace pulse
