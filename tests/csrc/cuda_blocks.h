// Kernel bodies of csrc/cuda run on the host, one thread of a block after the other, as the launches would run them.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "../../csrc/cuda/block.h"
#include "check.h"

// Runs body(block, tile) for every tile, in an order that no kernel may depend on.
template <class Body>
void run_tiles(int64_t tiles, const Body& body) {
  for (int64_t k = tiles - 1; k >= 0; --k) {
    pulse::HostBlock block;
    body(block, k);
  }
}

// Shared memory as a block finds it: on the heap, where AddressSanitizer watches its ends, and full of garbage.
template <class T>
std::unique_ptr<T> shared_memory() {
  auto memory = std::make_unique<T>();
  auto* bytes = reinterpret_cast<unsigned char*>(memory.get());
  for (size_t k = 0; k < sizeof(T); ++k) bytes[k] = static_cast<unsigned char>(0xA5 + k);
  return memory;
}

inline int64_t address(const void* data) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(data)); }
