"""docs/security.md and these tests say the same: every claim has its row, and every test a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_claim_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (S\d+) \| (signed|always) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == [f"S{k}" for k in range(1, 9)]
    tests = {name for file in HERE.glob("test_attack_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    for claim, _, cell in rows:
        assert cell.strip(), claim
        for name in re.findall(r"`([^`]+)`", cell):
            if name.startswith("tests/"):
                assert (HERE.parent.parent / name).is_file(), name
            elif name.startswith("test_attack_"):
                assert (HERE / f"{name}.py").is_file(), name
            else:
                assert any(name.removesuffix("*") in test for test in tests), (claim, name)


def test_claims_that_tests_name_are_on_the_page() -> None:
    for file in HERE.glob("test_attack_*.py"):
        for claim in re.findall(r"^# ---- (S\d+): ", file.read_text(), re.MULTILINE):
            assert f"| {claim} |" in PAGE
