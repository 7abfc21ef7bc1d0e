// pack and unpack: every width, both index types, and blobs that nobody vouches for.
#include "../../csrc/cpu/index_blob.h"

#include <cstring>

#include "check.h"

namespace {

using pulse::KernelTable;
using Blob = std::vector<uint8_t>;

template <class Index>
Blob pack(const KernelTable& table, const std::vector<Index>& indices, uint64_t numel, int threads = 1) {
  ThreadRunner runner(threads);
  pulse::Packer<Index> packer(table, indices.data(), static_cast<int64_t>(indices.size()), numel);
  Blob blob(packer.measure(runner));
  CHECK(packer.offsets_fit());
  packer.write(runner, blob.data());
  return blob;
}

// False where the blob is refused. What is accepted must be strictly increasing within [0, numel).
template <class Index>
bool unpack(const Blob& blob, std::vector<Index>* indices, int threads = 1) {
  ThreadRunner runner(threads);
  pulse::Unpacker unpacker(blob.data(), blob.size());
  if (!unpacker.error().empty()) return false;
  CHECK(unpacker.count() <= unpacker.numel());
  if (sizeof(Index) == 4 && unpacker.numel() > INT32_MAX) return false;  // the caller's duty: see register.cpp
  indices->resize(unpacker.count());
  unpacker.unpack(runner, indices->data());
  if (!unpacker.error().empty()) return false;
  int64_t last = -1;
  bool in_order = true;
  for (const Index index : *indices) {
    in_order &= index > last && static_cast<uint64_t>(index) < unpacker.numel();
    last = index;
  }
  CHECK(in_order);
  return true;
}

template <class Index>
void check_round_trip(const KernelTable& table, const std::vector<Index>& indices, uint64_t numel) {
  std::vector<Index> back;
  const Blob blob = pack(table, indices, numel);
  CHECK(unpack(blob, &back) && back == indices);
  for (const int threads : {2, 4}) {
    CHECK(pack(table, indices, numel, threads) == blob);
    CHECK(unpack(blob, &back, threads) && back == indices);
  }
}

// `count` indices whose gaps need exactly `width` bits, as far as they fit below `numel`.
template <class Index>
std::vector<Index> indices_of_width(Random& random, int count, int width, uint64_t numel) {
  std::vector<Index> indices;
  uint64_t next = random.below(3);
  const uint64_t most = width == 0 ? 0 : (uint64_t{1} << width) - 1;
  for (int k = 0; k < count; ++k) {
    if (next >= numel) break;
    indices.push_back(static_cast<Index>(next));
    const bool widest = k == 0 || random.below(50) == 0;
    next += 1 + (widest ? most : random.bits() & most);
  }
  return indices;
}

void check_widths(const KernelTable& table) {
  Random random(7);
  for (int width = 0; width < 62; ++width) {
    for (const int count : {0, 1, 2, 17, 255, 256, 257, 512, 700}) {
      const uint64_t numel = pulse::kMaxNumel;
      check_round_trip(table, indices_of_width<int64_t>(random, count, width, numel), numel);
      if (width < 31) check_round_trip(table, indices_of_width<int32_t>(random, count, width, INT32_MAX), INT32_MAX);
    }
  }
  // The widest gap there is: from the first position of 2^62 to the last. Widths 62 and 63 cannot be needed.
  check_round_trip<int64_t>(table, {0, (int64_t{1} << 62) - 1}, pulse::kMaxNumel);
  // 2^32 elements still take 4-byte bases; one more takes 8.
  CHECK(pack<int64_t>(table, {(int64_t{1} << 32) - 1}, uint64_t{1} << 32).size() == 32 + 4 + 4 + 4);
  CHECK(pack<int64_t>(table, {int64_t{1} << 32}, (uint64_t{1} << 32) + 1).size() == 32 + 8 + 4 + 4);
  // Enough blocks for several tasks.
  std::vector<int32_t> many;
  for (int32_t k = 0; k < 256 * 700 + 3; ++k) many.push_back(3 * k + (k / 256 % 2));
  check_round_trip(table, many, 3u * 256 * 701);
}

// A blob of widths 62 and 63, which no encoder here writes, is decoded all the same: 2 entries take width/32 words.
void check_widest_blocks() {
  for (const int width : {62, 63}) {
    const int64_t gap = 1000;
    Blob blob(32 + 8 + 4 + 4 + pulse::block_bytes(2, width));
    const pulse::IndexHeader header{pulse::kIndexMagic, 1, 8, 0, pulse::kMaxNumel, 2, pulse::block_bytes(2, width)};
    std::memcpy(blob.data(), &header, sizeof header);
    blob[32 + 8 + 4] = static_cast<uint8_t>(width);
    pulse::put_gap(blob.data() + 48, 1, width, gap);
    std::vector<int64_t> indices;
    CHECK(unpack(blob, &indices) && indices == (std::vector<int64_t>{0, gap + 1}));
  }
}

// A gap read back alone is the gap put in, at every width and slot: what a CUDA thread relies on.
void check_single_gaps() {
  Random random(3);
  for (int width = 1; width <= 63; ++width) {
    std::vector<uint64_t> gaps;
    Blob words(pulse::block_bytes(256, width));
    for (int slot = 0; slot < 256; ++slot) {
      gaps.push_back(random.bits() & ((uint64_t{1} << width) - 1));
      pulse::put_gap(words.data(), slot, width, gaps[slot]);
    }
    bool same = true;
    for (int slot = 0; slot < 256; ++slot) same &= pulse::get_gap(words.data(), slot, width) == gaps[slot];
    CHECK(same);
  }
}

template <class Index>
void check_hostile(const Blob& blob, Random& random) {
  std::vector<Index> indices;
  CHECK(unpack(blob, &indices));
  for (size_t size = 0; size < blob.size(); ++size) {
    CHECK(!unpack(Blob(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size)), &indices));
  }
  Blob longer(blob);
  longer.push_back(0);
  CHECK(!unpack(longer, &indices));
  for (size_t at = 0; at < blob.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      Blob damaged(blob);
      damaged[at] ^= static_cast<uint8_t>(flip);
      unpack(damaged, &indices);
      ++checks_passed;
    }
  }
  for (int round = 0; round < 2000; ++round) {  // several at once, in the header's fields too
    Blob damaged(blob);
    for (uint64_t hits = 1 + random.below(6); hits > 0; --hits) {
      damaged[random.below(damaged.size())] = static_cast<uint8_t>(random.bits());
    }
    unpack(damaged, &indices);
    ++checks_passed;
  }
}

