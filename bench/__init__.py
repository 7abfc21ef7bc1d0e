"""The benchmark suite: ``make bench``. Results: docs/performance.md."""
