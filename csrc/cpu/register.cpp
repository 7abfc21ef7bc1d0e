// torch.ops.pulse_kernels_cpu.*: the raw loops behind pulse_kernels/backends/cpu.py, on the LibTorch stable ABI.
//
// Arguments were checked in Python (pulse_kernels/ops.py); what is checked here keeps memory safe against a direct call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "compaction.h"
#include "index_blob.h"
#include "kernels.h"
#include "scatter.h"
#include "state_digest.h"
#include "streams.h"
#include "sums.h"

namespace pulse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

class TorchRunner final : public Runner {  // torch's own intra-op threads
 public:
  int threads() const override { return static_cast<int>(torch::stable::get_num_threads()); }
  void run(int workers, const std::function<void(int)>& body) override {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(static_cast<int>(worker));
    });
  }
};

void require(bool condition, const char* what) { STD_TORCH_CHECK(condition, "pulse_kernels_cpu: ", what); }

Tensor fresh(const Tensor& like, int64_t n, std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, std::vector<int64_t>{n}, dtype);
}

const void* read(const Tensor& t) {
  require(t.is_cpu() && t.is_contiguous(), "tensors must be contiguous and on the CPU");
  return t.const_data_ptr();
}

void* write(const Tensor& t) {
  require(t.is_cpu() && t.is_contiguous(), "tensors must be contiguous and on the CPU");
  return t.mutable_data_ptr();
}

bool is_wide(const Tensor& indices) {
  const bool wide = indices.scalar_type() == ScalarType::Long;
  require(wide || indices.scalar_type() == ScalarType::Int, "indices must be int32 or int64");
  return wide;
}

// ---- compaction -----------------------------------------------------------------------------------------------------

enum Kind : int64_t { kGateBf16, kGateFp16, kDiff, kResidualBf16, kResidualFp16 };

CompactFn compact_kernel(int64_t kind, int64_t value_bytes) {
  const KernelTable& k = best_kernels();
  switch (kind) {
    case kGateBf16: return k.gate_bf16;
    case kGateFp16: return k.gate_fp16;
    case kResidualBf16: return k.residual_bf16;
    case kResidualFp16: return k.residual_fp16;
    default: return value_bytes == 1 ? k.diff1 : value_bytes == 2 ? k.diff2 : value_bytes == 4 ? k.diff4 : k.diff8;
  }
}

int64_t element_size(const Tensor& t) { return static_cast<int64_t>(t.element_size()); }

CompactItem compact_item(int64_t kind, const Tensor& source, const Tensor& target, const Tensor* third, bool update) {
  const int64_t n = target.numel(), size = element_size(target);
  require(source.numel() == n && (third == nullptr || third->numel() == n), "sizes differ");
  const bool gate = kind == kGateBf16 || kind == kGateFp16;
  require(size == 1 || size == 2 || size == 4 || size == 8, "elements must have 1, 2, 4 or 8 bytes");
  require(element_size(source) == (gate ? 4 : size) && (!gate || size == 2), "element sizes do not fit the operator");
  const bool residual = kind >= kResidualBf16;
  require(residual == (third != nullptr) && (!residual || size == 4), "arguments do not fit the operator");
  void* target_data = update ? write(target) : const_cast<void*>(read(target));
  return {read(source), target_data, third == nullptr ? nullptr : read(*third), n};
}

