"""One worker, eight numbers, worked out on paper."""

from __future__ import annotations

from functools import partial

import torch

from pulse_kernels.loco import PulseLoCo

E6, E7, E8, E9, E20, E30 = (2.0**-k for k in (6, 7, 8, 9, 20, 30))


def test_two_rounds() -> None:
    # BF16 has 2^-7 between neighbours from 1 up to 2, and 2^-8 below 1; ties go to the even neighbour.
    #
    #   theta  local               s                 bf16(theta - s)  bf16(theta)
    #   1      1 - 2^-6            2^-6              1 - 2^-6         1            fires
    #   1      1 + 2^-9            -2^-9             1                1            silent
    #   1      1 + 2^-8            -2^-8             1 (tie, even)    1            silent
    #   1      1 + 2^-8 + 2^-20    -2^-8 - 2^-20     1 + 2^-7         1            fires
    #   2      2 - 2^-9            2^-9              2                2            silent
    #   0      2^-30               -2^-30            2^-30            0            fires
    #   -1     -1 + 2^-7           -2^-7             -1 + 2^-7        -1           fires
    #   1.5    1.5                 0                 1.5              1.5          silent
    theta = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 0.0, -1.0, 1.5])
    local = theta.clone()
    outer = partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
    loco = PulseLoCo({"w": local}, outer_optimizer=outer)
    local.copy_(torch.tensor([1 - E6, 1 + E9, 1 + E8, 1 + E8 + E20, 2 - E9, E30, -1 + E7, 1.5]))
    report = loco.sync()
    assert (report.num_fired, report.numel, report.density, report.round) == (4, 8, 0.5, 1)
    # What did not fire is the residual.
    assert loco.residual["w"].tolist() == [0.0, -E9, -E8, 0.0, E9, 0.0, 0.0, 0.0]
    # The outer step, the momentum's buffer being g at first: theta - 0.5 (g + 0.5 g) = theta - 0.75 g.
    expected = [1 - 0.75 * E6, 1.0, 1.0, 1 + 0.75 * (E8 + E20), 2.0, 0.75 * E30, -1 + 0.75 * E7, 1.5]
    assert loco.theta["w"].tolist() == expected
    assert local.tolist() == expected

    # Second round: only the second weight moves, from 1 to 1 + 2^-9 + 2^-20. With its residual
    # s = -2^-9 - (2^-9 + 2^-20) = -2^-8 - 2^-20, and 1 + 2^-8 + 2^-20 is 1 + 2^-7 in BF16: it fires.
    # The third still waits with -2^-8 (1 + 2^-8 is a tie), the fifth with 2^-9.
    local[1] += E9 + E20
    assert loco.sync().num_fired == 1
    assert loco.residual["w"].tolist() == [0.0, 0.0, -E8, 0.0, E9, 0.0, 0.0, 0.0]
    # buffer = 0.5 buffer + g. Where g is 0 now: step 0.5 (0 + 0.5 (0.5 g1)) = 0.125 g1. The second: 0.75 g.
    expected[0] -= 0.125 * E6
    expected[1] += 0.75 * (E8 + E20)
    expected[3] += 0.125 * (E8 + E20)
    expected[5] += 0.125 * E30
    expected[6] += 0.125 * E7
    assert loco.theta["w"].tolist() == expected
    assert local.tolist() == expected
