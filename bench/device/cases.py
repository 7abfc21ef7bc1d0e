"""What is measured: for each row of the report its contenders, ours first, and how each one's result is checked.

Cases stand in the order of their importance: where time runs out, the last ones are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import pulse_kernels as pk
from bench.device.data import (
    QWEN_7B,
    Decoder,
    Pair,
    check_qwen,
    joined,
    random_master,
    same_bits,
    same_positions,
)
from bench.workloads import percent
from pulse_kernels import checks, transfer
from pulse_kernels.backends import cuda, native, reference, two_pass
from pulse_kernels.cli.bench_quick import eager_gate

DENSITIES = (0.01, 0.001, 0.05)
EAGER, COMPILED, CUB = "eager", "torch.compile", "CUB"
KEY = 0x5EED


@dataclass(frozen=True)
class Entrant:
    """check: whether what ``run`` returned, and what it left, is right. before: ahead of each call, untimed.

    why_not: set where it cannot run here; the rest is unused then.
    """

    name: str
    run: Callable[[], Any] = lambda: None
    check: Callable[[Any], bool] = lambda result: False
    before: Callable[[], Any] | None = None
    why_not: str = ""


@dataclass
class Comparison:
    """title: with the sizes that were taken. num_bytes: what GB/s counts."""

    title: str
    num_bytes: int
    entrants: list[Entrant]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """key: names the row, whatever sizes were taken. seconds: a guess at what it takes on a GPU, compiling included."""

    key: str
    section: str
    seconds: float
    make: Callable[[], Comparison]


class DoesNotFit(Exception):
    """The device has not memory enough for a case, at any size worth measuring."""


@dataclass(frozen=True)
class Sizes:
    """Elements by the names that rows have, so that a dry run has the same rows."""

    gate: dict[str, int]
    decoder: Decoder
    apply: dict[str, float]  # changes as a share of the largest gate's elements
    copy_bytes: int


REAL = Sizes(
    gate={"1e9": 10**9, "1e8": 10**8},
    decoder=QWEN_7B,
    apply={"1e5": 1e-4, "1e6": 1e-3, "1e7": 1e-2, "1e8": 1e-1},
    copy_bytes=1 << 32,
)
DRY = Sizes(
    gate={"1e9": 3000, "1e8": 500},
    decoder=Decoder(layers=0, hidden=16, vocabulary=64),
    apply={"1e5": 0.001, "1e6": 0.01, "1e7": 0.05, "1e8": 0.1},
    copy_bytes=1 << 12,
)

# Bytes a parameter of everything that is alive at once: master, weight, eager's cast, mask and positions.
_GATE_BYTES = 12
_SMALLEST_SHARE = 0.02  # of the wanted size that is still worth measuring on a smaller device


def eager_gate_update(master: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast, compare bits, nonzero, gather, write back."""
    rounded = master.to(weight.dtype)
    positions = (rounded.view(torch.int16) != weight.view(torch.int16)).nonzero().squeeze(1)
    values = rounded[positions]
    weight.copy_(rounded)
    return positions, values


def eager_digest(bits: Tensor) -> Tensor:
    positions = torch.arange(bits.numel(), device=bits.device)
    return ((bits.long() & 0xFFFF) * reference.digest_weights(positions, KEY)).sum(1)


def eager_gaps(indices: Tensor) -> Tensor:
    """The least that others do: gaps of 16 bits, with no way out for wider ones."""
    return torch.diff(indices, prepend=indices.new_zeros(1)).to(torch.uint16)


def put(weight: Tensor, positions: Tensor, values: Tensor) -> None:
    weight.index_put_((positions,), values)


