"""What the CPU kernels have to reach, each floor computed from one comparison's medians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.results import Result, Results


@dataclass(frozen=True)
class Floor:
    """benchmark: the test that measures it. figure: what is bounded, from that test's medians.

    Exactly one of at_least and at_most is set.
    """

    what: str
    benchmark: str
    figure: Callable[[Result], float]
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        return f"≤ {self.at_most:g}{self.unit}" if self.at_least is None else f"≥ {self.at_least:g}{self.unit}"

    def measured(self, results: Results) -> float | None:
        result = results.by_name.get(self.benchmark)
        return None if result is None else self.figure(result)

    def holds(self, results: Results) -> bool:
        figure = self.measured(results)
        if figure is None:
            return False
        return (self.at_least is None or figure >= self.at_least) and (self.at_most is None or figure <= self.at_most)


def times_ours(peer: str) -> Callable[[Result], float]:
    """The peer's time as a multiple of ours."""
    return lambda result: result.peers[peer] / result.seconds


def times_of(peer: str) -> Callable[[Result], float]:
    """Our time as a multiple of the peer's."""
    return lambda result: result.seconds / result.peers[peer]


def phase_share(result: Result) -> float:
    """How much of the wall time the reports' phases account for."""
    return float(result.facts["phase_share"])


def bytes_an_entry(result: Result) -> float:
    """Position and FP32 value."""
    return float(result.facts["bytes_an_entry"])


def million_indices_a_second(result: Result) -> float:
    return result.facts["num_changed"] / result.seconds / 1e6


def bits_a_change(result: Result) -> float:
    """The whole file, header included."""
    return 8 * result.facts["sizes"][result.ours] / result.facts["num_changed"]


GATE = "test_gate_compact_update[0.01]"
PACK, UNPACK = "test_one_thread[0.01-pack_indices]", "test_one_thread[0.01-unpack_indices]"
APPLY = "test_apply_and_exchange[0.01]"
TRAINED_28, TRAINED_10 = "test_encode[trained, about 2.8%]", "test_encode[trained, about 1%]"
PUBLISH, PAUSE, CABLE = "test_publish", "test_pause", "test_over_a_cable"
RESIDUAL, ROUND = "test_gate_residual", "test_round"
CHECKPOINT = "test_encode[random, 1%]"
EAGER_CODING = "u16 gaps + values, zstd-1"

FLOORS = (
    Floor("`gate_compact(update=True)`, 1%: eager takes", GATE, times_ours("eager"), "x", at_least=6),
    Floor("`gate_compact(update=True)`, 1%: share of plain read", GATE, times_ours("plain read"), "", at_least=0.8),
    Floor("`pack_indices`, 1%, one core", PACK, million_indices_a_second, " M indices/s", at_least=500),
    Floor("`unpack_indices`, 1%, one core", UNPACK, million_indices_a_second, " M indices/s", at_least=500),
    Floor("`balanced`, trained, about 2.8%", TRAINED_28, bits_a_change, " bits/change", at_most=10.2),
    Floor("`balanced`, trained, about 1%", TRAINED_10, bits_a_change, " bits/change", at_most=11.5),
    Floor("`apply_patch_`, 1%: `index_put_` takes", APPLY, times_ours("index_put_"), "x", at_least=1.2),
    Floor("`exchange_patch_`, 1%: of `apply_patch_`", APPLY, times_ours("exchange_patch_"), "x", at_most=1.5),
    Floor("diff and encode, 1%: `!=`, u16 gaps, zstd-1 take", CHECKPOINT, times_ours(EAGER_CODING), "x", at_least=6),
    Floor("`publish`, 1%: of `gate_compact`", PUBLISH, times_of("gate_compact"), "x", at_most=1.6),
    Floor("`publish`, 1%: dense file and BLAKE3 take", PUBLISH, times_ours("dense file and BLAKE3"), "x", at_least=2),
    Floor("`publish`: phases the report names, of all time", PUBLISH, phase_share, "", at_least=0.9),
    Floor("the subscriber's pause, 1%: of `index_put_`", PAUSE, times_of("index_put_"), "x", at_most=3),
    Floor("`gate_residual`, 4%: eager takes", RESIDUAL, times_ours("eager"), "x", at_least=8),
    Floor("`gate_residual`, 4%: share of plain read", RESIDUAL, times_ours("plain read"), "", at_least=0.7),
    Floor("a PULSELoCo round of 4 ranks: eager takes", ROUND, times_ours("eager"), "x", at_least=4),
    Floor("an entry sent, 4% at random, without zstd", ROUND, bytes_an_entry, " bytes", at_most=5.0),
    Floor("publish to applied over 100 Mbit/s: dense takes", CABLE, times_ours("dense"), "x", at_least=25),
)
