// What the x86 instruction sets have in common once their masks and digest sums are there: the table's entries, and the
// scalar masks that a vector mask hands over to where it meets a NaN. Included by each inside its anonymous namespace.

struct Isa {
  static constexpr auto gate_bf16 = gate_bf16_mask;
  static constexpr auto gate_fp16 = gate_fp16_mask;
  static constexpr auto diff1 = diff1_mask;
  static constexpr auto diff2 = diff2_mask;
  static constexpr auto diff4 = diff4_mask;
  static constexpr auto diff8 = diff8_mask;
  static constexpr auto residual_bf16 = residual_mask<true>;
  static constexpr auto residual_fp16 = residual_mask<false>;
  static constexpr auto digest1 = digest1_sums;
  static constexpr auto digest2 = digest2_sums;
  static constexpr auto digest4 = digest4_sums;
  static constexpr auto digest8 = digest8_sums;
  static constexpr bool multiplies_64_bits = kMultiplies64Bits;
};

#include "kernels_impl.h"

uint64_t slow_gate_bf16(const uint32_t* master, const uint16_t* weight) {
  return scalar_mask<Gate<round_to_bf16, gate_bf16_mask>>(master, weight);
}
uint64_t slow_gate_fp16(const uint32_t* master, const uint16_t* weight) {
  return scalar_mask<Gate<round_to_fp16, gate_fp16_mask>>(master, weight);
}
uint64_t slow_residual_bf16(const float* theta, const float* local, const float* residual) {
  return scalar_mask<Residual<round_to_bf16, residual_mask<true>>>(theta, local, residual);
}
uint64_t slow_residual_fp16(const float* theta, const float* local, const float* residual) {
  return scalar_mask<Residual<round_to_fp16, residual_mask<false>>>(theta, local, residual);
}
void digest8_sums(const uint64_t* e, const DigestKey& key, uint64_t* sums) { scalar_block_sums(e, key, sums); }
