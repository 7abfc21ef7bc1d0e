"""PULSESync: a trainer's weights to its rollout fleet, losslessly, as what changed. docs/pulsesync.md explains it.

publisher.py   the trainer's end           source.py     what changed since the version receivers have
subscriber.py  the rollout's end           receiver.py   weights, and the step to the next version or back
chain.py       versions in a store         manifest.py   what commits a version; signing.py its signature
anchor.py      whole states                merge.py      parts of several ranks
persist.py     a subscriber's state on disk  aux_files.py  config, tokenizer: what goes with anchors
bounds.py      what a version may have      reports.py    what each step tells
store.py       object stores
"""

from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.publisher import Publisher
from pulse_kernels.sync.reports import ApplyReport, PublishReport, StageReport
from pulse_kernels.sync.store import Store, open_store
from pulse_kernels.sync.subscriber import Subscriber

__all__ = [
    "ApplyReport",
    "Chain",
    "PublishReport",
    "Publisher",
    "StageReport",
    "Store",
    "Subscriber",
    "open_store",
]