class Bench:
    """Makes cases for one device. Masters are kept from case to case while they have the right size."""

    def __init__(self, device: torch.device, dry_run: bool):
        check_qwen()
        self.device, self.dry_run = device, dry_run
        self.sizes = DRY if dry_run else REAL
        self._master: Tensor | None = None
        self._pair: Pair | None = None

    # ---- the list ----

    def cases(self) -> Iterator[Case]:
        yield Case("copy", "Copy", 2, self.copy)
        yield self._gate_case("1e9", 0.01, True)
        yield self._model_case(0.01, True)
        yield Case("apply/model", "Apply", 12, self.apply_model)
        yield Case("host/model", "To the host", 20, self.to_host)
        yield self._gate_case("1e9", 0.01, False)
        yield self._gate_case("1e8", 0.01, True)
        yield Case("digest/1e9", "Digest", 10, self.digest)
        yield Case("digest/model", "Digest", 10, self.digest_model)
        yield Case("pack/1e9", "Pack", 8, self.pack)
        yield Case("unpack/1e9", "Pack", 8, self.unpack)
        yield Case("pack/model", "Pack", 12, self.pack_model)
        for label in reversed(self.sizes.apply):
            yield Case(f"apply/{label}", "Apply", 6, lambda label=label: self.apply(label))
        yield self._gate_case("1e8", 0.01, False)
        yield self._model_case(0.01, False)
        for density in DENSITIES[1:]:
            for update in (True, False):
                for label in self.sizes.gate:
                    yield self._gate_case(label, density, update)
                yield self._model_case(density, update)

    def _gate_case(self, label: str, density: float, update: bool) -> Case:
        key = f"gate/{label}/{percent(density)}/{'update' if update else 'pure'}"
        return Case(key, "Gate", 12, lambda: self.gate(label, density, update))

    def _model_case(self, density: float, update: bool) -> Case:
        key = f"model/{percent(density)}/{'update' if update else 'pure'}"
        return Case(key, "Gate, a whole model", 20, lambda: self.model(density, update))

    # ---- memory ----

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return 1 << 62
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _fits(self, wanted: int, bytes_each: int, notes: list[str]) -> int:
        """Elements that fit, at most ``wanted``; a note says where that is less."""
        self._master = self._pair = None
        fitting = int(0.9 * self._free_bytes()) // bytes_each
        if fitting >= wanted:
            return wanted
        fitting -= fitting % (1 << 20)
        if fitting < _SMALLEST_SHARE * wanted:
            raise DoesNotFit(f"{wanted:,} elements take {wanted * bytes_each / 1e9:.0f} GB with all contenders")
        notes.append(f"{fitting:,} instead of {wanted:,} elements: memory")
        return fitting

    def _pair_of(self, numel: int, density: float, notes: list[str]) -> Pair:
        pair = self._pair
        if pair is not None and (pair.master.numel(), pair.density) == (numel, density):
            pair.put_back()
            return pair
        self._pair = None
        if self._master is None or self._master.numel() != numel:
            numel = self._fits(numel, _GATE_BYTES, notes)
            self._master = random_master(numel, self.device)
        self._pair = Pair(self._master, density)
        return self._pair

    def _model_pair(self, density: float, notes: list[str]) -> tuple[Pair, list[int]]:
        """One buffer that the decoder's tensors are parts of, and their sizes; fewer layers where memory is short."""
        decoder = self.sizes.decoder
        if self._master is None or self._master.numel() != sum(decoder.sizes()):
            self._master = self._pair = None
            room = 0.9 * self._free_bytes()
            while sum(decoder.sizes()) * _GATE_BYTES > room:
                if not decoder.layers:
                    raise DoesNotFit("not one layer of the model fits with all contenders")
                decoder = replace(decoder, layers=decoder.layers - 1)
            if decoder.layers < self.sizes.decoder.layers:
                notes.append(f"{decoder.layers} of {self.sizes.decoder.layers} layers: memory")
        sizes = decoder.sizes()
        return self._pair_of(sum(sizes), density, notes), sizes

    # ---- contenders ----

    def _compiled(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Entrant:
        """``function`` by torch.compile, for these very shapes; a dry run takes its tracing, and no compiler."""
        torch._dynamo.reset()  # else it would give up, unsaid, after some shapes
        compiled = torch.compile(function, dynamic=False, backend="eager" if self.dry_run else "inductor")
        return Entrant(name, lambda: compiled(*arguments), **options)

    def _cub(self, sources: list[Tensor], targets: list[Tensor], update: bool, **options: Any) -> Entrant:
        why_not = self._why_no_cuda_library()
        if why_not:
            return Entrant(CUB, why_not=why_not)
        operators = two_pass.TwoPass(cuda)
        dtypes = [checks.index_dtype("gate_compact", target.numel(), None) for target in targets]
        return Entrant(
            CUB, lambda: operators.compact_many("gate_compact", sources, targets, dtypes, update, False), **options
        )

    def _why_no_cuda_library(self) -> str:
        return native.cuda_library().reason if self.device.type == "cuda" else "it computes CUDA tensors"

    # ---- copy ----

    def copy(self) -> Comparison:
        notes: list[str] = []
        size = self._fits(self.sizes.copy_bytes, 2, notes)
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        entrant = Entrant(
            "copy_", lambda: target.copy_(source), lambda result: torch.equal(target, source), target.zero_
        )
        return Comparison(f"copy of {size / 1e9:.3g} GB on the device", 2 * size, [entrant], notes)

    # ---- gate ----

    def gate(self, label: str, density: float, update: bool) -> Comparison:
        notes: list[str] = []
        pair = self._pair_of(self.sizes.gate[label], density, notes)
        numel = pair.master.numel()
        title = f"`gate_compact{'(update=True)' if update else ''}`, {numel:.3g} elements, {percent(density)} changed"
        arguments = pair.master, pair.weight
        left = pair.is_new if update else pair.is_old
        options: dict[str, Any] = {"before": pair.put_back}
        options["check"] = lambda result: pair.is_right(*result[:2]) and left()
        eager = eager_gate_update if update else eager_gate

        indices = torch.empty(pair.num_changed, dtype=torch.int32, device=self.device)
        values, count = torch.empty_like(pair.new_values), torch.zeros(1, dtype=torch.int64, device=self.device)

        def into_buffers() -> tuple[Tensor, Tensor]:
            pk.gate_compact_out(*arguments, indices, values, count, update=update)
            return indices, values

        entrants = [
            Entrant("gate_compact", lambda: pk.gate_compact(*arguments, update=update), **options),
            Entrant("gate_compact_out", into_buffers, **options),
            self._cub(
                [pair.master],
                [pair.weight],
                update,
                before=pair.put_back,
                check=lambda result: pair.is_right(result[0][0], result[1][0]) and left(),
            ),
            Entrant(EAGER, lambda: eager(*arguments), **options),
            self._compiled(COMPILED, eager, *arguments, **options),
        ]
        return Comparison(title, 6 * numel, entrants, notes, {"numel": numel, "num_changed": pair.num_changed})

    def model(self, density: float, update: bool) -> Comparison:
        notes: list[str] = []
        pair, sizes = self._model_pair(density, notes)
        numel = pair.master.numel()
        masters, weights = list(pair.master.split(sizes)), list(pair.weight.split(sizes))
        left = pair.is_new if update else pair.is_old
        eager = eager_gate_update if update else eager_gate

        def check_many(result: Any) -> bool:
            return pair.is_right(joined(result[0], sizes), torch.cat(list(result[1]))) and left()

        def tensor_by_tensor() -> tuple[list[Tensor], ...]:
            rows = [eager(master, weight) for master, weight in zip(masters, weights, strict=True)]
            return [row[0] for row in rows], [row[1] for row in rows]

        many: dict[str, Any] = {"before": pair.put_back, "check": check_many}
        flat: dict[str, Any] = {"before": pair.put_back}
        flat["check"] = lambda result: pair.is_right(*result[:2]) and left()
        entrants = [
            Entrant("gate_compact_many", lambda: pk.gate_compact_many(masters, weights, update=update), **many),
            Entrant("one flat tensor", lambda: pk.gate_compact(pair.master, pair.weight, update=update), **flat),
            self._cub(masters, weights, update, **many),
            Entrant(EAGER, lambda: eager(pair.master, pair.weight), **flat),
            Entrant("eager, tensor by tensor", tensor_by_tensor, **many),
            self._compiled(COMPILED, eager, pair.master, pair.weight, **flat),
        ]
        title = (
            f"`gate_compact_many{'(update=True)' if update else ''}`, {len(sizes)} tensors, {numel:.3g} elements, "
            f"{percent(density)} changed"
        )
        facts = {"numel": numel, "tensors": len(sizes), "num_changed": pair.num_changed}
        return Comparison(title, 6 * numel, entrants, notes, facts)

    # ---- digest ----

    def digest(self) -> Comparison:
        notes: list[str] = []
        pair = self._pair_of(self.sizes.gate["1e9"], 0.01, notes)
        expected = reference.digest(pair.weight, KEY, 0)

        def check(result: Tensor) -> bool:
            return torch.equal(result, expected)

        entrants = [
            Entrant("digest", lambda: pk.digest(pair.weight, KEY), check),
            Entrant(EAGER, lambda: reference.digest(pair.weight, KEY, 0), check),
            self._compiled(COMPILED, eager_digest, pair.bits, check=check),
        ]
        numel = pair.weight.numel()
        return Comparison(f"`digest`, {numel:.3g} elements", 2 * numel, entrants, notes, {"numel": numel})

    def digest_model(self) -> Comparison:
        notes: list[str] = []
        pair, sizes = self._model_pair(0.01, notes)
        weights, keys = list(pair.weight.split(sizes)), list(range(len(sizes)))

        def eagerly() -> list[Tensor]:
            return [reference.digest(weight, key, 0) for weight, key in zip(weights, keys, strict=True)]

        expected = torch.stack(eagerly())

        def check(result: list[Tensor]) -> bool:
            return torch.equal(torch.stack(result), expected)

        entrants = [
            Entrant("digest_many", lambda: pk.digest_many(weights, keys), check),
            Entrant(EAGER, eagerly, check),
            Entrant(COMPILED, why_not="compiled for the flat tensor above"),
        ]
        numel = pair.weight.numel()
        title = f"`digest_many`, {len(sizes)} tensors, {numel:.3g} elements"
        return Comparison(title, 2 * numel, entrants, notes, {"numel": numel})

    # ---- pack ----

    def _no_packing(self) -> str:
        """Why packed indices are not measured: without the CUDA library the CPU packs those of a GPU."""
        return self._why_no_cuda_library() if self.device.type == "cuda" else ""

    def _packed_right(self, blob: Tensor, indices: Tensor, numel: int) -> bool:
        """Unpacks to the same positions, and is what the CPU packs where its library is there to do that soon."""
        if not same_positions(pk.unpack_indices(blob), indices):
            return False
        if not native.cpu_library().loaded and not self.dry_run:
            return True
        return torch.equal(blob.cpu(), pk.pack_indices(indices.cpu(), numel))

    def pack(self) -> Comparison:
        notes: list[str] = []
        pair = self._pair_of(self.sizes.gate["1e9"], 0.01, notes)
        indices, numel = pair.positions.int(), pair.weight.numel()
        gaps = eager_gaps(indices)
        options: dict[str, Any] = {"check": lambda result: torch.equal(result, gaps)}
        entrants = [
            Entrant(
                "pack_indices",
                lambda: pk.pack_indices(indices, numel),
                lambda result: self._packed_right(result, indices, numel),
                why_not=self._no_packing(),
            ),
            Entrant(EAGER, lambda: eager_gaps(indices), **options),
            self._compiled(COMPILED, eager_gaps, indices, **options),
        ]
        title = f"`pack_indices`, {len(indices):.3g} of {numel:.3g}; eager: 16-bit gaps"
        return Comparison(title, 4 * len(indices), entrants, notes, {"num_changed": len(indices)})

    def unpack(self) -> Comparison:
        notes: list[str] = []
        pair = self._pair_of(self.sizes.gate["1e9"], 0.01, notes)
        indices, numel, why_not = pair.positions.int(), pair.weight.numel(), self._no_packing()
        packed = indices if why_not else pk.pack_indices(indices, numel)
        gaps = torch.diff(indices, prepend=indices.new_zeros(1))

        def eagerly(gaps: Tensor) -> Tensor:
            return gaps.cumsum(0, dtype=torch.int32)

        options: dict[str, Any] = {"check": lambda result: same_positions(result, indices)}
        entrants = [
            Entrant("unpack_indices", lambda: pk.unpack_indices(packed), why_not=why_not, **options),
            Entrant(EAGER, lambda: eagerly(gaps), **options),
            self._compiled(COMPILED, eagerly, gaps, **options),
        ]
        title = f"`unpack_indices`, {len(indices):.3g} of {numel:.3g}; eager: running sum of 32-bit gaps"
        return Comparison(title, 4 * len(indices), entrants, notes, {"num_changed": len(indices)})

    def pack_model(self) -> Comparison:
        notes: list[str] = []
        pair, sizes = self._model_pair(0.01, notes)
        indices = _by_tensor(pair.positions, sizes)
        gaps = [eager_gaps(index) for index in indices]

        def check(result: list[Tensor]) -> bool:
            return all(self._packed_right(*row) for row in zip(result, indices, sizes, strict=True))

        entrants = [
            Entrant(
                "pack_indices_many", lambda: pk.pack_indices_many(indices, sizes), check, why_not=self._no_packing()
            ),
            Entrant(
                EAGER,
                lambda: [eager_gaps(index) for index in indices],
                lambda result: all(torch.equal(*row) for row in zip(result, gaps, strict=True)),
            ),
            Entrant(COMPILED, why_not="compiled for the flat tensor above"),
        ]
        count = pair.num_changed
        title = f"`pack_indices_many`, {count:.3g} of {len(sizes)} tensors; eager: 16-bit gaps"
        return Comparison(title, 4 * count, entrants, notes, {"num_changed": count})

    # ---- apply ----

    def apply(self, label: str) -> Comparison:
        notes: list[str] = []
        return self._apply(self._pair_of(self.sizes.gate["1e9"], self.sizes.apply[label], notes), notes)

    def apply_model(self) -> Comparison:
        notes: list[str] = []
        return self._apply(self._model_pair(0.01, notes)[0], notes)

    def _apply(self, pair: Pair, notes: list[str]) -> Comparison:
        weight, positions, values = pair.weight, pair.positions, pair.new_values
        numel = weight.numel()
        indices = positions.int() if numel < 1 << 31 else positions
        options: dict[str, Any] = {"before": pair.put_back, "check": lambda result: pair.is_new()}
        entrants = [
            Entrant("apply_patch_", lambda: pk.apply_patch_(weight, indices, values), **options),
            Entrant("check=False", lambda: pk.apply_patch_(weight, indices, values, check=False), **options),
            self._from_packed(pair, indices, options),
            Entrant(EAGER, lambda: put(weight, positions, values), **options),
            self._compiled(COMPILED, put, weight, positions, values, **options),
        ]
        count, each = len(indices), indices.element_size() + 4
        notes.append(f"counts {each} bytes a change; memory moves sectors of 32")
        title = f"`apply_patch_`, {count:.3g} changes of {numel:.3g} elements"
        return Comparison(title, each * count, entrants, notes, {"numel": numel, "num_changed": count})

    def _from_packed(self, pair: Pair, indices: Tensor, options: dict[str, Any]) -> Entrant:
        """What a receiver on a GPU does: it unpacks and writes in one kernel."""
        name, why_not = "apply_packed_patch_", self._no_packing()
        packed = indices if why_not else pk.pack_indices(indices, pair.weight.numel())
        return Entrant(
            name,
            lambda: pk.apply_packed_patch_(pair.weight, packed, pair.new_values),
            why_not=why_not,
            **options,
        )

    # ---- masters to packed bytes in the host's memory ----

    def to_host(self) -> Comparison:
        notes: list[str] = []
        pair, sizes = self._model_pair(0.01, notes)
        numel, why_not = pair.master.numel(), self._no_packing()
        masters, weights = list(pair.master.split(sizes)), list(pair.weight.split(sizes))
        expected = [] if why_not else pk.pack_indices_many(_by_tensor(pair.positions, sizes), sizes)
        expected = [blob.cpu() for blob in expected]
        positions, values = pair.positions.cpu(), pair.new_values.cpu()

        def in_groups(bounds: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
            """The gate of a group runs beside the copies of the one before it."""
            copies = []
            for begin, end in bounds:
                found = pk.gate_compact_many(masters[begin:end], weights[begin:end], update=True)
                blobs = pk.pack_indices_many(found[0], sizes[begin:end])
                copies += zip(transfer.to_host(blobs), transfer.to_host(found[1]), strict=True)
            return [blob.get() for blob, _ in copies], [value.get() for _, value in copies]

        def sent(result: tuple[list[Tensor], list[Tensor]]) -> bool:
            blobs = len(expected) == len(result[0]) and all(map(torch.equal, result[0], expected))
            return blobs and same_bits(torch.cat(result[1]), values) and pair.is_new()

        def eagerly() -> list[Tensor]:
            return [copy.get() for copy in transfer.to_host(eager_gate_update(pair.master, pair.weight))]

        def gate_alone() -> Any:
            return pk.gate_compact_many(masters, weights, update=True)

        def gate_right(result: Any) -> bool:
            return pair.is_right(joined(result[0], sizes), torch.cat(list(result[1]))) and pair.is_new()

        ours: dict[str, Any] = {"before": pair.put_back, "check": sent, "why_not": why_not}
        groups = _groups(sizes, 8)
        entrants = [
            Entrant("in groups", lambda: in_groups(groups), **ours),
            Entrant("all at once", lambda: in_groups([(0, len(sizes))]), **ours),
            self._patch_file(pair, masters, weights),
            Entrant("gate alone", gate_alone, gate_right, pair.put_back),
            Entrant(
                EAGER,
                eagerly,
                lambda result: torch.equal(result[0], positions) and same_bits(result[1], values) and pair.is_new(),
                pair.put_back,
            ),
            Entrant(COMPILED, why_not="its gate stands above; the rest is copies"),
        ]
        facts = {"numel": numel, "num_changed": pair.num_changed, "packed_bytes": sum(map(len, expected))}
        title = f"masters to packed host bytes, {len(sizes)} tensors, {numel:.3g} elements, 1% changed"
        notes.append("eager sends positions of 64 bits")
        return Comparison(title, 6 * numel, entrants, notes, facts)

    def _patch_file(self, pair: Pair, masters: list[Tensor], weights: list[Tensor]) -> Entrant:
        """The whole file, digests and all, as a publisher makes it that knows the digest of its base."""
        names = [str(k) for k in range(len(masters))]
        sources, targets = dict(zip(names, masters, strict=True)), dict(zip(names, weights, strict=True))
        base_digest = pk.StateDigest.of(targets).hexdigest()

        def check(data: bytes) -> bool:
            if not pair.is_new():
                return False
            pair.put_back()
            pk.Patch.from_bytes(data).apply_(targets)  # checks both digests
            return pair.is_new()

        return Entrant(
            "Patch.gate, fast",
            lambda: pk.Patch.gate(sources, targets, base_digest=base_digest, profile="fast").to_bytes("fast"),
            check,
            pair.put_back,
        )


def _by_tensor(positions: Tensor, sizes: list[int]) -> list[Tensor]:
    """Positions in all tensors as int32 positions in each."""
    ends = torch.tensor(sizes).cumsum(0)
    cuts = torch.searchsorted(positions, ends.to(positions.device)).tolist()
    begins = [0, *ends.tolist()[:-1]]
    return [
        (positions[first:last] - begin).int() for first, last, begin in zip([0, *cuts[:-1]], cuts, begins, strict=True)
    ]


def _groups(sizes: list[int], count: int) -> list[tuple[int, int]]:
    """The list cut into at most ``count`` runs of about as many elements."""
    total, groups, begin, held = sum(sizes), [], 0, 0
    for k, size in enumerate(sizes):
        held += size
        if held * count >= total or k == len(sizes) - 1:
            groups.append((begin, k + 1))
            begin, held = k + 1, 0
    return groups
