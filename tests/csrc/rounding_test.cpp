// round_to_bf16 and round_to_fp16 against the definition of rounding to nearest even, at every boundary there is.
#include <cmath>
#include <cstring>

#include "../../csrc/bits/rounding.h"
#include "check.h"

namespace {

uint32_t bits_of(float value) {
  uint32_t u;
  std::memcpy(&u, &value, 4);
  return u;
}

// BF16 is the upper half of FP32: below the tie down, above it up, at the tie to the even upper half.
void check_bf16() {
  for (uint32_t upper = 0; upper < 0x10000u; ++upper) {
    const bool nan_above = (upper & 0x7FFFu) >= 0x7F80u;  // Inf and NaN patterns
    if (nan_above) continue;
    for (const uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const uint32_t expected = lower < 0x8000u ? upper : lower > 0x8000u ? upper + 1 : upper + (upper & 1u);
      CHECK(pulse::round_to_bf16(upper << 16 | lower) == expected);
    }
  }
  CHECK(pulse::round_to_bf16(0x7F7FFFFFu) == 0x7F80u);  // the largest finite FP32 becomes Inf
  CHECK(pulse::round_to_bf16(0x7F800000u) == 0x7F80u);
  CHECK(pulse::round_to_bf16(0xFF800000u) == 0xFF80u);
  for (const uint32_t payload : {1u, 0x7FFFu, 0x8000u, 0x3FFFFFu, 0x400000u, 0x7FFFFFu}) {
    CHECK(pulse::round_to_bf16(0x7F800000u | payload) == 0x7FC0u);
    CHECK(pulse::round_to_bf16(0xFF800000u | payload) == 0xFFC0u);
  }
}

double value_of_half(uint32_t h) {
  const int exponent = static_cast<int>(h >> 10 & 31), fraction = static_cast<int>(h & 1023);
  return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
}

// Two neighbouring halves and the FP32 values around the middle between them, which FP32 holds exactly.
void check_fp16() {
  for (uint32_t h = 0; h < 0x7C00u; ++h) {
    // The neighbour of the largest finite half is 65536, where Inf begins.
    const double low = value_of_half(h), high = h == 0x7BFFu ? 65536.0 : value_of_half(h + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    CHECK(static_cast<double>(middle) == (low + high) / 2);
    const uint32_t tie = bits_of(middle);
    for (const uint32_t sign : {0u, 1u}) {
      const uint32_t s32 = sign << 31, s16 = sign << 15;
      CHECK(pulse::round_to_fp16(s32 | bits_of(static_cast<float>(low))) == (s16 | h));
      CHECK(pulse::round_to_fp16(s32 | (tie - 1)) == (s16 | h));
      CHECK(pulse::round_to_fp16(s32 | tie) == (s16 | (h + (h & 1u))));
      CHECK(pulse::round_to_fp16(s32 | (tie + 1)) == (s16 | (h + 1)));
    }
  }
  CHECK(pulse::round_to_fp16(1) == 0 && pulse::round_to_fp16(0x80000001u) == 0x8000u);  // FP32 denormals
  CHECK(pulse::round_to_fp16(0x7F7FFFFFu) == 0x7C00u && pulse::round_to_fp16(0xFF800000u) == 0xFC00u);
  for (const uint32_t payload : {1u, 0x1FFFu, 0x2000u, 0x400000u, 0x7FFFFFu}) {
    CHECK(pulse::round_to_fp16(0x7F800000u | payload) == 0x7E00u);
    CHECK(pulse::round_to_fp16(0xFF800000u | payload) == 0xFE00u);
  }
}

}  // namespace

void test_rounding() {
  check_bf16();
  check_fp16();
}
