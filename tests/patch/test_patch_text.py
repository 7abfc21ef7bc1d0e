"""Patches and reports as text: one short line, without tensors."""

from __future__ import annotations

import torch
from obstore.store import MemoryStore

from pulse_kernels import Patch
from pulse_kernels.sync import Publisher, Subscriber


def test_patches() -> None:
    old = {"w": torch.zeros(40, 50).bfloat16(), "gone": torch.ones(3)}
    new = {"w": old["w"].clone(), "come": torch.ones(3)}
    new["w"][3, :7] = 2
    patch = Patch.diff(old, new, base_version=4, version=5)
    assert (
        repr(patch)
        == str(patch)
        == (
            "Patch(version 4 to 5, 7 of 2000 elements changed, tensors: 1 changed, 1 added, 1 removed, "
            f"digest {patch.digest[:8]}...)"
        )
    )
    assert repr(patch.tensors["w"]) == "TensorPatch('w', bfloat16 [40, 50], 7 of 2000 changed)"
    assert repr(Patch()) == "Patch(0 of 0 elements changed, tensors: 0 changed)"


def test_reports() -> None:
    weights, store = {"w": torch.zeros(4000).bfloat16()}, MemoryStore()
    publisher = Publisher(store, weights)
    publisher.publish()
    subscriber = Subscriber(store, {"w": torch.ones(4000).bfloat16()})
    subscriber.poll()
    weights["w"][5:25] = 3
    report = publisher.publish()
    text = repr(report)
    assert text.startswith(f"PublishReport(version=1, kind='patch', base_version=0, digest={report.digest[:8]}..., ")
    assert f", num_changed=20, numel=4000, density=0.005, payload_bytes={report.payload_bytes}, " in text
    assert "note" not in text
    assert "seconds={" not in text
    assert text.endswith(f", total_seconds={report.total_seconds:.3g})")
    assert str(report) == text
    staged = subscriber.stage()
    assert repr(staged).startswith(
        "StageReport(version=1, from_version=0, from_anchor=False, patches=1, fetched_bytes="
    )
    assert repr(subscriber.apply()).startswith("ApplyReport(version=1, from_version=0, digest=")
    assert all(len(each) < 300 and "\n" not in each for each in (text, repr(staged)))
