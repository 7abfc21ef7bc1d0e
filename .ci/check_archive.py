"""What a built wheel holds: check_archive.py WHEEL LIBRARY...; the libraries it must have, and no others."""

import sys
import zipfile
from pathlib import Path

MOST_BYTES = 15_000_000

wheel, wanted = Path(sys.argv[1]), set(sys.argv[2:])
with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
libraries = {Path(name).name for name in names if name.endswith((".so", ".dylib"))}
assert libraries == wanted, f"{wheel.name} has the libraries {sorted(libraries)}, expected {sorted(wanted)}"
assert "-cp310-abi3-" in wheel.name, f"{wheel.name} is not tagged cp310-abi3"
size = wheel.stat().st_size
assert size < MOST_BYTES, f"{wheel.name} has {size:,} bytes, {MOST_BYTES:,} are allowed"
folders = {name.split("/")[0] for name in names}
assert all(folder.startswith("pulse_kernels") for folder in folders), f"{wheel.name} installs {sorted(folders)}"
print(f"wheel archive passed: {size:,} bytes, {', '.join(sorted(libraries))}")
