// PULSELoCo's gate (docs: gate_residual): s = residual + (theta - local) in FP32, fired where subtracting s moves the
// 16-bit view of theta. The meaning is backends/reference.py: pending_residual. Sums only, so nothing can be contracted.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "rounding.h"

namespace pulse {

PULSE_HD uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

PULSE_HD float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// A computed NaN becomes 0x7FC00000: its sign and payload would depend on operand order and architecture.
PULSE_HD uint32_t canonical_bits(float f) {
  const uint32_t u = float_bits(f);
  return is_nan_bits(u) ? 0x7FC00000u : u;
}

PULSE_HD uint32_t pending_bits(float theta, float local, float residual) {
  return canonical_bits(residual + (theta - local));
}

// `pending` is what pending_bits gave.
template <uint16_t (*Round)(uint32_t)>
PULSE_HD bool residual_fires(float theta, uint32_t pending) {
  return Round(canonical_bits(theta - float_of(pending))) != Round(float_bits(theta));
}

}  // namespace pulse
