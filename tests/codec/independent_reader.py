"""A reader of patch files written from docs/format.md alone: no line of it knows the package.

Slow and plain on purpose. A state is name -> (dtype name, shape, bits), bits being one integer an element.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import zlib
from typing import Any

import zstandard

State = dict[str, tuple[str, tuple[int, ...], list[int]]]
Changes = dict[str, tuple[list[int], list[int]]]  # positions, bits

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
ORDERED = {name for name in SIZES if name.startswith(("F", "BF"))}
UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


def require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


# ---- the file --------------------------------------------------------------------------------------------------------


def read_header(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The patch header and the streams by name."""
    (length,) = struct.unpack_from("<Q", data)
    outer = json.loads(data[8 : 8 + length].decode("utf-8"))
    metadata = outer.pop("__metadata__")
    require(sorted(metadata) == ["format", "pulse", "pulse_crc32"] and metadata["format"] == "pulse", "metadata")
    text = metadata["pulse"]
    require(f"{zlib.crc32(text.encode('utf-8')):08x}" == metadata["pulse_crc32"], "header CRC")
    header = json.loads(text)
    require(header["format"] == 1, "format")
    streams = {}
    at = 8 + length
    for k, (_, _, _, segments) in enumerate(header["tensors"] + header["added"]):
        for s, segment in enumerate(segments):
            parts = [] if segment[3] == "all" else [("i", segment[4], segment[6])]
            for kind, sizes, crc in [*parts, ("v", segment[8], segment[9])]:
                name, begin, end = f"{k}.{s}.{kind}", at - 8 - length, at - 8 - length + sum(sizes)
                entry = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
                require(outer.pop(name) == entry, name)
                streams[name] = data[at : at + sum(sizes)]
                at += sum(sizes)
                require(zlib.crc32(streams[name]) == crc, f"CRC of {name}")
    require(not outer and at == len(data), "streams left over")
    return header, streams


def load_part(stored: bytes, size: int) -> bytes:
    if not stored:
        return bytes(size)
    if len(stored) == size:
        return stored
    require(len(stored) < size, "part too long")
    plain = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    require(len(plain) == size, "part of the wrong size")
    return plain


