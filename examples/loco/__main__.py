"""Run the experiment; write its results, plots and table.

python -m examples.loco --doc docs/pulseloco.md             # `make loco`, 10 to 15 minutes on 2 cores
python -m examples.loco --steps 16 --seeds 0 --out build/loco
python -m examples.loco --from docs/loco/results.json       # plots and tables of results that are there
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from examples.loco.plots import save_plots
from examples.loco.runs import experiment
from examples.loco.settings import Results, Settings
from examples.loco.tables import put_tables
from pulse_kernels.errors import PulseError

RESULTS = "results.json"


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/loco"), help="folder of results.json and the plots")
    parser.add_argument("--doc", type=Path, help="write the tables between the marks of this Markdown file")
    parser.add_argument("--from", type=Path, dest="earlier", help="results to plot and tabulate, in place of a run")
    for name in ("steps", "window", "workers", "prompts", "samples", "held_out"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--seeds", type=int, nargs="+", default=default.seeds)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--other-rates", type=float, nargs="*", default=default.other_rates)
    given = vars(parser.parse_args())
    out, doc, earlier = given.pop("out"), given.pop("doc"), given.pop("earlier")
    try:
        if earlier is not None:
            results = Results.from_dict(json.loads(earlier.read_text()))
        else:
            given |= {name: tuple(given[name]) for name in ("seeds", "other_rates")}
            results = experiment(Settings(**given), lambda line: print(line, flush=True))
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULTS).write_text(json.dumps(results.to_dict()) + "\n")
        save_plots(results, out)
        if doc is not None:
            put_tables(results, doc)
    except (PulseError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {RESULTS} and plots; {results.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
