// Packed indices (bits/index_block.h, docs/format.md) on the GPU: a warp a block of 256 positions, eight of them a tile.
//
// Many tensors are one launch over a table of int64 rows with the row of each tile beside it; a tensor without indices
// has one tile too, which writes or checks what there is of its blob.
#pragma once

#include <cstdint>

#include "../bits/index_block.h"
#include "block.h"

namespace pulse {

constexpr int kTileBlocks = kWarps;
constexpr int kPerLane = kIndexBlock / kLanes;

PULSE_HD int entries_of(uint64_t count, int64_t block) {  // of an index block: 256 but for the last, 0 behind it
  const int64_t left = static_cast<int64_t>(count) - block * kIndexBlock;
  return static_cast<int>(left < 0 ? 0 : left < kIndexBlock ? left : kIndexBlock);
}

// ---- pack ------------------------------------------------------------------------------------------------------------

struct PackRow {
  int64_t indices, wide, count, numel, first_tile;
  int64_t first_block;  // of this tensor among the blocks of all
  int64_t blob_at;      // where its blob begins among all, a multiple of 16
};
constexpr int kPackColumns = sizeof(PackRow) / 8;

PULSE_HD PackRow pack_row(const int64_t* table, const int32_t* tile_rows, int64_t tile) {
  const int64_t* row = table + kPackColumns * static_cast<int64_t>(tile_rows[tile]);
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6]};
}

PULSE_HD uint64_t position_at(const PackRow& row, int64_t i) {
  if (row.wide != 0) return read_only(memory<const uint64_t>(row.indices) + i);
  return static_cast<uint64_t>(static_cast<int64_t>(read_only(memory<const int32_t>(row.indices) + i)));
}

// Entry `slot` of the index block that begins at position `first` of the list. Out of order or negative, positions give
// entries of up to 64 bits: a blob that nobody reads, but one of the size that its widths tell.
PULSE_HD uint64_t entry_at(const PackRow& row, int64_t first, int slot) {
  return slot == 0 ? 0 : position_at(row, first + slot) - position_at(row, first + slot - 1) - 1;
}

// Pass one: the width of every block. Traffic: the indices once (each is asked for twice, by neighbouring lanes), a byte
// a block.
template <class Block>
PULSE_BODY void widths_tile(Block& block, const int64_t* table, const int32_t* tile_rows, int64_t tile,
                            uint8_t* widths) {
  const PackRow row = pack_row(table, tile_rows, tile);
  const int64_t first_block = (tile - row.first_tile) * kTileBlocks;
  typename Block::template Each<uint64_t> all;
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    const int used = entries_of(row.count, index_block);
    all[t] = 0;
    PULSE_UNROLL
    for (int k = 0; k < kPerLane; ++k) {
      const int slot = k * kLanes + lane_of(t);
      if (slot < used) all[t] |= entry_at(row, index_block * kIndexBlock, slot);
    }
  });
  typename Block::template Each<uint64_t> any = block.warp_or(all);
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    if (lane_of(t) == 0 && entries_of(row.count, index_block) > 0) {
      widths[row.first_block + index_block] = static_cast<uint8_t>(bit_width(any[t]));
    }
  });
}

struct EntriesShared {
  uint64_t entries[kWarps][kIndexBlock];
};

PULSE_HD void put_u64(uint32_t* words, uint64_t value) {
  words[0] = static_cast<uint32_t>(value);
  words[1] = static_cast<uint32_t>(value >> 32);
}

