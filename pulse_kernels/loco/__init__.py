"""PULSELoCo: trainers that train apart, and exchange what BF16 can see (arXiv 2602.03839); docs/pulseloco.md.

loco.py        PulseLoCo: counts steps, runs rounds
fragment.py    global weights, residual, outer optimizer; gate and commit
exchange.py    the collectives of a round      wire.py      entries as bytes
tensors.py     which tensors, in which buckets  membership.py  ranks that join, leave, or were left behind
checkpoint.py  states on disk                   reports.py   what a round tells
optimizers.py  an outer optimizer's state as facts and tensors
"""

from pulse_kernels.loco.loco import PulseLoCo
from pulse_kernels.loco.reports import SyncReport

__all__ = ["PulseLoCo", "SyncReport"]
