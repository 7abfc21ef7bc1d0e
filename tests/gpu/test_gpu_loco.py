"""PULSELoCo on a GPU: the same bits as on the CPU, alone and as a NCCL group of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_helpers import DRY_RUN

from pulse_kernels.loco import PulseLoCo

pytestmark = pytest.mark.gpu

SHAPES = {"a": (30, 7) if DRY_RUN else (300, 70), "b": (105,), "scale": (), "none": (0, 4)}


def averaging(tensors):
    return torch.optim.SGD(tensors, lr=1.0)


def weights(device):
    generator = torch.Generator().manual_seed(3)
    return {name: (0.02 * torch.randn(shape, generator=generator)).to(device) for name, shape in SHAPES.items()}


def rounds(device, **options):
    """Three rounds of one rank. Plain averaging, whose arithmetic no device may fuse."""
    local = weights(device)
    loco = PulseLoCo(local, bucket_numel=200 if DRY_RUN else 5000, outer_optimizer=averaging, **options)
    fired = []
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        for tensor in local.values():
            tensor += (2e-5 * torch.randn(tensor.shape, generator=generator)).to(device)
        fired.append(loco.sync().num_fired)
    state = {**loco.theta, **{f"residual {name}": tensor for name, tensor in loco.residual.items()}}
    return fired, {name: tensor.cpu() for name, tensor in state.items()}


@pytest.fixture
def expected():
    fired, state = rounds(torch.device("cpu"))
    assert 0 < min(fired) < max(fired) < sum(tensor.numel() for tensor in weights("cpu").values())
    return fired, state


def check(found, expected):
    assert found[0] == expected[0]
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=str)
def test_alone(device, expected, options):
    check(rounds(device, **options), expected)


@pytest.mark.parametrize("options", [{}, {"compress": True}, {"exchange": "reduce"}, {"offload": True}], ids=str)
def test_in_a_group(device, expected, options, tmp_path):
    back_end = "gloo" if DRY_RUN else "nccl"
    dist.init_process_group(back_end, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        check(rounds(device, **options), expected)
    finally:
        dist.destroy_process_group()
