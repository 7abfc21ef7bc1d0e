"""Hugging Face safetensors checkpoints, files and folders: read, written and replaced tensor by tensor.

layout.py    what a checkpoint is made of, and its header and index as bytes
validate.py  what is refused in a layout, an index, a header
folder.py    which files of a folder are the checkpoint
reader.py    Checkpoint: slices of tensors, without mapping files
writer.py    CheckpointWriter: a new checkpoint, whole or not at all
replace.py   replace_in_place: an old one exchanged for a new one, whole at every moment
files.py     durable file operations, locks, temporary names
"""

from .layout import FileLayout, Layout, TensorInfo, TensorSpec
from .reader import Checkpoint
from .replace import recover, replace_in_place
from .state import CheckpointState, Interrupted, checkpoint_state
from .validate import validate_layout
from .writer import CheckpointWriter, TensorSink, TensorWriter

__all__ = [
    "Checkpoint",
    "CheckpointState",
    "CheckpointWriter",
    "FileLayout",
    "Interrupted",
    "Layout",
    "TensorInfo",
    "TensorSink",
    "TensorSpec",
    "TensorWriter",
    "checkpoint_state",
    "recover",
    "replace_in_place",
    "validate_layout",
]
