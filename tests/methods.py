"""The methods that any model can be trained with."""

from __future__ import annotations

from fedfleet.algorithms.table import METHODS, OF_ADAPTERS

ON_ANY_MODEL = {name: recipe for name, recipe in METHODS.items() if recipe.family != OF_ADAPTERS}
