"""The table of methods and parts that experiments choose by name. Light: importing it imports no torch.

A plug-in is any module with tables like these (METHODS, RULES, BALLS; WORKLOADS, MODELS, PARTITIONS; TRACKERS). A
value is a callable, or where it is found and one line on what it is.
"""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """A method: where its recipe is; its paper; trees kept per client; trees down and up; gradients per step."""

    build: str
    summary: str
    paper: str
    state: str
    down: str
    up: str
    gradients: str


class Part(NamedTuple):
    build: str
    summary: str


_HERE = "fedfleet.algorithms."

METHODS = {
    "fedavg": Recipe(
        _HERE + "fedavg:fedavg", "local steps of any rule, then the mean", "McMahan et al. 2017", "0", "1", "1", "1"
    ),
    "scaffold": Recipe(
        _HERE + "scaffold:scaffold", "control variates cancel drift", "Karimireddy et al. 2020", "1", "2", "2", "1"
    ),
    "local_sgdm": Recipe(
        _HERE + "local_sgdm:local_sgdm", "momenta are averaged like the models", "Yu et al. 2019", "0", "2", "2", "1"
    ),
    "fedprox": Recipe(
        _HERE + "fedprox:fedprox", "local steps pulled back to the server's model", "Li et al. 2020", "0", "1", "1", "1"
    ),
    "fedavg_m": Recipe(
        _HERE + "cheng:fedavg_m", "local steps along a shared momentum", "Cheng et al. 2024", "0", "2", "1", "1"
    ),
    "fedavg_vr": Recipe(
        _HERE + "cheng:fedavg_vr", "the same, variance-reduced", "Cheng et al. 2024", "0", "3", "1", "2"
    ),
    "scaffold_m": Recipe(
        _HERE + "cheng:scaffold_m", "shared momentum and control variates", "Cheng et al. 2024", "1", "3", "2", "1"
    ),
    "scaffold_vr": Recipe(
        _HERE + "cheng:scaffold_vr", "the same, variance-reduced", "Cheng et al. 2024", "1", "4", "2", "2"
    ),
    "local_muon": Recipe(
        _HERE + "local_muon:local_muon", "Muon on own momenta, averaged", "Takezawa et al. 2025", "1", "1", "1", "1"
    ),
    "fedmuon_bc": Recipe(
        _HERE + "fedmuon_bc:fedmuon_bc", "Muon on corrected momenta", "Takezawa et al. 2025", "1", "2", "2", "1"
    ),
}

RULES = {
    "sgd": Part(_HERE + "rules:Sgd", "y - lr v"),
    "momentum": Part(_HERE + "rules:Momentum", "heavy ball, Nesterov optional"),
    "adam": Part(_HERE + "rules:Adam", "Adam with bias correction"),
    "adamw": Part(_HERE + "rules:adamw", "Adam with decoupled weight decay"),
    "muon": Part(_HERE + "muon:muon", "orthogonalised momentum on matrices, a rule of its own on vectors"),
    "lmo": Part(_HERE + "muon:lmo", "step along a norm's ball: spectral, euclidean or max; no momentum"),
    "normalised": Part(_HERE + "rules:Normalised", "y - lr v / |v|"),
    "clip": Part(_HERE + "rules:Clip", "another rule on v clipped to a radius"),
}

BALLS = {
    "newton_schulz": Part(_HERE + "muon:NewtonSchulz", "0 to 10 iterations, coefficients by scheme"),
    "svd": Part(_HERE + "muon:Svd", "exact"),
    "identity": Part(_HERE + "muon:Identity", "no orthogonalisation"),
}
