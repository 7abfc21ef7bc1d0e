// Sums of sparse vectors against a dense vector, on several threads.
#include "../../csrc/cpu/sums.h"

#include <cstring>

#include "check.h"

void test_sums() {
  Random random(7);
  for (const int64_t numel : {int64_t{0}, int64_t{1}, pulse::kSumBlock - 1, pulse::kSumBlock, 5 * pulse::kSumBlock + 77}) {
    for (const int sparse : {1, 3, 1000}) {
      std::vector<std::vector<int32_t>> indices(4);
      std::vector<std::vector<float>> values(4);
      std::vector<float> dense(numel, 0.0f);
      std::vector<pulse::SparseVector> vectors;
      for (int k = 0; k < 4; ++k) {
        for (int64_t i = random.below(sparse); i < numel; i += 1 + random.below(2 * sparse - 1)) {
          // Small integers, so that sums are 0 at times.
          const float value = static_cast<float>(static_cast<int>(random.below(5)) - 2) / (k == 3 ? 3 : 1);
          indices[k].push_back(static_cast<int32_t>(i));
          values[k].push_back(value);
          dense[i] += value;
        }
        vectors.push_back({indices[k].data(), values[k].data(), static_cast<int64_t>(indices[k].size())});
      }
      for (const int threads : {1, 4}) {
        ThreadRunner runner(threads);
        pulse::SparseSum sum(vectors, numel);
        CHECK(sum.run(runner));
        std::vector<int32_t> found(sum.total());
        std::vector<float> sums(sum.total());
        sum.write(runner, found.data(), sums.data());
        int64_t at = 0;
        for (int64_t i = 0; i < numel; ++i) {
          if (dense[i] == 0) continue;
          CHECK(at < sum.total() && found[at] == i && std::memcmp(&sums[at], &dense[i], 4) == 0);
          ++at;
        }
        CHECK(at == sum.total());
      }
    }
  }
}
