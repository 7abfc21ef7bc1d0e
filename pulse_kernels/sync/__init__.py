"""PULSESync: a trainer's weights to its rollout fleet, losslessly, as what changed. docs/pulsesync.md explains it.

publisher.py   the trainer's end           source.py     what changed since the version receivers have
subscriber.py  the rollout's end           receiver.py   weights, and the step to the next version or back
chain.py       versions in a store         manifest.py   what commits a version; signing.py its signature
anchor.py      whole states                merge.py      parts of several ranks
persist.py     a subscriber's state on disk  aux_files.py  config, tokenizer: what goes with anchors
store.py       object stores               reports.py    what each step tells
bounds.py      what a version may have     estimate.py   sizes and times before a run
group.py       without a store: both ends over a process group; agreement.py what its ranks tell each other
sharded.py     the trainer's end where its state lies on many ranks; sharding.py boxes of tensors, sharded_anchor.py
metrics.py     for Prometheus              metrics_server.py over HTTP
"""

from pulse_kernels.sync.chain import Chain
from pulse_kernels.sync.estimate import Estimate, estimate
from pulse_kernels.sync.group import GroupPublisher, GroupSubscriber
from pulse_kernels.sync.metrics import Metrics
from pulse_kernels.sync.publisher import Publisher
from pulse_kernels.sync.reports import ApplyReport, PublishReport, StageReport
from pulse_kernels.sync.sharded import ShardedPublisher
from pulse_kernels.sync.sharding import Shard
from pulse_kernels.sync.store import Store, open_store
from pulse_kernels.sync.subscriber import Subscriber

__all__ = [
    "ApplyReport",
    "Chain",
    "Estimate",
    "GroupPublisher",
    "GroupSubscriber",
    "Metrics",
    "PublishReport",
    "Publisher",
    "Shard",
    "ShardedPublisher",
    "StageReport",
    "Store",
    "Subscriber",
    "estimate",
    "open_store",
]
