// Weights of the state digest: K(lane, i) = block_factor(i >> 8) * slot_factor(i & 255) mod 2^64, both odd.
// The meaning is backends/reference.py: digest_weights.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace pulse {

constexpr int kDigestBlock = 256;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

PULSE_HD uint64_t mix64(uint64_t z) {  // SplitMix64's finaliser
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

PULSE_HD uint64_t digest_seed(uint64_t key, int lane) { return mix64(key + (lane + 1) * kGolden); }

PULSE_HD uint64_t block_factor(uint64_t seed, uint64_t block) { return mix64(seed + block * kGolden) | 1u; }

// 32 bits, so that one 32 x 32 multiply serves an element of up to 4 bytes.
PULSE_HD uint32_t slot_factor(uint64_t seed, uint64_t slot) {
  return static_cast<uint32_t>(mix64(~seed + slot * kGolden) >> 32) | 1u;
}

PULSE_HD uint64_t digest_weight(uint64_t seed, uint64_t position) {
  return block_factor(seed, position / kDigestBlock) * slot_factor(seed, position % kDigestBlock);
}

}  // namespace pulse
