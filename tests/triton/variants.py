"""Every kernel of the Triton back end in every form, compiled for an architecture: ``variants.py 90`` prints JSON.

Name of each variant -> its resources (REG, STACK, LOCAL, SHARED) and the global loads in its PTX. No GPU is needed.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton_code import Variant, compiled, resources, triton_back_end, variant

import pulse_kernels as pk
from pulse_kernels import backends
from pulse_kernels.backends.triton import compaction

SIZES = (torch.int8, torch.bfloat16, torch.float32, torch.float64)
VIEWS = (torch.bfloat16, torch.float16)


def every_form() -> None:
    """Call each operator with each dtype it has kernels for, a lone tensor and several in one launch."""
    index = torch.arange(4, dtype=torch.int32)
    for both in (1, 2):
        floats = [torch.zeros(16) for _ in range(both)]
        for view in VIEWS:
            weights = [torch.zeros(16, dtype=view) for _ in range(both)]
            pk.visibility_mask_many(floats, weights)
            pk.gate_compact_many(floats, weights)
            pk.gate_compact_many(floats, weights, update=True, return_old=True, index_dtype=torch.int64)
            pk.gate_residual_many(floats, [x.clone() for x in floats], [x.clone() for x in floats], view=view)
        pk.commit_residual_many_(*([x.clone() for x in floats] for _ in range(3)), [index.clone() for _ in range(both)])
        for dtype in SIZES:
            tensors = [torch.zeros(16, dtype=dtype) for _ in range(both)]
            pk.diff_compact_many(tensors, [x.clone() for x in tensors], update=True, return_old=True)
            pk.digest_many(tensors, [1, 2][:both])
            # What takes O(changed) differs by the table's few loads only: one form each of the lone one, int32.
            index_dtypes = [torch.int64] if both == 2 else [torch.int32] if dtype is torch.bfloat16 else []
            for index_dtype in index_dtypes:
                indices, values = [index.to(index_dtype)] * both, [x[:4] for x in tensors]
                pk.apply_patch_many_([x.clone() for x in tensors], [i.clone() for i in indices], values)
                pk.exchange_patch_many_([x.clone() for x in tensors], [i.clone() for i in indices], values)
                digests = [torch.zeros(2, dtype=torch.int64)] * both
                pk.digest_update_many(digests, indices, values, values, [1, 2][:both])
                backends.for_device("cpu").gather(tensors[0], indices[0])


def all_variants() -> list[Variant]:
    found: dict[Variant, None] = {}

    def record(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], num_warps: int) -> None:
        found[variant(kernel, arguments, constants, num_warps)] = None
        if kernel is compaction.mark:
            arguments[-1].fill_(1)  # a change a tile, so that the second pass is launched

    with triton_back_end(record):
        every_form()
    return list(found)


def main(architecture: int) -> None:
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for item in all_variants():
            kernel = compiled(item, architecture)
            loads = collections.Counter(re.findall(r"ld\.global[\w.:]*", kernel.asm["ptx"]))
            assert item.name not in report, item.name
            report[item.name] = {**resources(kernel, Path(folder)), "warps": item.num_warps, "loads": loads}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
