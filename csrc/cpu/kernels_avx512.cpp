// AVX-512 F, BW, DQ and VL. Compiled with those flags; empty where the compiler lacks them. With PULSE_SIMDE the same
// source runs on any CPU through the SIMDe headers: how its bits are tested where no AVX-512 is at hand.
// AVX512-BF16's own conversions are not used: they flush denormals.
#include <cstdint>
#include <type_traits>

#include "../bits/digest.h"
#include "../bits/index_block.h"
#include "../bits/residual.h"
#include "../bits/rounding.h"
#include "digest_key.h"
#include "kernels.h"

#if defined(PULSE_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
// What SIMDe 0.8 lacks.
#define _mm512_cmpneq_epi8_mask(a, b) simde_mm512_cmp_epi8_mask(a, b, SIMDE_MM_CMPINT_NE)
#define _mm512_cmpneq_epi16_mask(a, b) simde_mm512_cmp_epi16_mask(a, b, SIMDE_MM_CMPINT_NE)
#define _mm512_cmpneq_epi32_mask(a, b) simde_mm512_cmp_epi32_mask(a, b, SIMDE_MM_CMPINT_NE)
#define _mm512_cmpneq_epi64_mask(a, b) simde_mm512_cmp_epi64_mask(a, b, SIMDE_MM_CMPINT_NE)
#define _mm512_cvtepu8_epi32(a) simde_mm512_cvtepu16_epi32(simde_mm256_cvtepu8_epi16(a))
#define PULSE_AVX512 1
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define PULSE_AVX512 1
#endif

#if defined(PULSE_AVX512)
namespace pulse {
namespace {

uint64_t slow_gate_bf16(const uint32_t* master, const uint16_t* weight);
uint64_t slow_gate_fp16(const uint32_t* master, const uint16_t* weight);
uint64_t slow_residual_bf16(const float* theta, const float* local, const float* residual);
uint64_t slow_residual_fp16(const float* theta, const float* local, const float* residual);

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m512i round_bf16(__m512i u) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd), 16);
}

inline __mmask16 nan_lanes(__m512 f) { return _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q); }

uint64_t gate_bf16_mask(const uint32_t* master, const uint16_t* weight) {
  uint64_t changed = 0;
  uint32_t nan = 0;
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i u = load(master + 16 * k);
    nan |= nan_lanes(_mm512_castsi512_ps(u));
    const __m512i held = _mm512_cvtepu16_epi32(load256(weight + 16 * k));
    changed |= static_cast<uint64_t>(_mm512_cmpneq_epi32_mask(round_bf16(u), held)) << (16 * k);
  }
  return __builtin_expect(nan != 0, 0) ? slow_gate_bf16(master, weight) : changed;
}

#if defined(PULSE_SIMDE)
inline __m256i to_fp16(__m512 f) {
  const __m128i low = _mm256_cvtps_ph(_mm512_castps512_ps256(f), _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(_mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(f), 1)),
                                       _MM_FROUND_TO_NEAREST_INT);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#else
