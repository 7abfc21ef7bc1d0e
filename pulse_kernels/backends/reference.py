"""The meaning of every operator, in plain PyTorch, on any device: the oracle that every back end is tested against.

Arguments arrive checked (``ops.py``). Positions are row-major logical positions. All arithmetic on weights is integer
arithmetic on their bits, so that signed zeros, denormals and NaN payloads come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pulse_kernels import checks
from pulse_kernels.errors import PatchFormatError

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements; bounds the oracle's temporaries


def bits(tensor: Tensor) -> Tensor:
    """The flat bits of ``tensor`` as signed integers of its width; a view where the tensor is contiguous."""
    raw = tensor.detach()
    if raw.dtype is torch.bool:  # whose copies keep no byte but 0 and 1
        raw = raw.view(torch.uint8)
    return raw.reshape(-1).view(_INT_OF_SIZE[tensor.element_size()])


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` contiguous and without lazy conjugation or negation; itself where it is so already."""
    if not tensor.requires_grad and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8).contiguous().view(torch.bool)  # a copy of bools keeps no byte but 0 and 1
    return tensor.resolve_conj().resolve_neg().contiguous()


# ---- rounding -------------------------------------------------------------------------------------------------------


def round_bits(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits (int16) of the flat FP32 ``master`` rounded to nearest even to BF16 or FP16; NaN becomes quiet | sign."""
    u = bits(master)  # int32; sums wrap only for NaN patterns, which are replaced
    magnitude = u & 0x7FFFFFFF
    sign = (u >> 16) & 0x8000
    is_nan = magnitude > 0x7F800000
    if dtype is torch.bfloat16:
        rounded = (u + (0x7FFF + ((u >> 16) & 1))) >> 16
        return torch.where(is_nan, sign | 0x7FC0, rounded).to(torch.int16)
    normal = (magnitude - 0x38000000 + (0x0FFF + ((magnitude >> 13) & 1))) >> 13
    # Below 2^-14 the result counts units of 2^-24: shift the full significand, ties to even.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = (126 - (magnitude >> 23)).clamp(1, 25)
    half = torch.ones_like(shift) << (shift - 1)
    subnormal = (significand + (half - 1) + ((significand >> shift) & 1)) >> shift
    rounded = torch.where(magnitude < 0x38800000, subnormal, normal)
    rounded = torch.where(magnitude >= 0x47800000, torch.full_like(rounded, 0x7C00), rounded)
    return (torch.where(is_nan, torch.full_like(rounded, 0x7E00), rounded) | sign).to(torch.int16)


# ---- gate and compaction --------------------------------------------------------------------------------------------


def visibility_mask(master: Tensor, weight: Tensor) -> Tensor:
    return (round_bits(master, weight.dtype) != bits(weight)).view(weight.shape)


def compact(
    op: str, source: Tensor, target: Tensor, index_dtype: torch.dtype, update: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions, new values, old values) where ``target`` differs from ``source``: cast (gate) or taken as it is."""
    new_bits = round_bits(source, target.dtype) if op == "gate_compact" else bits(source)
    old_bits = bits(target)
    positions = (new_bits != old_bits).nonzero().squeeze(1)
    values, old_values = new_bits[positions].view(target.dtype), old_bits[positions].view(target.dtype)
    if update:
        apply_patch_(target, positions, values)
    return positions.to(index_dtype), values, old_values


def compact_many(
    op: str,
    sources: list[Tensor],
    targets: list[Tensor],
    index_dtypes: list[torch.dtype],
    update: bool,
    return_old: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rows = [
        compact(op, source, target, dtype, update)
        for source, target, dtype in zip(sources, targets, index_dtypes, strict=True)
    ]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] if return_old else row[2][:0] for row in rows]


def compact_out(
    op: str,
    source: Tensor,
    target: Tensor,
    indices: Tensor,
    values: Tensor,
    count: Tensor,
    old_values: Tensor | None,
    update: bool,
) -> None:
    positions, new, old = compact(op, source, target, indices.dtype, update=False)
    found = positions.numel()
    count.detach().fill_(found)  # an inference tensor itself refuses outside of inference mode, after the write
    if found > indices.numel():
        return
    for buffer, result in ((indices, positions), (values, new), (old_values, old)):
        if buffer is not None:
            bits(buffer[:found]).copy_(bits(result))
    if update:
        apply_patch_(target, positions, new)


