// The inner loops, written once over `Isa`, which supplies 64-element comparison masks and 256-element digest sums.
// Included once an instruction set, inside its anonymous namespace, after its `struct Isa`.

// 63 for an empty mask, whose bit is never used.
inline uint32_t lowest_bit(uint64_t mask) { return static_cast<uint32_t>(__builtin_ctzll(mask | 1ull << 63)); }

// Hardware prefetchers stop at the end of a 4 KiB page; without this a pass over memory in small pages takes an eighth
// longer. Called once for each `count` elements.
template <class T, int count = 64>
inline void prefetch_ahead(const T* next) {
  constexpr int kAhead = 1024, kLine = 64 / sizeof(T);
  for (int k = 0; k < count; k += kLine) __builtin_prefetch(next + kAhead + k);
}

// ---- comparisons: changed(i), value(i), old(i), store(i, value), and a mask of 64 -----------------------------------

template <uint16_t (*Round)(uint32_t), uint64_t (*Mask64)(const uint32_t*, const uint16_t*)>
struct Gate {
  using Value = uint16_t;
  const uint32_t* master;
  uint16_t* weight;
  explicit Gate(const CompactItem& item)
      : master(static_cast<const uint32_t*>(item.source)), weight(static_cast<uint16_t*>(item.target)) {}
  uint64_t mask64(int64_t i) const {
    prefetch_ahead(master + i);
    prefetch_ahead(weight + i);
    return Mask64(master + i, weight + i);
  }
  Value value(int64_t i) const { return Round(master[i]); }
  Value old(int64_t i) const { return weight[i]; }
  bool changed(int64_t i) const { return value(i) != old(i); }
  void store(int64_t i, Value v) const { weight[i] = v; }
};

template <class T, uint64_t (*Mask64)(const T*, const T*)>
struct Diff {
  using Value = T;
  const T* fresh;
  T* stale;
  explicit Diff(const CompactItem& item)
      : fresh(static_cast<const T*>(item.source)), stale(static_cast<T*>(item.target)) {}
  uint64_t mask64(int64_t i) const {
    prefetch_ahead(fresh + i);
    prefetch_ahead(stale + i);
    return Mask64(fresh + i, stale + i);
  }
  Value value(int64_t i) const { return fresh[i]; }
  Value old(int64_t i) const { return stale[i]; }
  bool changed(int64_t i) const { return fresh[i] != stale[i]; }
  void store(int64_t i, Value v) const { stale[i] = v; }
};

template <uint16_t (*Round)(uint32_t), uint64_t (*Mask64)(const float*, const float*, const float*)>
struct Residual {
  using Value = uint32_t;
  const float *theta, *local, *residual;
  explicit Residual(const CompactItem& item)
      : theta(static_cast<const float*>(item.source)),
        local(static_cast<const float*>(item.target)),
        residual(static_cast<const float*>(item.third)) {}
  uint64_t mask64(int64_t i) const {
    prefetch_ahead(theta + i);
    prefetch_ahead(local + i);
    prefetch_ahead(residual + i);
    return Mask64(theta + i, local + i, residual + i);
  }
  Value value(int64_t i) const { return pending_bits(theta[i], local[i], residual[i]); }
  Value old(int64_t) const { return 0; }
  bool changed(int64_t i) const { return fires(theta[i], local[i], residual[i]); }
  void store(int64_t, Value) const {}
  static bool fires(float theta, float local, float residual) {
    return residual_fires<Round>(theta, pending_bits(theta, local, residual));
  }
};

// Two steps over a stretch that stays in the L1 cache: positions, then values. Changes are rare and their number in 64
// elements is unpredictable, so the first two positions are written without a branch (the sink has room: it holds at
// most as many as there were elements), and the second step has no branch to mispredict but its end.
template <class Comparison>
int64_t compact(const CompactItem& item, int64_t begin, int64_t end, const CompactSink& sink, bool update) {
  using Value = typename Comparison::Value;
  constexpr int64_t kStretch = 4096;
  const Comparison compare(item);
  auto* values = static_cast<Value*>(sink.values);
  auto* old_values = static_cast<Value*>(sink.old_values);
  uint16_t* const positions = sink.positions;
  int64_t found = 0;
  for (int64_t stretch = begin; stretch < end; stretch += kStretch) {
    const int64_t stretch_end = stretch + kStretch < end ? stretch + kStretch : end, first = found;
    int64_t i = stretch;
    for (; i + 64 <= stretch_end; i += 64) {
      uint64_t mask = compare.mask64(i);
      const auto at = static_cast<uint32_t>(i - sink.origin);
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        positions[found] = static_cast<uint16_t>(at + lowest_bit(mask));
        found += mask != 0;
        mask &= mask - 1;
      }
      for (; mask != 0; mask &= mask - 1) positions[found++] = static_cast<uint16_t>(at + lowest_bit(mask));
    }
    for (; i < stretch_end; ++i) {
      if (compare.changed(i)) positions[found++] = static_cast<uint16_t>(i - sink.origin);
    }
    const auto values_of_stretch = [&](auto keep_old, auto write) {
      for (int64_t k = first; k < found; ++k) {
        const int64_t position = sink.origin + positions[k];
        const Value value = compare.value(position);
        values[k] = value;
        if constexpr (keep_old.value) old_values[k] = compare.old(position);
        if constexpr (write.value) compare.store(position, value);
      }
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (old_values == nullptr) {
      update ? values_of_stretch(no, yes) : values_of_stretch(no, no);
    } else {
      update ? values_of_stretch(yes, yes) : values_of_stretch(yes, no);
    }
  }
  return found;
}

