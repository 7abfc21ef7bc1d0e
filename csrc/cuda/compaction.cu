// Kernels over compaction.h: what a tile is compared by decides which one runs.
#include "compaction.h"
#include "launch.h"

namespace pulse {
namespace {

using GateBf16 = GateChange<round_to_bf16>;
using GateFp16 = GateChange<round_to_fp16>;
using ResidualBf16 = ResidualChange<round_to_bf16>;
using ResidualFp16 = ResidualChange<round_to_fp16>;

}  // namespace

#define PULSE_COMPACTION(name, Change)                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                        \
      pulse_mark_##name(CompactJob job, uint32_t* mask, int32_t* counts) {                                      \
    __shared__ CudaBlock::Storage storage;                                                                      \
    CudaBlock block(storage);                                                                                   \
    mark_tile<Change>(block, job, blockIdx.x, mask, counts);                                                    \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                        \
      pulse_collect_##name(CompactJob job, const uint32_t* mask, CollectOutput out) {                           \
    __shared__ CudaBlock::Storage storage;                                                                      \
    __shared__ CollectShared shared;                                                                            \
    CudaBlock block(storage);                                                                                   \
    collect_tile<Change>(block, shared, job, blockIdx.x, mask, out);                                            \
  }

PULSE_COMPACTION(gate_bf16, GateBf16)
PULSE_COMPACTION(gate_fp16, GateFp16)
PULSE_COMPACTION(diff_1, DiffChange<uint8_t>)
PULSE_COMPACTION(diff_2, DiffChange<uint16_t>)
PULSE_COMPACTION(diff_4, DiffChange<uint32_t>)
PULSE_COMPACTION(diff_8, DiffChange<uint64_t>)
PULSE_COMPACTION(residual_bf16, ResidualBf16)
PULSE_COMPACTION(residual_fp16, ResidualFp16)

#undef PULSE_COMPACTION

namespace {

struct Kernels {
  void (*mark)(CompactJob, uint32_t*, int32_t*);
  void (*collect)(CompactJob, const uint32_t*, CollectOutput);
};

Kernels kernels_of(int64_t kind, int64_t size) {
  switch (kind) {
    case kGateBf16: return {pulse_mark_gate_bf16, pulse_collect_gate_bf16};
    case kGateFp16: return {pulse_mark_gate_fp16, pulse_collect_gate_fp16};
    case kResidualBf16: return {pulse_mark_residual_bf16, pulse_collect_residual_bf16};
    case kResidualFp16: return {pulse_mark_residual_fp16, pulse_collect_residual_fp16};
    default: break;
  }
  switch (size) {
    case 1: return {pulse_mark_diff_1, pulse_collect_diff_1};
    case 2: return {pulse_mark_diff_2, pulse_collect_diff_2};
    case 4: return {pulse_mark_diff_4, pulse_collect_diff_4};
    default: return {pulse_mark_diff_8, pulse_collect_diff_8};
  }
}

}  // namespace

cudaError_t launch_mark(int64_t kind, int64_t size, const CompactJob& job, int64_t tiles, uint32_t* mask,
                        int32_t* counts, cudaStream_t stream) {
  kernels_of(kind, size).mark<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(job, mask, counts);
  return cudaGetLastError();
}

cudaError_t launch_collect(int64_t kind, int64_t size, const CompactJob& job, const uint32_t* mask,
                           const CollectOutput& out, cudaStream_t stream) {
  kernels_of(kind, size).collect<<<static_cast<unsigned>(out.tiles), kThreads, 0, stream>>>(job, mask, out);
  return cudaGetLastError();
}

}  // namespace pulse
