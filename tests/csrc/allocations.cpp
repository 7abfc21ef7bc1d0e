// Array allocations go through malloc so that a test can let one fail. (AddressSanitizer watches malloc as well.)
#include <atomic>
#include <cstdlib>
#include <new>

std::atomic<long> allocations_left{-1};  // of those that may fail without throwing; negative: no limit

void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) <= 0) return nullptr;
  return std::malloc(size);
}
void* operator new[](std::size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
