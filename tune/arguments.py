"""The arguments of what experiments choose by name: their types, defaults and meanings, from signatures and docstrings.

Meanings are Markdown, of which the pages of the site consist; `plain` makes text for the command line of them.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from ..algorithms.parts.groups import PerGroup
from ..engine.config.registry import resolve, signature
from ..engine.config.schema import (
    Adapt,
    AsIf,
    Asynchronous,
    ClientModels,
    Pace,
    Personal,
    Privacy,
    Systems,
    WorkerGroup,
)

Tables = Mapping[str, Mapping[str, Any]]
"""The tables of a registry."""


class Argument(NamedTuple):
    """An argument of a part. default: as an experiment file has it, "" for none. meaning: Markdown."""

    name: str
    type: str
    default: str
    meaning: str
    required: bool


def arguments_of(table: str, name: str, tables: Tables) -> list[Argument]:
    """The arguments of the entry with a name in a table."""
    target = resolve(tables[table][name])
    hints, parameters = signature(target)
    said = of_method(target) if table == "METHODS" else of_part(name, target, parameters, tables)
    found = []
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty
        default = "" if required else shown(parameter.default, tables)
        found.append(Argument(key, in_words(hints.get(key, Any)), default, said.get(key, ""), required))
    return found


def of_method(target: Any) -> dict[str, str]:
    """Argument of a method -> its meaning."""
    own = {key: text for key, text in sentences(target).items() if text}
    return {**COMMON, **{key: text for key, text in own.items() if not (text.startswith("see ") and key in COMMON)}}


def of_part(name: str, target: Any, parameters: Container[str], tables: Tables) -> dict[str, str]:
    """Argument of any other part -> its meaning."""
    of_recipe = sentences(resolve(tables["METHODS"][RECIPES[name]])) if name in RECIPES else {}
    return {**ARGUMENTS, **of_recipe, **meanings(inspect.getmodule(target), parameters), **meanings(target, parameters)}


CHOOSE = "Choose it "
"""How the paragraph begins, at the head of a method's file, that says when to choose the method."""


def when_to_choose(target: Any) -> str:
    """When to choose the method that a recipe makes: one or two sentences that begin with CHOOSE; "" if its file does
    not say it, as that of a plug-in."""
    paragraphs = (inspect.getdoc(inspect.getmodule(target)) or "").split("\n\n")
    return next((" ".join(text.split()) for text in paragraphs if text.startswith(CHOOSE)), "")


def plain(markdown: str) -> str:
    """The text of some Markdown: links without their addresses, and code without its marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "").replace("\\|", "|")


# --- what arguments mean ----------------------------------------------------------------------------------------------
COMMON = {
    "rule": "the local optimiser",
    "server_lr": "the server's step size",
    "over": "`cohort`: the mean over the sampled clients; `all`: other clients count as not having moved",
    "carry": "what becomes of the rule's state after a round: `reset`, `keep` (with the client) or `average`",
    "nesterov": "Nesterov's form of the momentum",
    "betas": "weights of the old first and second moment",
    "beta2": "weight of the old second moment",
    "tau": "added to the root of the second moment",
    "bias_correction": "Adam's, for the moments' start at zero",
    "epsilon": "added to the denominator of the step",
    "norm": "whose ball the step is along: spectral, euclidean or max",
    "ball": "how matrices are orthogonalised; five classic Newton-Schulz iterations unless given",
    "scale": "factor of a matrix's step by its shape: none, jordan, moonlight or spectral",
    "aux": "names, * and ? as in file names, of matrices that the vectors' rule is for: embeddings, an output head",
    "local": "training on the clients: plain, scaffold or prox",
    "mu": "weight of prox, 0.1 unless given; only with local: prox",
    "compression": "makes what is sent smaller: one of `fedfleet list compressions`",
    "evaluate": "last: the model; last_two: the mean of the last two",
}
"""What an argument means where a recipe does not say, or refers to another."""

ARGUMENTS = {
    "model": "the [network](models.md)",
    "adapter": "[what is trained](adapters.md) beside the network's weights, which are then frozen",
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
    "order": "the order of Schatten's norm, from 1, the trace norm, to infinity, the spectral norm",
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
    "columns": "the number of columns of the unknowns; with more than one they are a matrix",
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
    "tiles": "the longest side of a tile of a matrix; with it, chunks are tiles, and not `size` numbers in turn",
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


MENTION = re.compile(r"((?:`\w+`(?:, | and )?)+|(?:^|(?<=[.;] )|(?<=, or ))\w+(?:, \w+)*): ")
"""The beginning of words about arguments: "`lr`, `mu`: ", or at the beginning of a sentence "lr, mu: "."""


def sentences(target: Any) -> dict[str, str]:
    """What a recipe's docstring says of each argument: "lr, mu: a sentence; start: another"."""
    known, said, last = signature(target)[1], {}, ()
    for part in " ".join((inspect.getdoc(target) or "").split()).split(";"):
        names, colon, text = part.partition(":")
        keys = tuple(name.strip().split(" ")[-1] for name in names.split(","))
        if colon and all(key in known for key in keys):
            last, part = keys, text
            said.update(dict.fromkeys(keys, ""))
        for key in last:
            said[key] = "; ".join(filter(None, [said[key], part.strip().rstrip(".").replace("|", "\\|")]))
    return said


