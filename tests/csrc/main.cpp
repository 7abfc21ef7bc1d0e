// Tests of csrc without torch: every kernel table this CPU runs, and the bodies of the CUDA kernels, against plain
// scalar code.
// PULSE_SIMDE: the AVX-512 table was compiled through SIMDe, so that any CPU runs it.
#include <cstring>

#include "check.h"

long checks_passed = 0;

namespace {

bool cpu_has(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return name == nullptr;
#endif
}

#if defined(PULSE_SIMDE)
constexpr bool kThroughSimde = true;
#else
constexpr bool kThroughSimde = false;
#endif

void test_table(const char* name, const pulse::KernelTable* table, bool runs) {
  if (table == nullptr) {
    std::printf("%s: not compiled in\n", name);
    return;
  }
  if (!runs) {
    std::printf("%s: not run, this CPU lacks it\n", name);
    return;
  }
  CHECK(std::strcmp(table->name, name) == 0);
  test_comparisons(*table);
  test_compaction(*table);
  test_index_blob(*table);
  test_patch(*table);
  test_digest(*table);
  std::printf("%s%s: passed\n", name, table == pulse::avx512_kernels() && kThroughSimde ? " through SIMDe" : "");
}

// Without PULSE_CPU in the environment the best table that this CPU runs is chosen.
void test_choice() {
  const char* expected = "portable";
  if (pulse::avx2_kernels() != nullptr && cpu_has("avx2")) expected = "avx2";
  if (pulse::avx512_kernels() != nullptr && cpu_has("avx512")) expected = "avx512";
  if (std::getenv("PULSE_CPU") == nullptr) CHECK(std::strcmp(pulse::best_kernels().name, expected) == 0);
}

}  // namespace

int main() {
  test_choice();
  test_rounding();
  test_streams();
  test_sums();
  test_cuda_compaction();
  test_cuda_packing(pulse::best_kernels());
  std::printf("csrc/cuda, on the host: passed\n");
  test_table("portable", &pulse::portable_kernels(), true);
  test_table("avx2", pulse::avx2_kernels(), cpu_has("avx2"));
  test_table("avx512", pulse::avx512_kernels(), kThroughSimde || cpu_has("avx512"));
  std::printf("%ld checks passed\n", checks_passed);
  return 0;
}
