"""``python -m bench.report RESULTS.json``: the run's tables as docs/performance.md, and the floors on the screen.

Always exits with 0, with ``--strict`` with 1 where a floor does not hold or was not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import ptx_counts
from bench.floors import FLOORS
from bench.results import Result, Results

ROOT = Path(__file__).resolve().parent.parent
FULL_SIZE = 100_000_000

# Heading, and what a reader has to know about the table below it.
DENSE_SECTIONS = {
    "Memory": "Reductions with all threads; the fastest is the plain read that the other tables refer to.",
    "Gate": (
        "FP32 masters against BF16 weights: 6 bytes a weight. Eager: cast, compare bits, nonzero, gather. The weights "
        "are put back between rounds, outside the timing."
    ),
    "Diff": "Two BF16 tensors: 4 bytes a weight. Eager: compare bits, nonzero, gather (new values only).",
    "PULSELoCo": "Three FP32 tensors: 12 bytes a weight read; `commit_residual_` also writes 4.",
    "Apply": (
        "Bounds, order and uniqueness checked by ours and bounds by `index_put_`, which takes int64 indices where ours "
        "takes int32."
    ),
    "Sync": (
        "`publish` to a local folder, all phases, to the committed manifest, everything forced to the disk. The pause "
        "is the subscriber's `apply` alone: undo log, scatter, digest. The cable joins two network namespaces."
    ),
    "Digest": "The peers are serial. `torch.hash_tensor` is the XOR of all elements: it misses an exchange of two.",
}
INDEX_SECTION = "Index packing"
ENCODE_SECTION, DECODE_SECTION = "Codings: weights to bytes", "Codings: bytes to weights"
STEPS_SECTION = "Steps"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; all columns but the first are aligned right."""
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def floors_table(results: Results) -> Iterator[str]:
    rows = []
    for floor in FLOORS:
        figure = floor.measured(results)
        holds = "not measured" if figure is None else "yes" if floor.holds(results) else "**no**"
        rows.append((floor.what, floor.bound, "-" if figure is None else f"{figure:.4g}{floor.unit}", holds))
    yield from table(("what", "floor", "measured", "holds"), rows)


def machine_lines(results: Results) -> Iterator[str]:
    m = results.machine
    yield f"- CPU: {m['cpu']}, {m['cores']} cores, instruction set in use: {m['instruction_set']}"
    yield f"- memory: {m['memory_gib']} GiB; {m['system']}"
    yield f"- torch {m['torch']} with {m['threads']} threads; Python {m['python']}"
    known = [result.other_processes for result in results.comparisons if result.other_processes is not None]
    busy = ""
    if known:
        taken, there = (sum(column) for column in zip(*known, strict=True))
        busy = f"; other processes took {100 * taken / there:.0f}% of the CPU time meanwhile"
    yield f"- {results.date}; {m['elements']:,} weights, {m['rounds']} rounds{busy}"


def dense_table(found: Sequence[Result]) -> Iterator[str]:
    """Ours, then every peer with its time and how many times ours it takes."""
    peers = list(dict.fromkeys(name for result in found for name in result.peers))
    rate = any(result.num_bytes for result in found)
    rows = []
    for result in found:
        cells = [result.title, milliseconds(result.seconds)]
        if rate:
            cells.append(f"{result.num_bytes / result.seconds / 1e9:.1f}" if result.num_bytes else "")
        for name in peers:
            seconds = result.peers.get(name)
            cells.append("" if seconds is None else f"{milliseconds(seconds)}, {seconds / result.seconds:.2f}x")
        rows.append(cells)
    yield from table(["operator", "median", *(["GB/s"] if rate else []), *peers], rows)


def index_table(found: Sequence[Result]) -> Iterator[str]:
    def speed(result: Result, seconds: float) -> str:
        return f"{result.facts['num_changed'] / seconds / 1e6:.0f}"

    rows = [
        (
            *(result.title, f"{result.facts['packed_bits']:.2f}", speed(result, result.seconds)),
            *(speed(result, result.peers[peer]) if peer in result.peers else "" for peer in ("eager", "numpy")),
        )
        for result in found
    ]
    header = ("operator", "bits/index", "M indices/s", "eager u16 gaps, M indices/s", "numpy u16 gaps, M indices/s")
    yield from table(header, rows)


