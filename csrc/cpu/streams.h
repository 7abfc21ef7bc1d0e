// The codec's byte streams (bits/byte_streams.h). Serial: the codec runs many at once, one a segment.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "../bits/byte_streams.h"

namespace pulse {

// Traffic: indices once, one byte (two with a low plane) an entry. Returns the bytes written to `escapes`, which has
// room for kMaxLeb128 bytes an entry where `escapes` is given; null only counts.
template <class Index>
int64_t encode_gaps(const Index* indices, int64_t n, uint64_t start, int shift, uint8_t* top, uint8_t* low,
                    std::vector<uint8_t>* escapes) {
  uint64_t next = start;  // the smallest position that may follow
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t gap = static_cast<uint64_t>(indices[k]) - next;
    next = static_cast<uint64_t>(indices[k]) + 1;
    const uint64_t high = gap >> shift;
    if (low != nullptr) low[k] = static_cast<uint8_t>(gap);
    if (high < kEscape) {
      top[k] = static_cast<uint8_t>(high);
      continue;
    }
    top[k] = kEscape;
    uint64_t rest = high - kEscape;
    for (; rest >= 0x80; rest >>= 7) escapes->push_back(static_cast<uint8_t>(rest) | 0x80);
    escapes->push_back(static_cast<uint8_t>(rest));
  }
  return static_cast<int64_t>(escapes->size());
}

// Returns -1 on success, else the entry at which the streams are wrong (n: bytes are left over).
template <class Index>
int64_t decode_gaps(const uint8_t* top, const uint8_t* low, const uint8_t* escapes, int64_t escape_bytes, int64_t n,
                    uint64_t start, uint64_t stop, int shift, Index* indices) {
  uint64_t next = start;
  int64_t at = 0;
  for (int64_t k = 0; k < n; ++k) {
    uint64_t high = top[k];
    if (__builtin_expect(high == kEscape, 0)) {
      uint64_t rest = 0;
      int place = 0;
      for (;; place += 7) {
        if (at == escape_bytes || place == 7 * kMaxLeb128) return k;
        const uint8_t byte = escapes[at++];
        rest |= static_cast<uint64_t>(byte & 0x7F) << place;
        if (byte < 0x80) break;
      }
      if (rest >= stop - start) return k;
      high += rest;
    }
    const uint64_t gap = low == nullptr ? high : high << shift | low[k];
    if (gap >= stop - next || high >> (63 - shift) != 0) return k;
    next += gap;
    indices[k] = static_cast<Index>(next++);
  }
  return at == escape_bytes ? -1 : n;
}

// Byte planes, least significant first. With a base: zigzag of the difference in the order of the values.
template <class Signed, bool Float, bool Based>
void encode_values(const Signed* values, const Signed* base, int64_t n, uint8_t* planes) {
  for (int64_t k = 0; k < n; ++k) {
    Signed coded = values[k];
    if constexpr (Based) {
      const auto now = static_cast<uint64_t>(Float ? ordered_bits(values[k]) : values[k]);
      const auto before = static_cast<uint64_t>(Float ? ordered_bits(base[k]) : base[k]);
      coded = zigzag(static_cast<Signed>(now - before));
    }
    for (size_t p = 0; p < sizeof(Signed); ++p) planes[p * n + k] = static_cast<uint8_t>(static_cast<uint64_t>(coded) >> 8 * p);
  }
}

template <class Signed, bool Float, bool Based>
void decode_values(const uint8_t* planes, const Signed* base, int64_t n, Signed* values) {
  using Unsigned = std::make_unsigned_t<Signed>;
  for (int64_t k = 0; k < n; ++k) {
    uint64_t coded = 0;
    for (size_t p = 0; p < sizeof(Signed); ++p) coded |= static_cast<uint64_t>(planes[p * n + k]) << 8 * p;
    if constexpr (Based) {
      const auto change = static_cast<uint64_t>(unzigzag(static_cast<Unsigned>(coded)));
      const auto before = static_cast<uint64_t>(Float ? ordered_bits(base[k]) : base[k]);
      const auto now = static_cast<Signed>(before + change);
      values[k] = Float ? ordered_bits(now) : now;
    } else {
      values[k] = static_cast<Signed>(coded);
    }
  }
}

}  // namespace pulse
