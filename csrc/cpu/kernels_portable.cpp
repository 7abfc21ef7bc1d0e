// Plain C++, left to the compiler's vectoriser: any little-endian architecture.
#include <cstdint>
#include <type_traits>

#include "../bits/digest.h"
#include "../bits/index_block.h"
#include "../bits/residual.h"
#include "../bits/rounding.h"
#include "digest_key.h"
#include "kernels.h"

namespace pulse {
namespace {

template <class T>
uint64_t diff_mask(const T* a, const T* b) {
  uint8_t flags[64];
  for (int k = 0; k < 64; ++k) flags[k] = a[k] != b[k];
  uint64_t mask = 0;
  for (int byte = 0; byte < 8; ++byte) {
    uint64_t eight;
    __builtin_memcpy(&eight, flags + 8 * byte, 8);
    mask |= (eight * 0x0102040810204080ull >> 56) << (8 * byte);  // gathers eight 0/1 bytes into a byte
  }
  return mask;
}

template <uint16_t (*Round)(uint32_t)>
uint64_t gate_mask(const uint32_t* master, const uint16_t* weight) {
  uint16_t rounded[64];
  for (int k = 0; k < 64; ++k) rounded[k] = Round(master[k]);
  return diff_mask(rounded, weight);
}

template <uint16_t (*Round)(uint32_t)>
uint64_t residual_mask(const float* theta, const float* local, const float* residual);

template <class T>
void block_sums(const T* elements, const DigestKey& key, uint64_t* sums);

struct Isa {
  static constexpr auto gate_bf16 = gate_mask<round_to_bf16>;
  static constexpr auto gate_fp16 = gate_mask<round_to_fp16>;
  static constexpr auto diff1 = diff_mask<uint8_t>;
  static constexpr auto diff2 = diff_mask<uint16_t>;
  static constexpr auto diff4 = diff_mask<uint32_t>;
  static constexpr auto diff8 = diff_mask<uint64_t>;
  static constexpr auto residual_bf16 = residual_mask<round_to_bf16>;
  static constexpr auto residual_fp16 = residual_mask<round_to_fp16>;
  static constexpr auto digest1 = block_sums<uint8_t>;
  static constexpr auto digest2 = block_sums<uint16_t>;
  static constexpr auto digest4 = block_sums<uint32_t>;
  static constexpr auto digest8 = block_sums<uint64_t>;
  static constexpr bool multiplies_64_bits = false;
};

#include "kernels_impl.h"

template <uint16_t (*Round)(uint32_t)>
uint64_t residual_mask(const float* theta, const float* local, const float* residual) {
  return scalar_mask<Residual<Round, residual_mask<Round>>>(theta, local, residual);
}

template <class T>
void block_sums(const T* elements, const DigestKey& key, uint64_t* sums) {
  scalar_block_sums(elements, key, sums);
}

}  // namespace

const KernelTable& portable_kernels() {
  static constexpr KernelTable table = make_table("portable");
  return table;
}

}  // namespace pulse
