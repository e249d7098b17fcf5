"""What a method costs, counted for the model of handwritten digits."""

from __future__ import annotations

import json

from ..engine.errors import FedFleetError
from ..engine.method_form.state_spec import StateSpec
from ..engine.run_spec import RunSpec
from ..engine.user_code import plugin_errors
from .files import load


def trees(name: str, plugins: tuple[str, ...]) -> dict[str, str]:
    """`state`, `down` and `up` of a method with its default arguments; {} if it cannot be built without arguments."""
    run_spec = RunSpec.of("list", load("digits", (f"method={name}", f"plugins={json.dumps(plugins)}")))
    try:
        with plugin_errors("method"):
            counted = StateSpec(run_spec.method(), run_spec.checked_initial_model())
    except FedFleetError:
        return {}
    sizes = {"state": counted.kept, "down": counted.down, "up": counted.up}
    return {column: f"{size / counted.model:.3g}" for column, size in sizes.items()}
