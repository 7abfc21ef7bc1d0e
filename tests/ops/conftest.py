"""Operators' tests run on one thread, but for those that ask for the ``threads`` fixture."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Most calls here are tiny: waking threads on a busy machine would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
