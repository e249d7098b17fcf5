"""The pages of methods explain every argument, and every file of a method lists its departures from the paper."""

import inspect
import re

import pytest

from fedfleet.algorithms.table import METHODS
from fedfleet.engine.config.registry import Registry, resolve, signature
from fedfleet.tune.arguments import arguments_of, sentences, shown
from tools.site import methods


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_explained(name):
    tables = Registry().tables
    text = methods.arguments(name, tables)
    assert "(" not in "".join(each.default for each in arguments_of("METHODS", name, tables)), "a representation"
    for key in signature(resolve(METHODS[name]))[1]:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
        meaning = row.rsplit(" | ", 1)[1].removesuffix(" |")
        assert len(meaning) > 2, f'{name}: say what {key} is in the recipe\'s docstring, "{key}: …; other: …"'


def test_sentences():
    def recipe(lr: float = 0.1, mu: float = 0.9, start: str = "zeros", rule: int = 0) -> None:
        """lr, mu: step size; momentum; start: zeros, or
        gradient: a pass; rule: x | y."""

    assert sentences(recipe) == {
        "lr": "step size; momentum",
        "mu": "step size; momentum",
        "start": "zeros, or gradient: a pass",
        "rule": "x \\| y",
    }


def test_defaults_are_shown_as_an_experiment_has_them():
    from fedfleet.algorithms.parts.rules import Clip, Sgd

    tables = Registry().tables
    assert shown(Clip(Sgd(0.5), 2.0), tables) == "{name: clip, rule: {name: sgd, lr: 0.5}, radius: 2.0}"
    assert [shown(v, tables) for v in (True, None, (0.9, 0.99), "mean")] == ["true", "", "[0.9, 0.99]", "mean"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_lists_its_departures(name: str):
    """The last paragraph of a method's file: a list, one sentence for each departure from the paper."""
    module = inspect.getmodule(resolve(METHODS[name]))
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    assert sum("Departures" in paragraph for paragraph in paragraphs) == 1
    head, _, listed = paragraphs[-1].partition("\n")
    assert head == "Departures:"
    sentences = [" ".join(item.split()) for item in re.split(r"^- ", listed, flags=re.M) if item]
    assert sentences
    for sentence in sentences:
        assert sentence.endswith("."), sentence
        assert not re.search(r"\.\s+[A-Z]", sentence), f"more than one sentence: {sentence}"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_when_to_choose_it(name: str):
    """In one paragraph of one or two sentences, which its page and the list of methods have."""
    said = methods.when(name)
    assert said.startswith("Choose it ")
    assert said.endswith(".")
    assert len(re.split(r"[.] (?=[A-Z])", said)) <= 2
    assert methods.page(name).count(said) == 1
