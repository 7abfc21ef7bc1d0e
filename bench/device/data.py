"""Masters and weights on the device, made there: a known share of the weights differs by one unit in the last place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 26  # elements at a time, wherever a temporary would else be as large as the tensor

# ---- Qwen2.5-7B ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder of Qwen2.5's kind: biases at q, k and v only, an lm_head of its own."""

    layers: int = 28
    hidden: int = 3584
    intermediate: int = 18944
    vocabulary: int = 152064
    heads: int = 28
    kv_heads: int = 4
    head_size: int = 128

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for k in range(self.layers):
            layer = f"model.layers.{k}."
            shapes |= {
                f"{layer}self_attn.q_proj.weight": (q, self.hidden),
                f"{layer}self_attn.q_proj.bias": (q,),
                f"{layer}self_attn.k_proj.weight": (kv, self.hidden),
                f"{layer}self_attn.k_proj.bias": (kv,),
                f"{layer}self_attn.v_proj.weight": (kv, self.hidden),
                f"{layer}self_attn.v_proj.bias": (kv,),
                f"{layer}self_attn.o_proj.weight": (self.hidden, q),
                f"{layer}mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{layer}mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{layer}mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{layer}input_layernorm.weight": (self.hidden,),
                f"{layer}post_attention_layernorm.weight": (self.hidden,),
            }
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}

    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes().values()]


QWEN_7B = Decoder()
QWEN_7B_TENSORS, QWEN_7B_PARAMETERS = 339, 7_615_616_512


def check_qwen() -> None:
    """The list of shapes is the real one's: its numbers of tensors and parameters are published."""
    sizes = QWEN_7B.sizes()
    if (len(sizes), sum(sizes)) != (QWEN_7B_TENSORS, QWEN_7B_PARAMETERS):
        raise AssertionError(f"{len(sizes)} tensors of {sum(sizes)} parameters, not Qwen2.5-7B")


# ---- a pair of masters and weights -----------------------------------------------------------------------------------


def random_master(numel: int, device: torch.device, seed: int = 0) -> Tensor:
    """FP32 [numel], normal with the spread of a language model's weights."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(numel, device=device).normal_(0, 0.02, generator=generator)


def random_positions(numel: int, density: float, device: torch.device, seed: int = 1) -> Tensor:
    """int64, sorted; each position taken with this probability, the last one always."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for begin in range(0, numel, CHUNK):
        size = min(CHUNK, numel - begin)
        taken = torch.rand(size, device=device, generator=generator) < density
        if begin + size == numel:
            taken[-1] = True
        parts.append(taken.nonzero().squeeze(1) + begin)
    return torch.cat(parts)


class Pair:
    """Masters and BF16 weights that lag behind them at ``positions``."""

    def __init__(self, master: Tensor, density: float):
        self.master, self.density = master, density
        self.positions = random_positions(master.numel(), density, master.device)
        self.weight = master.bfloat16()
        bits = self.bits
        self.new_values = self.weight[self.positions]
        self._old_bits = bits[self.positions] ^ 1
        bits[self.positions] = self._old_bits

    @property
    def bits(self) -> Tensor:
        return self.weight.view(torch.int16)

    @property
    def old_values(self) -> Tensor:
        return self._old_bits.view(torch.bfloat16)

    @property
    def num_changed(self) -> int:
        return self.positions.numel()

    def put_back(self) -> None:
        """The weights from before; touches the changed places only."""
        self.bits[self.positions] = self._old_bits

    def is_new(self) -> bool:
        """Whether the weights are the masters, rounded."""
        whole = zip(self.master.split(CHUNK), self.weight.split(CHUNK), strict=True)
        return all(torch.equal(m.bfloat16().view(torch.int16), w.view(torch.int16)) for m, w in whole)

    def is_old(self) -> bool:
        """Whether the weights are those from before: new everywhere but at the changed places."""
        if not torch.equal(self.bits[self.positions], self._old_bits):
            return False
        self.bits[self.positions] = self.new_values.view(torch.int16)
        rest = self.is_new()
        self.put_back()
        return rest

    def is_right(self, indices: Tensor, values: Tensor) -> bool:
        return same_bits(values, self.new_values) and same_positions(indices, self.positions)


def same_bits(a: Tensor, b: Tensor) -> bool:
    raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[b.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(raw), b.view(raw))


def same_positions(a: Tensor, b: Tensor) -> bool:
    """Whatever their dtypes; a chunk at a time."""
    if a.shape != b.shape:
        return False
    return all(torch.equal(x.long(), y.long()) for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))


def joined(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Positions in each of several tensors as positions in all of them, laid one behind the other."""
    shifted, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        shifted.append(part.long() + begin)
        begin += size
    return torch.cat(shifted)
