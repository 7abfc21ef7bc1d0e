// torch.ops.pulse_kernels_cuda.*: one kernel launch each, on the current stream of the tensors' device; on the LibTorch
// stable ABI. pulse_kernels/backends/cuda.py makes the tables and allocates the buffers.
//
// What is checked here keeps sizes and devices of the tensors consistent; addresses inside tables are the caller's word.
#define USE_CUDA  // declares the CUDA part of the shims
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "launch.h"
#include "packing.h"

#ifndef PULSE_CUDA_ARCHITECTURES
#define PULSE_CUDA_ARCHITECTURES "unknown"
#endif

namespace pulse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMostTiles = INT32_MAX;  // of a grid

void require(bool condition, const char* what) { STD_TORCH_CHECK(condition, "pulse_kernels_cuda: ", what); }

// Makes the tensors' device the current one for its lifetime, and launches on that device's current stream.
class Launch {
 public:
  Launch(const char* name, const Tensor& tensor)
      : name_(name), device_(on_cuda(tensor)), guard_(device_) {
    // This library has a CUDA runtime of its own, which reads the current device from the driver. Said again, so that
    // the right device does not depend on how torch's runtime defers its choice.
    check(cudaSetDevice(device_));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // The data of a tensor of at least `n` elements.
  template <class T>
  T* data(const Tensor& t, int64_t n) const {
    return static_cast<T*>(raw(t, n, sizeof(T)));
  }
  void* raw(const Tensor& t, int64_t n, int64_t element_size) const {
    require(t.is_cuda() && t.get_device_index() == device_, "tensors must be on one CUDA device");
    require(t.is_contiguous(), "tensors must be contiguous");
    require(static_cast<int64_t>(t.element_size()) == element_size && t.numel() >= n, "a tensor's size does not fit");
    return t.mutable_data_ptr();
  }

  void check(cudaError_t error) const {
    STD_TORCH_CHECK(error == cudaSuccess, "pulse_kernels_cuda: ", name_, " on device ", device_, ": ",
                    cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  }

 private:
  static int32_t on_cuda(const Tensor& tensor) {
    require(tensor.is_cuda(), "tensors must be on a CUDA device");
    return tensor.get_device_index();
  }

  const char* name_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

void require_tiles(int64_t tiles) { require(tiles > 0 && tiles <= kMostTiles, "1 to 2^31 - 1 tiles are one launch"); }

// ---- compaction ------------------------------------------------------------------------------------------------------

void require_kind(int64_t kind, int64_t size) {
  require(kind >= kGateBf16 && kind <= kResidualFp16, "unknown kind");
  const bool gate = kind == kGateBf16 || kind == kGateFp16;
  require(kind == kDiff ? size == 1 || size == 2 || size == 4 || size == 8 : size == (gate ? 2 : 4),
          "the element size does not fit the kind");
}

CompactJob job_of(const Launch& launch, const std::optional<Tensor>& table, const std::optional<Tensor>& tile_rows,
                  const std::vector<int64_t>& row, int64_t tiles) {
  require_tiles(tiles);
  require(table.has_value() == tile_rows.has_value(), "table and tile_rows come together");
  CompactJob job{};
  if (table) {
    job.table = launch.data<const int64_t>(*table, 5);
    job.tile_rows = launch.data<const int32_t>(*tile_rows, tiles);
  } else {
    require(row.size() == 5, "a row has five numbers");
    for (int k = 0; k < 5; ++k) job.row[k] = row[k];
  }
  return job;
}

void mark(int64_t kind, int64_t size, std::optional<Tensor> table, std::optional<Tensor> tile_rows,
          std::vector<int64_t> row, int64_t tiles, const Tensor& mask, const Tensor& counts) {
  require_kind(kind, size);
  const Launch launch("mark", mask);
  const CompactJob job = job_of(launch, table, tile_rows, row, tiles);
  launch.check(launch_mark(kind, size, job, tiles, launch.data<uint32_t>(mask, tiles * kTileWords),
                           launch.data<int32_t>(counts, tiles), launch.stream()));
}

void collect(int64_t kind, int64_t size, std::optional<Tensor> table, std::optional<Tensor> tile_rows,
             std::vector<int64_t> row, int64_t tiles, const Tensor& mask, const Tensor& ends, const Tensor& indices,
             const Tensor& values, std::optional<Tensor> old_values, bool update) {
  require_kind(kind, size);
  require(!update || kind <= kDiff, "the residual gate only reads");
  const Launch launch("collect", mask);
  const CompactJob job = job_of(launch, table, tile_rows, row, tiles);
  const bool wide = indices.scalar_type() == ScalarType::Long;
  require(wide || indices.scalar_type() == ScalarType::Int, "indices must be int32 or int64");
  CollectOutput out{};
  out.ends = launch.data<const int64_t>(ends, tiles);
  out.tiles = tiles;
  out.capacity = indices.numel();
  out.indices = launch.raw(indices, 0, wide ? 8 : 4);
  out.wide = wide;
  out.values = launch.raw(values, out.capacity, size);
  out.old_values = old_values ? launch.raw(*old_values, out.capacity, size) : nullptr;
  out.update = update;
  launch.check(launch_collect(kind, size, job, launch.data<const uint32_t>(mask, tiles * kTileWords), out,
                              launch.stream()));
}

// ---- packed indices --------------------------------------------------------------------------------------------------

struct Tiles {
  const int64_t* table;
  const int32_t* tile_rows;
  int64_t count;
  int64_t rows;
};

Tiles tiles_of(const Launch& launch, const Tensor& table, const Tensor& tile_rows, int columns) {
  require(table.numel() % columns == 0, "the table's rows have another length");
  require_tiles(tile_rows.numel());
  return {launch.data<const int64_t>(table, columns), launch.data<const int32_t>(tile_rows, 1), tile_rows.numel(),
          table.numel() / columns};
}

void pack_widths(const Tensor& table, const Tensor& tile_rows, const Tensor& widths) {
  const Launch launch("pack_widths", table);
  const Tiles tiles = tiles_of(launch, table, tile_rows, kPackColumns);
  launch.check(launch_widths(tiles.table, tiles.tile_rows, tiles.count, launch.data<uint8_t>(widths, 0),
                             launch.stream()));
}

void pack(const Tensor& table, const Tensor& tile_rows, const Tensor& widths, const Tensor& ends, const Tensor& blobs) {
  const Launch launch("pack", table);
  const Tiles tiles = tiles_of(launch, table, tile_rows, kPackColumns);
  launch.check(launch_pack(tiles.table, tiles.tile_rows, tiles.count, launch.data<const uint8_t>(widths, 0),
                           launch.data<const int64_t>(ends, widths.numel()), launch.data<uint8_t>(blobs, 32),
                           launch.stream()));
}

void unpack(const Tensor& table, const Tensor& tile_rows, const Tensor& errors, std::optional<Tensor> out) {
  const Launch launch("unpack", table);
  const Tiles tiles = tiles_of(launch, table, tile_rows, kUnpackColumns);
  launch.check(launch_unpack(tiles.table, tiles.tile_rows, tiles.count, launch.data<int64_t>(errors, tiles.rows),
                             out ? launch.data<uint8_t>(*out, 0) : nullptr, launch.stream()));
}

void exchange(const Tensor& table, const Tensor& tile_rows, std::optional<Tensor> old_values) {
  const Launch launch("exchange", table);
  const Tiles tiles = tiles_of(launch, table, tile_rows, kUnpackColumns);
  launch.check(launch_exchange(tiles.table, tiles.tile_rows, tiles.count,
                               old_values ? launch.data<uint8_t>(*old_values, 0) : nullptr, launch.stream()));
}

std::string architectures() { return PULSE_CUDA_ARCHITECTURES; }

int64_t runtime_version() { return CUDART_VERSION; }  // of the runtime inside this library: 1000 * major + 10 * minor

}  // namespace
}  // namespace pulse

STABLE_TORCH_LIBRARY(pulse_kernels_cuda, m) {
  m.def(
      "mark(int kind, int size, Tensor? table, Tensor? tile_rows, int[] row, int tiles, Tensor(a!) mask, "
      "Tensor(b!) counts) -> ()");
  m.def(
      "collect(int kind, int size, Tensor? table, Tensor? tile_rows, int[] row, int tiles, Tensor mask, Tensor ends, "
      "Tensor(a!) indices, Tensor(b!) values, Tensor(c!)? old_values, bool update) -> ()");
  m.def("pack_widths(Tensor table, Tensor tile_rows, Tensor(a!) widths) -> ()");
  m.def("pack(Tensor table, Tensor tile_rows, Tensor widths, Tensor ends, Tensor(a!) blobs) -> ()");
  m.def("unpack(Tensor table, Tensor tile_rows, Tensor(a!) errors, Tensor(b!)? out) -> ()");
  m.def("exchange(Tensor table, Tensor tile_rows, Tensor(a!)? old_values) -> ()");
  m.def("architectures() -> str");
  m.def("runtime_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pulse_kernels_cuda, CompositeExplicitAutograd, m) {
  m.impl("mark", TORCH_BOX(&pulse::mark));
  m.impl("collect", TORCH_BOX(&pulse::collect));
  m.impl("pack_widths", TORCH_BOX(&pulse::pack_widths));
  m.impl("pack", TORCH_BOX(&pulse::pack));
  m.impl("unpack", TORCH_BOX(&pulse::unpack));
  m.impl("exchange", TORCH_BOX(&pulse::exchange));
  m.impl("architectures", TORCH_BOX(&pulse::architectures));
  m.impl("runtime_version", TORCH_BOX(&pulse::runtime_version));
}
