// AVX2 and F16C. Compiled with those flags; empty where the compiler lacks them.
#include <cstdint>
#include <type_traits>

#include "../bits/digest.h"
#include "../bits/index_block.h"
#include "../bits/residual.h"
#include "../bits/rounding.h"
#include "digest_key.h"
#include "kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace pulse {
namespace {

uint64_t slow_gate_bf16(const uint32_t* master, const uint16_t* weight);

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256i load_lanes(const void* low, const void* high) {
  const __m128i first = _mm_loadu_si128(static_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}

// Elements 0..3 and 8..11 of p in one register, 4..7 and 12..15 in the other: packus then restores memory order.
inline __m256i load_split(const uint32_t* p) { return load_lanes(p, p + 8); }

// FP32 bits to BF16 bits in the low half of each lane, NaN aside.
inline __m256i round_bf16(__m256i u) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

// Lanes where either holds a NaN.
inline __m256i unordered(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), _CMP_UNORD_Q));
}

// Two vectors of sixteen 0/-1 words to 32 mask bits in memory order.
inline uint32_t word_mask(__m256i first, __m256i second) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
  return static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
}

// Ties and NaNs as the rule has them.
uint64_t exact_gate_bf16_mask(const uint32_t* master, const uint16_t* weight) {
  __m256i nan = _mm256_setzero_si256();
  uint64_t same = 0;
  for (int half = 0; half < 2; ++half) {
    __m256i equal[2];
    for (int k = 0; k < 2; ++k) {
      const uint32_t* m = master + 32 * half + 16 * k;
      const __m256i a = load_split(m), b = load_split(m + 4);
      nan = _mm256_or_si256(nan, unordered(a, b));
      const __m256i rounded = _mm256_packus_epi32(round_bf16(a), round_bf16(b));
      equal[k] = _mm256_cmpeq_epi16(rounded, load(weight + 32 * half + 16 * k));
    }
    same |= static_cast<uint64_t>(word_mask(equal[0], equal[1])) << (32 * half);
  }
  if (__builtin_expect(!_mm256_testz_si256(nan, nan), 0)) return slow_gate_bf16(master, weight);
  return ~same;
}

// Half up instead of half to even, which differs only at ties. With d = master - (weight << 16) - 0x8000, the high half
// of d is 0xFFFF where that rounding equals the weight, and the low half is 0 at a tie. A lane holds 16 neighbours of
// each 32, so that packing twice restores memory order.
__attribute__((always_inline)) inline uint64_t gate_bf16_mask(const uint32_t* master, const uint16_t* weight) {
  const __m256i half_ulp = _mm256_set1_epi16(-0x8000), wanted = _mm256_set1_epi32(-0x10000);
  __m256i nan = _mm256_setzero_si256(), seen = _mm256_setzero_si256();
  uint64_t same = 0;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256i equal[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const uint32_t* m = master + 32 * half + 8 * k;
      const uint16_t* w = weight + 32 * half + 8 * k;
      const __m256i a = load_lanes(m, m + 16), b = load_lanes(m + 4, m + 20), words = load_lanes(w, w + 16);
      nan = _mm256_or_si256(nan, unordered(a, b));
      const __m256i d_a = _mm256_sub_epi32(a, _mm256_unpacklo_epi16(half_ulp, words));
      const __m256i d_b = _mm256_sub_epi32(b, _mm256_unpackhi_epi16(half_ulp, words));
      equal[k] = _mm256_packs_epi32(_mm256_cmpeq_epi16(d_a, wanted), _mm256_cmpeq_epi16(d_b, wanted));
    }
    // Saturated: 0x80 where equal, 0 where changed; at a tie 0xFF and 0x7F.
    const __m256i bytes = _mm256_packs_epi16(equal[0], equal[1]);
    seen = _mm256_or_si256(seen, bytes);
    same |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(bytes))) << (32 * half);
  }
  const __m256i rare = _mm256_or_si256(nan, _mm256_and_si256(seen, _mm256_set1_epi8(1)));
  if (__builtin_expect(!_mm256_testz_si256(rare, rare), 0)) return exact_gate_bf16_mask(master, weight);
  return ~same;
}

