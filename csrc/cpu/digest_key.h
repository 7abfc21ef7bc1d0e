// Everything a digest kernel derives from a key, once.
#pragma once

#include <cstdint>

#include "../bits/digest.h"

namespace pulse {

constexpr int kDigits = 3;      // of a slot factor, in base 2^kDigitBits, signed
constexpr int kDigitBits = 11;  // 16 products of a 16-bit element and a digit, in pairs, stay inside 32 bits

struct DigestKey {
  uint64_t seeds[2];
  uint32_t slots[2 * kDigestBlock + 1];  // one more: a vector load of the odd factors ends on it
  alignas(64) int16_t digits[2][kDigits][kDigestBlock];
  uint64_t slot_sums[2];

  explicit DigestKey(uint64_t key) {
    slots[2 * kDigestBlock] = 0;
    for (int lane = 0; lane < 2; ++lane) {
      seeds[lane] = digest_seed(key, lane);
      slot_sums[lane] = 0;
      for (int k = 0; k < kDigestBlock; ++k) {
        const uint32_t factor = slot_factor(seeds[lane], k);
        slots[lane * kDigestBlock + k] = factor;
        slot_sums[lane] += factor;
        int64_t rest = factor;
        for (int d = 0; d < kDigits; ++d) {
          constexpr int64_t base = int64_t{1} << kDigitBits, half = base / 2;
          const int64_t digit = d + 1 < kDigits ? ((rest + half) & (base - 1)) - half : rest;
          digits[lane][d][k] = static_cast<int16_t>(digit);
          rest = (rest - digit) / base;
        }
      }
    }
  }
};

// Lane sums of one block out of sums over its digits: elements were taken as signed, less 2^15.
inline void join_digits(const DigestKey& key, const int64_t (&digit_sums)[2][kDigits], uint64_t* sums) {
  for (int lane = 0; lane < 2; ++lane) {
    sums[lane] = key.slot_sums[lane] << 15;
    for (int d = 0; d < kDigits; ++d) sums[lane] += static_cast<uint64_t>(digit_sums[lane][d]) << (d * kDigitBits);
  }
}

}  // namespace pulse