template <class Comparison>
void write_mask(const CompactItem& item, int64_t begin, int64_t end, uint8_t* out) {
  const Comparison compare(item);
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) {
    uint64_t mask = compare.mask64(i);
    for (int byte = 0; byte < 8; ++byte, mask >>= 8) {
      // Spread 8 bits to 8 bytes: replicate, select one bit a byte, normalise to 0 or 1.
      uint64_t spread = ((mask & 0xFF) * 0x0101010101010101ull) & 0x8040201008040201ull;
      spread = ((spread + 0x7F7F7F7F7F7F7F7Full) | spread) >> 7 & 0x0101010101010101ull;
      __builtin_memcpy(out + i + 8 * byte, &spread, 8);
    }
  }
  for (; i < end; ++i) out[i] = compare.changed(i);
}

inline void commit(const float* theta, const float* local, float* residual, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float s = residual[i] + (theta[i] - local[i]);
    const uint32_t nan = 0x7FC00000u;
    float canonical;
    __builtin_memcpy(&canonical, &nan, 4);
    residual[i] = s != s ? canonical : s;
  }
}

// ---- digest ---------------------------------------------------------------------------------------------------------

template <class T, void (*BlockSums)(const T*, const DigestKey&, uint64_t*)>
void digest_blocks(const void* data, int64_t blocks, uint64_t first_block, const DigestKey& key, uint64_t sums[2]) {
  const T* elements = static_cast<const T*>(data);
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t block_sums[2];
    prefetch_ahead<T, kDigestBlock>(elements + b * kDigestBlock);
    BlockSums(elements + b * kDigestBlock, key, block_sums);
    for (int lane = 0; lane < 2; ++lane) {
      sums[lane] += block_factor(key.seeds[lane], first_block + b) * block_sums[lane];
    }
  }
}

template <class T>
void scalar_block_sums(const T* elements, const DigestKey& key, uint64_t* sums) {
  uint64_t first = 0, second = 0;
  for (int k = 0; k < kDigestBlock; ++k) {
    first += static_cast<uint64_t>(elements[k]) * key.slots[k];
    second += static_cast<uint64_t>(elements[k]) * key.slots[kDigestBlock + k];
  }
  sums[0] = first;
  sums[1] = second;
}

// Positions are sorted, so neighbours mostly share a block, whose factors are mixed once.
template <class T, class Index>
void add_changes_by_block(const DigestKey& key, const Index* positions, const T* old_values, const T* new_values,
                          int64_t n, uint64_t sums[2]) {
  uint64_t block_sums[2] = {0, 0}, block = ~uint64_t{0};
  const auto close_block = [&] {
    for (int lane = 0; lane < 2; ++lane) {
      sums[lane] += block_factor(key.seeds[lane], block) * block_sums[lane];
      block_sums[lane] = 0;
    }
  };
  for (int64_t k = 0; k < n; ++k) {
    const auto position = static_cast<uint64_t>(positions[k]);
    if (position / kDigestBlock != block) {
      close_block();
      block = position / kDigestBlock;
    }
    const uint64_t change = static_cast<uint64_t>(new_values[k]) - static_cast<uint64_t>(old_values[k]);
    block_sums[0] += change * key.slots[position % kDigestBlock];
    block_sums[1] += change * key.slots[kDigestBlock + position % kDigestBlock];
  }
  close_block();
}