def explained(docstring: str, known: Container[str]) -> dict[str, str]:
    """Name -> what a docstring says of it, where it says "`name`: text" or "`name`, `other`: text" of known names."""
    said: dict[str, str] = {}
    for paragraph in docstring.split("\n\n"):
        text = " ".join(paragraph.split())
        found = [m for m in MENTION.finditer(text) if all(name in known for name in names_in(m[1]))]
        for this, following in zip_longest(found, found[1:]):
            words = text[this.end() : following.start() if following else None].strip().rstrip(";")
            for name in names_in(this[1]):
                said.setdefault(name, words)
    return said


def names_in(mention: str) -> list[str]:
    """The names in "`lr`, `mu`" or "lr and mu"."""
    return [name for name in re.findall(r"\w+", mention) if name != "and"]


def meanings(target: Any, known: Container[str]) -> dict[str, str]:
    """Argument -> what the docstrings of a callable say of it; those of a class and then of its base classes."""
    said: dict[str, str] = {}
    for owner in getattr(target, "__mro__", (target,)):
        if owner is not object:
            for name, words in explained(inspect.cleandoc(owner.__doc__ or ""), known).items():
                said.setdefault(name, words)
    return said


# --- types and defaults -----------------------------------------------------------------------------------------------
NAMES = {
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    Any: "name or mapping",
    PerGroup: "number for each group",
    WorkerGroup: "group",
    Privacy: "mapping",
    AsIf: "mapping",
    Systems: "mapping",
    Personal: "mapping",
    Adapt: "mapping",
    ClientModels: "mapping",
    Pace: "mapping",
    Asynchronous: "mapping",
}


def in_words(annotation: Any) -> str:
    """A type such as "integer or `auto`". None is left out: a default of None shows as an empty cell."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return in_words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(a) for a in arguments if a is not types.NoneType))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"list of {count}{plural(in_words(arguments[0]))}"
    if origin is list:
        return f"list of {plural(in_words(arguments[0]))}"
    if origin is dict:
        return f"mapping of names to {plural(in_words(arguments[1]))}"
    if isinstance(annotation, type) and hasattr(annotation, "table"):
        return annotation.__name__.lower()
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def plural(noun: str) -> str:
    """The plural of a type in words."""
    if "`" in noun or noun.endswith("s"):
        return noun
    return {"name or mapping": "values", "mapping of names to values": "mappings"}.get(noun, f"{noun}s")


def shown(value: Any, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A default as an experiment file has it."""
    if is_dataclass(value) and hasattr(value, "table"):
        entries = tables[getattr(value, "table")]  # noqa: B009 any part's
        made = f":{type(value).__name__}"
        name = next((n for n, entry in entries.items() if str(getattr(entry, "build", "")).endswith(made)), None)
        if name is None:
            return recipe(value, entries)
        arguments = [f"{f.name}: {shown(getattr(value, f.name), tables)}" for f in fields(value)]
        return f"{{{', '.join([f'name: {name}', *arguments])}}}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=repr)


def recipe(value: Any, entries: Mapping[str, Any]) -> str:
    """The name under which the table makes this part when no argument is given; else its representation."""
    for name, entry in entries.items():
        target = resolve(entry)
        if all(p.default is not p.empty for p in signature(target)[1].values()) and target() == value:
            return name
    return repr(value)
