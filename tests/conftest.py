"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Examples are the same in every run; how long one takes depends on the machine.
examples = int(os.environ.get("PULSE_TEST_EXAMPLES", "50"))
settings.register_profile("pulse", deadline=None, derandomize=True, max_examples=examples)
settings.load_profile("pulse")


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with each number of intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
