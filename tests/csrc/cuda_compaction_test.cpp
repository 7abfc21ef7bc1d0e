// csrc/cuda/compaction.h on the host, against plain loops: every kind, aligned and not, tails and many tensors.
#include "../../csrc/cuda/compaction.h"

#include <cmath>
#include <cstring>

#include "cuda_blocks.h"

namespace {

using pulse::CompactJob;
using pulse::kTile;
using pulse::kTileWords;

// A vector that begins `off` elements behind an address aligned to 256 bytes, and ends with its memory.
template <class T>
class Placed {
 public:
  Placed(int64_t n, int off) : off_(off), n_(n), data_(new (std::align_val_t(256)) T[n + off]) {}
  ~Placed() { operator delete[](data_, std::align_val_t(256)); }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;
  T& operator[](int64_t k) const { return data_[off_ + k]; }
  T* data() const { return data_ + off_; }
  int64_t size() const { return n_; }

 private:
  int off_;
  int64_t n_;
  T* data_;
};

// Bits at which rounding and comparing go wrong, and any others.
uint32_t hard_bits(Random& random) {
  static const uint32_t table[] = {0,          0x80000000u, 1,           0x00008000u, 0x00018000u, 0x3F808000u,
                                   0x3F818000u, 0x477FF000u, 0x7F7FFFFFu, 0x7F800000u, 0x7F800001u, 0xFFFFFFFFu,
                                   0x33000000u, 0x387FE000u, 0x7FC00000u, 0xFF800000u};
  return random.below(3) == 0 ? table[random.below(16)] : static_cast<uint32_t>(random.bits());
}

// Rounding in another way than rounding.h has it: to the nearest of the two candidates, ties to the even one.
uint16_t nearest_bf16(uint32_t u) {
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(((u >> 16) & 0x8000u) | 0x7FC0u);
  const uint32_t low = u & 0xFFFFu, high = u >> 16;
  const bool up = low > 0x8000u || (low == 0x8000u && (high & 1u) != 0);
  return static_cast<uint16_t>(high + (up ? 1 : 0));
}

template <class Change>
struct Inputs {
  using Source = typename Change::Source;
  using Target = typename Change::Target;
  Placed<Source> source;
  Placed<Target> target;
  Placed<uint32_t> third;
  Inputs(int64_t n, int off, Random& random, uint64_t one_in)
      : source(n, off), target(n, off), third(Change::kHasThird ? n : 0, Change::kHasThird ? off : 0) {
    for (int64_t k = 0; k < n; ++k) {
      source[k] = sizeof(Source) == 4 ? static_cast<Source>(hard_bits(random)) : static_cast<Source>(random.bits());
      if constexpr (Change::kHasThird) {
        // local near theta, a small residual: some fire, most do not
        target[k] = random.below(one_in) == 0 ? hard_bits(random) : source[k];
        third[k] = random.below(one_in) == 0 ? hard_bits(random) : 0;
      } else {
        target[k] = Change::value(source[k], 0, 0);
        if (random.below(one_in) == 0) target[k] = static_cast<Target>(target[k] ^ (Target{1} << random.below(8 * sizeof(Target))));
      }
    }
  }
};

template <class Change>
void check_tensors(const std::vector<int64_t>& sizes, int off, uint64_t one_in, bool wide, bool update, bool keep_old) {
  using Target = typename Change::Target;
  Random random(sizes.size() + off + one_in);
  std::vector<std::unique_ptr<Inputs<Change>>> inputs;
  std::vector<int64_t> table;
  std::vector<int32_t> tile_rows;
  std::vector<int64_t> expected_indices;
  std::vector<Target> expected_values, expected_old;
  for (const int64_t n : sizes) {
    if (n == 0) continue;
    inputs.push_back(std::make_unique<Inputs<Change>>(n, off, random, one_in));
    const Inputs<Change>& in = *inputs.back();
    table.insert(table.end(), {address(in.source.data()), address(in.target.data()),
                               Change::kHasThird ? address(in.third.data()) : 0, n,
                               static_cast<int64_t>(tile_rows.size())});
    tile_rows.insert(tile_rows.end(), (n + kTile - 1) / kTile, static_cast<int32_t>(inputs.size() - 1));
    for (int64_t k = 0; k < n; ++k) {
      const uint32_t third = Change::kHasThird ? in.third[k] : 0;
      if (!Change::changed(in.source[k], in.target[k], third)) continue;
      expected_indices.push_back(k);
      expected_values.push_back(Change::value(in.source[k], in.target[k], third));
      expected_old.push_back(in.target[k]);
    }
  }
  const auto tiles = static_cast<int64_t>(tile_rows.size());
  CompactJob job{table.data(), tile_rows.data(), {}};
  if (inputs.size() == 1) {
    job.table = nullptr;
    for (int k = 0; k < 5; ++k) job.row[k] = table[k];
  }
  std::vector<uint32_t> mask(tiles * kTileWords, 0xDEADBEEFu);
  std::vector<int32_t> counts(tiles, -1);
  run_tiles(tiles, [&](pulse::HostBlock& block, int64_t tile) {
    pulse::mark_tile<Change>(block, job, tile, mask.data(), counts.data());
  });
  std::vector<int64_t> ends;
  for (const int32_t count : counts) ends.push_back((ends.empty() ? 0 : ends.back()) + count);
  const auto total = static_cast<int64_t>(expected_indices.size());
  CHECK((ends.empty() ? 0 : ends.back()) == total);
  if (tiles == 0) return;
  for (const int64_t capacity : {total - 1, total, total + 3}) {
    if (capacity < 0) continue;
    std::vector<int32_t> narrow_indices(capacity, -3);
    std::vector<int64_t> wide_indices(capacity, -3);
    std::vector<Target> values(capacity, 7), old_values(capacity, 7);
    pulse::CollectOutput out{};
    out.ends = ends.data();
    out.tiles = tiles;
    out.capacity = capacity;
    out.indices = wide ? static_cast<void*>(wide_indices.data()) : narrow_indices.data();
    out.wide = wide;
    out.values = values.data();
    out.old_values = keep_old ? old_values.data() : nullptr;
    out.update = update && capacity == total + 3;  // once: afterwards the old values are gone
    run_tiles(tiles, [&](pulse::HostBlock& block, int64_t tile) {
      auto shared = shared_memory<pulse::CollectShared>();
      pulse::collect_tile<Change>(block, *shared, job, tile, mask.data(), out);
    });
    bool same = true;
    for (int64_t k = 0; k < capacity; ++k) {
      const bool written = capacity >= total && k < total;
      const int64_t index = wide ? wide_indices[k] : narrow_indices[k];
      same &= index == (written ? expected_indices[k] : -3) && values[k] == (written ? expected_values[k] : 7);
      same &= old_values[k] == (written && keep_old ? expected_old[k] : 7);
    }
    CHECK(same);
    if (!out.update) continue;
    bool updated = true;
    for (const auto& in : inputs) {
      for (int64_t k = 0; k < in->source.size(); ++k) {
        updated &= in->target[k] == Change::value(in->source[k], in->target[k], 0);
      }
    }
    CHECK(updated);
  }
}

template <class Change>
void check_kind() {
  for (const int off : {0, 1, 2, 4}) {
    for (const uint64_t one_in : {uint64_t{1}, uint64_t{20}, uint64_t{1} << 40}) {
      check_tensors<Change>({2 * kTile + 77}, off, one_in, false, Change::kWritable, true);
    }
    check_tensors<Change>({1, kTile, 0, kTile - 1, kTile + 1, 33, 3 * kTile}, off, 50, true, false, false);
  }
  for (const int64_t n : {1, 31, 32, 33, 1023, 1024, 1025, kTile - 1, kTile, kTile + 1}) {
    check_tensors<Change>({n}, 0, 3, n % 2 == 0, Change::kWritable, true);
  }
}

// The bits of a mask are where the definition has them.
void check_layout() {
  std::vector<uint16_t> fresh(2 * kTile), stale(2 * kTile);
  for (const int64_t at : {int64_t{0}, int64_t{31}, int64_t{32}, int64_t{1023}, int64_t{1024}, int64_t{8191}, int64_t{8192}, int64_t{9000}}) {
    fresh[at] = 1;
    const CompactJob job{nullptr, nullptr, {address(fresh.data()), address(stale.data()), 0, 2 * kTile, 0}};
    std::vector<uint32_t> mask(2 * kTileWords);
    std::vector<int32_t> counts(2);
    run_tiles(2, [&](pulse::HostBlock& block, int64_t tile) {
      pulse::mark_tile<pulse::DiffChange<uint16_t>>(block, job, tile, mask.data(), counts.data());
    });
    bool same = true;
    for (int64_t word = 0; word < 2 * kTileWords; ++word) same &= mask[word] == (word == at / 32 ? 1u << at % 32 : 0u);
    CHECK(same && counts[at / kTile] == 1 && counts[1 - at / kTile] == 0);
    fresh[at] = 0;
  }
}

// The comparisons themselves, written down in another way.
void check_comparisons() {
  Random random(31);
  using Gate = pulse::GateChange<pulse::round_to_bf16>;
  using Residual = pulse::ResidualChange<pulse::round_to_bf16>;
  for (int k = 0; k < 200000; ++k) {
    const uint32_t master = hard_bits(random);
    const uint16_t rounded = nearest_bf16(master);
    CHECK(Gate::value(master, 0, 0) == rounded && !Gate::changed(master, rounded, 0));
    CHECK(Gate::changed(master, static_cast<uint16_t>(rounded ^ 1u), 0));
    const uint32_t local = hard_bits(random), residual = hard_bits(random);
    float t, l, r;
    std::memcpy(&t, &master, 4);
    std::memcpy(&l, &local, 4);
    std::memcpy(&r, &residual, 4);
    const volatile float delta = t - l;
    const volatile float s = r + delta;
    uint32_t bits = 0x7FC00000u;
    if (!std::isnan(s)) {
      const float plain = s;
      std::memcpy(&bits, &plain, 4);
    }
    CHECK(Residual::value(master, local, residual) == bits);
    const volatile float moved = t - (std::isnan(s) ? NAN : s);
    uint32_t moved_bits = 0x7FC00000u;
    if (!std::isnan(moved)) {
      const float plain = moved;
      std::memcpy(&moved_bits, &plain, 4);
    }
    CHECK(Residual::changed(master, local, residual) == (nearest_bf16(moved_bits) != rounded));
  }
}

}  // namespace

void test_cuda_compaction() {
  check_layout();
  check_comparisons();
  check_kind<pulse::GateChange<pulse::round_to_bf16>>();
  check_kind<pulse::GateChange<pulse::round_to_fp16>>();
  check_kind<pulse::DiffChange<uint8_t>>();
  check_kind<pulse::DiffChange<uint16_t>>();
  check_kind<pulse::DiffChange<uint32_t>>();
  check_kind<pulse::DiffChange<uint64_t>>();
  check_kind<pulse::ResidualChange<pulse::round_to_bf16>>();
  check_kind<pulse::ResidualChange<pulse::round_to_fp16>>();
}