// Every weight anew, without a branch or a table: for those who multiply many 64-bit numbers at once.
template <class T, class Index>
void add_changes_one_by_one(const DigestKey& key, const Index* positions, const T* old_values, const T* new_values,
                            int64_t n, uint64_t sums[2]) {
  const uint64_t seed0 = key.seeds[0], seed1 = key.seeds[1];
  uint64_t sum0 = 0, sum1 = 0;
  for (int64_t k = 0; k < n; ++k) {
    const auto position = static_cast<uint64_t>(positions[k]);
    const uint64_t change = static_cast<uint64_t>(new_values[k]) - static_cast<uint64_t>(old_values[k]);
    sum0 += change * digest_weight(seed0, position);
    sum1 += change * digest_weight(seed1, position);
  }
  sums[0] += sum0;
  sums[1] += sum1;
}

template <class T, class Index>
void digest_changes(const Changed& changed, int64_t begin, int64_t end, const DigestKey& key, uint64_t sums[2]) {
  constexpr auto add = Isa::multiplies_64_bits ? add_changes_one_by_one<T, Index> : add_changes_by_block<T, Index>;
  add(key, static_cast<const Index*>(changed.positions) + begin, static_cast<const T*>(changed.old_values) + begin,
      static_cast<const T*>(changed.new_values) + begin, end - begin, sums);
}

// ---- packed indices -------------------------------------------------------------------------------------------------

template <class Index, class Unsigned>
bool gaps_of_block(const Index* indices, int used, uint32_t* gaps, uint32_t* all) {
  Unsigned seen = 0;
  gaps[0] = 0;
  for (int k = 1; k < used; ++k) {
    const Unsigned gap = static_cast<Unsigned>(indices[k]) - static_cast<Unsigned>(indices[k - 1]) - 1u;
    seen |= gap;
    gaps[k] = static_cast<uint32_t>(gap);
  }
  *all = static_cast<uint32_t>(seen);
  return static_cast<uint64_t>(seen) >> 32 == 0;
}

template <class Index>
bool sorted_within(const Index* indices, int64_t n, int64_t numel) {
  if (n == 0) return true;
  if (indices[0] < 0 || indices[n - 1] >= numel) return false;
  int64_t k = 1;
  // No early exit inside a run, so that the loop vectorises.
  for (; k + 256 <= n; k += 256) {
    int bad = 0;
    for (int j = 0; j < 256; ++j) bad |= indices[k + j] <= indices[k + j - 1];
    if (bad) return false;
  }
  int bad = 0;
  for (; k < n; ++k) bad |= indices[k] <= indices[k - 1];
  return bad == 0;
}

// ---- the table ------------------------------------------------------------------------------------------------------

constexpr KernelTable make_table(const char* name) {
  using GateBf16 = Gate<round_to_bf16, Isa::gate_bf16>;
  using GateFp16 = Gate<round_to_fp16, Isa::gate_fp16>;
  return KernelTable{
      name,
      compact<GateBf16>,
      compact<GateFp16>,
      compact<Diff<uint8_t, Isa::diff1>>,
      compact<Diff<uint16_t, Isa::diff2>>,
      compact<Diff<uint32_t, Isa::diff4>>,
      compact<Diff<uint64_t, Isa::diff8>>,
      compact<Residual<round_to_bf16, Isa::residual_bf16>>,
      compact<Residual<round_to_fp16, Isa::residual_fp16>>,
      write_mask<GateBf16>,
      write_mask<GateFp16>,
      commit,
      digest_blocks<uint8_t, Isa::digest1>,
      digest_blocks<uint16_t, Isa::digest2>,
      digest_blocks<uint32_t, Isa::digest4>,
      digest_blocks<uint64_t, Isa::digest8>,
      {{digest_changes<uint8_t, int32_t>, digest_changes<uint8_t, int64_t>},
       {digest_changes<uint16_t, int32_t>, digest_changes<uint16_t, int64_t>},
       {digest_changes<uint32_t, int32_t>, digest_changes<uint32_t, int64_t>},
       {digest_changes<uint64_t, int32_t>, digest_changes<uint64_t, int64_t>}},
      gaps_of_block<int32_t, uint32_t>,
      gaps_of_block<int64_t, uint64_t>,
      sorted_within<int32_t>,
      sorted_within<int64_t>,
  };
}

// Scalar masks: what an instruction set falls back to for a rare case, and all that the portable table has.
template <class Comparison, class... Pointers>
uint64_t scalar_mask(const Pointers*... pointers) {
  CompactItem item{};
  const void* addresses[] = {pointers...};
  item.source = addresses[0];
  item.target = const_cast<void*>(addresses[1]);
  if constexpr (sizeof...(Pointers) > 2) item.third = addresses[2];
  const Comparison compare(item);
  uint64_t mask = 0;
  for (int k = 0; k < 64; ++k) mask |= static_cast<uint64_t>(compare.changed(k)) << k;
  return mask;
}
