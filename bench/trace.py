"""Real weight changes: a small language model trained for real, its BF16 views taken step by step.

A decoder-only transformer of 5.5 million parameters (width 384, 3 layers, RMSNorm, SwiGLU, bytes as tokens) learns the
source of Python's standard library, one sequence of 32 a step. A short warm start at a high learning rate gives weights
and gradients a trained model's shape; then Adam with fresh moments goes on at 3e-6, the learning rate of RL
post-training, on FP32 masters. After every step the masters are rounded to BF16, and two consecutive views are a base
and its successor. The loss is next-token prediction and not an RL loss; what a patch looks like is decided by the size
of Adam's updates against the weights.

Just after Adam's start every update is close to the learning rate; later noisy gradients average out. So one run passes
from several per cent of changed weights down to about one, and the pairs nearest to the wanted densities are taken.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workloads import State, StatePair

WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY = 384, 3, 6, 1024, 256
LENGTH = 32
WARM_STEPS, WARM_RATE = 40, 1e-3
STEPS, RATE = 140, 3e-6
INIT_GAIN = 1.5


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, eps=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_GAIN * module.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def view(self) -> State:
        """The BF16 weights that a forward pass would see."""
        return {name: parameter.detach().bfloat16() for name, parameter in self.named_parameters()}


def text() -> Tensor:
    """uint8: the standard library's modules, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8)


@dataclass
class TracedPair(StatePair):
    """Two consecutive views. step: of Adam at 3e-6, from 1. density: changed share."""

    step: int
    density: float


def traced_pairs(wanted: Sequence[float], seed: int = 0) -> list[TracedPair]:
    """For each wanted density the pair of consecutive views that comes nearest to it.

    Runs on one thread: steps this small gain little from a second, and lose much where it has to wait for its turn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _traced_pairs(wanted, seed)
    finally:
        torch.set_num_threads(threads)


def _traced_pairs(wanted: Sequence[float], seed: int) -> list[TracedPair]:
    torch.manual_seed(seed)
    model, data = LanguageModel(), text()

    def train(optimizer: torch.optim.Optimizer) -> None:
        start = int(torch.randint(data.numel() - LENGTH, ()))
        tokens = data[start : start + LENGTH + 1].long()
        loss = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    warm = torch.optim.Adam(model.parameters(), lr=WARM_RATE, betas=(0.9, 0.95), fused=True)
    for _ in range(WARM_STEPS):
        train(warm)
    adam = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    best: list[TracedPair | None] = [None] * len(wanted)
    old = model.view()
    for step in range(1, STEPS + 1):
        train(adam)
        new = model.view()
        changed = sum(int((new[name].view(torch.int16) != old[name].view(torch.int16)).sum()) for name in new)
        density = changed / sum(tensor.numel() for tensor in new.values())
        for k, target in enumerate(wanted):
            taken = best[k]
            if taken is None or abs(density - target) < abs(taken.density - target):
                best[k] = TracedPair(f"trained, step {step}", old, new, step, density)
        old = new
    return [pair for pair in best if pair is not None]
