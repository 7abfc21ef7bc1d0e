"""What a version may have at most, given the weights it is for: known before anything of it is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from pulse_kernels.errors import ChainError
from pulse_kernels.sync.manifest import Manifest
from pulse_kernels.sync.receiver import check_names

# Beyond twice the weights: a tensor's line in a header, and what nobody minds.
_HEADER_BYTES = 8 << 10
_FREE_BYTES = 64 << 20


def check_sizes(named: Mapping[str, Tensor], manifests: Iterable[Manifest]) -> None:
    """ChainError where the parts of a version are larger than those of such weights can be.

    named: the weights by name. Raises BaseMismatchError where a version has tensors of other names.
    """
    dense = sum(tensor.nbytes for tensor in named.values())
    most = 2 * dense + len(named) * _HEADER_BYTES + _FREE_BYTES
    for manifest in manifests:
        check_names(named, manifest.tensor_digests)
        for kind, parts in (("anchor", manifest.anchor), ("patch", manifest.patch)):
            if (size := sum(part.bytes for part in parts)) > most:
                raise ChainError(
                    f"version {manifest.version}: the parts of its {kind} have {size} bytes, expected up to {most} "
                    f"for weights of {dense}; nothing of it was fetched. Run `pulse-kernels fsck`"
                )
