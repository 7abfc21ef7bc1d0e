// Byte streams of the codec (docs/format.md): gaps with one-byte tops and LEB128 escapes, values as byte planes of
// their zigzag-coded difference to the base. The meaning is backends/reference.py: encode_gaps ... decode_values.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace pulse {

constexpr uint64_t kEscape = 255;
constexpr int kMaxLeb128 = 9;  // 63 bits

// Floats' bits as integers of the same order: sign-magnitude to two's complement, its own inverse.
template <class Signed>
PULSE_HD Signed ordered_bits(Signed bits) {
  using U = uint64_t;
  const Signed lowest = static_cast<Signed>(U{1} << (8 * sizeof(Signed) - 1));
  return bits < 0 ? static_cast<Signed>(static_cast<U>(lowest) - static_cast<U>(bits) - 1) : bits;
}

template <class Signed>
PULSE_HD Signed zigzag(Signed change) {
  using U = uint64_t;
  return static_cast<Signed>((static_cast<U>(change) << 1) ^ static_cast<U>(change >> (8 * sizeof(Signed) - 1)));
}

template <class Unsigned>
PULSE_HD Unsigned unzigzag(Unsigned coded) {
  return static_cast<Unsigned>((coded >> 1) ^ static_cast<Unsigned>(-static_cast<int64_t>(coded & 1)));
}

}  // namespace pulse
