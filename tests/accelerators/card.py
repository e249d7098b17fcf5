"""Cards that are not there: what torch.cuda calls below its own Python code, on the processor.

torch.cuda is Python code that checks its arguments and calls functions in C, which a torch without CUDA lacks. Here
these functions are replaced, and nothing above them: so every function of torch.cuda refuses what it refuses on a card,
such as a device without an index where it wants one. The classes of streams and graphs have bases in C, and get
doubles with the same signatures. A graph is recorded by a tape, see tape.py.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .tape import Tape

TOTAL = 8 << 30
"""The bytes of a card's memory."""
PARTS = ("engine", "algorithms", "workloads", "tune")


def whole(value: Any, count: int) -> int:
    """An index of a card, as a function in C takes it."""
    if type(value) is not int:
        raise TypeError(f"an int is required, got {value!r}")
    if not 0 <= value < count:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return value


class Cards:
    """Some cards. `calls`: the names of the functions of torch.cuda that were called, as written in the caller.
    `streams`: the streams that were made. `waits`: how often the processor waited for an event. `fractions`: of each
    card's memory that the process may take."""

    def __init__(self, count: int) -> None:
        self.count, self.current, self.fractions = count, 0, [1.0] * count
        self.peak = self.allocated = 0
        self.calls: set[str] = set()
        self.streams: list[Any] = []
        self.waits = 0
        self.stream = [(0, index, 1) for index in range(count)]  # (id, device, type) of each card's current one

    def set_device(self, index: int) -> None:
        self.current = whole(index, self.count)

    def exchange(self, index: int) -> int:
        """Choose a card and return the one before; a negative number chooses none."""
        before = self.current
        if type(index) is not int:
            raise TypeError(f"an int is required, got {index!r}")
        if index >= 0:
            self.current = whole(index, self.count)
        return before

    def set_fraction(self, fraction: float, index: int) -> None:
        if type(fraction) is not float:
            raise TypeError(f"a float is required, got {fraction!r}")
        self.fractions[whole(index, self.count)] = fraction

    def memory(self, index: int) -> dict[str, Any]:
        whole(index, self.count)
        used = {"all": {"current": self.allocated, "peak": max(self.peak, self.allocated)}}
        return {"allocated_bytes": used, "reserved_bytes": used}

    def reset_peak(self, index: int) -> None:
        whole(index, self.count)
        self.peak = 0

    def set_stream(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        self.stream[whole(device_index, self.count)] = stream_id, device_index, device_type
        self.current = device_index

    def info(self, index: int) -> tuple[int, int]:
        whole(index, self.count)
        return TOTAL - self.allocated, TOTAL

    def properties(self, index: int) -> Any:
        whole(index, self.count)
        return SimpleNamespace(name="a card of tests", total_memory=TOTAL)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have torch.cuda find these cards."""
        import torch._inductor.config  # torch does so when it is asked to be deterministic, and looks for a card then

        in_c: dict[str, Callable[..., Any]] = {
            "_cuda_getDeviceCount": lambda: self.count,
            "_cuda_getDevice": lambda: self.current,
            "_cuda_setDevice": self.set_device,
            "_cuda_synchronize": lambda: None,
            "_cuda_getMemoryFraction": lambda index: self.fractions[whole(index, self.count)],
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_memoryStats": self.memory,
            "_cuda_resetPeakMemoryStats": self.reset_peak,
            "_cuda_emptyCache": lambda: None,
            "_host_emptyCache": lambda: None,
            "_cuda_getCurrentStream": lambda index: self.stream[whole(index, self.count)],
            "_cuda_setStream": self.set_stream,
        }
        for name, function in in_c.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        # What torch.cuda takes from there when it is imported, and its own state once CUDA is initialised.
        monkeypatch.setattr(torch.cuda, "_exchange_device", self.exchange)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", self.exchange)
        monkeypatch.setattr(torch.cuda, "_get_device_properties", self.properties, raising=False)
        monkeypatch.setattr(torch.cuda, "_cudart", SimpleNamespace(cudaMemGetInfo=self.info))
        monkeypatch.setattr(torch.cuda, "_initialized", True)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        self.replace(monkeypatch, "Stream", self.stream_class())
        self.replace(monkeypatch, "CUDAGraph", Graph)
        self.replace(monkeypatch, "Event", self.event_class())

    def replace(self, monkeypatch: pytest.MonkeyPatch, name: str, double: Any) -> None:
        """Replace a class of torch.cuda by one whose methods have the same signatures."""
        real = getattr(torch.cuda, name)
        for method, function in vars(double).items():
            if inspect.isfunction(function) and not method.startswith("__"):
                theirs = inspect.signature(getattr(real, method)).parameters
                assert [*inspect.signature(function).parameters] == [*theirs], f"{name}.{method} of this torch differs"
        monkeypatch.setattr(torch.cuda, name, double)

    def stream_class(self) -> Any:
        cards = self

        class Stream:
            def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
                stream = super().__new__(cls)
                with torch.cuda.device(device):
                    index = known.get("device_index", cards.current)
                if "stream_id" not in known:
                    cards.streams.append(stream)
                stream.stream_id, stream.device_type = known.get("stream_id", len(cards.streams)), 1
                stream.device_index, stream.device = index, torch.device("cuda", index)
                return stream

            def wait_stream(self, stream: Any) -> None:
                assert isinstance(stream, Stream)

        return Stream

    def event_class(self) -> Any:
        cards = self

        class Event:
            """It has happened as soon as it is recorded."""

            recorded = False

            def record(self, stream: Any = None) -> None:
                self.recorded = True

            def synchronize(self) -> None:
                assert self.recorded
                cards.waits += 1

        return Event

    def note_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fill `calls` from here on."""
        for name in used_names():
            real = getattr(torch.cuda, name)

            def call(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                self.calls.add(_name)
                return _real(*args, **kwargs)

            if inspect.isfunction(real):
                monkeypatch.setattr(torch.cuda, name, call)


class Graph:
    """A CUDA graph that is recorded by a tape."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: Tape | None = None

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, …, got {capture_error_mode}")
        if torch._C._cuda_getCurrentStream(torch.cuda.current_device())[0] == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.tape = Tape()
        self.tape.__enter__()

    def capture_end(self) -> None:
        assert self.tape is not None
        self.tape.__exit__(None, None, None)

    def replay(self) -> None:
        assert self.tape is not None
        self.tape.replay()


class OnTheProcessor(TorchFunctionMode):
    """Makes the tensors of a CUDA device in the processor's memory instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        args, kwargs = pytree.tree_map(moved, (args, kwargs or {}))
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def moved(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def used_names(*folders: str) -> set[str]:
    """The names of torch.cuda that the project uses."""
    root = Path(__file__).parents[2]
    found: set[str] = set()
    for path in (path for folder in folders or PARTS for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
                found.add(node.attr)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
                pytest.fail(f"{path}: write torch.cuda.name, which tests of its calls find")
    return found