uint64_t slow_gate_fp16(const uint32_t* master, const uint16_t* weight);

// vcvtps2ph rounds to nearest even and keeps FP16 denormals whatever MXCSR says; only its NaNs differ from the rule.
uint64_t gate_fp16_mask(const uint32_t* master, const uint16_t* weight) {
  __m256i nan = _mm256_setzero_si256();
  uint64_t same = 0;
  for (int half = 0; half < 2; ++half) {
    __m256i equal[2];
    for (int k = 0; k < 2; ++k) {
      const uint32_t* m = master + 32 * half + 16 * k;
      const __m256i a = load(m), b = load(m + 8);
      nan = _mm256_or_si256(nan, unordered(a, b));
      const __m128i low = _mm256_cvtps_ph(_mm256_castsi256_ps(a), _MM_FROUND_TO_NEAREST_INT);
      const __m128i high = _mm256_cvtps_ph(_mm256_castsi256_ps(b), _MM_FROUND_TO_NEAREST_INT);
      const __m256i rounded = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
      equal[k] = _mm256_cmpeq_epi16(rounded, load(weight + 32 * half + 16 * k));
    }
    same |= static_cast<uint64_t>(word_mask(equal[0], equal[1])) << (32 * half);
  }
  if (__builtin_expect(!_mm256_testz_si256(nan, nan), 0)) return slow_gate_fp16(master, weight);
  return ~same;
}

uint64_t diff1_mask(const uint8_t* a, const uint8_t* b) {
  const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(a), load(b))));
  const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(a + 32), load(b + 32))));
  return ~(low | static_cast<uint64_t>(high) << 32);
}

uint64_t diff2_mask(const uint16_t* a, const uint16_t* b) {
  uint64_t same = 0;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, a += 32, b += 32) {
    const __m256i first = _mm256_cmpeq_epi16(load(a), load(b));
    const __m256i second = _mm256_cmpeq_epi16(load(a + 16), load(b + 16));
    same |= static_cast<uint64_t>(word_mask(first, second)) << (32 * half);
  }
  return ~same;
}

uint64_t diff4_mask(const uint32_t* a, const uint32_t* b) {
  uint64_t same = 0;
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const __m256i equal = _mm256_cmpeq_epi32(load(a + 8 * k), load(b + 8 * k));
    same |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << (8 * k);
  }
  return ~same;
}

uint64_t diff8_mask(const uint64_t* a, const uint64_t* b) {
  uint64_t same = 0;
  for (int k = 0; k < 16; ++k) {
    const __m256i equal = _mm256_cmpeq_epi64(load(a + 4 * k), load(b + 4 * k));
    same |= static_cast<uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) << (4 * k);
  }
  return ~same;
}

uint64_t slow_residual_bf16(const float* theta, const float* local, const float* residual);
uint64_t slow_residual_fp16(const float* theta, const float* local, const float* residual);

template <bool Bf16>
uint64_t residual_mask(const float* theta, const float* local, const float* residual) {
  __m256i nan = _mm256_setzero_si256();
  uint64_t same = 0;
  for (int k = 0; k < 8; ++k) {
    const __m256 t = _mm256_loadu_ps(theta + 8 * k);
    const __m256 delta = _mm256_sub_ps(t, _mm256_loadu_ps(local + 8 * k));
    const __m256 next = _mm256_sub_ps(t, _mm256_add_ps(_mm256_loadu_ps(residual + 8 * k), delta));
    const __m256i a = _mm256_castps_si256(t), b = _mm256_castps_si256(next);
    nan = _mm256_or_si256(nan, unordered(a, b));
    __m256i equal;
    if constexpr (Bf16) {
      equal = _mm256_cmpeq_epi32(round_bf16(a), round_bf16(b));
    } else {
      const __m128i x = _mm256_cvtps_ph(t, _MM_FROUND_TO_NEAREST_INT);
      const __m128i y = _mm256_cvtps_ph(next, _MM_FROUND_TO_NEAREST_INT);
      equal = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(x, y));
    }
    same |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << (8 * k);
  }
  if (__builtin_expect(!_mm256_testz_si256(nan, nan), 0)) {
    return Bf16 ? slow_residual_bf16(theta, local, residual) : slow_residual_fp16(theta, local, residual);
  }
  return ~same;
}

