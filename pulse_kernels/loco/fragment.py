"""A fragment: tensors that are synchronised together, with their global weights, residual and outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from pulse_kernels import ops
from pulse_kernels.loco.exchange import check_finite
from pulse_kernels.loco.tensors import Bucket, Piece, by_pieces, cut, joined
from pulse_kernels.loco.wire import Entries

KEPT_ROUNDS = 64  # how far behind a rank may be and still know what became of what it sent
OuterOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass
class Fragment:
    """theta: global weights, FP32, by name. residual: what did not fire yet; None with the gate off. work: the local
    weights where theta is (with offload a host copy, else the trained tensors themselves), which serve as scratch
    memory for the mean in a commit. rounds: committed so far."""

    work: dict[str, Tensor]
    theta: dict[str, Tensor]
    residual: dict[str, Tensor] | None
    outer: Optimizer
    buckets: list[Bucket]
    view: torch.dtype | None
    rounds: int = 0
    history: list[str] = field(default_factory=list)  # what identifies the last rounds committed
    sent: list[Entries] = field(default_factory=list)  # in a round that others may have committed,
    doubt: str = ""  # and what identifies that one

    @classmethod
    def of(
        cls,
        work: dict[str, Tensor],
        theta: dict[str, Tensor],
        outer_optimizer: OuterOptimizer,
        view: torch.dtype | None,
        bucket_numel: int,
    ) -> Fragment:
        residual = None if view is None else {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        buckets = cut({name: tensor.numel() for name, tensor in theta.items()}, bucket_numel)
        outer = outer_optimizer(list(theta.values()))
        if not isinstance(outer, Optimizer):
            raise TypeError(f"outer_optimizer made a {type(outer).__name__}, expected a torch.optim.Optimizer")
        held = {id(tensor) for group in outer.param_groups for tensor in group["params"]}
        if left := [name for name, tensor in theta.items() if id(tensor) not in held]:
            raise ValueError(
                f"the outer optimizer does not hold {left[0]!r:.200}, whose updates would be lost: make it of all the "
                "tensors that outer_optimizer is given, themselves"
            )
        return cls(work, theta, residual, outer, buckets, view)

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.theta.values())

    def gate(self, bucket: Bucket) -> Entries:
        """What this rank has to send of a bucket; reads only. NonFiniteError where that is infinite or NaN."""
        theta, local = bucket.of(self.theta), bucket.of(self.work)
        if self.residual is None:
            values = torch.cat([global_ - own for global_, own in zip(theta, local, strict=True)])
            entries = Entries(None, values)
        else:
            assert self.view is not None
            columns = ops.gate_residual_many(
                theta, local, bucket.of(self.residual), view=self.view, index_dtype=torch.int32
            )
            entries = Entries(*joined(bucket, *columns))
        check_finite(entries.values, f"the pseudo-gradient of {_names(bucket)}")
        return entries

    def keep_residual(self, sent: Sequence[Entries]) -> None:
        """What was not ``sent``, by bucket, is the residual; theta and the local weights are as they were then."""
        if self.residual is not None:
            for bucket, entries in zip(self.buckets, sent, strict=True):
                assert entries.indices is not None
                indices = [index for _, index, _ in by_pieces(bucket, entries.indices, entries.values)]
                ops.commit_residual_many_(
                    bucket.of(self.theta), bucket.of(self.work), bucket.of(self.residual), indices, check=False
                )

    def step(self, means: Sequence[Entries], identity: str) -> None:
        """The outer step; the local weights' memory holds theta's gradient, the mean, and then theta."""
        for bucket, mean in zip(self.buckets, means, strict=True):
            _fill(bucket, self.work, mean)
        for name, tensor in self.theta.items():
            tensor.grad = self.work[name]
        try:
            self.outer.step()
        finally:
            for tensor in self.theta.values():
                tensor.grad = None
        self.reset()
        self.rounds += 1
        self.history = [*self.history, identity][-KEPT_ROUNDS:]

    def reset(self) -> None:
        """Local weights as the global ones."""
        for name, tensor in self.theta.items():
            self.work[name].copy_(tensor)

    def pending(self, name: str) -> Tensor:
        """``residual + (theta - local)`` of a tensor: what this rank has not sent; a new tensor."""
        delta = self.theta[name] - self.work[name]
        return delta if self.residual is None else self.residual[name] + delta


def _fill(bucket: Bucket, work: dict[str, Tensor], mean: Entries) -> None:
    """The pieces of a bucket as the mean: zero where no rank has sent anything."""
    slices = bucket.of(work)
    if mean.indices is None:
        for part, values in zip(slices, mean.values.split([part.numel() for part in slices]), strict=True):
            part.copy_(values)
        return
    torch._foreach_zero_(slices)
    rows: list[tuple[Piece, Tensor, Tensor]] = list(by_pieces(bucket, mean.indices, mean.values))
    ops.apply_patch_many_(slices, [index for _, index, _ in rows], [values for _, _, values in rows], check=False)


def _names(bucket: Bucket) -> str:
    first = f"{bucket.pieces[0].name!r:.200}"
    return first if len(bucket.pieces) == 1 else f"{first} and {len(bucket.pieces) - 1} more"