def split(stream: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(stream[:size])
        stream = stream[size:]
    return parts


# ---- indices ---------------------------------------------------------------------------------------------------------


def unpack_indices(blob: bytes) -> tuple[int, list[int]]:
    """(numel, positions) of packed indices."""
    magic, version, base_size, zero, elements, count, payload_size = struct.unpack_from("<4sBBHQQQ", blob)
    require((magic, version, zero) == (b"PKIX", 1, 0), "magic")
    require(base_size == (4 if elements <= 2**32 else 8), "base size")
    blocks = (count + 255) // 256
    at = 32
    bases = struct.unpack_from(f"<{blocks}{UNSIGNED[base_size]}", blob, at)
    at += base_size * blocks
    offsets = struct.unpack_from(f"<{blocks}I", blob, at)
    at += 4 * blocks
    widths = blob[at : at + blocks]
    at += (blocks + 3) // 4 * 4
    payload = blob[at:]
    require(len(payload) == payload_size, "payload")
    positions: list[int] = []
    for block in range(blocks):
        entries, width = min(256, count - 256 * block), widths[block]
        start = 32 * offsets[block]
        bits = int.from_bytes(payload[start : start + (entries * width + 31) // 32 * 4], "little")
        position = bases[block]
        for j in range(entries):
            entry = bits >> (j * width) & ((1 << width) - 1)
            position += entry + (j > 0)
            positions.append(position)
    require(all(a < b for a, b in itertools.pairwise(positions)), "order")
    require(not positions or positions[-1] < elements, "range")
    return elements, positions


def read_gaps(top: bytes, low: bytes | None, escapes: bytes) -> list[int]:
    """Positions inside the segment."""
    positions, at, next_position = [], 0, 0
    for j, high in enumerate(top):
        if high == 255:
            place = 0
            while True:
                byte = escapes[at]
                at += 1
                high += (byte & 0x7F) << place
                place += 7
                if byte < 0x80:
                    break
        gap = high if low is None else high << 8 | low[j]
        positions.append(next_position + gap)
        next_position = positions[-1] + 1
    require(at == len(escapes), "escapes left over")
    return positions


def read_positions(segment: list[Any], stream: bytes) -> list[int]:
    start, elements, count, code, sizes, escape_size, *_ = segment
    if code == "all":
        return list(range(start, start + elements))
    parts = split(stream, sizes)
    if code == "packed":
        packed_elements, local = unpack_indices(parts[0])
        require(packed_elements == elements, "numel")
    else:
        low = load_part(parts[1], count) if code == "gaps16" else None
        local = read_gaps(load_part(parts[0], count), low, load_part(parts[2], escape_size))
    require(len(local) == count and local[-1] < elements, "positions")
    return [start + position for position in local]


# ---- values ----------------------------------------------------------------------------------------------------------


def to_signed(bits: int, size: int) -> int:
    return bits - (1 << 8 * size) if bits >> (8 * size - 1) else bits


def ordered(x: int, dtype: str) -> int:
    """Of a signed integer; its own inverse."""
    return -(1 << 8 * SIZES[dtype] - 1) - x - 1 if dtype in ORDERED and x < 0 else x


def read_planes(parts: list[bytes], count: int, size: int) -> list[int]:
    planes = [load_part(part, count) for part in parts]
    require(len(planes) == size, "planes")
    return [sum(plane[j] << 8 * b for b, plane in enumerate(planes)) for j in range(count)]


def read_values(segment: list[Any], stream: bytes, dtype: str, old: list[int] | None) -> list[int]:
    """Bits of the new values."""
    count, code, sizes = segment[2], segment[7], segment[8]
    size = SIZES[dtype]
    if code == "raw":
        return list(struct.unpack(f"<{count}{UNSIGNED[size]}", stream))
    parts = split(stream, sizes)
    if code == "planes":
        return read_planes(parts, count, size)
    assert old is not None, "delta needs a base"
    signs, codes = load_part(parts[0], -(-count // 8)), load_part(parts[1], -(-count // 4))
    magnitudes = [codes[j // 4] >> 2 * (j % 4) & 3 for j in range(count)]
    require(count % 4 == 0 or codes[-1] >> 2 * (count % 4) == 0, "codes behind the last value")
    large = iter(read_planes(parts[2:], magnitudes.count(3), size))
    mask = (1 << 8 * size) - 1
    values = []
    for j, (code, before) in enumerate(zip(magnitudes, old, strict=True)):
        m = code + next(large) if code == 3 else code
        change = ~m if signs[j // 8] >> j % 8 & 1 else m + 1
        now = to_signed(ordered(to_signed(before, size), dtype) + change & mask, size)
        values.append(ordered(now, dtype) & mask)
    return values


# ---- a whole patch ---------------------------------------------------------------------------------------------------


def read(
    data: bytes, base: State | None = None
) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[int]]], State]:
    """(header, name -> (positions, bits) of changed tensors, added tensors)."""
    header, streams = read_header(data)
    changed, added = {}, {}
    for k, (name, dtype, shape, segments) in enumerate(header["tensors"] + header["added"]):
        positions: list[int] = []
        values: list[int] = []
        for s, segment in enumerate(segments):
            here = read_positions(segment, streams.get(f"{k}.{s}.i", b""))
            old = None
            if segment[7] == "delta":
                assert base is not None
                old = [base[name][2][position] for position in here]
            positions += here
            values += read_values(segment, streams[f"{k}.{s}.v"], dtype, old)
        if k < len(header["tensors"]):
            changed[name] = (positions, values)
        else:
            require(len(values) == numel(tuple(shape)), "added tensor not covered")
            added[name] = (dtype, tuple(shape), values)
    return header, changed, added


def apply(data: bytes, base: State) -> State:
    """The new state; both digests are checked."""
    header, changed, added = read(data, base)
    require(header["base_digest"] in ("", state_digest(base)), "base digest")
    state = {name: tensor for name, tensor in base.items() if name not in header["removed"]}
    for name, (positions, values) in changed.items():
        dtype, shape, bits = state[name]
        bits = list(bits)
        for position, value in zip(positions, values, strict=True):
            bits[position] = value
        state[name] = (dtype, shape, bits)
    state |= added
    require(header["digest"] in ("", state_digest(state)), "digest")
    return state


# ---- digest ----------------------------------------------------------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def hashed_text(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return name.encode() + b"\0" + dtype.encode() + b"\0" + ",".join(str(size) for size in shape).encode()


def digest_key(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(hashed_text(name, dtype, shape), digest_size=8).digest(), "little")


def seeds(key: int) -> tuple[int, int]:
    return mix((key + GOLDEN) & MASK), mix((key + 2 * GOLDEN) & MASK)


def weight(seed: int, i: int) -> int:
    block = mix((seed + (i >> 8) * GOLDEN) & MASK) | 1
    slot = mix(((~seed & MASK) + (i & 255) * GOLDEN) & MASK) >> 32 | 1
    return block * slot & MASK


def tensor_digest(key: int, bits: list[int]) -> tuple[int, int]:
    first, second = (sum(b * weight(seed, i) for i, b in enumerate(bits)) & MASK for seed in seeds(key))
    return first, second


def presence(key: int) -> tuple[int, int]:
    return mix(key), mix(~key & MASK)


def state_digest(state: State) -> str:
    lanes = [0, 0]
    for name, (dtype, shape, bits) in state.items():
        key = digest_key(name, dtype, shape)
        for lane in range(2):
            lanes[lane] = (lanes[lane] + tensor_digest(key, bits)[lane] + presence(key)[lane]) & MASK
    return f"{lanes[0]:016x}{lanes[1]:016x}"