def coding_tables(encoded: Sequence[Result], decoded: Sequence[Result]) -> Iterator[str]:
    back = {result.title: result for result in decoded}
    for result in encoded:
        changed, sizes = result.facts["num_changed"], result.facts["sizes"]
        yield f"### Weights {result.title}; {100 * result.facts['density']:.2f}% changed"
        yield ""
        reverse = back.get(result.title)
        encode_times = {result.ours: result.seconds, **result.peers}
        decode_times = {} if reverse is None else {reverse.ours: reverse.seconds, **reverse.peers}
        rows = []
        for name, size in sizes.items():
            cells = [name, f"{size:,}", f"{8 * size / changed:.2f}", f"{result.num_bytes / size:.0f}"]
            for times in (encode_times, decode_times):
                seconds = times.get(name)
                if seconds is None:
                    cells.extend(("", ""))
                else:
                    cells.extend((f"{result.num_bytes / seconds / 1e6:,.0f}", milliseconds(seconds)))
            rows.append(cells)
        header = ("coding", "bytes", "bits/change", "times smaller", "encode MB/s", "encode", "decode MB/s", "decode")
        yield from table(header, rows)
        if "header_bytes" in result.facts:
            header_bytes = result.facts["header_bytes"]
            yield ""
            yield (
                f"Of ours, balanced, {header_bytes:,} bytes are the header ({8 * header_bytes / changed:.2f} bits a "
                f"change): it grows with the number of tensors, not with their size."
            )
        yield ""


def steps_table(found: Sequence[Result]) -> Iterator[str]:
    rows = [
        (result.title, name, milliseconds(seconds))
        for result in found
        for name, seconds in {result.ours: result.seconds, **result.peers}.items()
    ]
    yield from table(("of", "step", "median"), rows)


def document(results: Results) -> Iterator[str]:
    yield "# Performance"
    yield ""
    yield "Written by `make bench`; the suite is in `bench/`."
    yield ""
    yield from machine_lines(results)
    yield ""
    yield (
        "All contenders of a row ran in turns, round by round, in one process; figures are medians. `3.00x` beside a "
        "time means that it is three times ours; for a plain read it is the share of its bytes/s that ours reaches. "
        "Eager is PyTorch on the same tensors with the same number of threads."
    )
    yield ""
    yield "## Floors"
    yield ""
    if results.machine["elements"] != FULL_SIZE:
        yield f"The floors are stated for {FULL_SIZE:,} weights; this run had {results.machine['elements']:,}."
        yield ""
    yield from floors_table(results)
    for name, note in DENSE_SECTIONS.items():
        if found := results.section(name):
            yield from ("", f"## {name}", "", note, "")
            yield from dense_table(found)
    if found := results.section(INDEX_SECTION):
        yield from ("", f"## {INDEX_SECTION}", "")
        yield ("Sorted int32 indices. The peers do the least one can: gaps as 16 bits, unchecked, wrong from 65536 on.")
        yield ""
        yield from index_table(found)
    if found := results.section(ENCODE_SECTION):
        yield from ("", "## Codings", "")
        yield (
            "From two versions of all weights to bytes, and from those bytes into the receiver's weights. MB/s counts "
            "the dense BF16 weights. Ours includes digests of both states, checksums and all checks; the peers check "
            "nothing, and their zstd runs on one thread."
        )
        yield ""
        yield (
            "*Trained* weights come from `bench/trace.py`: a byte-level language model of 5.5 million parameters "
            "trained with Adam at 3e-6 on FP32 masters, two consecutive BF16 views. *Random* weights are normal with "
            "spread 0.02; every position changes with the same probability, by one unit in the last place."
        )
        yield ""
        yield from coding_tables(found, results.section(DECODE_SECTION))
    if found := results.section(STEPS_SECTION):
        yield from ("## Steps of both ways, random weights", "")
        yield from steps_table(found)
    yield ""
    yield from ptx_counts.section()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="what --benchmark-json wrote; several for a run in parts")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a floor does not hold")
    options = parser.parse_args(arguments)
    results = Results.load(options.results)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(document(results)), encoding="utf-8")
    print("\n".join(floors_table(results)))
    print(f"\n{options.output}")
    return int(options.strict and not all(floor.holds(results) for floor in FLOORS))


if __name__ == "__main__":
    sys.exit(main())
