// The codec's byte streams (bits/byte_streams.h). Serial: the codec runs many at once, one a segment.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../bits/byte_streams.h"

namespace pulse {

// Returns the place after the value's bytes: at most kMaxLeb128 further, one more for a value of 64 bits.
inline uint8_t* put_leb128(uint64_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<uint8_t>(value) | 0x80;
  *out++ = static_cast<uint8_t>(value);
  return out;
}

// Which of 64 bytes are 255.
inline uint64_t escape_mask(const uint8_t* bytes) {
  constexpr uint64_t low = 0x7F7F7F7F7F7F7F7Full;
  uint64_t mask = 0;
  for (int k = 0; k < 8; ++k) {
    uint64_t eight;
    std::memcpy(&eight, bytes + 8 * k, 8);
    const uint64_t high_bits = ((eight & low) + 0x0101010101010101ull) & eight & ~low;
    mask |= ((high_bits >> 7) * 0x0102040810204080ull >> 56) << 8 * k;
  }
  return mask;
}

// Traffic: indices once, one byte (two with a low plane) an entry. The first loop has no branches and vectorises; the
// second visits the escapes alone. `low` is null for a shift of 0.
template <class Index>
void encode_gaps(const Index* indices, int64_t n, uint64_t start, int shift, uint8_t* top, uint8_t* low,
                 std::vector<uint8_t>* escapes) {
  using Unsigned = std::make_unsigned_t<Index>;
  const auto gap_at = [=](int64_t k) {
    const Unsigned next = k == 0 ? static_cast<Unsigned>(start) : static_cast<Unsigned>(indices[k - 1]) + 1u;
    return static_cast<Unsigned>(static_cast<Unsigned>(indices[k]) - next);
  };
  const auto top_of = [=](Unsigned gap) {
    const Unsigned high = gap >> shift;
    return static_cast<uint8_t>(high < kEscape ? high : kEscape);
  };
  if (n > 0) top[0] = top_of(gap_at(0));
  for (int64_t k = 1; k < n; ++k) {
    top[k] = top_of(static_cast<Unsigned>(indices[k]) - static_cast<Unsigned>(indices[k - 1]) - 1u);
  }
  if (low != nullptr) {
    for (int64_t k = 0; k < n; ++k) low[k] = static_cast<uint8_t>(gap_at(k));
  }
  uint32_t count = 0;  // n fits 32 bits
  for (int64_t k = 0; k < n; ++k) count += top[k] == kEscape;
  escapes->resize(count);  // most take one byte
  size_t used = 0;
  for (int64_t k = 0; k < n; k += 64) {
    uint8_t last[64] = {0};
    if (n - k < 64) std::memcpy(last, top + k, n - k);
    for (uint64_t mask = escape_mask(n - k < 64 ? last : top + k); mask != 0; mask &= mask - 1) {
      const int64_t at = k + __builtin_ctzll(mask);
      constexpr size_t most = kMaxLeb128 + 1;  // a gap of positions out of order wraps to 64 bits
      if (escapes->size() - used < most) escapes->resize(2 * escapes->size() + most);
      uint8_t* const out = escapes->data() + used;
      used += put_leb128((static_cast<uint64_t>(gap_at(at)) >> shift) - kEscape, out) - out;
    }
  }
  escapes->resize(used);
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

inline int64_t sign_bytes(int64_t n) { return (n + 7) / 8; }
inline int64_t code_bytes(int64_t n) { return (n + 3) / 4; }

template <class Unsigned>
inline void put_planes(uint8_t* planes, int64_t n, int64_t k, Unsigned coded) {
  for (size_t p = 0; p < sizeof(Unsigned); ++p) planes[p * n + k] = static_cast<uint8_t>(coded >> 8 * p);
}

template <class Unsigned>
inline Unsigned get_planes(const uint8_t* planes, int64_t n, int64_t k) {
  uint64_t coded = 0;
  for (size_t p = 0; p < sizeof(Unsigned); ++p) coded |= static_cast<uint64_t>(planes[p * n + k]) << 8 * p;
  return static_cast<Unsigned>(coded);
}

template <bool Float, class Signed>
inline std::make_unsigned_t<Signed> ordered(Signed bits) {
  return static_cast<std::make_unsigned_t<Signed>>(Float ? ordered_bits(bits) : bits);
}

// Byte planes of the bits, least significant first: n * sizeof(Signed) bytes.
template <class Signed>
void encode_values(const Signed* values, int64_t n, uint8_t* planes) {
  using Unsigned = std::make_unsigned_t<Signed>;
  for (int64_t k = 0; k < n; ++k) put_planes(planes, n, k, static_cast<Unsigned>(values[k]));
}

template <class Signed>
void decode_values(const uint8_t* planes, int64_t n, Signed* values) {
  using Unsigned = std::make_unsigned_t<Signed>;
  for (int64_t k = 0; k < n; ++k) values[k] = static_cast<Signed>(get_planes<Unsigned>(planes, n, k));
}

template <class Signed, bool Float>
inline std::make_unsigned_t<Signed> change_at(const Signed* values, const Signed* base, int64_t k) {
  return static_cast<std::make_unsigned_t<Signed>>(ordered<Float>(values[k]) - ordered<Float>(base[k]));
}

template <class Unsigned>
inline bool is_negative(Unsigned change) {
  return change >> (8 * sizeof(Unsigned) - 1) != 0;
}

// Changes against the base, in the order of the values, first half: sign_bytes(n) of signs and code_bytes(n) of codes.
// Returns how many magnitudes are large.
template <class Signed, bool Float>
int64_t encode_codes(const Signed* values, const Signed* base, int64_t n, uint8_t* out) {
  uint8_t* const codes_out = out + sign_bytes(n);
  int64_t large = 0;
  for (int64_t first = 0; first < n; first += 64) {
    const int64_t count = n - first < 64 ? n - first : 64;
    uint8_t negative[64] = {0}, codes[64] = {0};
    for (int64_t j = 0; j < count; ++j) {
      const auto change = change_at<Signed, Float>(values, base, first + j);
      negative[j] = is_negative(change);
      const auto magnitude = change_magnitude(change, negative[j] != 0);
      codes[j] = magnitude < kLargeCode ? static_cast<uint8_t>(magnitude) : kLargeCode;
    }
    for (int64_t j = 0; j < count; j += 8) {
      uint64_t eight;
      std::memcpy(&eight, negative + j, 8);
      out[(first + j) / 8] = static_cast<uint8_t>(eight * 0x0102040810204080ull >> 56);  // eight 0/1 bytes to bits
    }
    for (int64_t j = 0; j < count; j += 4) {
      uint32_t four;
      std::memcpy(&four, codes + j, 4);
      codes_out[(first + j) / 4] = static_cast<uint8_t>(four | four >> 6 | four >> 12 | four >> 18);
    }
    uint8_t here = 0;
    for (const uint8_t code : codes) here = static_cast<uint8_t>(here + (code == kLargeCode));
    large += here;
  }
  return large;
}

// Second half: the planes of the large magnitudes that `codes`, from encode_codes, announce.
template <class Signed, bool Float>
void encode_large(const Signed* values, const Signed* base, int64_t n, const uint8_t* codes, int64_t large,
                  uint8_t* planes) {
  int64_t at = 0;
  for (int64_t byte = 0; byte < code_bytes(n); ++byte) {
    for (uint32_t mask = codes[byte] & codes[byte] >> 1 & 0x55; mask != 0; mask &= mask - 1) {
      const auto change = change_at<Signed, Float>(values, base, 4 * byte + __builtin_ctz(mask) / 2);
      const auto magnitude = change_magnitude(change, is_negative(change));
      put_planes(planes, large, at++, static_cast<decltype(magnitude)>(magnitude - kLargeCode));
    }
  }
}

// `in`: signs, codes and the planes of `large` magnitudes. Returns false where the codes announce another number.
template <class Signed, bool Float>
bool decode_changes(const uint8_t* in, int64_t large, const Signed* base, int64_t n, Signed* values) {
  using Unsigned = std::make_unsigned_t<Signed>;
  const uint8_t* const codes = in + sign_bytes(n);
  const uint8_t* const planes = codes + code_bytes(n);
  int64_t at = 0;
  for (int64_t k = 0; k < n; ++k) {
    auto magnitude = static_cast<Unsigned>(codes[k / 4] >> (k % 4 * 2) & kLargeCode);
    if (__builtin_expect(magnitude == kLargeCode, 0)) {
      if (at == large) return false;
      magnitude = static_cast<Unsigned>(magnitude + get_planes<Unsigned>(planes, large, at++));
    }
    const bool negative = in[k / 8] >> (k % 8) & 1;
    const auto now = static_cast<Signed>(ordered<Float>(base[k]) + change_of(magnitude, negative));
    values[k] = Float ? ordered_bits(now) : now;
  }
  return at == large;
}

}  // namespace pulse
