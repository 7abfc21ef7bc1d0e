// Kernels over packing.h.
#include "packing.h"
#include "launch.h"

namespace pulse {

// Blocks on a multiprocessor that the compiler leaves registers for: 64 a thread. Left alone it aims at more blocks than
// shared memory has room for, and spills.
constexpr int kBlocksWanted = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    pulse_pack_widths(const int64_t* table, const int32_t* tile_rows, uint8_t* widths) {
  __shared__ CudaBlock::Storage storage;
  CudaBlock block(storage);
  widths_tile(block, table, tile_rows, blockIdx.x, widths);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    pulse_pack(const int64_t* table, const int32_t* tile_rows, const uint8_t* widths, const int64_t* ends,
               uint8_t* blobs) {
  __shared__ CudaBlock::Storage storage;
  __shared__ EntriesShared shared;
  CudaBlock block(storage);
  pack_tile(block, shared, table, tile_rows, blockIdx.x, widths, ends, blobs);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksWanted)
    pulse_unpack(const int64_t* table, const int32_t* tile_rows, int64_t* errors, uint8_t* out) {
  __shared__ CudaBlock::Storage storage;
  __shared__ EntriesShared shared;
  CudaBlock block(storage);
  unpack_tile(block, shared, table, tile_rows, blockIdx.x, errors, out);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksWanted)
    pulse_exchange(const int64_t* table, const int32_t* tile_rows, uint8_t* old_values) {
  __shared__ CudaBlock::Storage storage;
  __shared__ EntriesShared shared;
  CudaBlock block(storage);
  exchange_tile(block, shared, table, tile_rows, blockIdx.x, old_values);
}

cudaError_t launch_widths(const int64_t* table, const int32_t* tile_rows, int64_t tiles, uint8_t* widths,
                          cudaStream_t stream) {
  pulse_pack_widths<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, tile_rows, widths);
  return cudaGetLastError();
}

cudaError_t launch_pack(const int64_t* table, const int32_t* tile_rows, int64_t tiles, const uint8_t* widths,
                        const int64_t* ends, uint8_t* blobs, cudaStream_t stream) {
  pulse_pack<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, tile_rows, widths, ends, blobs);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const int64_t* table, const int32_t* tile_rows, int64_t tiles, int64_t* errors, uint8_t* out,
                          cudaStream_t stream) {
  pulse_unpack<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, tile_rows, errors, out);
  return cudaGetLastError();
}

cudaError_t launch_exchange(const int64_t* table, const int32_t* tile_rows, int64_t tiles, uint8_t* old_values,
                            cudaStream_t stream) {
  pulse_exchange<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, tile_rows, old_values);
  return cudaGetLastError();
}

}  // namespace pulse