def _canonical_nan(computed: Tensor) -> Tensor:
    """A computed NaN becomes 0x7FC00000: its sign and payload depend on operand order and architecture."""
    return torch.where(computed.isnan(), torch.full_like(computed, float("nan")), computed)


def pending_residual(theta: Tensor, local: Tensor, residual: Tensor) -> Tensor:
    """``s = residual + (theta - local)`` in FP32, flat."""
    return _canonical_nan(residual.detach().reshape(-1) + (theta.detach().reshape(-1) - local.detach().reshape(-1)))


def gate_residual_many(
    thetas: list[Tensor],
    locals_: list[Tensor],
    residuals: list[Tensor],
    view: torch.dtype,
    index_dtypes: list[torch.dtype],
) -> tuple[list[Tensor], list[Tensor]]:
    all_indices, all_values = [], []
    for theta, local, residual, dtype in zip(thetas, locals_, residuals, index_dtypes, strict=True):
        s = pending_residual(theta, local, residual)
        flat = theta.detach().reshape(-1)
        fired = round_bits(_canonical_nan(flat - s), view) != round_bits(flat, view)
        positions = fired.nonzero().squeeze(1)
        all_indices.append(positions.to(dtype))
        all_values.append(s[positions])
    return all_indices, all_values


def commit_residual_(theta: Tensor, local: Tensor, residual: Tensor, indices: Tensor) -> None:
    s = pending_residual(theta, local, residual)
    s[indices.long()] = 0.0
    residual.detach().copy_(s.view(residual.shape))


def sum_entries(indices: list[Tensor], values: list[Tensor], numel: int) -> tuple[Tensor, Tensor]:
    """FP32 ``values`` at sorted unique int32 ``indices`` below ``numel``, summed over the lists in their order, each
    element as ((0 + v_0) + v_1) + ...; (positions, sums) of the sums that are not zero. PULSELoCo's exchange."""
    total = torch.zeros(numel, dtype=torch.float32, device=values[0].device)
    for index, value in zip(indices, values, strict=True):
        positions = index.long()
        total[positions] = total[positions] + value
    found = total.nonzero().squeeze(1)
    return found.to(torch.int32), total[found]


# ---- patches --------------------------------------------------------------------------------------------------------


def first_bad_index(indices: Tensor, numel: int) -> int:
    """Where ``indices`` first stops being strictly increasing within [0, numel), or -1."""
    if indices.numel() == 0:
        return -1
    positions = indices.long()  # an int32 comparison would wrap numel
    bad = (positions < 0) | (positions >= numel)
    bad[1:] |= positions[1:] <= positions[:-1]
    where = bad.nonzero()
    return int(where[0]) if where.numel() else -1


