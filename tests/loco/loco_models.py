"""PULSELoCo in plain PyTorch, one process: the formulas of arXiv 2602.03839, written once more, with dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


class PlainLoCo:
    """Workers as lists of tensors. ``view`` None is DiLoCo."""

    def __init__(
        self,
        theta: Sequence[Tensor],
        workers: int,
        view: torch.dtype | None = torch.bfloat16,
        outer: Callable[[list[Tensor]], Optimizer] | None = None,
    ) -> None:
        self.theta = [tensor.clone() for tensor in theta]
        self.local = [[tensor.clone() for tensor in theta] for _ in range(workers)]
        self.residual = [[torch.zeros_like(tensor) for tensor in theta] for _ in range(workers)]
        self.view = view
        self.outer = (
            torch.optim.SGD(self.theta, lr=0.7, momentum=0.9, nesterov=True) if outer is None else outer(self.theta)
        )

    def fired(self, worker: int, k: int) -> tuple[Tensor, Tensor]:
        """(s, where it fires) of a tensor."""
        theta = self.theta[k]
        s = self.residual[worker][k] + (theta - self.local[worker][k])
        if self.view is None:
            return s, torch.ones_like(s, dtype=torch.bool)
        before, after = theta.to(self.view), (theta - s).to(self.view)
        return s, before.view(torch.int16) != after.view(torch.int16)

    def round(self) -> list[int]:
        """One round; how many entries each worker sent."""
        counts = [0] * len(self.local)
        for k, theta in enumerate(self.theta):
            total = torch.zeros_like(theta)
            for worker, residual in enumerate(self.residual):
                s, fires = self.fired(worker, k)
                counts[worker] += int(fires.sum())
                total += torch.where(fires, s, torch.zeros(()))
                if self.view is not None:
                    residual[k] = torch.where(fires, torch.zeros(()), s)
            theta.grad = total / len(self.local)
        self.outer.step()
        for local in self.local:
            for k, theta in enumerate(self.theta):
                local[k].copy_(theta)
        return counts


def moved(local: Sequence[Tensor], seed: int, spread: float = 2e-5) -> None:
    """Inner steps: ``local`` moves by normal noise, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in local:
        tensor += spread * torch.randn(tensor.shape, generator=generator)


def model(seed: int = 0) -> dict[str, Tensor]:
    """Weights of several shapes, 0-d and empty among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (37, 11), "b": (130,), "scale": (), "none": (0, 3), "c": (5, 3, 7)}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