// With `keys`, also int64[4] each: the target's digest as it was (with `digest_before`, else 0) and its change.
std::tuple<Tensors, Tensors, Tensors, Tensors> compact_many(int64_t kind, Tensors sources, Tensors targets,
                                                            Tensors thirds, std::vector<int64_t> wide,
                                                            std::vector<int64_t> keys, bool digest_before, bool update,
                                                            bool keep_old) {
  require(keys.empty() || (keys.size() == targets.size() && keep_old), "keys do not fit the other arguments");
  require(sources.size() == targets.size() && wide.size() == targets.size(), "lists differ in length");
  require(kind >= kGateBf16 && kind <= kResidualFp16, "unknown kind");
  require(thirds.empty() || thirds.size() == targets.size(), "lists differ in length");
  const size_t n_targets = targets.size();
  std::tuple<Tensors, Tensors, Tensors, Tensors> result{Tensors(n_targets), Tensors(n_targets), Tensors(n_targets),
                                                        Tensors(keys.size())};
  TorchRunner runner;
  std::vector<Compaction> passes;  // tensors of one element size share one; kept until all succeeded
  const auto one_pass = [&](int64_t size) {
    std::vector<size_t> members;
    std::vector<CompactItem> items;
    for (size_t k = 0; k < targets.size(); ++k) {
      if (element_size(targets[k]) != size) continue;
      require(wide[k] != 0 || targets[k].numel() <= INT32_MAX, "too many elements for int32 indices");
      members.push_back(k);
      items.push_back(compact_item(kind, sources[k], targets[k], thirds.empty() ? nullptr : &thirds[k], update));
    }
    if (members.empty()) return;
    passes.emplace_back(std::move(items), compact_kernel(kind, size), static_cast<int>(size), keep_old || update);
    Compaction& compaction = passes.back();
    if (!keys.empty()) {
      std::vector<uint64_t> member_keys;
      for (const size_t k : members) member_keys.push_back(static_cast<uint64_t>(keys[k]));
      compaction.keep_digests(member_keys, digest_before ? digest_kernel(best_kernels(), size) : nullptr);
    }
    require(compaction.run(runner, update), "out of memory; nothing was changed");
    std::vector<Compaction::Output> outputs;
    for (size_t m = 0; m < members.size(); ++m) {
      const size_t k = members[m];
      const int64_t n = compaction.total(m);
      Tensor indices = fresh(targets[k], n, wide[k] != 0 ? ScalarType::Long : ScalarType::Int);
      Tensor values = fresh(targets[k], n), old_values = fresh(targets[k], keep_old ? n : 0);
      outputs.push_back({indices.mutable_data_ptr(), wide[k] != 0, values.mutable_data_ptr(),
                         keep_old ? old_values.mutable_data_ptr() : nullptr});
      std::get<0>(result)[k] = indices;
      std::get<1>(result)[k] = values;
      std::get<2>(result)[k] = old_values;
      if (!keys.empty()) {
        Tensor sums = fresh(targets[k], Compaction::kDigestSums, ScalarType::Long);
        auto* data = static_cast<uint64_t*>(sums.mutable_data_ptr());
        for (int s = 0; s < Compaction::kDigestSums; ++s) data[s] = compaction.digest(m, s);
        std::get<3>(result)[k] = sums;
      }
    }
    compaction.write(runner, outputs);
  };
  try {
    for (const int64_t size : {1, 2, 4, 8}) one_pass(size);
  } catch (...) {  // a list the checks refuse, or no memory for the results
    if (update) {
      for (const Compaction& compaction : passes) compaction.undo();
    }
    throw;
  }
  return result;
}

int64_t compact_out(int64_t kind, const Tensor& source, const Tensor& target, const Tensor& indices,
                    const Tensor& values, std::optional<Tensor> old_values, bool update) {
  const int64_t size = element_size(target), capacity = indices.numel();
  require(kind >= kGateBf16 && kind <= kDiff, "unknown kind");
  require(values.numel() == capacity && element_size(values) == size, "values do not fit");
  require(!old_values || (old_values->numel() == capacity && element_size(*old_values) == size), "old do not fit");
  require(is_wide(indices) || target.numel() <= INT32_MAX, "too many elements for int32 indices");
  const Compaction::Output output{write(indices), is_wide(indices), write(values),
                                  old_values ? write(*old_values) : nullptr};
  TorchRunner runner;
  Compaction compaction({compact_item(kind, source, target, nullptr, update)}, compact_kernel(kind, size),
                        static_cast<int>(size), update || old_values.has_value());
  require(compaction.run(runner, update), "out of memory; nothing was changed");
  if (compaction.total(0) > capacity) {
    if (update) compaction.undo();
  } else {
    compaction.write(runner, {output});
  }
  return compaction.total(0);
}

void mask(int64_t kind, const Tensor& master, const Tensor& weight, const Tensor& out) {
  const CompactItem item = compact_item(kind, master, weight, nullptr, false);
  require(out.numel() == item.numel && element_size(out) == 1, "the mask does not fit");
  const MaskFn kernel = kind == kGateBf16 ? best_kernels().mask_bf16 : best_kernels().mask_fp16;
  auto* bytes = static_cast<uint8_t*>(write(out));
  TorchRunner().for_each((item.numel + kCompactChunk - 1) / kCompactChunk, [&](int, int64_t task) {
    const int64_t end = (task + 1) * kCompactChunk;
    kernel(item, task * kCompactChunk, end < item.numel ? end : item.numel, bytes);
  });
}

