"""The table of methods and parts that experiments choose by name. Light: importing it imports no torch.

A plug-in is any module with tables like these (METHODS, RULES, BALLS, COMPRESSIONS; WORKLOADS, MODELS, PARTITIONS;
TRACKERS). A value is a callable, or where it is found and one line on what it is.
"""

from __future__ import annotations

from typing import NamedTuple

from ..workloads.entry import Entry


class Recipe(NamedTuple):
    """A method: where its recipe is; its paper; trees kept per client; trees down and up; gradients per step. "ratio":
    the method's argument, a share of a tree; places: of entries, packed."""

    build: str
    summary: str
    paper: str
    state: str
    down: str
    up: str
    gradients: str


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
        _HERE + "cheng:fedavg_m", "steps along a shared momentum", "Cheng et al. 2024", "0", "2", "1 + scalar", "1"
    ),
    "fedavg_vr": Recipe(
        _HERE + "cheng:fedavg_vr", "FedAvg-M, variance-reduced", "Cheng et al. 2024", "0", "3", "1 + scalar", "2"
    ),
    "scaffold_m": Recipe(
        _HERE + "cheng:scaffold_m", "momentum and control variates", "Cheng et al. 2024", "1", "2", "2 + scalar", "1"
    ),
    "scaffold_vr": Recipe(
        _HERE + "cheng:scaffold_vr", "SCAFFOLD-M, variance-reduced", "Cheng et al. 2024", "1", "3", "2 + scalar", "2"
    ),
    "padamfed": Recipe(
        _HERE + "padamfed:padamfed", "SCAFFOLD-M, sizes from S, K, R", "Yan et al. 2025", "1", "2", "2 + scalar", "1"
    ),
    "padamfed_vr": Recipe(
        _HERE + "padamfed:padamfed_vr", "PAdaMFed, variance-reduced", "Yan et al. 2025", "1", "3", "3 + scalar", "2"
    ),
    "stem": Recipe(
        _HERE + "stem:stem", "STORM, averaged", "Khanduri et al. 2021", "1 + scalar", "2 + scalar", "2", "2"
    ),
    "fafed": Recipe(
        _HERE + "fafed:fafed", "STEM, preconditioned like Adam", "Wu et al. 2023", "1 + scalar", "3 + scalar", "3", "2"
    ),
    "local_muon": Recipe(
        _HERE + "local_muon:local_muon", "Muon on own momenta, averaged", "Takezawa et al. 2025", "1", "1", "1", "1"
    ),
    "fedmuon_bc": Recipe(
        _HERE + "fedmuon_bc:fedmuon_bc", "Muon on corrected momenta", "Takezawa et al. 2025", "1", "2", "2", "1"
    ),
    "fedavgm": Recipe(_HERE + "fedavgm:fedavgm", "server momentum on the mean", "Hsu et al. 2019", "0", "1", "1", "1"),
    "fedadagrad": Recipe(_HERE + "fedopt:fedadagrad", "Adagrad on the server", "Reddi et al. 2021", "0", "1", "1", "1"),
    "fedadam": Recipe(_HERE + "fedopt:fedadam", "Adam on the server", "Reddi et al. 2021", "0", "1", "1", "1"),
    "fedyogi": Recipe(_HERE + "fedopt:fedyogi", "Yogi on the server", "Reddi et al. 2021", "0", "1", "1", "1"),
    "fedexp": Recipe(
        _HERE + "fedexp:fedexp", "the server extrapolates", "Jhunjhunwala et al. 2023", "0", "1", "1 + scalar", "1"
    ),
    "fedexp_m": Recipe(
        _HERE + "fedexp:fedexp_m", "with momentum", "Jhunjhunwala et al. 2023", "0", "1", "1 + scalar", "1"
    ),
    "feddu_adagrad": Recipe(
        _HERE + "feddua:feddu_adagrad", "adaptive metric and step", "Takakura et al. 2025", "0", "1", "1 + scalar", "1"
    ),
    "feddu_adam": Recipe(
        _HERE + "feddua:feddu_adam", "the same with momentum", "Takakura et al. 2025", "0", "1", "1 + scalar", "1"
    ),
    "avg_biclip": Recipe(
        _HERE + "tailopt:avg_biclip", "BiClip steps, then the mean", "Lee et al. 2025", "0", "1", "1", "1"
    ),
    "adagrad_biclip": Recipe(
        _HERE + "tailopt:adagrad_biclip", "BiClip steps, Adagrad outside", "Lee et al. 2025", "0", "1", "1", "1"
    ),
    "rmsprop_biclip": Recipe(
        _HERE + "tailopt:rmsprop_biclip", "BiClip steps, RMSProp outside", "Lee et al. 2025", "0", "1", "1", "1"
    ),
    "adam_biclip": Recipe(
        _HERE + "tailopt:adam_biclip", "BiClip steps, Adam outside", "Lee et al. 2025", "0", "1", "1", "1"
    ),
    "bi2clip": Recipe(_HERE + "tailopt:bi2clip", "BiClip inside and outside", "Lee et al. 2025", "0", "1", "1", "1"),
    "diloco": Recipe(
        _HERE + "diloco:diloco", "own AdamW inside, Nesterov outside", "Douillard et al. 2023", "2", "1", "1", "1"
    ),
    "muloco": Recipe(
        _HERE + "diloco:muloco", "own Muon inside, Nesterov outside", "Therien et al. 2025", "1 to 2", "1", "1", "1"
    ),
    "fedmuon_ma": Recipe(
        _HERE + "fedmuon_ma:fedmuon_ma", "Muon, momenta averaged too", "Zhang, Gao 2025", "0", "2 + scalar", "2", "1"
    ),
    "local_sgda": Recipe(
        _HERE + "local_sgda:local_sgda",
        "min-max: local descent-ascent, then the mean",
        "Deng, Mahdavi 2021",
        "0",
        "1",
        "1",
        "1",
    ),
    "local_sgdam": Recipe(
        _HERE + "local_sgdam:local_sgdam",
        "min-max: with averaged momenta",
        "Sharma et al. 2022",
        "0",
        "2 + scalar",
        "2",
        "1",
    ),
    "fed_sgda_m": Recipe(
        _HERE + "fed_sgda_m:fed_sgda_m", "min-max: with STORM, averaged", "Wu et al. 2023", "0", "2 + scalar", "2", "2"
    ),
    "sagda": Recipe(_HERE + "sagda:sagda", "min-max: with control variates", "Yang et al. 2022", "1", "2", "2", "1"),
    "fess_gda": Recipe(
        _HERE + "fess_gda:fess_gda", "min-max: the server smooths the primal", "Shen et al. 2024", "0", "1", "1", "1"
    ),
    "fed_nsgda_m": Recipe(
        _HERE + "fed_nsgda_m:fed_nsgda_m",
        "min-max: normalised, momentum and controls",
        "Zhang, Gao 2025",
        "1",
        "2",
        "2",
        "1",
    ),
    "fedmuon_da": Recipe(
        _HERE + "fedmuon_da:fedmuon_da", "min-max: the same with Muon's steps", "Zhang, Gao 2025", "1", "2", "2", "1"
    ),
    "fed_sgda_clip": Recipe(
        _HERE + "fed_sgda_clip:fed_sgda_clip",
        "min-max: the same with clipped steps",
        "Zhang, Gao 2025",
        "1",
        "2",
        "2",
        "1",
    ),
    "fedmud": Recipe(
        _HERE + "fedmud:fedmud", "low-rank updates, folded in", "Li et al. 2025", "1", "ratio + scalar", "ratio", "1"
    ),
    "fedmud_bkd": Recipe(
        _HERE + "fedmud:fedmud_bkd", "Kronecker blocks", "Li et al. 2025", "1", "ratio + scalar", "ratio", "1"
    ),
    "fedmud_aad": Recipe(
        _HERE + "fedmud:fedmud_aad", "averages exactly", "Li et al. 2025", "1", "ratio + scalar", "ratio", "1"
    ),
    "fedmud_bkd_aad": Recipe(
        _HERE + "fedmud:fedmud_bkd_aad", "blocks, exactly", "Li et al. 2025", "1", "ratio + scalar", "ratio", "1"
    ),
    "fedmud_f": Recipe(
        _HERE + "fedmud:fedmud_f", "one factor frozen", "Li et al. 2025", "1", "ratio + scalar", "ratio", "1"
    ),
    "fedmud_bkd_f": Recipe(
        _HERE + "fedmud:fedmud_bkd_f",
        "blocks, one factor frozen",
        "Li et al. 2025",
        "1",
        "ratio + scalar",
        "ratio",
        "1",
    ),
    "fedhm": Recipe(
        _HERE + "fedhm:fedhm", "truncated decompositions down", "Yao et al. 2021", "0", "ratio", "ratio", "1"
    ),
    "fedlmt": Recipe(
        _HERE + "fedlmt:fedlmt", "weights are low-rank products", "Liu et al. 2024", "0", "ratio", "ratio", "1"
    ),
    "fedpara": Recipe(
        _HERE + "fedpara:fedpara", "entrywise low-rank", "Hyeon-Woo et al. 2022", "0", "ratio", "ratio", "1"
    ),
    "ef21_p": Recipe(
        _HERE + "ef21_p:ef21_p",
        "random entries up, largest down",
        "Gruntkowska et al. 2023",
        "1",
        "ratio + places",
        "ratio + scalar",
        "1",
    ),
    "fedbat": Recipe(_HERE + "fedbat:fedbat", "one bit a weight up", "Li et al. 2024", "0", "1", "1/32 + scalars", "1"),
}