// Pass two. widths: what pass one left; ends: its running sum over all blocks of all tensors (int64).
// Traffic: the indices once more, the blobs once.
template <class Block>
PULSE_BODY void pack_tile(Block& block, EntriesShared& shared, const int64_t* table, const int32_t* tile_rows,
                          int64_t tile, const uint8_t* widths, const int64_t* ends, uint8_t* blobs) {
  const PackRow row = pack_row(table, tile_rows, tile);
  const int64_t first_block = (tile - row.first_tile) * kTileBlocks;
  const IndexTables tables = index_tables(row.count, row.numel);
  const auto blocks = static_cast<int64_t>(tables.blocks);
  const uint8_t* own_widths = widths + row.first_block;
  const int64_t* own_ends = ends + row.first_block;
  const int64_t before = row.first_block == 0 ? 0 : ends[row.first_block - 1];
  auto* blob = reinterpret_cast<uint32_t*>(blobs + row.blob_at);
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    const int used = entries_of(row.count, index_block);
    if (used == 0) return;
    PULSE_UNROLL
    for (int k = 0; k < kPerLane; ++k) {
      const int slot = k * kLanes + lane_of(t);
      if (slot < used) shared.entries[warp_of(t)][slot] = entry_at(row, index_block * kIndexBlock, slot);
    }
  });
  block.barrier();
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    const int used = entries_of(row.count, index_block);
    if (used > 0) {
      const int width = own_widths[index_block];
      const int64_t offset = own_ends[index_block] - width - before;
      uint32_t* words = blob + tables.payload_at / 4 + 8 * offset;
      const int count = static_cast<int>(block_bytes(used, width) / 4);
      for (int k = lane_of(t); k < count; k += kLanes) words[k] = entries_word(shared.entries[warp_of(t)], used, width, k);
      if (lane_of(t) == 0) {
        const uint64_t base = position_at(row, index_block * kIndexBlock);
        uint32_t* bases = blob + tables.bases_at / 4;
        if (tables.base_bytes == 4) {
          bases[index_block] = static_cast<uint32_t>(base);
        } else {
          put_u64(bases + 2 * index_block, base);
        }
        blob[tables.offsets_at / 4 + index_block] = static_cast<uint32_t>(offset);
      }
    }
    if (t < kTileBlocks / 4 && first_block + 4 * t < blocks) {  // four widths, or what there is of them and zeros
      uint32_t four = 0;
      for (int k = 0; k < 4; ++k) {
        const int64_t at = first_block + 4 * t + k;
        if (at < blocks) four |= static_cast<uint32_t>(own_widths[at]) << (8 * k);
      }
      blob[(tables.widths_at + first_block) / 4 + t] = four;
    }
    if (t == kThreads - 1 && first_block == 0) {
      const int64_t last = blocks - 1;
      const uint64_t payload = blocks == 0 ? 0
                                           : static_cast<uint64_t>(own_ends[last] - own_widths[last] - before) * 32 +
                                                 block_bytes(entries_of(row.count, last), own_widths[last]);
      blob[0] = kIndexMagic;
      blob[1] = 1u | static_cast<uint32_t>(tables.base_bytes) << 8;
      put_u64(blob + 2, row.numel);
      put_u64(blob + 4, row.count);
      put_u64(blob + 6, payload);
    }
  });
}

// ---- unpack ----------------------------------------------------------------------------------------------------------

struct UnpackRow {
  int64_t blob;  // aligned to 16 bytes
  int64_t count, numel, payload_bytes;  // as the host read them, checked against each other and the blob's size
  int64_t first_tile;
  int64_t out_at, out_size;  // where its results begin, in bytes, and the size of one; 0: it has none
  int64_t weight, values;    // addresses; exchange only
  int64_t value_size;
};
constexpr int kUnpackColumns = sizeof(UnpackRow) / 8;

PULSE_HD UnpackRow unpack_row(const int64_t* table, int64_t number) {
  const int64_t* row = table + kUnpackColumns * number;
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9]};
}

// What is wrong with a blob, the gravest first: errors[row] is the least of class << 56 | block.
enum UnpackError : int64_t { kBadWidth, kBadOffset, kBadPad, kBadPayload, kBadBlock };

struct ErrorSink {
  int64_t* of_row;  // null: the blob was found good before
  template <class Block>
  PULSE_BODY void report(Block& block, UnpackError error, int64_t index_block) const {
    if (of_row != nullptr) block.atomic_min(of_row, static_cast<int64_t>(error) << 56 | index_block);
  }
};

// Sums that stop at 2^62, over every position: entries of 63 bits cannot wrap them. Associative.
struct CappedSum {
  PULSE_HD uint64_t operator()(uint64_t a, uint64_t b) const {
    const uint64_t sum = a + b;  // of two numbers up to 2^62
    return sum < kMaxNumel ? sum : kMaxNumel;
  }
};