void commit(const Tensor& theta, const Tensor& local, const Tensor& residual) {
  const int64_t n = residual.numel();
  require(theta.numel() == n && local.numel() == n, "sizes differ");
  require(element_size(theta) == 4 && element_size(local) == 4 && element_size(residual) == 4, "expected FP32");
  const auto *t = static_cast<const float*>(read(theta)), *l = static_cast<const float*>(read(local));
  auto* r = static_cast<float*>(write(residual));
  TorchRunner().for_each((n + kCompactChunk - 1) / kCompactChunk, [&](int, int64_t task) {
    const int64_t end = (task + 1) * kCompactChunk;
    best_kernels().commit(t, l, r, task * kCompactChunk, end < n ? end : n);
  });
}

// ---- patches --------------------------------------------------------------------------------------------------------

template <class Index>
int64_t first_bad(const Index* indices, int64_t n, int64_t numel, bool (*sorted)(const Index*, int64_t, int64_t)) {
  constexpr int64_t task_size = 1 << 18;  // less takes no longer than to wake a thread
  std::atomic<int64_t> bad_task{INT64_MAX};
  TorchRunner().for_each((n + task_size - 1) / task_size, [&](int, int64_t task) {
    // Each task looks at the entry before its own as well.
    const int64_t begin = task == 0 ? 0 : task * task_size - 1;
    const int64_t end = n < (task + 1) * task_size ? n : (task + 1) * task_size;
    if (sorted(indices + begin, end - begin, numel)) return;
    int64_t seen = bad_task;
    while (task < seen && !bad_task.compare_exchange_weak(seen, task)) {
    }
  });
  if (bad_task == INT64_MAX) return -1;
  for (int64_t k = bad_task * task_size;; ++k) {
    if (indices[k] < 0 || indices[k] >= numel || (k > 0 && indices[k] <= indices[k - 1])) return k;
  }
}

int64_t first_bad_index(const Tensor& indices, int64_t numel) {
  const int64_t n = indices.numel();
  if (is_wide(indices)) return first_bad(static_cast<const int64_t*>(read(indices)), n, numel, best_kernels().sorted64);
  return first_bad(static_cast<const int32_t*>(read(indices)), n, numel, best_kernels().sorted32);
}

template <class Call>
void by_size(int64_t size, const Call& call) {
  require(size == 1 || size == 2 || size == 4 || size == 8, "elements must have 1, 2, 4 or 8 bytes");
  by_element_size(size, call);
}

template <class Value, class Index>
void scatter_typed(const Tensor& weight, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                   const Tensor& indices, const Tensor& values, const std::optional<Tensor>& old_values) {
  TorchRunner runner;
  auto* w = static_cast<Value*>(weight.mutable_data_ptr());
  const auto* i = static_cast<const Index*>(read(indices));
  const auto* v = static_cast<const Value*>(read(values));
  auto* old = old_values ? static_cast<Value*>(write(*old_values)) : nullptr;
  if (weight.is_contiguous()) {
    scatter(runner, w, i, v, old, indices.numel(), Contiguous{});
  } else {
    scatter(runner, w, i, v, old, indices.numel(), Strided{sizes, strides});
  }
}

void scatter_values(const Tensor& weight, const Tensor& indices, const Tensor& values, std::optional<Tensor> old_values) {
  const int64_t n = indices.numel(), size = element_size(weight);
  require(weight.is_cpu() && values.numel() == n && element_size(values) == size, "values do not fit");
  require(!old_values || (old_values->numel() == n && element_size(*old_values) == size), "old values do not fit");
  std::vector<int64_t> sizes, strides;
  for (int64_t d = 0; d < weight.dim(); ++d) {
    sizes.push_back(weight.size(d));
    strides.push_back(weight.stride(d));
  }
  by_size(size, [&](auto value) {
    using Value = decltype(value);
    if (is_wide(indices)) {
      scatter_typed<Value, int64_t>(weight, sizes, strides, indices, values, old_values);
    } else {
      scatter_typed<Value, int32_t>(weight, sizes, strides, indices, values, old_values);
    }
  });
}

