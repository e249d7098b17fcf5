"""Factors that are drawn at random are the same for all parties of a run, which draw them once in a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedfleet.algorithms.fedlmt import fedlmt
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.parts.reparameterisation import Factored, random_factor
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.workloads import counted

from .compressed import COHORTS, build, trained

RULE = Sgd(0.05)


def recipe_of(recipe: Any) -> Any:
    return recipe(RULE, ratio=0.8, layers="all", nearest=True)


def space_of(recipe: Any) -> Factored:
    method: Any = build(recipe_of(recipe))
    return method.space


@pytest.mark.parametrize("recipe", [fedmud, fedlmt])
def test_all_parties_of_a_process_draw_once(recipe):
    """The clients' `unpack`, the server's step and the model that is evaluated need the factors of every round."""
    random_factor.cache_clear()
    trained(recipe_of(recipe))
    found = random_factor.cache_info()
    space = space_of(recipe)
    turns = len(COHORTS) if recipe is fedmud else 1  # FedMUD draws anew after each update, FedLMT once
    numbers = len(space.sized) * len(space.form.starts)
    assert found.misses == turns * numbers
    assert found.hits >= 2 * (found.misses - numbers)


def test_a_draw_is_uniform_or_normal_as_counted_numbers_say():
    key = counted.key(3, "factors", 1, 2, "u")
    parts, shape = (3, "factors", 1, 2, "u"), (3, 2)
    uniform = random_factor(parts, shape, True, 0.5, torch.float64)
    assert torch.equal(uniform, ((2 * counted.uniform(key, 6) - 1) * 0.5).view(shape))
    normal = random_factor(parts, shape, False, 0.25, torch.float32)
    assert torch.equal(normal, (counted.normal(key, 6) * 0.25).to(torch.float32).view(shape))


def test_a_draw_for_sizes_alone_has_no_numbers_and_is_not_kept():
    random_factor.cache_clear()
    space = space_of(fedmud_aad)
    drawn = space.fixed(0, torch.zeros(1, device="meta"))
    assert {value.device.type for value in drawn.values()} == {"meta"}
    assert {name: value.shape for name, value in drawn.items()} == {
        name: value.shape for name, value in space.fixed(0, torch.zeros(1)).items()
    }
    assert random_factor.cache_info().misses == len(drawn)  # the numbers of the second call


def test_a_draw_in_inference_mode_can_be_trained_with_later():
    random_factor.cache_clear()
    space, like = space_of(fedmud_aad), torch.zeros(1)
    with torch.inference_mode():
        space.fixed(0, like)
    weight = torch.ones((), requires_grad=True)
    torch.stack([(weight * value).sum() for value in space.fixed(0, like).values()]).sum().backward()
    assert weight.grad is not None