PULSE_HD uint64_t base_at(const uint32_t* blob, const IndexTables& tables, int64_t index_block) {
  const uint32_t* bases = blob + tables.bases_at / 4;
  if (tables.base_bytes == 4) return read_only(bases + index_block);
  const uint32_t *low = bases + 2 * index_block, *high = low + 1;
  return read_only(low) | static_cast<uint64_t>(read_only(high)) << 32;
}

// The checks that need only a block's own row of the tables and the next one's. The offsets, each checked against the
// one before, are thereby the running sum of all widths before it. Returns the width, or -1 where the block cannot be
// read safely.
template <class Block>
PULSE_BODY int checked_width(Block& block, const UnpackRow& row, const IndexTables& tables, int64_t index_block,
                             const ErrorSink& errors) {
  const auto* blob = memory<const uint32_t>(row.blob);
  const auto* widths = memory<const uint8_t>(row.blob) + tables.widths_at;
  const uint32_t* offsets = blob + tables.offsets_at / 4;
  const auto last = static_cast<int64_t>(tables.blocks) - 1;
  const int width = read_only(widths + index_block);
  const uint64_t offset = read_only(offsets + index_block);
  bool good = true;
  if (width > kMaxWidth) {
    errors.report(block, kBadWidth, index_block);
    good = false;
  }
  if (index_block == 0 && offset != 0) errors.report(block, kBadOffset, 0);
  if (index_block < last && offset + width != read_only(offsets + index_block + 1)) {
    errors.report(block, kBadOffset, index_block + 1);
  }
  const uint64_t end = 32 * offset + block_bytes(entries_of(row.count, index_block), width);
  const auto payload = static_cast<uint64_t>(row.payload_bytes);
  if (index_block == last && end != payload) errors.report(block, kBadPayload, index_block);
  if (index_block == last) {
    for (uint64_t at = tables.widths_at + tables.blocks; at < tables.payload_at; ++at) {
      if (read_only(memory<const uint8_t>(row.blob) + at) != 0) errors.report(block, kBadPad, index_block);
    }
  }
  return good && end <= payload ? width : -1;
}

// The positions of a tile's blocks into shared.entries, all of them checked. Where a block is bad its positions mean
// nothing; none of them is read or written outside.
template <class Block>
PULSE_BODY void decode_tile(Block& block, EntriesShared& shared, const UnpackRow& row, int64_t first_block,
                            const ErrorSink& errors) {
  const IndexTables tables = index_tables(row.count, row.numel);
  const auto* blob = memory<const uint32_t>(row.blob);
  const auto blocks = static_cast<int64_t>(tables.blocks);
  struct Steps {
    uint64_t own[kPerLane];
  };
  typename Block::template Each<Steps> steps;  // eight entries in a row, as distances
  typename Block::template Each<uint64_t> sum;
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    const int used = entries_of(row.count, index_block), lane = lane_of(t);
    if (t == 0 && blocks == 0 && row.payload_bytes != 0) errors.report(block, kBadPayload, 0);
    sum[t] = 0;
    PULSE_UNROLL
    for (int k = 0; k < kPerLane; ++k) steps[t].own[k] = 0;
    if (used == 0) return;
    const ErrorSink first_lane{lane == 0 ? errors.of_row : nullptr};
    const int width = checked_width(block, row, tables, index_block, first_lane);
    if (width < 0) return;
    const uint64_t offset = read_only(blob + tables.offsets_at / 4 + index_block);
    const uint32_t* words = blob + tables.payload_at / 4 + 8 * offset;
    const auto word = [words](int k) { return read_only(words + k); };
    PULSE_UNROLL
    for (int k = 0; k < kPerLane; ++k) {
      const int slot = lane * kPerLane + k;
      if (slot >= used) continue;
      const uint64_t entry = get_entry(word, slot, width);
      if (slot > 0) steps[t].own[k] = CappedSum()(entry < kMaxNumel ? entry : kMaxNumel, 1);
      sum[t] = CappedSum()(sum[t], steps[t].own[k]);
    }
    if (lane == 0) {  // bits behind the last entry are zero: one blob a set of indices
      const int stray = used * width % 32;
      const bool bad = stray != 0 && word(used * width / 32) >> stray != 0;
      if (bad || get_entry(word, 0, width) != 0) errors.report(block, kBadBlock, index_block);
    }
  });
  block.warp_exclusive_scan(sum, CappedSum());
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t);
    const int used = entries_of(row.count, index_block), lane = lane_of(t);
    if (used == 0) return;
    const uint64_t base = base_at(blob, tables, index_block), numel = row.numel;
    uint64_t position = CappedSum()(base < numel ? base : numel, sum[t]);
    PULSE_UNROLL
    for (int k = 0; k < kPerLane; ++k) {
      position = CappedSum()(position, steps[t].own[k]);
      shared.entries[warp_of(t)][lane * kPerLane + k] = position;
    }
    if (lane != (used - 1) / kPerLane) return;
    // Positions only grow within a block: the last, which no step of this lane follows, bounds them all, and the next
    // block starts behind it.
    if (position >= numel) {
      errors.report(block, kBadBlock, index_block);
    } else if (index_block + 1 < blocks && base_at(blob, tables, index_block + 1) <= position) {
      errors.report(block, kBadBlock, index_block + 1);
    }
  });
  block.barrier();
}

