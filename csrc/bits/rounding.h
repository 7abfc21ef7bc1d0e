// FP32 to BF16 and FP16, round to nearest even, on integers: no flushed denormals, one NaN rule everywhere.
// The meaning is backends/reference.py: round_bits.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace pulse {

constexpr uint32_t kAbsMask = 0x7FFFFFFFu;
constexpr uint32_t kInfinity = 0x7F800000u;

PULSE_HD bool is_nan_bits(uint32_t u) { return (u & kAbsMask) > kInfinity; }

PULSE_HD uint16_t round_to_bf16(uint32_t u) {
  // A NaN keeps its sign and loses its payload; adding the rounding term to 0x7F800001 would give infinity.
  if (is_nan_bits(u)) return static_cast<uint16_t>(((u >> 16) & 0x8000u) | 0x7FC0u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

PULSE_HD uint16_t round_to_fp16(uint32_t u) {
  const uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & kAbsMask;
  uint32_t rounded;
  if (magnitude > kInfinity) {
    rounded = 0x7E00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and above
    rounded = 0x7C00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14 and above: a normal result, 65520 carries into infinity
    rounded = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // the result counts units of 2^-24
    const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint32_t exponent = magnitude >> 23;
    const uint32_t shift = exponent < 101u ? 25u : 126u - exponent;
    rounded = (significand + ((1u << (shift - 1u)) - 1u) + ((significand >> shift) & 1u)) >> shift;
  }
  return static_cast<uint16_t>(sign | rounded);
}

}  // namespace pulse
