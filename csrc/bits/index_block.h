// The packed index layout (docs/format.md): blocks of 256 strictly increasing positions.
//
// A block stores its first position (base) and, for every entry, the gap to the one before it less one, in `width`
// bits; entry 0 stores 0. A full block takes 32 * width bytes, so a block's offset is the sum of the widths before it,
// in units of 32 bytes. Blocks depend on nothing but their own (base, offset, width): any one can be packed, unpacked
// or skipped alone, by one CPU core or one CUDA warp. An outlier widens its own block only.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace pulse {

constexpr int kIndexBlock = 256;
constexpr int kHeaderBytes = 32;
constexpr int kMaxWidth = 63;
constexpr uint32_t kIndexMagic = 0x58494B50u;  // "PKIX"
constexpr uint64_t kMaxNumel = 1ull << 62;

struct IndexHeader {  // the first 32 bytes, little-endian
  uint32_t magic;
  uint8_t version;
  uint8_t base_bytes;
  uint16_t zero;
  uint64_t numel;
  uint64_t count;
  uint64_t payload_bytes;
};
static_assert(sizeof(IndexHeader) == kHeaderBytes, "the header is 32 bytes");

// Where the tables of a blob lie. bases[blocks] of base_bytes each, offsets[blocks] u32, widths[blocks] u8 padded to 4.
struct IndexTables {
  uint64_t blocks, bases_at, offsets_at, widths_at, payload_at;
  int base_bytes;
};

PULSE_HD IndexTables index_tables(uint64_t count, uint64_t numel) {
  IndexTables t;
  t.blocks = (count + kIndexBlock - 1) / kIndexBlock;
  t.base_bytes = numel <= (1ull << 32) ? 4 : 8;
  t.bases_at = kHeaderBytes;
  t.offsets_at = t.bases_at + t.blocks * t.base_bytes;
  t.widths_at = t.offsets_at + t.blocks * 4;
  t.payload_at = t.widths_at + (t.blocks + 3) / 4 * 4;
  return t;
}

PULSE_HD uint64_t block_bytes(int used, int width) { return (static_cast<uint64_t>(used) * width + 31) / 32 * 4; }

PULSE_HD int bit_width(uint64_t value) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(static_cast<long long>(value));
#else
  return value == 0 ? 0 : 64 - __builtin_clzll(value);
#endif
}

// The lowest `width` bits set, up to all 64.
PULSE_HD uint64_t low_bits(int width) { return width == 0 ? 0 : ~0ull >> (64 - width); }

PULSE_HD uint32_t load_word(const uint8_t* words, uint64_t k) {
  uint32_t word;
  memcpy(&word, words + 4 * k, 4);
  return word;
}

// Entry `slot` of a block whose payload starts at `words`: what one CUDA thread reads. Touches no byte after the
// block's own words.
PULSE_HD uint64_t get_gap(const uint8_t* words, int slot, int width) {
  if (width == 0) return 0;
  const uint64_t bit = static_cast<uint64_t>(slot) * width;
  const uint64_t first = bit / 32, last = (bit + width - 1) / 32;
  const int shift = static_cast<int>(bit % 32);
  uint64_t value = load_word(words, first) >> shift;
  int have = 32 - shift;
  for (uint64_t k = first + 1; k <= last; ++k, have += 32) value |= static_cast<uint64_t>(load_word(words, k)) << have;
  return width == 64 ? value : value & ((1ull << width) - 1);
}

// The same from aligned words, of which at most three hold an entry; read(k) gives word k.
template <class Read>
PULSE_HD uint64_t get_entry(const Read& read, int slot, int width) {
  if (width == 0) return 0;
  const int bit = slot * width, first = bit / 32, last = (bit + width - 1) / 32, shift = bit % 32;
  uint64_t value = read(first) >> shift;
  if (last > first) value |= static_cast<uint64_t>(read(first + 1)) << (32 - shift);
  if (last > first + 1) value |= static_cast<uint64_t>(read(first + 2)) << (64 - shift);
  return value & low_bits(width);
}

// Word `k` of a block whose `used` entries lie in `entries`, none of them over `width` bits.
PULSE_HD uint32_t entries_word(const uint64_t* entries, int used, int width, int k) {
  uint32_t word = 0;
  const int begin = 32 * k, end = begin + 32;
  for (int slot = begin / width; slot < used && slot * width < end; ++slot) {
    const int at = slot * width - begin;  // of the entry's lowest bit, seen from the word's
    word |= static_cast<uint32_t>(at < 0 ? entries[slot] >> -at : entries[slot] << at);
  }
  return word;
}

// Adds entry `slot` to zeroed words.
PULSE_HD void put_gap(uint8_t* words, int slot, int width, uint64_t gap) {
  uint64_t bit = static_cast<uint64_t>(slot) * width;
  int left = width;
  while (left > 0) {
    const int shift = static_cast<int>(bit % 32);
    const int take = left < 32 - shift ? left : 32 - shift;
    const uint32_t part = static_cast<uint32_t>(gap & ((1ull << take) - 1)) << shift;
    const uint32_t word = load_word(words, bit / 32) | part;
    memcpy(words + 4 * (bit / 32), &word, 4);
    gap >>= take;
    bit += take;
    left -= take;
  }
}

}  // namespace pulse
