// The codec's byte streams: round trips, and decoding of bytes that nobody vouches for.
#include <limits>
#include <type_traits>

#include "../../csrc/cpu/streams.h"
#include "check.h"

namespace {

using Bytes = std::vector<uint8_t>;

struct Gaps {
  Bytes top, low, escapes;
};

template <class Index>
Gaps encode(const std::vector<Index>& indices, uint64_t start, int shift) {
  Gaps gaps{Bytes(indices.size()), Bytes(shift != 0 ? indices.size() : 0), {}};
  const auto n = static_cast<int64_t>(indices.size());
  pulse::encode_gaps(indices.data(), n, start, shift, gaps.top.data(), shift != 0 ? gaps.low.data() : nullptr,
                     &gaps.escapes);
  return gaps;
}

// -1, or the bad entry. What is accepted must be strictly increasing within [start, stop).
template <class Index>
int64_t decode(const Gaps& gaps, uint64_t start, uint64_t stop, std::vector<Index>* indices) {
  indices->assign(gaps.top.size(), 0);
  const bool has_low = !gaps.low.empty();
  const auto n = static_cast<int64_t>(gaps.top.size());
  const int64_t bad = pulse::decode_gaps(gaps.top.data(), has_low ? gaps.low.data() : nullptr, gaps.escapes.data(),
                                         static_cast<int64_t>(gaps.escapes.size()), n, start, stop, has_low ? 8 : 0,
                                         indices->data());
  if (bad >= 0) return bad;
  uint64_t next = start;
  bool in_order = true;
  for (const Index index : *indices) {
    in_order &= static_cast<uint64_t>(index) >= next && static_cast<uint64_t>(index) < stop;
    next = static_cast<uint64_t>(index) + 1;
  }
  CHECK(in_order);
  return -1;
}

template <class Index>
void check_gaps(const std::vector<Index>& indices, uint64_t start, uint64_t stop) {
  for (const int shift : {0, 8}) {
    const Gaps gaps = encode(indices, start, shift);
    std::vector<Index> back;
    CHECK(decode(gaps, start, stop, &back) == -1 && back == indices);
    if (indices.empty()) continue;
    CHECK(decode(gaps, start, static_cast<uint64_t>(indices.back()), &back) >= 0);  // a range too short by one
    Gaps damaged = gaps;
    damaged.escapes.push_back(0);
    CHECK(decode(damaged, start, stop, &back) == static_cast<int64_t>(indices.size()));  // a byte left over
    for (Bytes Gaps::*const stream : {&Gaps::top, &Gaps::low, &Gaps::escapes}) {
      for (size_t at = 0; at < (gaps.*stream).size(); ++at) {
        for (int flip = 1; flip < 256; ++flip) {
          damaged = gaps;
          (damaged.*stream)[at] ^= static_cast<uint8_t>(flip);
          decode(damaged, start, stop, &back);
          ++checks_passed;
        }
      }
    }
    for (size_t size = 0; size < gaps.escapes.size(); ++size) {
      damaged = gaps;
      damaged.escapes.resize(size);
      damaged.escapes.shrink_to_fit();
      CHECK(decode(damaged, start, stop, &back) >= 0);
    }
  }
}

void check_hostile_gaps() {
  std::vector<int64_t> indices;
  // Ten bytes of LEB128, and nine that announce 2^63 - 1: refused, whatever the range.
  CHECK(decode({{255}, {}, Bytes(10, 0x80)}, 0, uint64_t{1} << 62, &indices) == 0);
  Bytes nine(8, 0xFF);
  nine.push_back(0x7F);
  CHECK(decode({{255}, {}, nine}, 0, uint64_t{1} << 62, &indices) == 0);
  CHECK(decode({{255}, {7}, nine}, 0, uint64_t{1} << 62, &indices) == 0);
  // 2^56 as an escaped top would be 2^64 after its shift by 8: refused, not taken for 0.
  const Bytes two_to_56{0x81, 0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x00};
  CHECK(decode({{255}, {7}, two_to_56}, 0, uint64_t{1} << 62, &indices) == 0);
  CHECK(decode({{255}, {}, {0}}, 0, 256, &indices) == -1 && indices[0] == 255);
  CHECK(decode({{255}, {}, {0}}, 0, 255, &indices) == 0);
  CHECK(decode({{0}, {}, {}}, 5, 5, &indices) == 0);  // an empty range holds nothing

  Random random(17);
  for (int round = 0; round < 50000; ++round) {
    const size_t n = random.below(9);
    Gaps gaps{Bytes(n), Bytes(random.below(2) == 0 ? n : 0), Bytes(random.below(30))};
    for (uint8_t& byte : gaps.top) byte = random.below(2) == 0 ? 255 : static_cast<uint8_t>(random.bits());
    for (uint8_t& byte : gaps.low) byte = static_cast<uint8_t>(random.bits());
    for (uint8_t& byte : gaps.escapes) byte = static_cast<uint8_t>(random.bits());
    const uint64_t start = random.below(100);
    decode(gaps, start, start + (random.bits() >> random.below(64)) % (uint64_t{1} << 62), &indices);
    ++checks_passed;
  }
}

template <class Signed, bool Float>
Bytes encoded_changes(const std::vector<Signed>& values, const std::vector<Signed>& base, int64_t* large) {
  const auto n = static_cast<int64_t>(values.size());
  const int64_t codes = pulse::sign_bytes(n), head = codes + pulse::code_bytes(n);
  Bytes changes(head);
  *large = pulse::encode_codes<Signed, Float>(values.data(), base.data(), n, changes.data());
  changes.resize(head + *large * static_cast<int64_t>(sizeof(Signed)));
  const Bytes head_bytes(changes.begin(), changes.begin() + head);
  pulse::encode_large<Signed, Float>(values.data(), base.data(), n, head_bytes.data() + codes, *large,
                                     changes.data() + head);
  return changes;
}

template <class Signed, bool Float>
void check_changes(const std::vector<Signed>& values, const std::vector<Signed>& base) {
  int64_t large = 0;
  const Bytes changes = encoded_changes<Signed, Float>(values, base, &large);
  const auto n = static_cast<int64_t>(values.size());
  std::vector<Signed> back(values.size());
  CHECK((pulse::decode_changes<Signed, Float>(changes.data(), large, base.data(), n, back.data())));
  CHECK(back == values);
  if (large == 0) return;
  // One entry fewer than the codes announce: refused before it is read.
  const Bytes short_of_one(changes.begin(), changes.end() - sizeof(Signed));
  CHECK(!(pulse::decode_changes<Signed, Float>(short_of_one.data(), large - 1, base.data(), n, back.data())));
}

template <class Signed>
void check_values() {
  Random random(sizeof(Signed));
  std::vector<Signed> values, base;
  const Signed edges[] = {0, 1, -1, std::numeric_limits<Signed>::max(), std::numeric_limits<Signed>::min()};
  for (const Signed a : edges) {
    for (const Signed b : edges) {
      values.push_back(a);
      base.push_back(b);
    }
  }
  for (int k = 0; k < 1000; ++k) {
    values.push_back(static_cast<Signed>(random.bits()));
    base.push_back(static_cast<Signed>(random.bits()));
  }
  for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, size_t{64}, values.size()}) {
    const std::vector<Signed> some(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(size));
    const std::vector<Signed> against(base.begin(), base.begin() + static_cast<std::ptrdiff_t>(size));
    const auto n = static_cast<int64_t>(size);
    std::vector<Signed> back(size);
    Bytes planes(size * sizeof(Signed));
    pulse::encode_values(some.data(), n, planes.data());
    pulse::decode_values(planes.data(), n, back.data());
    CHECK(back == some);
    for (const bool near : {false, true}) {
      std::vector<Signed> old = against;
      for (size_t k = 0; near && k < size; ++k) {
        const auto step = static_cast<std::make_unsigned_t<Signed>>(random.bits() % 13 - 6);
        old[k] = static_cast<Signed>(static_cast<std::make_unsigned_t<Signed>>(some[k]) + step);
      }
      check_changes<Signed, false>(some, old);
      check_changes<Signed, true>(some, old);
    }
  }
}

// One step up, one down across zero (-0 lies one below +0), no change, three up: signs 0, 1, 0, 0 and magnitudes less one
// of 0, 0, 0xFFFF, 2, that is codes 0, 0, 3, 2 and 0xFFFF - 3 in planes.
void check_value_meaning() {
  int64_t large = 0;
  const Bytes changes = encoded_changes<int16_t, true>({0x3F81, static_cast<int16_t>(0x8000), 0x3F80, 0x3F83},
                                                       {0x3F80, 0x0000, 0x3F80, 0x3F80}, &large);
  CHECK(large == 1);
  CHECK(changes == (Bytes{0b0010, 0b10110000, 0xFC, 0xFF}));
}

}  // namespace

void test_streams() {
  check_gaps<int32_t>({}, 0, 10);
  check_gaps<int32_t>({0, 1, 2, 257, 258, 514, 5000, 70000, 2000000000}, 0, 2000000001);
  check_gaps<int64_t>({1000, 1255, 1511, int64_t{1} << 40, (int64_t{1} << 62) - 1}, 1000, uint64_t{1} << 62);
  check_hostile_gaps();
  check_values<int8_t>();
  check_values<int16_t>();
  check_values<int32_t>();
  check_values<int64_t>();
  check_value_meaning();
}
