"""Import and round trip of an installed wheel, run from outside the checkout: check_wheel.py native|reference."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import pulse_kernels as pk

wanted = sys.argv[1]
warnings.simplefilter("ignore")
here = Path(__file__).resolve().parent
assert here not in Path(pk.__file__).resolve().parents or "site-packages" in pk.__file__, pk.__file__

torch.manual_seed(0)
master = torch.randn(300, 1000)
weight = master.bfloat16()
receiver = {"w": weight.clone(), "b": torch.zeros(7)}
trainer = {"w": weight, "b": torch.zeros(7)}
master += 1e-3 * torch.randn(300, 1000)
indices, values, old = pk.gate_compact(master, weight, update=True, return_old=True)
assert 0 < indices.numel() < master.numel()
assert torch.equal(weight.view(torch.int16), master.bfloat16().view(torch.int16))
assert torch.equal(pk.unpack_indices(pk.pack_indices(indices, weight.numel())), indices)

patch = pk.Patch.diff(receiver, trainer, base_version=1, version=2)
with tempfile.TemporaryDirectory() as folder:
    for profile in ("fast", "balanced"):
        copy = {name: tensor.clone() for name, tensor in receiver.items()}
        patch.save(Path(folder, profile), profile=profile)
        pk.Patch.load(Path(folder, profile), base=copy).apply_(copy)
        assert torch.equal(copy["w"].view(torch.int16), weight.view(torch.int16)), profile

from pulse_kernels.sync import Publisher, Subscriber  # noqa: E402

with tempfile.TemporaryDirectory() as folder, Publisher(folder, {"w": weight}, masters={"w": master}) as publisher:
    publisher.publish()
    subscriber = Subscriber(folder)
    master += 1e-3 * torch.randn(300, 1000)
    assert publisher.publish().kind == "patch"
    assert subscriber.poll().version == 1
    assert torch.equal(subscriber.params["w"].view(torch.int16), weight.view(torch.int16))

doctor = subprocess.run([sys.executable, "-m", "pulse_kernels", "doctor"], capture_output=True, text=True, check=True)
native = any(line.split()[:2] == ["yes", "cpu"] for line in doctor.stdout.splitlines())
assert native == (wanted == "native"), doctor.stdout
cuda = next(line for line in doctor.stdout.splitlines() if line.split()[1:2] == ["cuda"])
if os.environ.get("PULSE_NATIVE") == "0":
    expected = "PULSE_NATIVE=0 is set"
elif not list(Path(pk.__file__).parent.glob("_cuda*.so")):
    expected = "not built"
else:
    expected = "sm_80, sm_90, sm_100, sm_120" if torch.version.cuda else "is a CPU-only build"
assert expected in cuda, cuda
print(f"wheel check passed ({wanted}): {indices.numel()} changes, {pk.__file__}")
