"""Patch.save and Patch.load: a path holds a whole patch or what it held before, whatever goes wrong."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import pulse_kernels as pk


def make(seed: int, numel: int = 1000) -> pk.Patch:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(numel, generator=generator)
    return pk.Patch.diff({"w": old}, {"w": torch.where(torch.rand(numel, generator=generator) < 0.3, old + 1, old)})


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("profile", ["fast", "balanced"])
@pytest.mark.parametrize("kind", [str, Path])
def test_there_and_back(tmp_path: Path, profile: str, kind: type) -> None:
    old = {"w": torch.zeros(5), "v": torch.ones(2)}
    patch = pk.Patch.diff(old, {"w": torch.ones(5)}, version=3)
    path = kind(tmp_path / "größe 1.safetensors")
    assert patch.save(path, profile) == os.path.getsize(path)
    assert only_file(tmp_path).read_bytes() == patch.to_bytes(profile)
    found = pk.Patch.load(path, old, current_digest=patch.base_digest)
    assert (found.version, found.digest, found.removed) == (3, patch.digest, ("v",))
    assert found.apply_(old) == patch.digest


def test_a_base_for_saving(tmp_path: Path) -> None:
    old, patch = {"w": torch.zeros(500)}, pk.Patch.diff({"w": torch.zeros(500)}, {"w": torch.ones(500)})
    bare = pk.Patch(tensors={"w": pk.TensorPatch("w", (500,), torch.float32, *_columns(patch))})
    with pytest.raises(ValueError, match="pass base="):
        bare.save(tmp_path / "p")
    assert not list(tmp_path.iterdir())
    bare.save(tmp_path / "p", base=old)
    assert pk.Patch.load(tmp_path / "p", old).num_changed == 500


def _columns(patch: pk.Patch) -> tuple[torch.Tensor, torch.Tensor]:
    return patch.tensors["w"].indices, patch.tensors["w"].values


def test_an_older_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "p"
    make(1).save(path)
    reader = path.open("rb")
    make(2).save(path)
    assert reader.read() == make(1).to_bytes()  # whoever has it open keeps it
    assert path.read_bytes() == make(2).to_bytes()
    reader.close()
    only_file(tmp_path)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        make(1).save(tmp_path / "p")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o640


def test_load_limits(tmp_path: Path) -> None:
    patch = make(1)
    patch.save(tmp_path / "p", "fast")
    with pytest.raises(pk.PatchFormatError, match="pass max_decoded_bytes"):
        pk.Patch.load(tmp_path / "p", max_decoded_bytes=100)


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(pk.PulseError, match=r"nowhere: cannot read the patch: No such file.*; check the path"):
        pk.Patch.load(tmp_path / "nowhere")
    with pytest.raises(pk.PulseError, match="cannot read the patch: Is a directory"):
        pk.Patch.load(tmp_path)


def test_half_a_file(tmp_path: Path) -> None:
    data = make(1).to_bytes()
    (tmp_path / "p").write_bytes(data[: len(data) // 2])
    with pytest.raises(pk.PatchFormatError, match="truncated"):
        pk.Patch.load(tmp_path / "p")


# ---- what cannot be written ------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(pk.PulseError, match="cannot write the patch: No such file or directory; nothing was left"):
        make(1).save(tmp_path / "nowhere" / "p")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_file_s_place(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "inside").touch()
    with pytest.raises(pk.PulseError, match=r"cannot write the patch: .*irectory"):
        make(1).save(tmp_path / "p")
    assert only_file(tmp_path).name == "p"


def test_a_file_in_the_folder_s_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(pk.PulseError, match="cannot write the patch: Not a directory"):
        make(1).save(tmp_path / "f" / "p")
    assert only_file(tmp_path).read_text() == "x"


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal is played where the tests run as root."""
    folder = tmp_path / "f"
    folder.mkdir(mode=0o555)
    if os.geteuid() == 0:
        import builtins

        real = builtins.open

        def refuse(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
            if "x" in mode:
                raise PermissionError(13, "Permission denied", str(file))
            return real(file, mode, *args, **kwargs)  # type: ignore[call-overload]

        monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(pk.PulseError, match=r"cannot write the patch: Permission denied; .*permissions"):
        make(1).save(folder / "p")
    assert not list(folder.iterdir())


FULL = """
import resource, sys, torch
import pulse_kernels as pk
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
old = {"w": torch.zeros(100_000)}
patch = pk.Patch.diff(old, {"w": torch.rand(100_000)})
try:
    patch.save(sys.argv[1], "fast")
except pk.PulseError as error:
    assert "cannot write the patch: File too large; nothing was left behind" in str(error), error
    print("refused")
pk.Patch().save(sys.argv[1] + "2")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one in a process with a limit on file sizes: the file that was there stays, no other is left."""
    (tmp_path / "p").write_bytes(b"the old patch")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "p")], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert (tmp_path / "p").read_bytes() == b"the old patch"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "p2"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failures_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException) -> None:
    (tmp_path / "p").write_bytes(b"the old patch")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(pk.PulseError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        make(1).save(tmp_path / "p")
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "free space" in str(caught.value)
    assert only_file(tmp_path).read_bytes() == b"the old patch"


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes stop coming in the middle."""
    from pulse_kernels.codec import PatchBuilder

    real = PatchBuilder.chunks

    def stops(self: PatchBuilder) -> object:
        for k, chunk in enumerate(real(self)):
            if k == 3:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(PatchBuilder, "chunks", stops)
    with pytest.raises(KeyboardInterrupt):
        make(1).save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_patch_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a reader would refuse it"):
        pk.Patch(version=-1).save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


# ---- many writers ----------------------------------------------------------------------------------------------------

SAVE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_patch_files import make
patch = make(1, 200_000)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(25):
    patch.save(sys.argv[2])
"""


def test_two_processes_save_to_one_path(tmp_path: Path) -> None:
    """While both write, and in the end, the path holds a whole patch of one of them."""
    path, patch = tmp_path / "p", make(2, 200_000)
    theirs, ours = make(1, 200_000).to_bytes(), patch.to_bytes()
    command = [sys.executable, "-c", SAVE, str(Path(__file__).parent), str(path)]
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        while other.poll() is None:
            patch.save(path)
            found.append(path.read_bytes())
    assert other.returncode == 0
    assert set(found) <= {theirs, ours}
    assert only_file(tmp_path).read_bytes() in (theirs, ours)


def test_many_threads_save_to_one_path(tmp_path: Path) -> None:
    path, patches = tmp_path / "p", [make(seed) for seed in range(6)]
    mask = os.umask(0o022)
    os.umask(mask)
    threads = [threading.Thread(target=patch.save, args=(path,)) for patch in patches for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only_file(tmp_path).read_bytes() in {patch.to_bytes() for patch in patches}
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_saving_takes_no_second_copy_of_the_file(tmp_path: Path) -> None:
    """Chunks go to the file as they are; a patch of 64 MB is not joined first."""
    patch = pk.Patch(added={"w": torch.zeros(1 << 26, dtype=torch.uint8)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = patch.save(tmp_path / "p", "fast")
    assert size > 1 << 26
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120 << 10
