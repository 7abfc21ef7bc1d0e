// Chooses the instruction set at run time.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace pulse {
namespace {

bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const KernelTable& choose() {
  const char* asked = std::getenv("PULSE_CPU");
  const auto is_asked = [asked](const char* name) { return asked != nullptr && std::strcmp(asked, name) == 0; };
  // Whoever asks for more than there is, or for what nobody knows, gets the best there is.
  const bool portable = is_asked("portable"), avx512 = !portable && !is_asked("avx2");
  if (avx512 && cpu_has_avx512() && avx512_kernels() != nullptr) return *avx512_kernels();
  if (!portable && cpu_has_avx2() && avx2_kernels() != nullptr) return *avx2_kernels();
  return portable_kernels();
}

}  // namespace

const KernelTable& best_kernels() {
  static const KernelTable& table = choose();
  return table;
}

}  // namespace pulse