inline __m256i to_fp16(__m512 f) { return _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#endif

uint64_t gate_fp16_mask(const uint32_t* master, const uint16_t* weight) {
  uint64_t changed = 0;
  uint32_t nan = 0;
  for (int k = 0; k < 4; ++k) {
    const __m512 f = _mm512_castsi512_ps(load(master + 16 * k));
    nan |= nan_lanes(f);
    changed |= static_cast<uint64_t>(_mm256_cmpneq_epi16_mask(to_fp16(f), load256(weight + 16 * k))) << (16 * k);
  }
  return __builtin_expect(nan != 0, 0) ? slow_gate_fp16(master, weight) : changed;
}

uint64_t diff1_mask(const uint8_t* a, const uint8_t* b) { return _mm512_cmpneq_epi8_mask(load(a), load(b)); }

uint64_t diff2_mask(const uint16_t* a, const uint16_t* b) {
  const uint64_t low = _mm512_cmpneq_epi16_mask(load(a), load(b));
  return low | static_cast<uint64_t>(_mm512_cmpneq_epi16_mask(load(a + 32), load(b + 32))) << 32;
}

uint64_t diff4_mask(const uint32_t* a, const uint32_t* b) {
  uint64_t changed = 0;
#pragma GCC unroll 4
  for (int k = 0; k < 64; k += 16) {
    changed |= static_cast<uint64_t>(_mm512_cmpneq_epi32_mask(load(a + k), load(b + k))) << k;
  }
  return changed;
}

uint64_t diff8_mask(const uint64_t* a, const uint64_t* b) {
  uint64_t changed = 0;
#pragma GCC unroll 8
  for (int k = 0; k < 64; k += 8) {
    changed |= static_cast<uint64_t>(_mm512_cmpneq_epi64_mask(load(a + k), load(b + k))) << k;
  }
  return changed;
}

template <bool Bf16>
uint64_t residual_mask(const float* theta, const float* local, const float* residual) {
  uint64_t changed = 0;
  uint32_t nan = 0;
  for (int k = 0; k < 64; k += 16) {
    const __m512 t = _mm512_loadu_ps(theta + k);
    const __m512 delta = _mm512_sub_ps(t, _mm512_loadu_ps(local + k));
    const __m512 next = _mm512_sub_ps(t, _mm512_add_ps(_mm512_loadu_ps(residual + k), delta));
    nan |= nan_lanes(t) | nan_lanes(next);
    uint64_t mask;
    if constexpr (Bf16) {
      mask = _mm512_cmpneq_epi32_mask(round_bf16(_mm512_castps_si512(t)), round_bf16(_mm512_castps_si512(next)));
    } else {
      mask = _mm256_cmpneq_epi16_mask(to_fp16(t), to_fp16(next));
    }
    changed |= mask << k;
  }
  if (__builtin_expect(nan != 0, 0)) {
    return Bf16 ? slow_residual_bf16(theta, local, residual) : slow_residual_fp16(theta, local, residual);
  }
  return changed;
}

inline uint64_t sum_lanes(__m512i v) {
  uint64_t lanes[8], sum = 0;
  _mm512_storeu_si512(lanes, v);
  for (const uint64_t lane : lanes) sum += lane;
  return sum;
}

inline int64_t sum_int32(__m512i v) {
  int32_t lanes[16];
  int64_t sum = 0;
  _mm512_storeu_si512(lanes, v);
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}

// Products of 32-bit elements and slot factors: even and odd lanes take one 32 x 32 multiply each.
template <class Widen>
inline void sums_of(const DigestKey& key, uint64_t* sums, Widen widen) {
  __m512i acc[2][2];
  for (auto& pair : acc) pair[0] = pair[1] = _mm512_setzero_si512();
  for (int k = 0; k < kDigestBlock; k += 16) {
    const __m512i even = widen(k), odd = _mm512_srli_epi64(even, 32);
#pragma GCC unroll 2
    for (int lane = 0; lane < 2; ++lane) {
      const uint32_t* factors = key.slots + lane * kDigestBlock + k;  // loaded one further, the odd ones lie low
      acc[lane][0] = _mm512_add_epi64(acc[lane][0], _mm512_mul_epu32(even, load(factors)));
      acc[lane][1] = _mm512_add_epi64(acc[lane][1], _mm512_mul_epu32(odd, load(factors + 1)));
    }
  }
  for (int lane = 0; lane < 2; ++lane) sums[lane] = sum_lanes(_mm512_add_epi64(acc[lane][0], acc[lane][1]));
}

void digest1_sums(const uint8_t* e, const DigestKey& key, uint64_t* sums) {
  sums_of(key, sums, [e](int k) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(e + k))); });
}

// Digits of the factors instead: 32 elements a multiply, and sums that stay inside 32 bits for the whole block.
void digest2_sums(const uint16_t* e, const DigestKey& key, uint64_t* sums) {
  __m512i acc[2][kDigits];
  for (auto& lane : acc) {
    for (auto& sum : lane) sum = _mm512_setzero_si512();
  }
  const __m512i offset = _mm512_set1_epi16(-0x8000);
  for (int k = 0; k < kDigestBlock; k += 32) {
    const __m512i elements = _mm512_xor_si512(load(e + k), offset);
#pragma GCC unroll 2
    for (int lane = 0; lane < 2; ++lane) {
#pragma GCC unroll 3
      for (int d = 0; d < kDigits; ++d) {
        const __m512i products = _mm512_madd_epi16(elements, load(key.digits[lane][d] + k));
        acc[lane][d] = _mm512_add_epi32(acc[lane][d], products);
      }
    }
  }
  int64_t digit_sums[2][kDigits];
  for (int lane = 0; lane < 2; ++lane) {
    for (int d = 0; d < kDigits; ++d) digit_sums[lane][d] = sum_int32(acc[lane][d]);
  }
  join_digits(key, digit_sums, sums);
}

void digest4_sums(const uint32_t* e, const DigestKey& key, uint64_t* sums) {
  sums_of(key, sums, [e](int k) { return load(e + k); });
}
void digest8_sums(const uint64_t* e, const DigestKey& key, uint64_t* sums);

constexpr bool kMultiplies64Bits = true;  // VPMULLQ
#include "kernels_x86.h"

}  // namespace

const KernelTable* avx512_kernels() {
  static constexpr KernelTable table = make_table("avx512");
  return &table;
}

}  // namespace pulse
#else
namespace pulse {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace pulse
#endif