def exchange_patch_(weight: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    positions = indices.long()
    if weight.is_contiguous():
        flat = bits(weight)
        old = flat[positions]
        flat[positions] = bits(values)
        return old.view(weight.dtype)
    where = torch.unravel_index(positions, weight.shape)
    raw = weight.detach().view(_INT_OF_SIZE[weight.element_size()])
    old = raw[where]
    raw[where] = bits(values)
    return old.view(weight.dtype)


def apply_patch_(weight: Tensor, indices: Tensor, values: Tensor) -> None:
    exchange_patch_(weight, indices, values)


def gather(weight: Tensor, indices: Tensor) -> Tensor:
    """Values at checked positions."""
    return bits(weight)[indices.long()].view(weight.dtype)


# ---- packed indices (layout: docs/format.md) ------------------------------------------------------------------------

BLOCK = 256
HEADER_BYTES = 32
_MAGIC = int.from_bytes(b"PKIX", "little")
MAX_NUMEL = 1 << 62


def _bit_length(values: Tensor) -> Tensor:
    width = torch.zeros_like(values)
    for k in range(63):
        width += values >= (1 << k)
    return width


def _little_endian(values: Tensor, size: int) -> Tensor:
    shifts = torch.arange(0, 8 * size, 8, device=values.device)
    return ((values.long().unsqueeze(1) >> shifts) & 0xFF).to(torch.uint8).reshape(-1)


def _from_little_endian(data: Tensor, size: int) -> Tensor:
    shifts = torch.arange(0, 8 * size, 8, device=data.device)
    return (data.view(-1, size).long() << shifts).sum(1)


def packed_sizes(count: int, numel: int) -> tuple[int, int, int]:
    """(blocks, bytes of one base, bytes of the header and the three block tables)."""
    blocks = -(-count // BLOCK)
    base_bytes = 4 if numel <= 1 << 32 else 8
    return blocks, base_bytes, HEADER_BYTES + blocks * (base_bytes + 4) + -(-blocks // 4) * 4


def pack_indices(indices: Tensor, numel: int) -> Tensor:
    count, device = indices.numel(), indices.device
    blocks, base_bytes, _ = packed_sizes(count, numel)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=device)
    padded[:count] = indices
    grid = padded.view(blocks, BLOCK)
    gaps = torch.zeros_like(grid)
    gaps[:, 1:] = grid[:, 1:] - grid[:, :-1] - 1
    gaps.view(-1)[count:] = 0
    # The largest gap decides: OR would do as well, max reads more plainly.
    widths = _bit_length(gaps.amax(1)) if blocks else gaps.new_zeros(0)
    offsets = widths.cumsum(0) - widths  # in units of 32 bytes: a full block takes 32 * width bytes
    chunks = []
    for block in range(blocks):
        width, used = int(widths[block]), min(BLOCK, count - block * BLOCK)
        places = torch.arange(width, device=device)
        stream = ((gaps[block, :used].unsqueeze(1) >> places) & 1).reshape(-1)
        size = -(-used * width // 32) * 4
        padded_stream = torch.zeros(size * 8, dtype=torch.int64, device=device)
        padded_stream[: stream.numel()] = stream
        weights = 1 << torch.arange(8, device=device)
        chunks.append((padded_stream.view(-1, 8) * weights).sum(1).to(torch.uint8))
    payload = torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.uint8, device=device)
    fields = torch.tensor([numel, count, payload.numel()], device=device)
    widths_padded = torch.zeros(-(-blocks // 4) * 4, dtype=torch.uint8, device=device)
    widths_padded[:blocks] = widths.to(torch.uint8)
    return torch.cat(
        [
            _little_endian(torch.tensor([_MAGIC, 1 | base_bytes << 8], device=device), 4),
            _little_endian(fields, 8),
            _little_endian(grid[:, 0], base_bytes),
            _little_endian(offsets, 4),
            widths_padded,
            payload,
        ]
    )


def packed_header(packed: Tensor) -> tuple[int, int]:
    """(count, numel) of a packed blob whose sizes are consistent; else PatchFormatError."""
    return packed_headers([packed])[0]


def packed_headers(packed: Sequence[Tensor]) -> list[tuple[int, int]]:
    """``packed_header`` of each; one synchronisation a device."""
    heads = [b""] * len(packed)
    for rows in checks.rows_by_device(packed).values():
        whole = [k for k in rows if packed[k].numel() >= HEADER_BYTES]
        data = bytes(torch.cat([packed[k][:HEADER_BYTES] for k in whole]).tolist()) if whole else b""
        for at, k in enumerate(whole):
            heads[k] = data[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
    headers = []
    for k, (head, blob) in enumerate(zip(heads, packed, strict=True)):
        try:
            headers.append(read_header(head, blob.numel()))
        except PatchFormatError as error:
            error.row = k
            raise
    return headers


def read_header(head: bytes, size: int) -> tuple[int, int]:
    """The same of a blob of ``size`` bytes that begins with ``head``."""
    if size < HEADER_BYTES:
        raise PatchFormatError(f"packed indices: {size} bytes, a header alone takes {HEADER_BYTES}")
    if head[:4] != b"PKIX" or head[4] != 1 or head[6:8] != b"\0\0":
        raise PatchFormatError(f"packed indices: header {head[:8].hex()}, expected 'PKIX', version 1, two zero bytes")
    numel, count, payload = (int.from_bytes(head[at : at + 8], "little") for at in (8, 16, 24))
    if numel > MAX_NUMEL or count > numel:
        raise PatchFormatError(f"packed indices: count {count} for numel {numel}; count <= numel <= 2^62 is required")
    blocks, base_bytes, tables = packed_sizes(count, numel)
    if head[5] != base_bytes:
        raise PatchFormatError(f"packed indices: base size {head[5]}, numel {numel} needs {base_bytes}")
    if tables + payload != size:
        raise PatchFormatError(
            f"packed indices: {size} bytes, but {blocks} blocks and a payload of {payload} need {tables + payload}"
        )
    return count, numel


def unpack_indices(packed: Tensor, index_dtype: torch.dtype, header: tuple[int, int] | None = None) -> Tensor:
    """``header``: what ``packed_header`` said, where it was read before."""
    count, numel = header or packed_header(packed)
    blocks, base_bytes, tables = packed_sizes(count, numel)
    at = HEADER_BYTES + blocks * base_bytes
    bases = _from_little_endian(packed[HEADER_BYTES:at], base_bytes)
    offsets = _from_little_endian(packed[at : at + 4 * blocks], 4)
    widths = packed[at + 4 * blocks : at + 5 * blocks].long()
    pad = packed[at + 5 * blocks : tables]
    if bool((widths > 63).any()) or bool(pad.any()):
        raise PatchFormatError("packed indices: a block width over 63 or a non-zero pad byte")
    if bool((offsets != widths.cumsum(0) - widths).any()):
        raise PatchFormatError("packed indices: block offsets are not the running sum of the widths")
    used_last = count - (blocks - 1) * BLOCK
    expected = int(widths[:-1].sum()) * 32 + -(-used_last * int(widths[-1]) // 32) * 4 if blocks else 0
    if packed.numel() - tables != expected:
        raise PatchFormatError(f"packed indices: payload of {packed.numel() - tables} bytes, widths need {expected}")
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    for block in range(blocks):
        used, width = min(BLOCK, count - block * BLOCK), int(widths[block])
        start = tables + int(offsets[block]) * 32
        data = packed[start : start + -(-used * width // 32) * 4].long()
        stream = ((data.unsqueeze(1) >> torch.arange(8, device=data.device)) & 1).reshape(-1)
        gaps = (stream[: used * width].view(used, width) << torch.arange(width, device=data.device)).sum(1)
        if bool(stream[used * width :].any()) or int(gaps[0]) != 0:
            raise PatchFormatError(f"packed indices: block {block} has non-zero bits where zeros are required")
        steps = gaps + 1
        steps[0] = bases[block]
        # Each gap is under 2^63 but 256 of them may wrap: a wrapped sum shows as a step down.
        positions = steps.cumsum(0)
        lower = positions[:-1] if used > 1 else positions[:0]
        if bool((positions[1:] <= lower).any()) or not int(positions[0]) >= 0 or int(positions[-1]) >= numel:
            raise PatchFormatError(f"packed indices: block {block} leaves [0, {numel})")
        if block and int(positions[0]) <= int(out[block * BLOCK - 1]):
            raise PatchFormatError(f"packed indices: block {block} does not start after the one before it")
        out[block * BLOCK : block * BLOCK + used] = positions
    return out.to(index_dtype)


def check_packed_fit(weights: list[Tensor], values: list[Tensor], headers: Sequence[tuple[int, int]]) -> None:
    """PatchFormatError for the first blob, known by its header, that does not fit its weight and values."""
    for k, (weight, value, (count, numel)) in enumerate(zip(weights, values, headers, strict=True)):
        if (count, numel) != (value.numel(), weight.numel()):
            raise PatchFormatError(
                f"packed indices: {count} of {numel} elements, but there are {value.numel()} values for a weight of "
                f"{weight.numel()} elements",
                k,
            )


def exchange_packed_many_(
    weights: list[Tensor], packed: list[Tensor], values: list[Tensor], keep_old: bool
) -> list[Tensor]:
    headers = packed_headers(packed)
    check_packed_fit(weights, values, headers)
    indices = [unpack_indices(blob, torch.int64, header) for blob, header in zip(packed, headers, strict=True)]
    old_values = [exchange_patch_(*row) for row in zip(weights, indices, values, strict=True)]
    return old_values if keep_old else [old[:0] for old in old_values]


# ---- state digest ---------------------------------------------------------------------------------------------------
#
# digest[lane] = sum_i bits_i * M(lane, i >> 8) * T(lane, i & 255) mod 2^64, bits unsigned, M and T odd mixes of key and
# position (docs/format.md). T has 32 bits so that CPU lanes need one 32 x 32 multiply an element.

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(values: Tensor, places: int) -> Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)


def mix64(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 bits."""
    values = (values ^ _shift_right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift_right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift_right(values, 31)


def digest_weights(positions: Tensor, key: int) -> Tensor:
    """K(key, i) for both lanes: int64 [2, n]."""
    lanes = torch.tensor([_signed(key + _GOLDEN), _signed(key + 2 * _GOLDEN)], device=positions.device)
    seeds = mix64(lanes).unsqueeze(1)
    block_factor = mix64(seeds + (positions >> 8) * _signed(_GOLDEN)) | 1
    slot_factor = _shift_right(mix64(~seeds + (positions & 255) * _signed(_GOLDEN)), 32) | 1
    return block_factor * slot_factor


def _unsigned_bits(tensor: Tensor) -> Tensor:
    raw = bits(tensor)
    return raw if raw.dtype is torch.int64 else raw.long() & ((1 << (8 * tensor.element_size())) - 1)


def digest(tensor: Tensor, key: int, start: int) -> Tensor:
    flat, total = bits(tensor), torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for at in range(0, flat.numel(), _CHUNK):
        part = _unsigned_bits(flat[at : at + _CHUNK])
        positions = torch.arange(start + at, start + at + part.numel(), device=tensor.device)
        total += (part * digest_weights(positions, key)).sum(1)
    return total


def diff_digest_many(
    new: list[Tensor], old: list[Tensor], keys: list[int], index_dtypes: list[torch.dtype], digest_before: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """``diff_compact`` with the old values and int64 [4] each: the digest of ``old`` (zeros unless ``digest_before``)
    and by how much the digest of ``new`` differs from it. One pass where a back end can."""
    indices, values, old_values = compact_many("diff_compact", new, old, index_dtypes, False, True)
    sums = []
    for tensor, key, index, before, after in zip(old, keys, indices, old_values, values, strict=True):
        zero = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        whole = digest(tensor, key, 0) if digest_before else zero
        sums.append(torch.cat([whole, digest_update(zero, index, before, after, key)]))
    return indices, values, old_values, sums


def digest_update(digest: Tensor, indices: Tensor, old: Tensor, new: Tensor, key: int) -> Tensor:
    change = _unsigned_bits(new) - _unsigned_bits(old)
    return digest + (change * digest_weights(indices.long(), key)).sum(1)


# ---- byte streams of the codec (docs/format.md) ---------------------------------------------------------------------


def encode_gaps_many(
    indices: list[Tensor], starts: list[int], shifts: list[int]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """starts: the least position that each can have."""
    rows = [
        _encode_gaps(positions.long() - start, shift)
        for positions, start, shift in zip(indices, starts, shifts, strict=True)
    ]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _encode_gaps(positions: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """(top, low, escapes): gap >> shift as one byte each, 255 meaning "255 + the next LEB128 of escapes"."""
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    high = gaps >> shift
    top = high.clamp(max=255).to(torch.uint8)
    low = (gaps & 0xFF).to(torch.uint8) if shift else top[:0]
    rest = high[high >= 255] - 255
    length = ((_bit_length(rest) + 6) // 7).clamp(min=1)
    columns = torch.arange(9, device=rest.device)
    groups = (rest.unsqueeze(1) >> (7 * columns)) & 0x7F
    groups |= (columns < length.unsqueeze(1) - 1).long() << 7
    return top, low, groups[columns < length.unsqueeze(1)].to(torch.uint8)


def _read_leb128(escapes: Tensor, count: int) -> list[int]:
    values, value, place = [], 0, 0
    for byte in escapes.tolist():
        if place > 56:
            raise PatchFormatError("gaps: an escaped gap of more than 9 bytes")
        value |= (byte & 0x7F) << place
        place += 7
        if byte < 0x80:
            values.append(value)
            value, place = 0, 0
    if place or len(values) != count:
        raise PatchFormatError(f"gaps: {len(values)} escaped gaps, {count} are announced")
    return values


def decode_gaps(top: Tensor, low: Tensor, escapes: Tensor, start: int, stop: int, index_dtype: torch.dtype) -> Tensor:
    high = top.long()
    escaped = (high == 255).nonzero().squeeze(1)
    rest = _read_leb128(escapes, escaped.numel())
    if any(value > (stop - start) >> (8 if low.numel() else 0) for value in rest):  # shifted up, it could wrap
        raise PatchFormatError(f"gaps: an escaped gap of {max(rest)} in a range of {stop - start}")
    high[escaped] += torch.tensor(rest, dtype=torch.int64, device=high.device)
    gaps = (high << 8) | low.long() if low.numel() else high
    positions = (gaps + 1).cumsum(0) + (start - 1)
    bad = first_bad_index(positions, stop)
    if bad >= 0:
        raise PatchFormatError(f"gaps: position {int(positions[bad])} at entry {bad} leaves [{start}, {stop})")
    return positions.to(index_dtype)


def _ordered(raw: Tensor, is_float: bool) -> Tensor:
    """Integers whose order is the order of the floats: sign-magnitude to two's complement, a bijection on all bits."""
    if not is_float:
        return raw
    lowest = torch.full_like(raw, torch.iinfo(raw.dtype).min)
    return torch.where(raw < 0, lowest - raw - 1, raw)


def encode_values_many(values: list[Tensor], bases: list[Tensor] | None) -> list[Tensor]:
    return [_encode_values(tensor, None if bases is None else bases[k]) for k, tensor in enumerate(values)]


def _to_fields(values: Tensor, width: int) -> Tensor:
    """uint8: values below 2^width, ``8 // width`` to a byte, the first in the lowest bits; zeros behind the last."""
    per_byte = 8 // width
    padded = torch.zeros(-(-values.numel() // per_byte) * per_byte, dtype=torch.int64, device=values.device)
    padded[: values.numel()] = values
    places = width * torch.arange(per_byte, device=values.device)
    return (padded.view(-1, per_byte) << places).sum(1).to(torch.uint8)


def _from_fields(fields: Tensor, width: int, count: int) -> Tensor:
    places = width * torch.arange(8 // width, device=fields.device)
    return ((fields.long().unsqueeze(1) >> places) & ((1 << width) - 1)).view(-1)[:count]


def _to_planes(raw: Tensor) -> Tensor:
    """Byte planes of the bits, least significant first."""
    return raw.contiguous().view(torch.uint8).view(-1, raw.element_size()).t().reshape(-1)


def _from_planes(planes: Tensor, size: int) -> Tensor:
    return planes.view(size, -1).t().reshape(-1).clone().view(_INT_OF_SIZE[size])


def _encode_values(values: Tensor, base: Tensor | None) -> Tensor:
    """Byte planes of the bits. Given a base: signs of the changes, 1 bit each; codes, 2 bits each, of their magnitudes
    less one, 3 standing for all from 3 on; planes of those, less 3. A change is ordered(value) - ordered(base),
    wrapping."""
    if base is None:
        return _to_planes(bits(values))
    is_float = values.dtype.is_floating_point
    change = _ordered(bits(values), is_float) - _ordered(bits(base), is_float)
    magnitude = torch.where(change < 0, ~change, change - 1)  # -1, the highest as unsigned, for no change at all
    codes = torch.where((magnitude < 0) | (magnitude >= 3), torch.full_like(magnitude, 3), magnitude)
    parts = [_to_fields(change < 0, 1), _to_fields(codes, 2), _to_planes(magnitude[codes == 3] - 3)]
    return torch.cat(parts)


def decode_values(planes: Tensor, base: Tensor | None, dtype: torch.dtype) -> Tensor:
    size, is_float = dtype.itemsize, dtype.is_floating_point
    if base is None:
        return _from_planes(planes, size).view(dtype)
    count = base.numel()
    head = -(-count // 8), -(-count // 4)
    signs, codes, large = planes.split([*head, planes.numel() - sum(head)])
    magnitude = _from_fields(codes, 2, count).to(_INT_OF_SIZE[size])
    announced = int((magnitude == 3).sum())
    if announced * size != large.numel():
        raise PatchFormatError("values: the codes announce another number of large changes than there are")
    magnitude[magnitude == 3] += _from_planes(large, size)
    change = torch.where(_from_fields(signs, 1, count).bool(), ~magnitude, magnitude + 1)
    return _ordered(change + _ordered(bits(base), is_float), is_float).view(dtype)