// Values at checked positions of a contiguous tensor.
Tensor gather_values(const Tensor& weight, const Tensor& indices) {
  const int64_t n = indices.numel();
  Tensor values = fresh(weight, n);
  const void *w = read(weight), *i = read(indices);
  void* out = values.mutable_data_ptr();
  by_size(element_size(weight), [&](auto value) {
    using V = decltype(value);
    if (is_wide(indices)) {
      gather(static_cast<const V*>(w), static_cast<const int64_t*>(i), static_cast<V*>(out), n);
    } else {
      gather(static_cast<const V*>(w), static_cast<const int32_t*>(i), static_cast<V*>(out), n);
    }
  });
  return values;
}

// ---- packed indices -------------------------------------------------------------------------------------------------

template <class Index>
Tensor pack_typed(const Tensor& indices, int64_t numel) {
  TorchRunner runner;
  Packer<Index> packer(best_kernels(), static_cast<const Index*>(read(indices)), indices.numel(), numel);
  const auto bytes = static_cast<int64_t>(packer.measure(runner));
  require(packer.offsets_fit(), "more than 128 GiB of packed indices; pack the tensor in parts");
  Tensor blob = fresh(indices, bytes, ScalarType::Byte);
  packer.write(runner, static_cast<uint8_t*>(blob.mutable_data_ptr()));
  return blob;
}

Tensor pack(const Tensor& indices, int64_t numel) {
  require(numel >= 0 && static_cast<uint64_t>(numel) <= kMaxNumel, "numel out of range");
  return is_wide(indices) ? pack_typed<int64_t>(indices, numel) : pack_typed<int32_t>(indices, numel);
}

// The indices and an empty string, or what is wrong with the blob.
std::tuple<Tensor, std::string> unpack(const Tensor& packed, bool wide) {
  require(element_size(packed) == 1, "packed must be bytes");
  TorchRunner runner;
  Unpacker unpacker(static_cast<const uint8_t*>(read(packed)), packed.numel());
  const auto dtype = wide ? ScalarType::Long : ScalarType::Int;
  if (!unpacker.error().empty()) return {fresh(packed, 0, dtype), unpacker.error()};
  require(wide || unpacker.numel() <= INT32_MAX, "too many elements for int32 indices");
  Tensor indices = fresh(packed, static_cast<int64_t>(unpacker.count()), dtype);
  if (wide) {
    unpacker.unpack(runner, static_cast<int64_t*>(indices.mutable_data_ptr()));
  } else {
    unpacker.unpack(runner, static_cast<int32_t*>(indices.mutable_data_ptr()));
  }
  return {indices, unpacker.error()};
}

// ---- digest ---------------------------------------------------------------------------------------------------------

Tensor state_digest(const Tensor& tensor, int64_t key, int64_t start) {
  const int64_t size = element_size(tensor);
  require(size == 1 || size == 2 || size == 4 || size == 8, "elements must have 1, 2, 4 or 8 bytes");
  TorchRunner runner;
  Tensor result = fresh(tensor, 2, ScalarType::Long);
  digest(runner, digest_kernel(best_kernels(), size), read(tensor), size, tensor.numel(), key, start,
         static_cast<uint64_t*>(result.mutable_data_ptr()));
  return result;
}

