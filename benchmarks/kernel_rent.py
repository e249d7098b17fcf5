"""Measures what each kind of kernels earns: clients per second with it and without it.

    python benchmarks/kernel_rent.py [w1 w2 … w8] [--methods fedavg fedmuon_bc] [--passes 3]

The works are those of `fedfleet bench`. Every kind that a run can have, and that is proven on its data, is measured as
an execution plan is, in each of its blocks. A figure is the most clients per second of one worker, over blocks and over
passes in which the kinds take turns. The rent of a kind is the figure of the fastest one of all, divided by that of the
fastest one of the others: 1 for a kind that is not the fastest.
"""

from __future__ import annotations

import argparse

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.planning import autotune
from fedfleet.engine.planning.execution_plan import all_kernels, candidates, disproof, why_not
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.bench import works
from fedfleet.tune.bench.measure import METHODS


def run_of(work: str, method: str) -> RunSpec:
    made = experiment(
        {
            "plugins": [works.__name__],
            "workload": work,
            "method": METHODS.get(method, method),
            "federation": {**works.FEDERATIONS[work], "rounds": 1},
            "engine": {"backend": "local", "workers": 1},
            "tracking": {"uri": "none"},
        }
    )
    return RunSpec.of("rent", made)


def figures(run_spec: RunSpec, passes: int) -> dict[str, float]:
    """Clients per second by the name of kernels, torch's first."""
    split, engine = run_spec.split(), run_spec.experiment.engine
    kinds = [
        str(kernels)
        for kernels in all_kernels(run_spec)
        if kernels.is_promising(run_spec) and not why_not(run_spec, kernels)
        if disproof(run_spec, split, kernels) is None
    ]
    found = dict.fromkeys(kinds, 0.0)
    for _ in range(passes):
        for name in kinds:
            asked = run_spec.with_engine(engine.model_copy(update={"kernels": name}))
            seconds = autotune.measure(asked, split, candidates(asked, split))
            found[name] = max([found[name], *(1 / each for each in seconds.values())])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("works", nargs="*", default=list(works.FEDERATIONS))
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--passes", type=int, default=3)
    asked = parser.parse_args()
    print("| work | method | kernels | clients/s | rent |\n| --- | --- | --- | ---: | ---: |")
    for work in asked.works:
        for method in asked.methods:
            found = figures(run_of(work, method), asked.passes)
            for name, figure in found.items():
                others = max((other for each, other in found.items() if each != name), default=figure)
                rent = max(figure / others, 1.0)
                print(f"| {work} | {method} | {name} | {figure:.1f} | {rent:.2f} |", flush=True)


if __name__ == "__main__":
    main()
