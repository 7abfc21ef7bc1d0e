"""Tables of many tensors: what stands in them, and when a kept one serves again."""

from __future__ import annotations

import pytest
import torch

from pulse_kernels.backends import tiles

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept():
    tiles._kept.cache_clear()
    yield
    tiles._kept.cache_clear()


def test_rows_of_the_table():
    cut = tiles.cut([(7, 8), (1, 2), (3, 4), (5, 6)], [10, 0, 21, 5], 10, CPU)
    assert cut.rows == [0, 2, 3]
    assert cut.count == 5
    assert cut.table.tolist() == [[7, 8, 0], [3, 4, 1], [5, 6, 4]]
    assert cut.tile_rows.tolist() == [0, 1, 1, 1, 2]
    assert cut.last.tolist() == [0, 3, 4]
    assert tiles.cut([(7, 8), (1, 2)], [0, 21], 10, CPU) == tiles.Tiles([1], 3, (1, 2, 0))
    assert tiles.cut([(7, 8)], [0], 10, CPU) == tiles.Tiles([], 0, ())


def test_a_kept_table_serves_the_very_same_call_only():
    columns, sizes = [(7, 10), (9, 20)], [10, 20]
    kept = tiles.cut(columns, sizes, 8, CPU, keep=True)
    assert tiles.cut(list(columns), list(sizes), 8, CPU, keep=True) is kept
    others = [([(7, 10), (8, 20)], sizes, 8), (columns, [10, 30], 8), (columns, sizes, 4), (columns[::-1], sizes, 8)]
    for other, extents, tile in others:
        found, fresh = tiles.cut(other, extents, tile, CPU, keep=True), tiles.cut(other, extents, tile, CPU)
        assert found is not kept
        assert torch.equal(found.table, fresh.table)
        assert torch.equal(found.tile_rows, fresh.tile_rows)
    assert tiles.cut(columns, sizes, 8, CPU) is not kept


def test_few_are_kept():
    for k in range(50):
        tiles.cut([(k, 1), (k, 2)], [1, 2], 8, CPU, keep=True)
    assert tiles._kept.cache_info().currsize <= 8
