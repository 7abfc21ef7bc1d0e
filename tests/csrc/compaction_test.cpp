// Compaction of several tensors on several threads: order, undo, and running out of memory half way.
#include "../../csrc/cpu/compaction.h"

#include "../../csrc/bits/rounding.h"
#include "check.h"

extern std::atomic<long> allocations_left;  // allocations.cpp

namespace {

using pulse::CompactItem;
using pulse::Compaction;

struct Pair {
  std::vector<uint32_t> master;
  std::vector<uint16_t> weight, wanted;
  std::vector<int64_t> positions;
};

Pair make_pair(Random& random, int64_t n, int percent) {
  Pair pair;
  for (int64_t k = 0; k < n; ++k) {
    pair.master.push_back(static_cast<uint32_t>(random.bits()));
    pair.wanted.push_back(pulse::round_to_bf16(pair.master[k]));
    const bool changed = static_cast<int>(random.below(100)) < percent;
    pair.weight.push_back(static_cast<uint16_t>(pair.wanted[k] ^ (changed ? 1u << random.below(16) : 0u)));
    if (changed) pair.positions.push_back(k);
  }
  return pair;
}

// Empty tensors, tensors around one chunk, and enough changes to fill more than one slab.
std::vector<Pair> make_model(Random& random) {
  std::vector<Pair> model;
  const int64_t chunk = pulse::kCompactChunk;
  for (const int64_t n : {int64_t{0}, int64_t{1}, chunk - 1, chunk, chunk + 1, int64_t{0}, 9 * chunk + 77}) {
    model.push_back(make_pair(random, n, n > 2 * chunk ? 100 : 3));
  }
  return model;
}

std::vector<CompactItem> items_of(std::vector<Pair>& model) {
  std::vector<CompactItem> items;
  for (Pair& pair : model) {
    items.push_back({pair.master.data(), pair.weight.data(), nullptr, static_cast<int64_t>(pair.master.size())});
  }
  return items;
}

template <class Index>
void check_output(Compaction& compaction, pulse::Runner& runner, const std::vector<Pair>& model,
                  const std::vector<std::vector<uint16_t>>& before) {
  std::vector<std::vector<Index>> indices;
  std::vector<std::vector<uint16_t>> values, old_values;
  std::vector<Compaction::Output> outputs;
  for (size_t k = 0; k < model.size(); ++k) {
    CHECK(compaction.total(k) == static_cast<int64_t>(model[k].positions.size()));
    indices.emplace_back(compaction.total(k));
    values.emplace_back(compaction.total(k));
    old_values.emplace_back(compaction.total(k));
    outputs.push_back({indices[k].data(), sizeof(Index) == 8, values[k].data(), old_values[k].data()});
  }
  compaction.write(runner, outputs);
  for (size_t k = 0; k < model.size(); ++k) {
    size_t wrong = 0;
    for (size_t j = 0; j < indices[k].size(); ++j) {
      const int64_t position = model[k].positions[j];
      wrong += indices[k][j] != position || values[k][j] != model[k].wanted[position];
      wrong += old_values[k][j] != before[k][position];
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

void test_compaction(const pulse::KernelTable& table) {
  Random random(1);
  std::vector<Pair> model = make_model(random);
  std::vector<std::vector<uint16_t>> before;
  for (const Pair& pair : model) before.push_back(pair.weight);
  const auto unchanged = [&] {
    for (size_t k = 0; k < model.size(); ++k) {
      if (model[k].weight != before[k]) return false;
    }
    return true;
  };

  for (const int threads : {1, 2, 4}) {
    ThreadRunner runner(threads);
    Compaction reading(items_of(model), table.gate_bf16, 2, true);
    CHECK(reading.run(runner, false) && unchanged());
    check_output<int32_t>(reading, runner, model, before);

    // With digests of the weights as they were before the update, and of the change.
    Compaction updating(items_of(model), table.gate_bf16, 2, true);
    updating.keep_digests({1, 2, 3, 4, 5, 6, 7}, table.digest2);
    CHECK(updating.run(runner, true));
    for (size_t k = 0; k < model.size(); ++k) {
      uint64_t expected[2], after[2];
      const auto n = static_cast<int64_t>(before[k].size());
      pulse::digest(runner, table.digest2, before[k].data(), 2, n, k + 1, 0, expected);
      pulse::digest(runner, table.digest2, model[k].wanted.data(), 2, n, k + 1, 0, after);
      for (int lane = 0; lane < 2; ++lane) {
        CHECK(updating.digest(k, lane) == expected[lane]);
        CHECK(updating.digest(k, 2 + lane) == after[lane] - expected[lane]);
      }
    }
    for (const Pair& pair : model) CHECK(pair.weight == pair.wanted);
    check_output<int64_t>(updating, runner, model, before);
    updating.undo();
    CHECK(unchanged());

    // Each slab takes three allocations; whichever fails, the weights are as they were.
    bool failed = true;
    for (long allowed = 0; failed; ++allowed) {
      Compaction starved(items_of(model), table.gate_bf16, 2, true);
      allocations_left = allowed;
      failed = !starved.run(runner, true);
      allocations_left = -1;
      CHECK(failed ? unchanged() : allowed >= 6);
      if (!failed) starved.undo();
      CHECK(unchanged());
    }
  }
}
