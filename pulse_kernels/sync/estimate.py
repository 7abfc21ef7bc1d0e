"""Sizes and times of weight synchronisation before a run: patch against dense, and the bandwidth that a trainer needs.

The size of a patch. Let each of n weights change with probability p, independently. The gap to the next change is
geometric, and its entropy is that of n coin flips shared by their np changes:

    H(p) = (-p log2 p - (1 - p) log2(1 - p)) / p     bits a change

No code of positions does better on average when nothing but p is known (Cover and Thomas, Elements of Information
Theory, 2nd edition, chapters 2 and 5). ``VALUE_BITS`` is what the profile "balanced" takes on top, for the values as
differences against the base and for what its coding of gaps loses. It was fitted to docs/performance.md, where trained
weights take 2.2 to 2.5 bits and random changes of one unit in the last place 1.1: the number between them misses the
sizes there by at most 8%. Changes far from the base's values cost up to their full width: give ``value_bits``.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace

from pulse_kernels.state import Params, named_tensors

VALUE_BITS = 1.62
# A patch file's header, from docs/performance.md: 4,352 to 5,352 bytes for 17 to 22 tensors.
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 600, 230

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BANDWIDTH = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([kKmMgGtT]?i?)(\S+)\s*")
_UNIT = {"bit": 1, "bits": 1, "bit/s": 1, "bits/s": 1, "bps": 1, "b/s": 1}
_UNIT |= {"B/s": 8, "byte/s": 8, "bytes/s": 8, "Byte/s": 8, "Bytes/s": 8}


@dataclass(frozen=True)
class Estimate:
    """What ``estimate`` predicts. Bytes are of one receiver; seconds are of all receivers that share the link.

    ratio: dense bytes over patch bytes. dense_from_density: the density from which a patch would be as large as the
    dense weights, 1.0 where none is. The last five need ``step_seconds``: bandwidths are those, in bits per second,
    at which a trainer that waits for each transfer computes for ``utilisation`` of its time, and patch_utilisation and
    dense_utilisation are the shares it reaches at ``bandwidth``; None without.
    """

    numel: int
    density: float
    num_changed: int
    bits_per_change: float
    patch_bytes: int
    dense_bytes: int
    ratio: float
    dense_from_density: float
    bandwidth: float
    receivers_per_link: int
    patch_seconds: float
    dense_seconds: float
    utilisation: float
    step_seconds: float | None = None
    patch_bandwidth: float | None = None
    dense_bandwidth: float | None = None
    patch_utilisation: float | None = None
    dense_utilisation: float | None = None

    @property
    def dense_is_cheaper(self) -> bool:
        """Whether the dense weights are no larger than the patch."""
        return self.dense_bytes <= self.patch_bytes

    def to_dict(self) -> dict[str, int | float | bool | None]:
        """Every field and ``dense_is_cheaper``, ready for JSON: the ratio is None where there is nothing to send."""
        ratio = self.ratio if math.isfinite(self.ratio) else None
        return asdict(self) | {"ratio": ratio, "dense_is_cheaper": self.dense_is_cheaper}

    def __str__(self) -> str:
        receivers = f", shared by {self.receivers_per_link} receivers" if self.receivers_per_link > 1 else ""
        weights = f"{_si(self.numel).rstrip()} weights, {self.density:.3g} of them changed"
        lines = [
            f"{weights}, over {_si(self.bandwidth)}bit/s{receivers}",
            f"patch: {_si(self.patch_bytes)}B ({self.bits_per_change:.2f} bits a change), {self.patch_seconds:.3g} s",
            f"dense: {_si(self.dense_bytes)}B, {self.dense_seconds:.3g} s; {self.ratio:.3g} times the patch",
        ]
        if self.dense_is_cheaper:
            lines.append("send the dense weights: the patch is no smaller")
        elif self.dense_from_density < 1:
            lines.append(f"dense is cheaper from a density of {self.dense_from_density:.3g} on")
        if self.step_seconds is not None:
            lines.append(
                f"with steps of {self.step_seconds:.3g} s a trainer computes {self.patch_utilisation:.1%} of its time "
                f"with patches, {self.dense_utilisation:.1%} with dense weights"
            )
        if self.patch_bandwidth is not None and self.dense_bandwidth is not None:
            lines.append(
                f"{self.utilisation:.1%} of its time takes {_si(self.patch_bandwidth)}bit/s with patches, "
                f"{_si(self.dense_bandwidth)}bit/s with dense weights"
            )
        return "\n".join(lines)


def estimate(
    params: Params | int,
    density: float,
    bandwidth: float | str,
    *,
    dtype_bytes: int | None = None,
    step_seconds: float | None = None,
    utilisation: float = 0.9,
    bits_per_change: float | None = None,
    value_bits: float = VALUE_BITS,
    receivers_per_link: int = 1,
) -> Estimate:
    """Predict sizes and times of one synchronisation, patch against dense, and the bandwidth a trainer needs.

    params: the weights, or how many there are. density: share of them that changes between two versions, 0 to 1.
    bandwidth: of the link, in bits per second, or text such as "100 Mbit/s", "0.2 Gbit/s" or "12.5 MB/s" (b is bit, B
    is byte). dtype_bytes: of a weight; the tensors' own, or 2 with a number. step_seconds: of compute between two
    synchronisations; with it, ``utilisation`` = compute / (compute + transfer) is solved for the bandwidth:
    transferred bits * u / ((1 - u) * step_seconds). bits_per_change: of a patch, where it was measured; else it follows
    from the density by the model above, with ``value_bits`` a change for values and the header by its tensors.
    receivers_per_link: how many receivers fetch over the same link, each its own copy.

    Raises ValueError where a number is outside its range or a text is no bandwidth, TypeError where it is no number.
    """
    density = _number("density", density)
    if not 0 <= density <= 1:
        raise ValueError(f"density is {density!r}, expected a share from 0 to 1; divide per cents by 100")
    bits_per_second = parse_bandwidth(bandwidth)
    utilisation = _number("utilisation", utilisation)
    if not 0 < utilisation < 1:
        raise ValueError(f"utilisation is {utilisation!r}, expected a share above 0 and below 1, such as 0.9")
    if step_seconds is not None:
        step_seconds = _positive("step_seconds", step_seconds)
    if bits_per_change is not None:
        bits_per_change = _positive("bits_per_change", bits_per_change)
    value_bits = _positive("value_bits", value_bits)
    receivers = _whole("receivers_per_link", receivers_per_link, least=1)
    if dtype_bytes is not None:
        dtype_bytes = _whole("dtype_bytes", dtype_bytes, least=1)

    num_tensors = 0
    if isinstance(params, float) and params.is_integer():
        params = int(params)  # 7e9 is how people write it
    if isinstance(params, int):
        numel = _whole("params", params, least=1)
        dense_bytes = numel * (2 if dtype_bytes is None else dtype_bytes)
    else:
        tensors = named_tensors(params).values()
        num_tensors = len(tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        if not numel:
            raise ValueError("params holds no weights; expected a model, tensors, or their number of weights")
        dense_bytes = sum(tensor.numel() * (dtype_bytes or tensor.element_size()) for tensor in tensors)

    num_changed = round(numel * density)
    if bits_per_change is None:
        header_bits = 8 * (HEADER_BYTES + HEADER_BYTES_PER_TENSOR * num_tensors)
        bits = num_changed * (gap_entropy(density) + value_bits) + (header_bits if num_changed else 0)
        crossing = _crossing(value_bits, 8 * dense_bytes / numel)
    else:
        bits = num_changed * bits_per_change
        crossing = min(1.0, 8 * dense_bytes / numel / bits_per_change)
    patch_bytes = math.ceil(bits / 8)
    patch_bits, dense_bits = (8 * size * receivers for size in (patch_bytes, dense_bytes))
    patch_seconds, dense_seconds = patch_bits / bits_per_second, dense_bits / bits_per_second
    result = Estimate(
        numel=numel,
        density=density,
        num_changed=num_changed,
        bits_per_change=bits / num_changed if num_changed else 0.0,
        patch_bytes=patch_bytes,
        dense_bytes=dense_bytes,
        ratio=dense_bytes / patch_bytes if patch_bytes else math.inf,
        dense_from_density=crossing,
        bandwidth=bits_per_second,
        receivers_per_link=receivers,
        patch_seconds=patch_seconds,
        dense_seconds=dense_seconds,
        utilisation=utilisation,
    )
    if step_seconds is None:
        return result
    seconds_to_spare = step_seconds * (1 - utilisation) / utilisation
    return replace(
        result,
        step_seconds=step_seconds,
        patch_bandwidth=patch_bits / seconds_to_spare,
        dense_bandwidth=dense_bits / seconds_to_spare,
        patch_utilisation=step_seconds / (step_seconds + patch_seconds),
        dense_utilisation=step_seconds / (step_seconds + dense_seconds),
    )


def gap_entropy(density: float) -> float:
    """Bits a change that its position takes at best, where each weight changes with probability ``density``; 0 at 0."""
    if density in (0, 1):
        return 0.0
    # log1p: at 1e-9 the second term would be lost in rounding.
    return -math.log2(density) - (1 - density) * math.log1p(-density) / math.log(2) / density


def parse_bandwidth(bandwidth: float | str) -> float:
    """Bits per second of a number or a text such as "100 Mbit/s", "0.2 Gbit/s", "12.5 MB/s" or "1 GiB/s".

    Prefixes are decimal, or binary with an i, in either case; b is bit and B is byte. Raises ValueError where it is
    no such text, not finite or not above 0; TypeError where it is neither number nor text.
    """
    if not isinstance(bandwidth, str):
        return _positive("bandwidth", bandwidth)
    match = _BANDWIDTH.fullmatch(bandwidth)
    prefix, unit = (match[2].lower(), match[3]) if match else ("", "")
    if not match or prefix not in _PREFIX or unit not in _UNIT:
        raise ValueError(
            f"bandwidth is {bandwidth!r:.80}, expected a number and a unit, such as "
            "'100 Mbit/s', '0.2 Gbit/s' or '12.5 MB/s'"
        )
    return _positive("bandwidth", float(match[1]) * _PREFIX[prefix] * _UNIT[unit])


def _crossing(value_bits: float, width: float) -> float:
    """The lowest density p at which p * (H(p) + value_bits) reaches a weight's width in bits; 1.0 where none does."""
    low, high = 0.0, 1 / (1 + 2.0**-value_bits)  # p * H(p) + p * value_bits rises up to there
    if high * (gap_entropy(high) + value_bits) < width:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle * (gap_entropy(middle) + value_bits) < width:
            low = middle
        else:
            high = middle
    return high


def _si(number: float) -> str:
    """Three digits and a decimal prefix, with a space before the unit that follows."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a number")
    return float(value)


def _positive(name: str, value: float) -> float:
    value = _number(name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}, expected a finite number above 0")
    return value


def _whole(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    return value
