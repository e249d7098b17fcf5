"""Pages of the parts that experiments choose by name: workloads, models, partitions, rules, compressions, codecs, …."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedfleet.engine.config.registry import Registry, resolve, signature, summary

from .annotations import in_words
from .methods import citation, equations_of, prose, sentences, shown
from .text import meanings, sentence, table

PAGES = {
    "workloads": ("Workloads and data sets", "WORKLOADS", "workload: {name: digits, model: mlp}"),
    "models": ("Models", "MODELS", "workload: {name: fashion_mnist, model: {name: cnn4, norm: group}}"),
    "partitions": (
        "Partitions: non-IID data",
        "PARTITIONS",
        "workload: {name: digits, partition: {name: dirichlet, beta: 0.1}}",
    ),
    "rules": (
        "Local rules and their step sizes (learning rates)",
        "RULES",
        "method: {name: fedavg, rule: {name: momentum, lr: 0.05}}",
    ),
    "balls": ("Orthogonalisations", "BALLS", "method: {name: fedmuon_bc, ball: {name: newton_schulz, iterations: 3}}"),
    "compressions": ("Compressions", "COMPRESSIONS", "method: {name: fedavg, compression: {name: sparsification}}"),
    "codecs": (
        "Codecs",
        "CODECS",
        "method: {name: diloco, compression: {name: coded, codec: {name: sparse, bits: 2}}}",
    ),
    "aggregators": ("Rules of aggregation", "AGGREGATORS", "aggregate: {name: multi_krum, f: 4, before: [nnm]}"),
    "preaggregators": (
        "Rules before the aggregation",
        "PREAGGREGATORS",
        "aggregate: {name: median, before: [bucketing]}",
    ),
    "mechanisms": ("Mechanisms of noise", "MECHANISMS", "privacy: {clip: 0.5, mechanism: {name: banded, bands: 8}}"),
    "samplers": ("Samplers", "SAMPLERS", "federation: {sampler: {name: power_of_choice, d: 40}}"),
    "devices": ("Devices", "DEVICES", "systems: {devices: {name: lognormal, compute: 80, sigma: 0.8}}"),
    "distributions": (
        "Distributions of speeds",
        "DISTRIBUTIONS",
        "systems: {devices: {name: drawn, compute: {name: zipf, a: 1.5, most: 100}}}",
    ),
    "availabilities": (
        "Availability of clients",
        "AVAILABILITIES",
        "systems: {availability: {name: sessions, length: 3600, pause: 7200, spread: 0.5}}",
    ),
    "local_work": ("Partial work", "LOCAL_WORK", "systems: {work: {name: uniform, p: 0.5}}"),
    "attacks": ("Attacks", "ATTACKS", "attack: {name: alie, share: 0.2, z: max}"),
}
"""Page -> its title, the table of the registry, and an example."""

ARGUMENTS = {
    "model": "the [network](models.md)",
    "partition": "the [rule that assigns rows to clients](partitions.md)",
    "lr": "the step size",
    "mu": "the weight of the old momentum",
    "nesterov": "whether the step is Nesterov's",
    "betas": "the weights of the old first and second moment",
    "eps": "the number that is added to a denominator",
    "weight_decay": "the factor of decoupled weight decay",
    "decay_on": "the tensors that decay: `all`, or those with two axes or more (`matrices`), embeddings included",
    "no_decay": "names, `*` and `?` as in file names, of tensors that do not decay, with `decay_on: matrices`",
    "matrix_lr": "the step size of matrices",
    "vector_lr": "the step size of everything that is not a matrix, or a rule for it",
    "rule": "the rule that is wrapped",
    "radius": "the largest norm of a direction",
    "rest": "the rule for everything that is not a hidden matrix",
    "ball": "how matrices are [orthogonalised](balls.md); five classic Newton-Schulz iterations unless given",
    "scale": "the factor of a matrix's step by its shape: `none`, `jordan`, `moonlight` or `spectral`",
    "aux": "names, `*` and `?` as in file names, of matrices that the vectors' rule is for: embeddings, an output head",
    "over": "whose norm is taken: that of all parameters of a `group`, or that of each `tensor`",
    "iterations": "the number of iterations, 0 to 10",
    "scheme": "the coefficients of the iterations: `classic`, `jordan` or `you`",
    "dtype": "the type in which the iterations are computed: `same` as the parameters, or `bfloat16`",
    "form": "which factors are trained: a pair, a pair beside random ones that stay fixed, or one factor alone",
    "product": "how two factors become a matrix: as a low-rank product, or as blocks of Kronecker products",
    "up": "which entries are sent up; `identity` sends all of them",
    "down": "which entries are sent down; `identity` sends all of them",
    "augment": "the random changes of training images: `crop`, `flip`",
    "norm": "the normalisation layers, `batch` or `group`",
    "groups": "the number of groups of GroupNorm",
    "hidden": "the number of units of a hidden layer",
    "layers": "the number of layers",
    "pool": "what the head sees, the `last` output or the `max` over time",
    "dropout": "the rate of dropout",
    "head": "the width of one head of attention",
    "rows": "the number of training rows of each client",
    "dim": "the number of unknowns, or of inputs",
    "heterogeneity": "how far the solutions of clients are apart",
    "condition": "the ratio of the largest and the smallest eigenvalue of each client",
    "coupling": "the factor of the term that couples primal and dual",
    "copies": "the number of rows of each tensor; with more than one the problem is Polyak-Lojasiewicz",
    "length": "the number of tokens of an input; longer texts are cut",
    "vocabulary": "the number of different tokens",
    "embedding": "the width of the word vectors",
    "beta": "the parameter of the Dirichlet distribution; the smaller it is, the more clients differ",
    "per_client": "the number of shards or labels of each client",
    "f": "the number of Byzantine messages to tolerate; `expected` or `known` where there is an attack",
    "before": "[pre-aggregations](preaggregators.md), in order",
    "vectors": "whether the rule runs on `each` vector of a message, on one for all (`joint`), or on all `joined`",
    "share": "the share of the clients that are Byzantine",
    "clients": "the numbers of the clients that are Byzantine, instead of a share",
    "knows": "whether the attackers see the `honest` messages of the round or only their `own`",
    "unit": "what `compute` is measured for: the `forward` pass of an example, an `example`, a `step`, or a `visit`",
    "bits": "the bits of each number",
    "per": "the numbers of a group that has floats of its own; all of a tensor are one group unless given",
    "to": "the type",
    "density": "the share of the numbers of a chunk that is sent",
    "size": "the numbers of a chunk",
    "ratio": "the share of the numbers of a tensor that is sent",
    "rounds": "the first and the last round of the attack, as `10-20`; all rounds unless given",
}
"""What an argument means where the docstring of a part does not say it."""

RECIPES = {
    "updates": "fedmud",
    "factors": "fedlmt",
    "hadamard": "fedpara",
    "decomposition": "fedhm",
    "sparsification": "ef21_p",
    "binarisation": "fedbat",
}
"""Compression -> the method whose recipe explains the arguments of the compression."""


def page(name: str) -> str:
    title, kind, example = PAGES[name]
    tables = Registry().tables
    entries = tables[kind]
    listed = table(("name", "what it is"), [(f"[`{n}`](#{n})", sentence(summary(e))) for n, e in entries.items()])
    head = f"# {title}\n\nThis page is generated from the code. Example:\n\n```yaml\n{example}\n```\n\n{listed}"
    return "\n".join([head, *(section(n, entry, tables) for n, entry in entries.items())])


def section(name: str, entry: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    target = resolve(entry)
    hints, parameters = signature(target)
    of_recipe = sentences(resolve(tables["METHODS"][RECIPES[name]])) if name in RECIPES else {}
    said = {**ARGUMENTS, **of_recipe, **meanings(inspect.getmodule(target), parameters), **meanings(target, parameters)}
    rows = []
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty
        default = "required" if required else code(shown(parameter.default, tables))
        rows.append((f"`{key}`", in_words(hints[key]), default, sentence(said.get(key, ""))))
    text = prose(inspect.getdoc(target) or "")
    arguments = table(("argument", "type", "default", "meaning"), rows) if rows else "No arguments.\n"
    return f"## `{name}` {{ #{name} }}\n\n{sentence(text)}\n\n{source(name, target, tables)}{arguments}"


def source(name: str, target: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The paper and the equations of a rule of aggregation, from the head of its file. Other parts have none."""
    if name not in {**tables["AGGREGATORS"], **tables["PREAGGREGATORS"]} or target.__module__.endswith(".contract"):
        return ""
    module = inspect.getmodule(target)
    return f"{citation(module)}\n\n{equations_of((inspect.getdoc(module) or '').split(chr(10) * 2))}\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""