Tensor state_digest_update(const Tensor& before, const Tensor& indices, const Tensor& old_values,
                           const Tensor& new_values, int64_t key) {
  const int64_t n = indices.numel(), size = element_size(old_values);
  require(before.numel() == 2 && before.scalar_type() == ScalarType::Long, "digest must be int64[2]");
  require(old_values.numel() == n && new_values.numel() == n && element_size(new_values) == size, "sizes differ");
  TorchRunner runner;
  Tensor result = fresh(before, 2);
  auto* out = static_cast<uint64_t*>(result.mutable_data_ptr());
  std::memcpy(out, read(before), 16);
  require(size == 1 || size == 2 || size == 4 || size == 8, "elements must have 1, 2, 4 or 8 bytes");
  digest_update(runner, digest_changes_kernel(best_kernels(), size, is_wide(indices)),
                {read(indices), read(old_values), read(new_values)}, n, key, out);
  return result;
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// The sums of sparse FP32 vectors that are not zero: sorted int32 positions and values.
std::tuple<Tensor, Tensor> sum_entries(Tensors indices, Tensors values, int64_t numel) {
  require(indices.size() == values.size() && !indices.empty(), "lists differ in length");
  require(0 <= numel && numel <= INT32_MAX, "numel out of range");
  std::vector<SparseVector> vectors;
  for (size_t k = 0; k < indices.size(); ++k) {
    const int64_t n = indices[k].numel();
    require(!is_wide(indices[k]) && element_size(values[k]) == 4 && values[k].numel() == n, "entries do not fit");
    const auto* positions = static_cast<const int32_t*>(read(indices[k]));
    require(n == 0 || (positions[0] >= 0 && positions[n - 1] < numel), "positions out of range");
    vectors.push_back({positions, static_cast<const float*>(read(values[k])), n});
  }
  TorchRunner runner;
  SparseSum sum(std::move(vectors), numel);
  require(sum.run(runner), "out of memory; nothing was changed");
  Tensor places = fresh(indices[0], sum.total()), totals = fresh(values[0], sum.total());
  sum.write(runner, static_cast<int32_t*>(places.mutable_data_ptr()), static_cast<float*>(totals.mutable_data_ptr()));
  return {places, totals};
}

// ---- byte streams ---------------------------------------------------------------------------------------------------

// One segment a task: (tops, low planes, escapes), a low plane being empty for a shift of 0. starts: the least position
// that each can have.
std::tuple<Tensors, Tensors, Tensors> gaps_to_bytes(Tensors indices, std::vector<int64_t> starts,
                                                    std::vector<int64_t> shifts) {
  require(indices.size() == shifts.size() && indices.size() == starts.size(), "lists differ in length");
  const size_t segments = indices.size();
  Tensors tops, lows, escapes;
  std::vector<const void*> inputs;
  std::vector<uint8_t*> top_data, low_data;
  for (size_t k = 0; k < segments; ++k) {
    require(shifts[k] == 0 || shifts[k] == 8, "shift must be 0 or 8");
    require(indices[k].numel() <= INT32_MAX, "a segment has fewer than 2^31 entries");
    is_wide(indices[k]);
    inputs.push_back(read(indices[k]));
    tops.push_back(fresh(indices[k], indices[k].numel(), ScalarType::Byte));
    lows.push_back(fresh(indices[k], shifts[k] != 0 ? indices[k].numel() : 0, ScalarType::Byte));
    top_data.push_back(static_cast<uint8_t*>(tops[k].mutable_data_ptr()));
    low_data.push_back(shifts[k] != 0 ? static_cast<uint8_t*>(lows[k].mutable_data_ptr()) : nullptr);
  }
  std::vector<std::vector<uint8_t>> rest(segments);
  TorchRunner().for_each(static_cast<int64_t>(segments), [&](int, int64_t k) {
    const int64_t n = indices[k].numel();
    const int shift = static_cast<int>(shifts[k]);
    if (is_wide(indices[k])) {
      encode_gaps(static_cast<const int64_t*>(inputs[k]), n, starts[k], shift, top_data[k], low_data[k], &rest[k]);
    } else {
      encode_gaps(static_cast<const int32_t*>(inputs[k]), n, starts[k], shift, top_data[k], low_data[k], &rest[k]);
    }
  });
  for (size_t k = 0; k < segments; ++k) {
    escapes.push_back(fresh(indices[k], static_cast<int64_t>(rest[k].size()), ScalarType::Byte));
    if (!rest[k].empty()) std::memcpy(escapes[k].mutable_data_ptr(), rest[k].data(), rest[k].size());
  }
  return {tops, lows, escapes};
}

// The indices and -1, or the entry at which the streams are wrong.
std::tuple<Tensor, int64_t> bytes_to_gaps(const Tensor& top, const Tensor& low, const Tensor& escapes, int64_t start,
                                          int64_t stop, bool wide) {
  const int64_t n = top.numel();
  require(element_size(top) == 1 && element_size(low) == 1 && element_size(escapes) == 1, "streams must be bytes");
  require(low.numel() == 0 || low.numel() == n, "the low plane does not fit");
  require(0 <= start && start <= stop && (wide || stop <= INT32_MAX), "range does not fit the indices");
  const auto* low_data = low.numel() != 0 ? static_cast<const uint8_t*>(read(low)) : nullptr;
  const int shift = low_data != nullptr ? 8 : 0;
  Tensor indices = fresh(top, n, wide ? ScalarType::Long : ScalarType::Int);
  const auto *t = static_cast<const uint8_t*>(read(top)), *e = static_cast<const uint8_t*>(read(escapes));
  void* out = indices.mutable_data_ptr();
  const int64_t bad = wide ? decode_gaps(t, low_data, e, escapes.numel(), n, start, stop, shift, static_cast<int64_t*>(out))
                           : decode_gaps(t, low_data, e, escapes.numel(), n, start, stop, shift, static_cast<int32_t*>(out));
  return {indices, bad};
}

// Calls call(signed value of `size` bytes, whether its order is that of floats).
template <class Call>
void by_size_and_kind(int64_t size, bool is_float, const Call& call) {
  by_size(size, [&](auto unsigned_value) {
    const std::make_signed_t<decltype(unsigned_value)> value{};
    return is_float ? call(value, std::true_type{}) : call(value, std::false_type{});
  });
}

// One segment a task; `bases` is empty or has one entry a segment.
Tensors values_to_planes(Tensors values, Tensors bases, std::vector<int64_t> is_float) {
  const bool based = !bases.empty();
  require(!based || bases.size() == values.size(), "lists differ in length");
  require(is_float.size() == values.size(), "lists differ in length");
  const size_t segments = values.size();
  std::vector<const void*> in(segments), base(segments);
  for (size_t k = 0; k < segments; ++k) {
    const int64_t size = element_size(values[k]);
    require(size == 1 || size == 2 || size == 4 || size == 8, "elements must have 1, 2, 4 or 8 bytes");
    require(!based || (bases[k].numel() == values[k].numel() && element_size(bases[k]) == size), "base does not fit");
    in[k] = read(values[k]);
    base[k] = based ? read(bases[k]) : nullptr;
  }
  const auto each = [&](const auto& code) {  // code(segment, its values, its base, their number, whether floats)
    TorchRunner().for_each(static_cast<int64_t>(segments), [&](int, int64_t k) {
      by_size_and_kind(element_size(values[k]), is_float[k] != 0, [&](auto value, auto float_kind) {
        using S = std::remove_const_t<decltype(value)>;
        code(k, static_cast<const S*>(in[k]), static_cast<const S*>(base[k]), values[k].numel(), float_kind);
      });
    });
  };
  // Signs and codes first: they tell how large the whole is.
  std::vector<std::vector<uint8_t>> heads(segments);
  std::vector<int64_t> large(segments);
  for (size_t k = 0; based && k < segments; ++k) {
    heads[k].resize(sign_bytes(values[k].numel()) + code_bytes(values[k].numel()));
  }
  if (based) {
    each([&](int64_t k, auto* from, auto* before, int64_t n, auto float_kind) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
      large[k] = encode_codes<S, float_kind.value>(from, before, n, heads[k].data());
    });
  }
  Tensors planes(segments);
  std::vector<uint8_t*> out(segments);
  for (size_t k = 0; k < segments; ++k) {
    const int64_t entries = based ? large[k] : values[k].numel();
    const auto head = static_cast<int64_t>(heads[k].size());
    planes[k] = fresh(values[k], head + entries * element_size(values[k]), ScalarType::Byte);
    out[k] = static_cast<uint8_t*>(planes[k].mutable_data_ptr());
  }
  each([&](int64_t k, auto* from, auto* before, int64_t n, auto float_kind) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    if (based) {
      std::memcpy(out[k], heads[k].data(), heads[k].size());
      encode_large<S, float_kind.value>(from, before, n, out[k] + sign_bytes(n), large[k],
                                        out[k] + heads[k].size());
    } else {
      encode_values(from, n, out[k]);
    }
  });
  return planes;
}

