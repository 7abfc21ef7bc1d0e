// How work is spread over threads: tasks are taken one by one from a counter, so that a slow core takes fewer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace pulse {

class Runner {
 public:
  virtual ~Runner() = default;
  virtual int threads() const = 0;
  // Calls body(worker) once for each worker in [0, workers), possibly at the same time. body must not throw.
  virtual void run(int workers, const std::function<void(int)>& body) = 0;

  // Calls task(worker, k) for every k in [0, tasks).
  template <class Task>
  void for_each(int64_t tasks, const Task& task) {
    const int64_t wanted = threads() < tasks ? threads() : tasks;
    if (wanted <= 1) {
      for (int64_t k = 0; k < tasks; ++k) task(0, k);
      return;
    }
    std::atomic<int64_t> next{0};
    run(static_cast<int>(wanted), [&](int worker) {
      for (int64_t k = next++; k < tasks; k = next++) task(worker, k);
    });
  }
};

}  // namespace pulse
