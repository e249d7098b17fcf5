"""The modules of a workload: their mode in training and in evaluation, and where their random numbers come from.

Modules of torch such as `nn.Dropout` draw from torch's global generator. What they draw depends on everything that the
process drew before. So the same configuration would give other bits on another number of workers, and such modules
cannot be vectorised over clients. A training run refuses them by name before its first round.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...workloads import counted
from ...workloads.stateless import Keyed
from ...workloads.workload import Batch, Params, Split, UnfitOutput, Workload
from ..errors import ConfigError, first_line
from ..kernels.agreement import equal

ROWS = 2
"""The number of examples in the trial batch."""
TRIALS = 3
"""A module is refused if a global generator moved in every one of this many trials. In a single trial, another thread
may have drawn."""

CONVERTIBLE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MultiheadAttention)
KEYED = "fedfleet.workloads.models.dropout.Dropout"
OWN = "a subclass of fedfleet.workloads.stateless.Keyed that draws from counted.uniform(self.key, count)"


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for all modules of the process that passes over those which other threads call."""
    thread = threading.get_ident()
    return lambda *given: hook(*given) if threading.get_ident() == thread else None


@contextmanager
def evaluating() -> Iterator[None]:
    """Every module that is called in this context runs in eval() mode, wherever the workload keeps it, and modules that
    are random in training do not draw.

    `Classification` sets the mode of its network itself. This context is for workloads that call modules of their own,
    which torch builds in training mode. The modules are back in training mode when the context ends.
    """
    changed: list[nn.Module] = []

    @of_this_thread
    def to_eval(module: nn.Module, inputs: Any) -> None:
        if any(part.training for part in module.modules()):
            changed.extend(part for part in module.modules() if part.training)
            module.eval()
            for part in module.modules():
                if isinstance(part, Keyed):
                    part.key = None

    hook = register_module_forward_pre_hook(to_eval)
    try:
        yield
    finally:
        hook.remove()
        for module in changed:
            module.training = True


def check_draws(workload: Workload, x: Params, split: Split) -> None:
    """Raise ConfigError where a module of the workload draws from a global generator while it is trained, where the
    output of a network does not fit, or where it does not compute in the run's dtype.

    x: the tensors of the model before round 1. One batch of the first client's rows goes through it. Another exception
    of the workload's own code is not reported here: the first round meets it again, and reports whose code raised it.
    """
    rows = split.client_index.rows[:ROWS]
    batch = {name: torch.from_numpy(np.ascontiguousarray(column[rows])) for name, column in split.train.items()}
    batch["key"] = counted.key(0, "trial")
    p = {name: value.detach().cpu() for name, value in x.items()}
    found = ""
    for _ in range(TRIALS):
        found = trial(workload, p, batch)
        if not found:
            return
    raise ConfigError(f"workload: {found}")


def trial(workload: Workload, p: Params, batch: Batch) -> str:
    """An error sentence if a module draws from a global generator in one forward pass of training, else "".

    Draws outside of modules are found by `trial_step`, which reports the line. Raises ConfigError for an output that
    does not fit, and for types that torch does not compute with.
    """
    try:
        with kept_generators(), noted_draws() as found:
            workload.trial(p, batch)
    except UnfitOutput as error:
        raise ConfigError(f"workload: {error}") from error
    except Exception as error:
        if told := type_error(workload, next(iter(p.values())).dtype, error):
            raise ConfigError(told) from error
        return ""
    return found[0] if found else ""


def type_error(workload: Workload, dtype: torch.dtype, error: Exception) -> str:
    """An error sentence if torch refuses to compute with a network's tensors because their types differ, else "".
    dtype: of the run. error: what a forward pass raised."""
    if workload.outline is None or not re.search(r"\bd?types?\b", str(error)):
        return ""
    other, wanted = in_another_type(workload.outline, dtype), str(dtype).removeprefix("torch.")
    return other and (
        f"workload: the network must compute in engine.dtype={wanted}, got {other}, and torch says "
        f"{first_line(error)!r}; convert it in forward, as by .to(x.dtype), or change engine.dtype"
    )


def in_another_type(network: nn.Module, dtype: torch.dtype) -> str:
    """The first parameter or buffer whose floats have another type, as in "the buffer scale in float64"; "" if none
    has. Parameters are converted to the type of the run, buffers are not, so parameters in torch's usual type are not
    meant."""
    for kind, tensors in (("buffer", network.named_buffers()), ("parameter", network.named_parameters())):
        for name, tensor in tensors:
            usual = (dtype, torch.float32) if kind == "parameter" else (dtype,)
            if tensor.is_floating_point() and tensor.dtype not in usual:
                return f"the {kind} {name} in {str(tensor.dtype).removeprefix('torch.')}"
    return ""


@contextmanager
def noted_draws() -> Iterator[list[str]]:
    """A context whose list gets an error sentence for each module that draws from a global generator, the innermost
    first."""
    found: list[str] = []
    calls: list[tuple[nn.Module, dict[str, Any]]] = []  # modules whose forward has begun, the outermost first

    def begin(module: nn.Module, inputs: Any) -> None:
        calls.append((module, generators()))

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        if drawn := moved(calls[-1][1]):
            name = next((name for name, part in calls[0][0].named_modules() if part is module), "")
            what = f"module {name} ({type(module).__name__})" if name else f"module {type(module).__name__}"
            found.append(
                f"{what} must draw from its batch's key while training, got draws from {drawn}; {remedy(module)}"
            )
        calls.pop()

    hooks = register_module_forward_pre_hook(of_this_thread(begin)), register_module_forward_hook(of_this_thread(end))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def remedy(module: nn.Module) -> str:
    """What to use instead of a module of torch that draws from a global generator."""
    if type(module) in CONVERTIBLE:
        return "call fedfleet.convert on the network where it is built"
    if isinstance(module, nn.RNNBase):
        return f"set its dropout to 0 and use {KEYED} beside it"
    return f"use {KEYED} or {OWN} in its place"


# --- the global generators of the process -----------------------------------------------------------------------------
def generators() -> dict[str, Any]:
    """The states of the global generators of torch, NumPy and Python, by their names in error messages."""
    return {
        "torch's global generator": torch.get_rng_state(),
        "NumPy's global generator": np.random.get_state(),
        "Python's module random": random.getstate(),
    }


def moved(before: dict[str, Any]) -> str:
    """The name of a generator whose state differs from that in `before` (as `generators` returned it), or ""."""
    now = generators()
    return next((name for name, state in before.items() if not equal(state, now[name])), "")


@contextmanager
def kept_generators() -> Iterator[None]:
    """A context at whose end the global generators have the states again that they had at its beginning."""
    torch_state, numpy_state, python_state = generators().values()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
