// csrc/cuda/packing.h on the host: bytes and verdicts of the CPU's coder, from blobs good and hostile.
#include "../../csrc/cuda/packing.h"

#include <cstring>

#include "../../csrc/cpu/index_blob.h"
#include "cuda_blocks.h"

namespace {

using Blob = std::vector<uint8_t>;
using pulse::kTileBlocks;
using pulse::KernelTable;

int64_t tiles_for(int64_t count) {
  const int64_t per_tile = kTileBlocks * pulse::kIndexBlock;
  return count == 0 ? 1 : (count + per_tile - 1) / per_tile;
}

// One list of indices as the table has it.
struct List {
  const void* data;
  bool wide;
  int64_t count, numel;
};

// What backends/cuda.py does around the two launches.
std::vector<Blob> pack_all(const std::vector<List>& lists) {
  std::vector<int64_t> table;
  std::vector<int32_t> tile_rows;
  int64_t blocks = 0;
  for (const List& list : lists) {
    table.insert(table.end(), {address(list.data), list.wide, list.count, list.numel,
                               static_cast<int64_t>(tile_rows.size()), blocks, 0});
    tile_rows.insert(tile_rows.end(), tiles_for(list.count), static_cast<int32_t>(table.size() / 7 - 1));
    blocks += (list.count + 255) / 256;
  }
  const auto tiles = static_cast<int64_t>(tile_rows.size());
  std::vector<uint8_t> widths(blocks);
  run_tiles(tiles, [&](pulse::HostBlock& block, int64_t tile) {
    pulse::widths_tile(block, table.data(), tile_rows.data(), tile, widths.data());
  });
  std::vector<int64_t> ends;
  for (const uint8_t width : widths) ends.push_back((ends.empty() ? 0 : ends.back()) + width);
  std::vector<int64_t> sizes, begins;
  int64_t total = 0;
  for (size_t k = 0; k < lists.size(); ++k) {
    const pulse::IndexTables tables = pulse::index_tables(lists[k].count, lists[k].numel);
    int64_t size = tables.payload_at;
    const int64_t first = table[7 * k + 5], last = first + static_cast<int64_t>(tables.blocks) - 1;
    for (int64_t b = first; b < last; ++b) size += 32 * widths[b];
    if (tables.blocks > 0) size += pulse::block_bytes(pulse::entries_of(lists[k].count, tables.blocks - 1), widths[last]);
    table[7 * k + 6] = total;
    begins.push_back(total);
    sizes.push_back(size);
    total += (size + 15) / 16 * 16;
  }
  // Exactly as large as needed but for the alignment between blobs, and not zeroed.
  std::vector<uint32_t> buffer((total - (sizes.back() + 15) / 16 * 16 + sizes.back()) / 4, 0xDEADBEEFu);
  run_tiles(tiles, [&](pulse::HostBlock& block, int64_t tile) {
    auto shared = shared_memory<pulse::EntriesShared>();
    pulse::pack_tile(block, *shared, table.data(), tile_rows.data(), tile, widths.data(), ends.data(),
                     reinterpret_cast<uint8_t*>(buffer.data()));
  });
  std::vector<Blob> blobs;
  const auto* bytes = reinterpret_cast<const uint8_t*>(buffer.data());
  for (size_t k = 0; k < lists.size(); ++k) blobs.emplace_back(bytes + begins[k], bytes + begins[k] + sizes[k]);
  return blobs;
}

template <class Index>
Blob pack_on_cpu(const KernelTable& kernels, const std::vector<Index>& indices, uint64_t numel) {
  ThreadRunner runner(1);
  pulse::Packer<Index> packer(kernels, indices.data(), static_cast<int64_t>(indices.size()), numel);
  Blob blob(packer.measure(runner));
  packer.write(runner, blob.data());
  return blob;
}

// A blob where kernels find it: aligned to 16 bytes, and not a byte longer than it is.
struct Aligned {
  explicit Aligned(const Blob& blob) : size(blob.size()), data(new (std::align_val_t(16)) uint8_t[blob.size()]) {
    std::memcpy(data, blob.data(), size);
  }
  ~Aligned() { operator delete[](data, std::align_val_t(16)); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  size_t size;
  uint8_t* data;
};

struct Verdict {
  int64_t error = INT64_MAX;
  bool good() const { return error == INT64_MAX; }
};

// The host's part of the checks is the CPU's: what its header check refuses never reaches a kernel.
bool header_good(const Blob& blob, pulse::IndexHeader* header) {
  if (blob.size() < pulse::kHeaderBytes) return false;
  std::memcpy(header, blob.data(), sizeof *header);
  if (header->magic != pulse::kIndexMagic || header->version != 1 || header->zero != 0) return false;
  if (header->numel > pulse::kMaxNumel || header->count > header->numel) return false;
  const pulse::IndexTables tables = pulse::index_tables(header->count, header->numel);
  return header->base_bytes == tables.base_bytes && tables.payload_at <= blob.size() &&
         blob.size() - tables.payload_at == header->payload_bytes;
}

template <class Index>
bool unpack_all(const Blob& blob, std::vector<Index>* indices, Verdict* verdict = nullptr) {
  pulse::IndexHeader header;
  if (!header_good(blob, &header)) return false;
  const Aligned aligned(blob);
  indices->assign(header.count, -7);
  const std::vector<int64_t> table{address(aligned.data), static_cast<int64_t>(header.count),
                                   static_cast<int64_t>(header.numel), static_cast<int64_t>(header.payload_bytes),
                                   0, 0, sizeof(Index), 0, 0, 0};
  const std::vector<int32_t> tile_rows(tiles_for(header.count));
  Verdict found;
  run_tiles(static_cast<int64_t>(tile_rows.size()), [&](pulse::HostBlock& block, int64_t tile) {
    auto shared = shared_memory<pulse::EntriesShared>();
    pulse::unpack_tile(block, *shared, table.data(), tile_rows.data(), tile, &found.error,
                       reinterpret_cast<uint8_t*>(indices->data()));
  });
  if (verdict != nullptr) *verdict = found;
  return found.good();
}

template <class Index>
bool unpack_on_cpu(const Blob& blob, std::vector<Index>* indices) {
  ThreadRunner runner(1);
  pulse::Unpacker unpacker(blob.data(), blob.size());
  if (!unpacker.error().empty()) return false;
  indices->resize(unpacker.count());
  unpacker.unpack(runner, indices->data());
  return unpacker.error().empty();
}

template <class Index>
void check_same(const KernelTable& kernels, const std::vector<Index>& indices, uint64_t numel) {
  const Blob blob = pack_all({{indices.data(), sizeof(Index) == 8, static_cast<int64_t>(indices.size()),
                               static_cast<int64_t>(numel)}})[0];
  CHECK(blob == pack_on_cpu(kernels, indices, numel));
  std::vector<Index> back;
  CHECK(unpack_all(blob, &back) && back == indices);
}

template <class Index>
std::vector<Index> of_width(Random& random, int count, int width, uint64_t numel) {
  std::vector<Index> indices;
  const uint64_t most = width == 0 ? 0 : (uint64_t{1} << width) - 1;
  uint64_t next = random.below(3);
  for (int k = 0; k < count && next < numel; ++k) {
    indices.push_back(static_cast<Index>(next));
    next += 1 + (k == 0 || random.below(50) == 0 ? most : random.bits() & most);
  }
  return indices;
}

void check_widths(const KernelTable& kernels) {
  Random random(21);
  for (int width = 0; width < 62; ++width) {
    for (const int count : {0, 1, 2, 31, 33, 255, 256, 257, 700, 2048, 2049}) {
      check_same(kernels, of_width<int64_t>(random, count, width, pulse::kMaxNumel), pulse::kMaxNumel);
      if (width < 31) check_same(kernels, of_width<int32_t>(random, count, width, INT32_MAX), INT32_MAX);
    }
  }
  check_same<int64_t>(kernels, {0, (int64_t{1} << 62) - 1}, pulse::kMaxNumel);
  check_same<int64_t>(kernels, {(int64_t{1} << 32) - 1}, uint64_t{1} << 32);
  check_same<int64_t>(kernels, {int64_t{1} << 32}, (uint64_t{1} << 32) + 1);
}

void check_many(const KernelTable& kernels) {
  Random random(22);
  const auto a = of_width<int32_t>(random, 5000, 7, INT32_MAX);
  const auto b = of_width<int64_t>(random, 300, 40, pulse::kMaxNumel);
  const std::vector<int32_t> none;
  const auto c = of_width<int32_t>(random, 2048, 1, INT32_MAX);
  const std::vector<Blob> blobs = pack_all({{none.data(), false, 0, 9},
                                            {a.data(), false, static_cast<int64_t>(a.size()), INT32_MAX},
                                            {b.data(), true, static_cast<int64_t>(b.size()), int64_t{1} << 62},
                                            {none.data(), false, 0, 0},
                                            {c.data(), false, static_cast<int64_t>(c.size()), INT32_MAX}});
  CHECK(blobs[0] == pack_on_cpu(kernels, none, 9) && blobs[3] == pack_on_cpu(kernels, none, 0));
  CHECK(blobs[1] == pack_on_cpu(kernels, a, INT32_MAX));
  CHECK(blobs[2] == pack_on_cpu(kernels, b, pulse::kMaxNumel));
  CHECK(blobs[4] == pack_on_cpu(kernels, c, INT32_MAX));
}

// Lists that break the contract: whatever comes out, nothing is written outside a buffer of the size that the widths
// ask for, and what unpacks to positions in order is what a reader may get.
void check_unsorted_lists() {
  Random random(23);
  for (int round = 0; round < 200; ++round) {
    const auto count = static_cast<int64_t>(random.below(3000));
    std::vector<int64_t> wide(count);
    std::vector<int32_t> narrow(count);
    for (int64_t k = 0; k < count; ++k) {
      wide[k] = static_cast<int64_t>(random.bits() >> random.below(64));
      if (random.below(2) == 0) wide[k] = -wide[k];
      narrow[k] = static_cast<int32_t>(random.bits());
    }
    const Blob blob = pack_all({{wide.data(), true, count, 1000}, {narrow.data(), false, count, 1000}})[0];
    std::vector<int64_t> back;
    if (unpack_all(blob, &back)) {
      for (int64_t k = 0; k < count; ++k) CHECK(back[k] < 1000 && (k == 0 || back[k] > back[k - 1]));
    }
  }
  // Gaps of 64 bits: down by one, and from the lowest position to the highest.
  const std::vector<int64_t> down{5, 4, INT64_MIN, INT64_MAX};
  const Blob blob = pack_all({{down.data(), true, 4, 1000}})[0];
  CHECK(blob[32 + 4 + 4] == 64);
  std::vector<int64_t> back;
  Verdict verdict;
  CHECK(!unpack_all(blob, &back, &verdict) && verdict.error >> 56 == pulse::kBadWidth);
}

void check_same_verdict(const Blob& blob) {
  std::vector<int64_t> on_cpu, here;
  const bool good = unpack_on_cpu(blob, &on_cpu);
  CHECK(unpack_all(blob, &here) == good);
  CHECK(!good || here == on_cpu);
}

void check_hostile(const Blob& blob, Random& random) {
  check_same_verdict(blob);
  for (size_t at = 0; at < blob.size(); ++at) {
    for (int flip = 1; flip < 256; flip += at < 64 ? 1 : 7) {
      Blob damaged(blob);
      damaged[at] ^= static_cast<uint8_t>(flip);
      check_same_verdict(damaged);
    }
  }
  for (int round = 0; round < 1000; ++round) {
    Blob damaged(blob);
    for (uint64_t hits = 1 + random.below(6); hits > 0; --hits) {
      damaged[random.below(damaged.size())] = static_cast<uint8_t>(random.bits());
    }
    check_same_verdict(damaged);
  }
}

void check_random_blobs(Random& random) {
  for (int round = 0; round < 5000; ++round) {
    const uint64_t count = random.below(600), numel = count + random.below(1000);
    const pulse::IndexTables tables = pulse::index_tables(count, numel);
    Blob blob(tables.payload_at + random.below(300) / 4 * 4);
    for (uint8_t& byte : blob) byte = random.below(3) == 0 ? static_cast<uint8_t>(random.bits()) : 0;
    const pulse::IndexHeader header{pulse::kIndexMagic, 1, static_cast<uint8_t>(tables.base_bytes), 0, numel, count,
                                    blob.size() - tables.payload_at};
    std::memcpy(blob.data(), &header, sizeof header);
    check_same_verdict(blob);
  }
}

// Widths of 63 bits and sums that would wrap 64: full blocks of the widest entries.
void check_wrapping_sums() {
  for (const int width : {60, 61, 62, 63}) {
    for (const uint64_t entry : {(uint64_t{1} << width) - 1, uint64_t{1} << (width - 1), uint64_t{1} << 58}) {
      if (entry >> width != 0) continue;
      const pulse::IndexTables tables = pulse::index_tables(256, pulse::kMaxNumel);
      Blob blob(tables.payload_at + pulse::block_bytes(256, width));
      const pulse::IndexHeader header{pulse::kIndexMagic, 1, 8, 0, pulse::kMaxNumel, 256, pulse::block_bytes(256, width)};
      std::memcpy(blob.data(), &header, sizeof header);
      blob[tables.widths_at] = static_cast<uint8_t>(width);
      for (int slot = 1; slot < 256; ++slot) pulse::put_gap(blob.data() + tables.payload_at, slot, width, entry);
      std::vector<int64_t> indices;
      Verdict verdict;
      CHECK(!unpack_all(blob, &indices, &verdict) && verdict.error >> 56 == pulse::kBadBlock);
      check_same_verdict(blob);
    }
  }
}

template <class Value>
void check_exchange(Random& random, int count, int width) {
  const std::vector<int32_t> indices = of_width<int32_t>(random, count, width, 1 << 20);
  const auto n = static_cast<int64_t>(indices.size());
  const int64_t numel = n == 0 ? 5 : indices.back() + 1;
  const Aligned blob(pack_all({{indices.data(), false, n, numel}})[0]);
  std::vector<Value> weight(numel), values(n), old_values(n);
  for (Value& value : weight) value = static_cast<Value>(random.bits());
  for (Value& value : values) value = static_cast<Value>(random.bits());
  std::vector<Value> expected(weight), overwritten;
  for (int64_t k = 0; k < n; ++k) {
    overwritten.push_back(expected[indices[k]]);
    expected[indices[k]] = values[k];
  }
  const auto payload = static_cast<int64_t>(blob.size - pulse::index_tables(n, numel).payload_at);
  const std::vector<int64_t> table{address(blob.data), n, numel, payload, 0, 0, sizeof(Value), address(weight.data()),
                                   address(values.data()), sizeof(Value)};
  const std::vector<int32_t> tile_rows(tiles_for(n));
  for (const bool keep : {true, false}) {
    std::vector<Value> written(weight);
    std::vector<int64_t> own_table(table);
    own_table[7] = address(written.data());
    run_tiles(static_cast<int64_t>(tile_rows.size()), [&](pulse::HostBlock& block, int64_t tile) {
      auto shared = shared_memory<pulse::EntriesShared>();
      pulse::exchange_tile(block, *shared, own_table.data(), tile_rows.data(), tile,
                           keep ? reinterpret_cast<uint8_t*>(old_values.data()) : nullptr);
    });
    CHECK(written == expected);
  }
  CHECK(old_values == overwritten);
}

// Words read and made in two ways agree, at every width and slot.
void check_entries() {
  Random random(24);
  for (int width = 1; width <= 64; ++width) {
    for (const int used : {1, 2, 31, 32, 33, 255, 256}) {
      std::vector<uint64_t> entries(used);
      std::vector<uint32_t> words(pulse::block_bytes(used, width) / 4), made;
      for (int slot = 0; slot < used; ++slot) {
        entries[slot] = random.bits() & pulse::low_bits(width);
        pulse::put_gap(reinterpret_cast<uint8_t*>(words.data()), slot, width, entries[slot]);
      }
      for (size_t k = 0; k < words.size(); ++k) {
        made.push_back(pulse::entries_word(entries.data(), used, width, static_cast<int>(k)));
      }
      CHECK(made == words);
      bool same = true;
      const auto word = [&](int k) { return words.at(k); };
      for (int slot = 0; slot < used; ++slot) same &= pulse::get_entry(word, slot, width) == entries[slot];
      CHECK(same);
    }
  }
}

}  // namespace

void test_cuda_packing(const KernelTable& kernels) {
  check_entries();
  check_widths(kernels);
  check_many(kernels);
  check_unsorted_lists();
  check_wrapping_sums();
  Random random(25);
  for (const int count : {0, 1, 255, 256, 257, 2048, 2100}) {
    for (const int width : {0, 4, 11}) {
      check_exchange<uint8_t>(random, count, width);
      check_exchange<uint16_t>(random, count, width);
      check_exchange<uint32_t>(random, count, width);
      check_exchange<uint64_t>(random, count, width);
    }
  }
  check_hostile(pack_on_cpu<int32_t>(kernels, {}, 0), random);
  check_hostile(pack_on_cpu<int32_t>(kernels, {0, 5, 6, 100, 101}, 1000), random);
  check_hostile(pack_on_cpu<int64_t>(kernels, {1, int64_t{1} << 40, int64_t{1} << 61}, pulse::kMaxNumel), random);
  check_hostile(pack_on_cpu(kernels, of_width<int32_t>(random, 260, 2, 5000), 5000), random);
  check_hostile(pack_on_cpu(kernels, of_width<int64_t>(random, 256, 5, 50000), 50000), random);
  check_random_blobs(random);
}