// Checks a tile of a blob that nobody vouches for and, with `out`, unpacks it: int32 or int64 by the row's out_size.
// Traffic: the blob once, the indices once.
template <class Block>
PULSE_BODY void unpack_tile(Block& block, EntriesShared& shared, const int64_t* table, const int32_t* tile_rows,
                            int64_t tile, int64_t* errors, uint8_t* out) {
  const int64_t number = tile_rows[tile];
  const UnpackRow row = unpack_row(table, number);
  const int64_t first_block = (tile - row.first_tile) * kTileBlocks;
  decode_tile(block, shared, row, first_block, ErrorSink{errors + number});
  if (out == nullptr) return;
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t), first = index_block * kIndexBlock;
    const int used = entries_of(row.count, index_block);
    for (int slot = lane_of(t); slot < used; slot += kLanes) {
      const uint64_t position = shared.entries[warp_of(t)][slot];
      if (row.out_size == 8) {
        reinterpret_cast<int64_t*>(out + row.out_at)[first + slot] = static_cast<int64_t>(position);
      } else {
        reinterpret_cast<int32_t*>(out + row.out_at)[first + slot] = static_cast<int32_t>(position);
      }
    }
  });
}

template <class Value>
PULSE_HD void exchange_one(const UnpackRow& row, uint64_t position, int64_t k, uint8_t* old_values) {
  Value* weight = memory<Value>(row.weight) + position;
  if (old_values != nullptr) reinterpret_cast<Value*>(old_values + row.out_at)[k] = *weight;
  *weight = read_only(memory<const Value>(row.values) + k);
}

// Unpacks and scatters at once, from blobs that unpack_tile found good; positions are nowhere stored. old_values: null,
// or where what was overwritten goes.
// Traffic: the blob and the values once, a sector of the weight read and written a change, the old values written.
template <class Block>
PULSE_BODY void exchange_tile(Block& block, EntriesShared& shared, const int64_t* table, const int32_t* tile_rows,
                              int64_t tile, uint8_t* old_values) {
  const UnpackRow row = unpack_row(table, tile_rows[tile]);
  const int64_t first_block = (tile - row.first_tile) * kTileBlocks;
  decode_tile(block, shared, row, first_block, ErrorSink{nullptr});
  block.each([&](int t) {
    const int64_t index_block = first_block + warp_of(t), first = index_block * kIndexBlock;
    const int used = entries_of(row.count, index_block);
    for (int slot = lane_of(t); slot < used; slot += kLanes) {
      const uint64_t position = shared.entries[warp_of(t)][slot];
      if (position >= static_cast<uint64_t>(row.numel)) continue;  // only if the blob was changed since
      switch (row.value_size) {
        case 1: exchange_one<uint8_t>(row, position, first + slot, old_values); break;
        case 2: exchange_one<uint16_t>(row, position, first + slot, old_values); break;
        case 4: exchange_one<uint32_t>(row, position, first + slot, old_values); break;
        default: exchange_one<uint64_t>(row, position, first + slot, old_values); break;
      }
    }
  });
}

}  // namespace pulse
