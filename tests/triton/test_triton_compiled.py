"""Every Triton kernel in every form compiles to machine code for every architecture, within its means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ARCHITECTURES = [80, 90, 100, 120]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Architecture -> variants; compiled by two processes, as compiling keeps to one thread."""
    script = Path(__file__).parent / "variants.py"
    found = {}
    for both in (ARCHITECTURES[:2], ARCHITECTURES[2:]):
        running = {}
        for number in both:
            output = (tmp_path_factory.mktemp("variants") / f"{number}.json").open("w+")
            process = subprocess.Popen([sys.executable, script, str(number)], stdout=output, stderr=subprocess.PIPE)
            running[number] = process, output
        for number, (process, output) in running.items():
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors.decode()[-3000:]
            output.seek(0)
            found[number] = json.load(output)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestCompiled:
    def test_no_kernel_spills(self, reports, architecture):
        assert len(reports[architecture]) >= 60
        for name, kernel in reports[architecture].items():
            assert kernel["STACK"] == kernel["LOCAL"] == 0, name

    def test_registers_leave_room_for_the_programs_that_keep_memory_busy(self, reports, architecture):
        # 65536 registers an SM. Dense passes need two programs an SM (backends/triton/launch.py), the scattered second
        # pass as many as give it 20 warps.
        for name, kernel in reports[architecture].items():
            programs = 65536 // (kernel["REG"] * 32 * kernel["warps"])
            kind = name.split("[")[0]
            least = {"collect": 10, "scatter": 6, "gather": 6, "digest_changes": 4, "order": 4, "digest": 3}
            assert programs >= least.get(kind, 2), (name, kernel["REG"])

    def test_dense_passes_load_wide(self, reports, architecture):
        # 16 bytes a thread of the widest input, and as many elements of the others.
        wide = {"v4.b32": 16, "v2.b64": 16, "v2.b32": 8}
        seen = set()
        for name, kernel in reports[architecture].items():
            kind, form = name.split("[")
            if kind not in ("mark", "visibility", "commit", "digest"):
                continue
            loads = {key.removeprefix("ld.global."): count for key, count in kernel["loads"].items()}
            sizes = sorted(wide[key] for key in loads if key in wide)
            mixed = "KIND=0" in form or "KIND=1" in form
            assert sizes == ([8, 16] if mixed else [16]), (name, loads)
            seen.add((kind, mixed))
        assert seen == {("mark", True), ("mark", False), ("visibility", True), ("commit", False), ("digest", False)}
