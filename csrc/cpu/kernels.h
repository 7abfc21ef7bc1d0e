// The inner loops of the CPU back end, one table an instruction set; which one runs is decided at run time.
#pragma once

#include <cstdint>

namespace pulse {

struct DigestKey;

// Calls with_type(T{}), T being the unsigned integer of `size` bytes.
template <class WithType>
void by_element_size(int64_t size, const WithType& with_type) {
  switch (size) {
    case 1: return with_type(uint8_t{});
    case 2: return with_type(uint16_t{});
    case 4: return with_type(uint32_t{});
    default: return with_type(uint64_t{});
  }
}

// What a comparison reads and, with `update`, writes. `third` is PULSELoCo's residual, else null.
struct CompactItem {
  const void* source;  // FP32 master, new tensor, or theta
  void* target;        // weight, old tensor, or local
  const void* third;
  int64_t numel;
};

// Where the changes of one chunk go: room for every element of the chunk. `old_values` may be null.
struct CompactSink {
  int64_t origin;       // what positions count from; no element is 2^16 or more further on
  uint16_t* positions;
  void* values;
  void* old_values;
};

// Compares elements [begin, end) and appends what changed; returns how many. Traffic: source and target read once,
// written only where changed.
using CompactFn = int64_t (*)(const CompactItem&, int64_t begin, int64_t end, const CompactSink&, bool update);
using MaskFn = void (*)(const CompactItem&, int64_t begin, int64_t end, uint8_t* mask);
using CommitFn = void (*)(const float* theta, const float* local, float* residual, int64_t begin, int64_t end);
// Adds the digest of whole blocks of 256 elements.
using DigestFn = void (*)(const void* data, int64_t blocks, uint64_t first_block, const DigestKey& key,
                          uint64_t sums[2]);
// Changed entries: sorted positions, int32 or int64, and values of the same dtype.
struct Changed {
  const void *positions, *old_values, *new_values;
};
// Adds (new - old) * K over entries [begin, end).
using DigestChangesFn = void (*)(const Changed&, int64_t begin, int64_t end, const DigestKey& key, uint64_t sums[2]);
// gap[k] = indices[k] - indices[k - 1] - 1, gap[0] = 0; returns the OR of all. 32-bit gaps; false if one is wider.
using Gaps32Fn = bool (*)(const int32_t* indices, int used, uint32_t* gaps, uint32_t* all);
using Gaps64Fn = bool (*)(const int64_t* indices, int used, uint32_t* gaps, uint32_t* all);
using PackFn = void (*)(const uint32_t* gaps, uint8_t* words);  // a full block of 256 gaps
using Unpack32Fn = uint64_t (*)(const uint8_t* words, uint64_t base, int32_t* positions);
using Unpack64Fn = uint64_t (*)(const uint8_t* words, uint64_t base, int64_t* positions);
using Sorted32Fn = bool (*)(const int32_t* indices, int64_t n, int64_t numel);
using Sorted64Fn = bool (*)(const int64_t* indices, int64_t n, int64_t numel);

extern const PackFn pack_by_width[33];      // widths 0..32
extern const Unpack32Fn unpack32_by_width[33];
extern const Unpack64Fn unpack64_by_width[33];

struct KernelTable {
  const char* name;
  CompactFn gate_bf16, gate_fp16, diff1, diff2, diff4, diff8, residual_bf16, residual_fp16;
  MaskFn mask_bf16, mask_fp16;
  CommitFn commit;
  DigestFn digest1, digest2, digest4, digest8;
  DigestChangesFn digest_changes[4][2];  // values of 1, 2, 4, 8 bytes; int32 or int64 positions
  Gaps32Fn gaps32;
  Gaps64Fn gaps64;
  Sorted32Fn sorted32;     // strictly increasing within [0, numel)
  Sorted64Fn sorted64;
};

const KernelTable& portable_kernels();
const KernelTable* avx2_kernels();    // null where not compiled in
const KernelTable* avx512_kernels();  // null where not compiled in

// The best table this CPU can run; PULSE_CPU=portable or avx2 asks for no more than that.
const KernelTable& best_kernels();

}  // namespace pulse
