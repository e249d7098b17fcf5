"""Pages of the parts that experiments choose by name: workloads, models, partitions, rules, compressions, codecs, …."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedfleet.engine.config.registry import Registry, resolve, summary
from fedfleet.tune.arguments import arguments_of

from .methods import citation, equations_of, prose
from .text import sentence, table

PAGES = {
    "workloads": ("Workloads and data sets", "WORKLOADS", "workload: {name: digits, model: mlp}"),
    "models": ("Models", "MODELS", "workload: {name: fashion_mnist, model: {name: cnn4, norm: group}}"),
    "adapters": (
        "Adapters: small trained tensors beside frozen ones",
        "ADAPTERS",
        "workload: {name: digits, model: mlp, adapter: {name: lora, targets: linear, rank: 4}}",
    ),
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


def page(name: str) -> str:
    title, kind, example = PAGES[name]
    tables = Registry().tables
    entries = tables[kind]
    listed = table(("name", "what it is"), [(f"[`{n}`](#{n})", sentence(summary(e))) for n, e in entries.items()])
    head = f"# {title}\n\nThis page is generated from the code. Example:\n\n```yaml\n{example}\n```\n\n{listed}"
    return "\n".join([head, *(section(kind, n, entry, tables) for n, entry in entries.items())])


def section(table_name: str, name: str, entry: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The section of an entry of a table."""
    target = resolve(entry)
    rows = [
        (f"`{each.name}`", each.type, "required" if each.required else code(each.default), sentence(each.meaning))
        for each in arguments_of(table_name, name, tables)
    ]
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
