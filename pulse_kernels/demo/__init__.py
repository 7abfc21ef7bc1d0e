"""The live demo: GRPO on arithmetic, with rollout processes that follow the trainer through a store alone.

`task` what is learnt, `model` the policy, `grpo` the algorithm; `trainer` and `rollout` the two kinds of process,
`messages` what passes between them, `processes` how they start and end; `run` puts it together, with `table`, `report`
and `chart` to look at.
"""

from __future__ import annotations

from pulse_kernels.demo.report import DemoReport
from pulse_kernels.demo.run import run_demo

__all__ = ["DemoReport", "run_demo"]
