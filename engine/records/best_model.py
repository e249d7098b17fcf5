"""The best model of a run so far, and best.safetensors, the file that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

FILE = "best.safetensors"


class Best(NamedTuple):
    """The model of the round in which a metric had its best value, the earlier one of equal ones.

    metric: a column of the records. mode: whether larger (`max`) or smaller values (`min`) are better. round: from 1.
    value: of the metric in that round. model: name -> tensor.
    """

    metric: str
    mode: Literal["max", "min"]
    round: int
    value: float
    model: Mapping[str, Tensor]

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.facts.items())
        return f"Best({facts}, model=<{len(self.model)} tensors>)"

    @property
    def facts(self) -> dict[str, Any]:
        """The same without the model."""
        return {name: value for name, value in self._asdict().items() if name != "model"}

    def saved(self, frozen: Sequence[str] = ()) -> bytes:
        """The content of the file. Its metadata have the facts as texts. frozen: the names of frozen tensors."""
        from ..storage.tensor_bytes import tensor_bytes

        facts = {name: value if isinstance(value, str) else repr(value) for name, value in self.facts.items()}
        named = {"frozen": ",".join(frozen)} if frozen else {}
        return tensor_bytes(self.model, {**facts, **named})

    @staticmethod
    def loaded(data: bytes) -> Best:
        """The inverse of `saved`. Raises an exception of any kind for a damaged file."""
        from safetensors.torch import load

        facts = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        mode = cast(Literal["max", "min"], facts["mode"])
        return Best(facts["metric"], mode, int(facts["round"]), float(facts["value"]), load(data))
