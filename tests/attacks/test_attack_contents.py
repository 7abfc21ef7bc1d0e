"""S8 of docs/security.md: what is in a part is checked, whoever made it and whatever its hash."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import obstore
import pytest
import torch
from forge import Forgery, Part, pack, segment
from hostile import UNPICKLED, Exploit, Run, attacked, goes_on, refuses
from manifest_samples import encode
from obstore.store import MemoryStore
from safetensors.torch import load, save
from sync_models import bits

from pulse_kernels import ChainError, Patch
from pulse_kernels.sync import Subscriber
from pulse_kernels.sync.manifest import manifest_key

# ---- S8: contents are checked, whoever made them ---------------------------------------------------------------------


def patch_of(run: Run, version: int) -> Patch:
    return Patch.from_bytes(run.read(run.part(version)), run.states[version - 1])


def forged(run: Run, *parts: Part, name: str = "embed.weight", shape: tuple[int, ...] = (64, 96)) -> bytes:
    content = run.manifest(2)
    forgery = Forgery([[name, "BF16", list(shape), list(parts)]])
    forgery.fields |= {"base_digest": content["base_digest"], "digest": content["digest"]}
    return forgery.build()


def lying(run: Run) -> bytes:
    patch = patch_of(run, 2)
    item = next(iter(patch.tensors.values()))
    item.values.view(torch.int16)[0] ^= 1
    return patch.to_bytes("fast")


def bomb(run: Run) -> bytes:
    most = (1 << 31) - 1
    return forged(run, Part(0, most, most, "gaps8", [b"", b"", b""], 0, "planes", [b"", b""]), shape=(most,))


def adding(run: Run) -> bytes:
    patch = patch_of(run, 2)
    patch.added["extra"] = torch.zeros(3)
    return patch.to_bytes("fast")


PATCHES: dict[str, tuple[Callable[[Run], bytes], str]] = {
    "values that lead elsewhere": (lying, "its patch does not lead to its digest"),
    "NaN for a value": (
        lambda run: forged(run, segment("BF16", 0, 6144, [5], [0x7FC1], "packed", "raw")),
        "its patch does not lead to its digest",
    ),
    "a bomb": (bomb, "hostile.safetensors: .*embed.weight"),
    "positions out of order": (
        lambda run: forged(
            run,
            Part(0, 6144, 512, "packed", [pack([*range(256, 512), *range(256)], 6144)], 0, "raw", [bytes(1024)]),
        ),
        "hostile.safetensors: .*embed.weight",
    ),
    "a position twice": (
        lambda run: forged(run, Part(0, 6144, 512, "packed", [pack([*range(256)] * 2, 6144)], 0, "raw", [bytes(1024)])),
        "hostile.safetensors: .*embed.weight",
    ),
    "an unknown tensor": (
        lambda run: forged(run, segment("BF16", 0, 9, [1], [1], "packed", "raw"), name="other", shape=(9,)),
        "hostile.safetensors: .*other",
    ),
    "another shape": (
        lambda run: forged(run, segment("BF16", 0, 9, [1], [1], "packed", "raw"), shape=(9,)),
        "hostile.safetensors: .*embed.weight",
    ),
    "a tensor more": (adding, "adds, replaces or removes tensors"),
    "another base": (lambda run: run.read(run.part(1)), "leads from digest .* to .*, the manifest says from"),
    "not a patch": (lambda run: save({"w": torch.ones(2)}), "hostile.safetensors: "),
}


@pytest.mark.parametrize("name", PATCHES)
def test_attack_patch_with_a_fitting_hash(name: str) -> None:
    run, subscriber, honest = attacked()
    make, match = PATCHES[name]
    run.plant_part(2, make(run))
    refuses(subscriber, ChainError, match)
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_lying_patch_is_passed_by_the_next_anchor() -> None:
    """The cheaper way through it is not tried for ever."""
    run = Run(key=None, anchor_every=4)
    run.publish(2)
    subscriber = run.subscriber()
    subscriber.poll()
    run.publish()
    run.plant_part(2, lying(run))
    refuses(subscriber, ChainError, "its patch does not lead to its digest")
    refuses(subscriber, ChainError, "version 2: ")
    run.publish(2)
    goes_on(subscriber, run)
    run.publish()
    goes_on(subscriber, run)


def test_attack_two_parts_that_set_one_element() -> None:
    run, subscriber, honest = attacked()
    data = run.read(run.part(2))
    run.write("patches/00000002/other.safetensors", data)
    content = run.manifest(2)
    content["patch"].append({**content["patch"][0], "key": "patches/00000002/other.safetensors"})
    run.plant(2, content)
    refuses(subscriber, ChainError, "two parts set the same element of ")
    run.restore(honest)
    goes_on(subscriber, run)


def header(**tensors: Any) -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        text = encode({name.replace("_", "."): fields for name, fields in tensors.items()})
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return make


def two(first: list[int], second: list[int], dtype: str = "BF16") -> Callable[[bytes], bytes]:
    rows = {"a": first, "b": second}
    return header(**{name: {"dtype": dtype, "shape": [4], "data_offsets": at} for name, at in rows.items()})


def renamed(old: str, new: str, **kinds: torch.dtype) -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        state = load(data)
        state[new] = state.pop(old)
        return save(
            {name: tensor.view(kinds.get(name.replace(".", "_"), tensor.dtype)) for name, tensor in state.items()}
        )

    return make


def without(name: str, **more: torch.Tensor) -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        return save({**{key: tensor for key, tensor in load(data).items() if key != name}, **more})

    return make


ANCHORS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a header of 2^64 - 1 bytes": (lambda data: b"\xff" * 8 + data[8:], "a header of 18446744073709551615 bytes"),
    "overlapping tensors": (two([0, 8], [4, 12]), "is said to lie at 4 to 12, after 8"),
    "a tensor behind the end": (two([0, 8], [8, 1 << 60]), "is said to lie at"),
    "a negative offset": (two([-8, 0], [0, 8]), "lies at"),
    "an unknown dtype": (two([0, 8], [8, 16], dtype="PICKLE"), "unknown dtype"),
    "no JSON": (lambda data: data[:8] + b"(" + data[9:], "not JSON"),
    "another dtype": (renamed("scale", "scale", embed_weight=torch.float16), "has digest .*, its manifest says"),
    "a name like a path": (renamed("scale", "../../scale"), "which the manifest does not know"),
    "a tensor more": (without("", extra=torch.ones(2)), "'extra', which the manifest does not know"),
    "a tensor less": (without("scale"), "the tensor 'scale' is in none of its files"),
    "another shape": (without("scale", scale=torch.zeros(1, dtype=torch.bfloat16)), "has digest .*, its manifest"),
    "other values": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "has digest .*, its manifest says"),
    "a pickle": (lambda data: pickle.dumps(Exploit()), "a header of|it was cut"),
}


@pytest.mark.parametrize("name", ANCHORS)
def test_attack_anchor_with_a_fitting_hash(name: str) -> None:
    run = Run(key=None, anchor_every=1)
    run.publish()
    subscriber = run.subscriber()
    subscriber.poll()
    run.publish()
    honest = run.everything()
    make, match = ANCHORS[name]
    run.plant_part(1, make(run.read(run.part(1, "anchor"))), "anchor", patch=[], base_version=None, base_digest=None)
    refuses(subscriber, ChainError, match)
    assert not UNPICKLED
    run.restore(honest)
    goes_on(subscriber, run)


def test_attack_damaged_version_further_back_is_not_needed() -> None:
    """Rubbish in place of an old version does not keep a newcomer from the newest anchor."""
    run = Run(anchor_every=2)
    run.publish(5)
    run.write(manifest_key(3), b"rubbish")
    run.write(manifest_key(1), b"")
    goes_on(run.subscriber(), run)


def test_attack_pruned_base_is_named() -> None:
    run, _, honest = attacked()
    obstore.delete(run.store, [manifest_key(0), run.part(0, "anchor")])
    newcomer = run.subscriber()
    with pytest.raises(ChainError, match="no way to version 2: version 0 is not in the store"):
        newcomer.poll()
    run.restore(honest)
    goes_on(newcomer, run)


def test_signed_not_a_numbers_keep_their_bits() -> None:
    """A subscriber judges no values: what the trainer was allowed to sign arrives, payloads of NaN and all."""
    from pulse_kernels.sync import Publisher

    store, weights = MemoryStore(), {"w": torch.zeros(4, dtype=torch.bfloat16)}
    publisher = Publisher(store, weights, on_nonfinite="allow")
    publisher.publish()
    weights["w"].view(torch.int16).copy_(torch.tensor([0x7F81, 0x7FC1, -1, -0x80], dtype=torch.int16))
    publisher.publish()
    subscriber = Subscriber(store)
    assert isinstance(subscriber.params, dict)
    assert torch.equal(bits(subscriber.params["w"]), bits(weights["w"]))