inline uint64_t sum_lanes(__m256i v) {
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return static_cast<uint64_t>(_mm_extract_epi64(two, 0)) + static_cast<uint64_t>(_mm_extract_epi64(two, 1));
}

// Products of 32-bit elements and slot factors: even and odd lanes take one 32 x 32 multiply each.
template <class Widen>
inline void sums_of(const DigestKey& key, uint64_t* sums, Widen widen) {
  __m256i acc[2][2];
  for (auto& pair : acc) pair[0] = pair[1] = _mm256_setzero_si256();
  for (int k = 0; k < kDigestBlock; k += 8) {
    const __m256i even = widen(k), odd = _mm256_srli_epi64(even, 32);
#pragma GCC unroll 2
    for (int lane = 0; lane < 2; ++lane) {
      const uint32_t* factors = key.slots + lane * kDigestBlock + k;  // loaded one further, the odd ones lie low
      acc[lane][0] = _mm256_add_epi64(acc[lane][0], _mm256_mul_epu32(even, load(factors)));
      acc[lane][1] = _mm256_add_epi64(acc[lane][1], _mm256_mul_epu32(odd, load(factors + 1)));
    }
  }
  for (int lane = 0; lane < 2; ++lane) sums[lane] = sum_lanes(_mm256_add_epi64(acc[lane][0], acc[lane][1]));
}

void digest1_sums(const uint8_t* e, const DigestKey& key, uint64_t* sums) {
  sums_of(key, sums, [e](int k) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(e + k))); });
}

// Digits of the factors instead: 16 elements a multiply, and sums that stay inside 32 bits for the whole block. They start
// from 2^31, so that they widen as unsigned.
void digest2_sums(const uint16_t* e, const DigestKey& key, uint64_t* sums) {
  __m256i acc[2][kDigits];
  const __m256i bias = _mm256_set1_epi32(INT32_MIN);
  for (auto& lane : acc) {
    for (auto& sum : lane) sum = bias;
  }
  const __m256i offset = _mm256_set1_epi16(-0x8000);
  for (int k = 0; k < kDigestBlock; k += 16) {
    const __m256i elements = _mm256_xor_si256(load(e + k), offset);
#pragma GCC unroll 2
    for (int lane = 0; lane < 2; ++lane) {
#pragma GCC unroll 3
      for (int d = 0; d < kDigits; ++d) {
        const __m256i products = _mm256_madd_epi16(elements, load(key.digits[lane][d] + k));
        acc[lane][d] = _mm256_add_epi32(acc[lane][d], products);
      }
    }
  }
  const __m256i low = _mm256_set1_epi64x(UINT32_MAX);
  __m256i joined[2];
#pragma GCC unroll 2
  for (int lane = 0; lane < 2; ++lane) {
    joined[lane] = _mm256_setzero_si256();
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
      const __m256i sum = acc[lane][d];
      const __m256i wide = _mm256_add_epi64(_mm256_and_si256(sum, low), _mm256_srli_epi64(sum, 32));
      joined[lane] = _mm256_add_epi64(joined[lane], _mm256_slli_epi64(wide, d * kDigitBits));
    }
  }
  constexpr uint64_t biases = (uint64_t{8} << 31) * (1 + (uint64_t{1} << kDigitBits) + (uint64_t{1} << 2 * kDigitBits));
  static_assert(kDigits == 3, "biases has three");
  for (int lane = 0; lane < 2; ++lane) sums[lane] = (key.slot_sums[lane] << 15) + sum_lanes(joined[lane]) - biases;
}

void digest4_sums(const uint32_t* e, const DigestKey& key, uint64_t* sums) {
  sums_of(key, sums, [e](int k) { return load(e + k); });
}
void digest8_sums(const uint64_t* e, const DigestKey& key, uint64_t* sums);

constexpr bool kMultiplies64Bits = false;  // what AVX2 lacks
#include "kernels_x86.h"

}  // namespace

const KernelTable* avx2_kernels() {
  static constexpr KernelTable table = make_table("avx2");
  return &table;
}

}  // namespace pulse
#else
namespace pulse {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace pulse
#endif