// Writes into `values`, which has the wanted dtype; false where the codes do not fit the planes.
bool planes_to_values(const Tensor& planes, std::optional<Tensor> base, bool is_float, const Tensor& values) {
  const int64_t n = values.numel(), size = element_size(values);
  require(element_size(planes) == 1, "planes must be bytes");
  const int64_t rest = planes.numel() - (base ? sign_bytes(n) + code_bytes(n) : 0);
  require(rest >= 0 && rest % size == 0 && (base || rest == n * size), "planes do not fit");
  require(!base || (base->numel() == n && element_size(*base) == size), "base does not fit");
  const auto* in = static_cast<const uint8_t*>(read(planes));
  const void* b = base ? read(*base) : nullptr;
  void* out = write(values);
  bool fits = true;
  by_size_and_kind(size, is_float, [&](auto value, auto float_kind) {
    using S = std::remove_const_t<decltype(value)>;
    if (b == nullptr) {
      decode_values(in, n, static_cast<S*>(out));
    } else {
      fits = decode_changes<S, float_kind.value>(in, rest / size, static_cast<const S*>(b), n, static_cast<S*>(out));
    }
  });
  return fits;
}

std::string instruction_set() { return best_kernels().name; }

}  // namespace
}  // namespace pulse

STABLE_TORCH_LIBRARY(pulse_kernels_cpu, m) {
  m.def(
      "compact_many(int kind, Tensor[] sources, Tensor(a!)[] targets, Tensor[] thirds, int[] wide, int[] keys, "
      "bool digest_before, bool update, bool keep_old) -> (Tensor[], Tensor[], Tensor[], Tensor[])");
  m.def(
      "compact_out(int kind, Tensor source, Tensor(a!) target, Tensor(b!) indices, Tensor(c!) values, "
      "Tensor(d!)? old_values, bool update) -> int");
  m.def("mask(int kind, Tensor master, Tensor weight, Tensor(a!) out) -> ()");
  m.def("commit(Tensor theta, Tensor local, Tensor(a!) residual) -> ()");
  m.def("first_bad_index(Tensor indices, int numel) -> int");
  m.def("scatter(Tensor(a!) weight, Tensor indices, Tensor values, Tensor(b!)? old_values) -> ()");
  m.def("gather(Tensor weight, Tensor indices) -> Tensor");
  m.def("pack(Tensor indices, int numel) -> Tensor");
  m.def("unpack(Tensor packed, bool wide) -> (Tensor, str)");
  m.def("digest(Tensor tensor, int key, int start) -> Tensor");
  m.def("digest_update(Tensor digest, Tensor indices, Tensor old, Tensor new, int key) -> Tensor");
  m.def("encode_gaps_many(Tensor[] indices, int[] starts, int[] shifts) -> (Tensor[], Tensor[], Tensor[])");
  m.def("decode_gaps(Tensor top, Tensor low, Tensor escapes, int start, int stop, bool wide) -> (Tensor, int)");
  m.def("encode_values_many(Tensor[] values, Tensor[] bases, int[] is_float) -> Tensor[]");
  m.def("decode_values(Tensor planes, Tensor? base, bool is_float, Tensor(a!) values) -> bool");
  m.def("sum_entries(Tensor[] indices, Tensor[] values, int numel) -> (Tensor, Tensor)");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(pulse_kernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("compact_many", TORCH_BOX(&pulse::compact_many));
  m.impl("compact_out", TORCH_BOX(&pulse::compact_out));
  m.impl("mask", TORCH_BOX(&pulse::mask));
  m.impl("commit", TORCH_BOX(&pulse::commit));
  m.impl("first_bad_index", TORCH_BOX(&pulse::first_bad_index));
  m.impl("scatter", TORCH_BOX(&pulse::scatter_values));
  m.impl("gather", TORCH_BOX(&pulse::gather_values));
  m.impl("pack", TORCH_BOX(&pulse::pack));
  m.impl("unpack", TORCH_BOX(&pulse::unpack));
  m.impl("digest", TORCH_BOX(&pulse::state_digest));
  m.impl("digest_update", TORCH_BOX(&pulse::state_digest_update));
  m.impl("encode_gaps_many", TORCH_BOX(&pulse::gaps_to_bytes));
  m.impl("decode_gaps", TORCH_BOX(&pulse::bytes_to_gaps));
  m.impl("encode_values_many", TORCH_BOX(&pulse::values_to_planes));
  m.impl("decode_values", TORCH_BOX(&pulse::planes_to_values));
  m.impl("sum_entries", TORCH_BOX(&pulse::sum_entries));
  m.impl("instruction_set", TORCH_BOX(&pulse::instruction_set));
}