RULES = {
    "sgd": Entry(_HERE + "parts.rules:Sgd", "y - lr v"),
    "momentum": Entry(_HERE + "parts.rules:Momentum", "heavy ball, Nesterov optional"),
    "adam": Entry(_HERE + "parts.rules:Adam", "Adam with bias correction"),
    "adamw": Entry(_HERE + "parts.rules:adamw", "Adam with decoupled weight decay"),
    "muon": Entry(_HERE + "parts.muon:muon", "orthogonalised momentum on matrices, a rule of its own on vectors"),
    "lmo": Entry(_HERE + "parts.muon:lmo", "step along a norm's ball: spectral, euclidean or max; no momentum"),
    "normalised": Entry(_HERE + "parts.rules:Normalised", "y - lr v / |v|"),
    "clip": Entry(_HERE + "parts.rules:Clip", "another rule on v clipped to a radius"),
    "biclip": Entry(_HERE + "parts.biclip:BiClip", "v with magnitudes kept between two thresholds"),
    "muon_adamw": Entry(_HERE + "parts.muon_adamw:muon_adamw", "Muon on hidden matrices, AdamW on the rest"),
}

COMPRESSIONS = {
    "updates": Entry(_HERE + "parts.compression:updates", "factored changes of frozen weights, as in FedMUD"),
    "factors": Entry(_HERE + "parts.compression:factors", "weights that are low-rank products, as in FedLMT"),
    "hadamard": Entry(
        _HERE + "parts.compression:hadamard", "weights that are entrywise low-rank products, as in FedPara"
    ),
    "decomposition": Entry(_HERE + "fedhm:Decomposition", "truncated decompositions of weights, as in FedHM"),
    "sparsification": Entry(_HERE + "ef21_p:Sparsification", "some entries each way, as in EF21-P"),
    "binarisation": Entry(_HERE + "fedbat:Binarisation", "one bit a weight, scales learned, as in FedBAT"),
}

BALLS = {
    "newton_schulz": Entry(_HERE + "parts.muon:NewtonSchulz", "0 to 10 iterations, coefficients by scheme"),
    "svd": Entry(_HERE + "parts.muon:Svd", "exact"),
    "identity": Entry(_HERE + "parts.muon:Identity", "no orthogonalisation"),
}
