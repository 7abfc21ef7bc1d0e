// Byte streams of the codec (docs/format.md): gaps with one-byte tops and LEB128 escapes, values as byte planes, of
// themselves or of their change against the base. The meaning is backends/reference.py: encode_gaps ... decode_values.
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

// A change as its sign and its magnitude less one (mod 2^bits). RL steps move most values by one unit: signs, which no
// coder can shorten, take one bit each, and magnitudes one code of two bits, four to a byte, so that a byte-wise entropy
// coder gets below one bit for the common one. The code 3 announces a large magnitude, less 3, in byte planes.
constexpr int kLargeCode = 3;

template <class Unsigned>
PULSE_HD Unsigned change_magnitude(Unsigned change, bool negative) {
  return static_cast<Unsigned>(negative ? ~change : change - 1u);
}
template <class Unsigned>
PULSE_HD Unsigned change_of(Unsigned magnitude, bool negative) {
  return static_cast<Unsigned>(negative ? ~magnitude : magnitude + 1u);
}

}  // namespace pulse
