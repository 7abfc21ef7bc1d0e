"""Fused kernels for lossless sparse weight synchronisation in RL post-training (PULSE, arXiv 2602.03839)."""

from pulse_kernels import codec as _codec  # noqa: F401  # installs itself behind Patch.to_bytes and its kin
from pulse_kernels.errors import BaseMismatchError, CheckpointError, PatchFormatError, PulseError, VerificationError
from pulse_kernels.ops import (
    apply_patch_,
    apply_patch_many_,
    commit_residual_,
    commit_residual_many_,
    diff_compact,
    diff_compact_many,
    diff_compact_out,
    digest,
    digest_many,
    digest_update,
    digest_update_many,
    exchange_patch_,
    exchange_patch_many_,
    gate_compact,
    gate_compact_many,
    gate_compact_out,
    gate_residual,
    gate_residual_many,
    pack_indices,
    pack_indices_many,
    unpack_indices,
    unpack_indices_many,
    visibility_mask,
    visibility_mask_many,
)
from pulse_kernels.patch import Patch, TensorPatch
from pulse_kernels.state import StateDigest

__version__ = "0.1.0"

__all__ = [
    "BaseMismatchError",
    "CheckpointError",
    "Patch",
    "PatchFormatError",
    "PulseError",
    "StateDigest",
    "TensorPatch",
    "VerificationError",
    "apply_patch_",
    "apply_patch_many_",
    "commit_residual_",
    "commit_residual_many_",
    "diff_compact",
    "diff_compact_many",
    "diff_compact_out",
    "digest",
    "digest_many",
    "digest_update",
    "digest_update_many",
    "exchange_patch_",
    "exchange_patch_many_",
    "gate_compact",
    "gate_compact_many",
    "gate_compact_out",
    "gate_residual",
    "gate_residual_many",
    "pack_indices",
    "pack_indices_many",
    "unpack_indices",
    "unpack_indices_many",
    "visibility_mask",
    "visibility_mask_many",
]
