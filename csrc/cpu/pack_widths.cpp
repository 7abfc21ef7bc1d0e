// Bit packing of full blocks, one function a width: with a constant width every shift is a constant.
#include <cstdint>

#include "../bits/index_block.h"
#include "kernels.h"

namespace pulse {
namespace {

// 64 values make exactly Width 64-bit words.
template <int Width>
void pack_block(const uint32_t* gaps, uint8_t* words) {
  if constexpr (Width > 0) {
    for (int group = 0; group < kIndexBlock / 64; ++group, gaps += 64, words += 8 * Width) {
      uint64_t word = 0;
      int filled = 0, at = 0;
#pragma GCC unroll 64
      for (int k = 0; k < 64; ++k) {
        const uint64_t gap = gaps[k];
        word |= gap << filled;
        if (filled + Width >= 64) {
          __builtin_memcpy(words + 8 * at++, &word, 8);
          word = filled + Width > 64 ? gap >> (64 - filled) : 0;
          filled += Width - 64;
        } else {
          filled += Width;
        }
      }
    }
  }
}

// Positions straight from the words: the running sum stays in a register. Returns the last position.
template <class Index, int Width>
uint64_t unpack_block(const uint8_t* words, uint64_t base, Index* positions) {
  uint64_t position = base - 1;  // entry 0 stores a gap of 0
  if constexpr (Width == 0) {
    for (int k = 0; k < kIndexBlock; ++k) positions[k] = static_cast<Index>(++position);
  } else {
    constexpr uint64_t low = (1ull << Width) - 1;
    for (int group = 0; group < kIndexBlock / 64; ++group, positions += 64, words += 8 * Width) {
      uint64_t word, next;
      __builtin_memcpy(&word, words, 8);
      int used = 0, at = 1;
#pragma GCC unroll 64
      for (int k = 0; k < 64; ++k) {
        uint64_t gap = word >> used;
        if (used + Width > 64) {
          __builtin_memcpy(&next, words + 8 * at++, 8);
          gap |= next << (64 - used);
          word = next;
          used += Width - 64;
        } else if (used + Width == 64) {
          if (k < 63) __builtin_memcpy(&word, words + 8 * at++, 8);
          used = 0;
        } else {
          used += Width;
        }
        position += (gap & low) + 1;
        positions[k] = static_cast<Index>(position);
      }
    }
  }
  return position;
}

template <int Width>
constexpr auto unpack32 = unpack_block<int32_t, Width>;
template <int Width>
constexpr auto unpack64 = unpack_block<int64_t, Width>;

}  // namespace

#define PULSE_WIDTHS(f)                                                                                             \
  f<0>, f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>, f<10>, f<11>, f<12>, f<13>, f<14>, f<15>, f<16>,      \
      f<17>, f<18>, f<19>, f<20>, f<21>, f<22>, f<23>, f<24>, f<25>, f<26>, f<27>, f<28>, f<29>, f<30>, f<31>, f<32>

const PackFn pack_by_width[33] = {PULSE_WIDTHS(pack_block)};
const Unpack32Fn unpack32_by_width[33] = {PULSE_WIDTHS(unpack32)};
const Unpack64Fn unpack64_by_width[33] = {PULSE_WIDTHS(unpack64)};

}  // namespace pulse