// A tensor one element shorter than the last position needs: that position lies just outside. Full blocks of narrow and
// of wide gaps and short blocks are bounded by code of their own.
template <class Index>
void check_last_position(const KernelTable& table, int count, int width) {
  Random random(width);
  std::vector<Index> indices = indices_of_width<Index>(random, count, width, pulse::kMaxNumel);
  CHECK(static_cast<int>(indices.size()) == count);
  const auto last = static_cast<uint64_t>(indices.back());
  Blob blob = pack(table, indices, last + 1);
  std::vector<Index> back;
  CHECK(unpack(blob, &back) && back == indices);
  std::memcpy(blob.data() + 8, &last, 8);  // the header's numel
  CHECK(!unpack(blob, &back));
}

void check_random_blobs(Random& random) {
  std::vector<int64_t> indices;
  for (int round = 0; round < 20000; ++round) {
    // A header that gets past the first checks, tables and payload of random bytes.
    const uint64_t count = random.below(600), numel = count + random.below(1000);
    const pulse::IndexTables tables = pulse::index_tables(count, numel);
    Blob blob(tables.payload_at + random.below(300) / 4 * 4);
    for (uint8_t& byte : blob) byte = random.below(3) == 0 ? static_cast<uint8_t>(random.bits()) : 0;
    const pulse::IndexHeader header{pulse::kIndexMagic, 1, static_cast<uint8_t>(tables.base_bytes), 0, numel, count,
                                    blob.size() - tables.payload_at};
    std::memcpy(blob.data(), &header, sizeof header);
    unpack(blob, &indices);
    ++checks_passed;
  }
}

void check_sorted(const KernelTable& table) {
  Random random(5);
  for (const int64_t n : {0, 1, 2, 256, 257, 258, 513, 1000}) {
    std::vector<int32_t> narrow;
    for (int64_t k = 0; k < n; ++k) narrow.push_back(static_cast<int32_t>(2 * k));
    std::vector<int64_t> wide(narrow.begin(), narrow.end());
    CHECK(table.sorted32(narrow.data(), n, 2 * n) && table.sorted64(wide.data(), n, 2 * n));
    if (n == 0) continue;
    CHECK(!table.sorted32(narrow.data(), n, 2 * n - 2) && !table.sorted64(wide.data(), n, 2 * n - 2));
    for (int64_t k = 0; k < n; ++k) {
      const int32_t repeat = k == 0 ? -1 : narrow[k - 1];  // negative, or equal to the one before
      std::vector<int32_t> bad_narrow(narrow);
      std::vector<int64_t> bad_wide(wide);
      bad_narrow[k] = repeat;
      bad_wide[k] = repeat;
      CHECK(!table.sorted32(bad_narrow.data(), n, 2 * n) && !table.sorted64(bad_wide.data(), n, 2 * n));
    }
  }
}

}  // namespace

void test_index_blob(const KernelTable& table) {
  check_sorted(table);
  check_widths(table);
  check_widest_blocks();
  check_single_gaps();
  for (const int count : {1, 5, 255, 256, 257, 512}) {
    check_last_position<int32_t>(table, count, 3);
    check_last_position<int64_t>(table, count, 3);
    check_last_position<int64_t>(table, count, 40);
  }
  Random random(11);
  check_hostile<int32_t>(pack<int32_t>(table, {}, 0), random);
  check_hostile<int32_t>(pack<int32_t>(table, {0, 5, 6, 100, 101}, 1000), random);
  check_hostile<int64_t>(pack<int64_t>(table, {1, int64_t{1} << 40, int64_t{1} << 61}, pulse::kMaxNumel), random);
  check_hostile<int32_t>(pack(table, indices_of_width<int32_t>(random, 260, 2, 5000), 5000), random);
  check_hostile<int64_t>(pack(table, indices_of_width<int64_t>(random, 256, 5, 50000), 50000), random);
  check_random_blobs(random);
}
