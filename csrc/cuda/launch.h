// What register.cpp launches: one kernel each, on a stream of the current device. Addresses are of that device.
// Each returns cudaSuccess or why the kernel could not be launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "compaction.h"

namespace pulse {

enum Kind : int64_t { kGateBf16, kGateFp16, kDiff, kResidualBf16, kResidualFp16 };

// size: bytes of an element of target and values; tiles: up to 2^31 - 1.
cudaError_t launch_mark(int64_t kind, int64_t size, const CompactJob& job, int64_t tiles, uint32_t* mask,
                        int32_t* counts, cudaStream_t stream);
cudaError_t launch_collect(int64_t kind, int64_t size, const CompactJob& job, const uint32_t* mask,
                           const CollectOutput& out, cudaStream_t stream);

// Tables and buffers as packing.h has them.
cudaError_t launch_widths(const int64_t* table, const int32_t* tile_rows, int64_t tiles, uint8_t* widths,
                          cudaStream_t stream);
cudaError_t launch_pack(const int64_t* table, const int32_t* tile_rows, int64_t tiles, const uint8_t* widths,
                        const int64_t* ends, uint8_t* blobs, cudaStream_t stream);
cudaError_t launch_unpack(const int64_t* table, const int32_t* tile_rows, int64_t tiles, int64_t* errors, uint8_t* out,
                          cudaStream_t stream);
cudaError_t launch_exchange(const int64_t* table, const int32_t* tile_rows, int64_t tiles, uint8_t* old_values,
                            cudaStream_t stream);

}  // namespace pulse
