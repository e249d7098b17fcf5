"""Measures whether memory grows in a long run.

    python benchmarks/soak.py --rounds 2000

The run is SCAFFOLD on digits, on Ray with two workers, with a checkpoint every 20 rounds. The script prints the memory
of the driver and of both workers during the run, and the slopes of straight lines that are fitted to their own memory
(RssAnon) after a warm-up. `ps` and `top` show the resident size, which also counts pages that are shared with other
processes: mapped files (RssFile) and shared memory (RssShmem).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from watch import watch

WARMUP = 0.2
"""Share of the rounds that are left out: clients take part for the first time, and heaps grow."""


def config(rounds: int) -> dict[str, Any]:
    return {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [32]}},
        "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.05}},
        "federation": {"clients": 100, "cohort": 20, "rounds": rounds, "local": {"steps": 2, "batch": 8}},
        "engine": {"workers": 2},
        "evaluate": {"every": 20},
        "checkpoint": {"every": 20},
        "tracking": {"uri": "none"},
    }


def slope(rounds: Sequence[float], memory: Sequence[float]) -> tuple[float, float]:
    """(MiB per 1,000 rounds, its standard error were the residuals independent)."""
    x, y = np.asarray(rounds) / 1000, np.asarray(memory)
    (by, at), *_ = np.linalg.lstsq(np.stack([x, np.ones_like(x)], 1), y, rcond=None)
    left = y - by * x - at
    return float(by), float(np.sqrt((left @ left) / (len(x) - 2) / ((x - x.mean()) @ (x - x.mean()))))


def resident(look: dict[str, float], who: str) -> str:
    """The resident size of the driver, or of both workers together, and its parts."""
    own, files, shared = look[who], look[f"{who}/File"], look[f"{who}/Shmem"]
    whole = own + files + shared
    return f"{who} {whole:.1f} MiB resident, of which own {own:.2f}, files {files:.1f}, shared memory {shared:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=5, help="rounds between measurements of memory")
    parser.add_argument("--folder", help="folder in which the folder of the run is made")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        seen = watch(config(asked.rounds), Path(folder) / "run", asked.every)
    print(f"{len(seen.rows)} rounds in {seen.arrivals[-1]:.0f} s, {len(seen.memory)} looks")
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        look = seen.memory[round(share * (len(seen.memory) - 1))]
        print(f"  round {look['round']:.0f}: {'; '.join(resident(look, who) for who in ('driver', 'workers'))}")
    late = [look for look in seen.memory if look["round"] > WARMUP * asked.rounds]
    for who in ("driver", "workers"):
        by, error = slope([look["round"] for look in late], [look[who] for look in late])
        print(f"{who}: {by:+.2f} MiB per 1,000 rounds (standard error {error:.2f})")


if __name__ == "__main__":
    main()
