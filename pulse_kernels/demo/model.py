"""A small decoder-only transformer whose parameters *are* the BF16 weights that patches carry.

RMSNorm, rotary positions, SwiGLU, no biases, input and output embeddings untied: the shape of current open models at
1.3 million parameters. Parameters are BF16; each forward pass widens them to FP32 (exactly) and computes there, since
few CPUs multiply BF16 at a useful speed. A change of an FP32 master that rounding absorbs is therefore invisible to
every forward pass, in the trainer as in the rollout processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pulse_kernels.demo.task import ALPHABET, ANSWER_LENGTH, PROMPT_LENGTH

WARM_START = "warm_start.safetensors"


@dataclass(frozen=True)
class ModelConfig:
    width: int = 192
    layers: int = 3
    heads: int = 4
    hidden: int = 512
    vocabulary: int = len(ALPHABET)
    positions: int = PROMPT_LENGTH + ANSWER_LENGTH


# Keys and values of one layer so far, [batch, heads, positions, head width].
LayerCache = tuple[Tensor, Tensor]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.float())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.float(), eps=1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.heads = config.heads
        self.attention_norm = RMSNorm(width)
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = RMSNorm(width)
        self.gate_up = nn.Parameter(torch.empty(2 * hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        batch, length, width = x.shape
        qkv = linear(self.attention_norm(x), self.qkv)
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        # A new position sees all that is cached and the new positions up to itself.
        visible = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + linear(attended.transpose(1, 2).reshape(batch, length, width), self.out)
        gate, up = linear(self.mlp_norm(x), self.gate_up).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.down), (k, v)


class Policy(nn.Module):
    """Next-token logits for new tokens, given the keys and values of the tokens before them."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.cos: Tensor
        self.sin: Tensor
        half = config.width // config.heads // 2
        frequencies = 100.0 ** -(torch.arange(half) / half)
        angles = torch.arange(config.positions)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, cache: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        start = cache[0][0].shape[2] if cache else 0
        cos = self.cos[start : start + tokens.shape[1]]
        sin = self.sin[start : start + tokens.shape[1]]
        x = F.embedding(tokens, self.embedding.float())
        new_cache = []
        for index, block in enumerate(self.blocks):
            x, layer_cache = block(x, cos, sin, cache[index] if cache else None)
            new_cache.append(layer_cache)
        return linear(self.norm(x), self.head), new_cache

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights for supervised training from nothing: the usual normal of 0.02, norms at 1."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """name -> the very tensors the forward pass reads, outside autograd."""
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def warm_start_path() -> Path:
    return Path(str(resources.files("pulse_kernels.demo").joinpath(WARM_START)))


def load_policy(path: Path | None = None) -> Policy:
    """The BF16 policy of the warm start, version 0 of every run."""
    from safetensors.torch import load_file

    policy = Policy()
    for parameter in policy.parameters():  # not Module.to(): the rotary tables are no weights and stay FP32
        parameter.data = parameter.data.to(torch.bfloat16)
    policy.load_state_dict(load_file(path or warm_start_path()))
    return policy


def num_parameters(policy: Policy) -> int:
    return sum(parameter.numel() for parameter in policy.parameters())
