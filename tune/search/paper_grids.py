"""The tuning grids of the papers, by method, which `fedfleet search FILE --paper-grid` searches.

    fedmuon_bc   Takezawa et al. 2025, table 1
    fedmuon_ma   Zhang, Gao 2025 (FedMuon), section 5; the paper gives no grids for its baselines
    feddua       Takakura et al. 2025, appendix G.3, image classification; feddua_text: Shakespeare; feddua_synthetic:
                 linear regression, where epsilon is 0 (1e-9 elsewhere)
    fedmud       Li et al. 2025, section 5.1
    minimax      Zhang, Gao 2025 (minimax), section 5: [1e-3, 1e-1]; we choose the points in it and
                 use it for all methods
    fedopt       Reddi et al. 2021, appendix D: half-decades, whose ends are taken from secondary sources

Half-decades are rounded as FedDuA prints them, 10^-1.5 = 0.0316…. Keys are arguments of the method.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...engine.config.yaml_text import own
from ...engine.errors import ConfigError, nearest


class PaperGrid(NamedTuple):
    """A grid of one paper for one method. `values`: dotted argument -> its values; `rule`: the local rule if the
    experiment names none; `workloads`: those it is meant for, () for any."""

    values: dict[str, tuple[Any, ...]]
    rule: str = ""
    workloads: tuple[str, ...] = ()


def decades(low: float, high: float) -> tuple[float, ...]:
    """From 10^low to 10^high in half-decades."""
    return tuple(float(f"{10 ** (low + i / 2):.4g}") for i in range(int(2 * (high - low)) + 1))


IMAGES = ("cifar10", "cifar100", "femnist", "tiny_imagenet", "fashion_mnist", "mnist", "svhn")
TABLE_1 = (0.1, 0.01, 0.001)
MUON = {"matrix_lr": (0.001, 0.0001), "vector_lr": (0.1, 0.01)}


def feddua(server: str, images: Any, text: Any, synthetic: Any, **fixed: tuple[float, float]) -> dict[str, PaperGrid]:
    """The grids of appendix G.3 for one method. server: the argument of its server rule; images, text, synthetic: its
    values in the three kinds of tasks; fixed: further arguments, (value for the first two, value for the third)."""
    kinds = {
        "feddua": (decades(-2, 0), images, 0, IMAGES),
        "feddua_text": (decades(-2, 0), text, 0, ("shakespeare",)),
        "feddua_synthetic": (decades(-3, -1), synthetic, 1, ("linear",)),
    }
    return {
        paper: PaperGrid({"rule.lr": local, server: values, **{k: (v[i],) for k, v in fixed.items()}}, "sgd", workloads)
        for paper, (local, values, i, workloads) in kinds.items()
        if values
    }


SERVER = decades(-1, 1)
MUD = {"rule.lr": (1.0, 0.3, 0.1, 0.03, 0.01)}
DRAWN = {**MUD, "a": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)}
MINIMAX = ["local_sgda", "local_sgdam", "fed_sgda_m", "sagda", "fess_gda", "fed_nsgda_m", "fedmuon_da", "fed_sgda_clip"]
COMPRESSED = {
    **{name: MUD for name in ("fedhm", "ef21_p", "fedbat")},
    **{name: DRAWN for name in ("fedlmt", "fedpara", "fedmud", "fedmud_bkd", "fedmud_aad", "fedmud_bkd_aad")},
    **{name: DRAWN for name in ("fedmud_f", "fedmud_bkd_f")},
}
TAU = {"tau": decades(-5, -1)}

GRIDS: dict[str, dict[str, PaperGrid]] = {
    "fedavg": {
        "fedmuon_bc": PaperGrid({"rule.lr": TABLE_1}, "momentum"),
        **feddua("server_lr", SERVER, SERVER, SERVER),
        "fedmud": PaperGrid(MUD, "sgd"),
    },
    "scaffold": {
        "fedmuon_bc": PaperGrid({"rule.lr": TABLE_1}, "momentum"),
        **feddua("server_lr", SERVER, SERVER, None),
    },
    "local_muon": {"fedmuon_bc": PaperGrid(MUON)},
    "fedmuon_bc": {"fedmuon_bc": PaperGrid(MUON)},
    "fedmuon_ma": {
        "fedmuon_ma": PaperGrid(
            {"matrix_lr": (0.001, 0.002, 0.005, 0.01, 0.05), "weight_decay": (1e-4, 0.001, 0.01, 0.05, 0.1, 0.2)}
        )
    },
    "fedprox": {"feddua": PaperGrid({"mu": (0.001, 0.01, 0.1, 1.0), "rule.lr": decades(-2, 0)}, "sgd", IMAGES)},
    "fedavgm": feddua("server_lr", SERVER, SERVER, SERVER),
    "fedexp": feddua("epsilon", decades(-4, -2), decades(-1, 1), (0.0,)),
    "fedexp_m": feddua("epsilon", decades(-4, -2), decades(-1, 1), (0.0,)),
    "fedadagrad": {
        **feddua("server_lr", decades(-4, -2), decades(-3, -1), decades(-2, 0), tau=(1e-9, 0.0), v_init=(0.0, 0.0)),
        "fedopt": PaperGrid({"rule.lr": decades(-3, 0.5), "server_lr": decades(-3, 1), **TAU}, "sgd"),
    },
    "fedadam": {
        **feddua("server_lr", decades(-4, -2), decades(-3, -1), decades(-2, 0), tau=(1e-9, 0.0), v_init=(0.0, 0.0)),
        "fedopt": PaperGrid({"rule.lr": decades(-3, 0.5), "server_lr": decades(-3, 1), **TAU}, "sgd"),
    },
    "fedyogi": {"fedopt": PaperGrid({"rule.lr": decades(-3, 0.5), "server_lr": decades(-3, 1), **TAU}, "sgd")},
    "feddu_adagrad": feddua("epsilon_g", decades(-3, -1), decades(-3, -1), (0.0,), epsilon=(1e-9, 0.0)),
    "feddu_adam": feddua("epsilon_g", decades(-3, -1), decades(-3, -1), (0.0,), epsilon=(1e-9, 0.0)),
    **{name: {"minimax": PaperGrid({"lr": (0.001, 0.003, 0.01, 0.03, 0.1)})} for name in MINIMAX},
    **{name: {"fedmud": PaperGrid(values, "sgd")} for name, values in COMPRESSED.items()},
}


def choose(method: str, workload: str, paper: str = "auto") -> PaperGrid:
    """The grid for a method: that of the named paper, else the first one for the workload, else the first one.

    Raises ConfigError if there is none.
    """
    if method not in GRIDS:
        raise ConfigError(f"--paper-grid: no paper gives a grid for {method}; {nearest(method, GRIDS)}")
    known = GRIDS[method]
    if paper != "auto":
        if paper not in known:
            raise ConfigError(f"--paper-grid: {paper} has no grid for {method}; {nearest(paper, known)}")
        return known[paper]
    meant = [grid for grid in known.values() if workload in grid.workloads]
    return (meant or list(known.values()))[0]


def with_grid(data: dict[str, Any], paper: str = "auto") -> dict[str, Any]:
    """The experiment with a paper's grid for its method, which replaces the file's values of these arguments."""
    made = own(data)
    method, workload = (part_of(made.get(key), key) for key in ("method", "workload"))
    grid = choose(method["name"], workload["name"], paper)
    if grid.rule and not isinstance(method.get("rule"), dict):
        method["rule"] = {"name": method.get("rule") or grid.rule}
    for key, values in grid.values.items():
        *outer, last = key.split(".")
        place = method
        for name in outer:
            place = place[name]
        place[last] = {"search": "grid", "values": list(values)}
    made["method"] = method
    return made


def part_of(spec: Any, key: str) -> dict[str, Any]:
    """A part of the experiment as a mapping with a name; ConfigError if it has none."""
    named = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise ConfigError(f"{key} needs a name, so that the paper's grid can be found, got {spec!r}; write {{name: …}}")
    return named
