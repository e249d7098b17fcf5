"""The settings of torch with which a run computes, and the turns of runs in threads of one process.

A run has the settings of a new process: what the caller has set for itself, such as a default dtype or autocast, does
not enter it, and the caller has its own settings again whenever its code runs. On GPUs there are more: deterministic
kernels, and the precision of products.

Some settings belong to the process. So the runs of several threads take turns: a run has the turn while it computes a
round, and nothing else of this package computes meanwhile. This also protects what such runs share, like the module of
a workload and the recordings of steps.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.overrides
import torch.utils._device

WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The environment variable that fixes the memory of cuBLAS, and its values with which cuBLAS is deterministic."""
NO_FORM = re.compile(r"(\S+) does not have a deterministic implementation")
CPU = torch.device("cpu")
Yielded = TypeVar("Yielded")
Sent = TypeVar("Sent")
Returned = TypeVar("Returned")
_C: Any = torch._C
_modes: Any = torch.overrides
_device: Any = torch.utils._device


class Setting(NamedTuple):
    """A setting: how it is read and written, and the value of a run."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    value: Any


def attribute(part: Any, name: str, value: Any) -> Setting:
    """A setting that is an attribute."""
    return Setting(lambda: getattr(part, name), lambda value: setattr(part, name, value), value)


def precision(backend: str, operation: str, value: str = "none") -> Setting:
    """The precision of products of float32 in an operation; "none" is that of all operations of the backend."""
    write = lambda value: _C._set_fp32_precision_setter(backend, operation, value)  # noqa: E731
    return Setting(lambda: _C._get_fp32_precision_getter(backend, operation), write, value)


def deterministic(value: bool, warn_only: bool) -> Setting:
    """Whether kernels shall be deterministic, and whether others only warn."""
    read = lambda: (  # noqa: E731
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return Setting(
        read, lambda pair: torch.use_deterministic_algorithms(pair[0], warn_only=pair[1]), (value, warn_only)
    )


@lru_cache
def of_process(device: torch.device, tf32: bool) -> tuple[Setting, ...]:
    """The settings of the process, in the order in which they are made."""
    return tuple(_of_process(device, tf32))


def _of_process(device: torch.device, tf32: bool) -> Iterator[Setting]:
    """The same. Precisions are inherited: the outer one comes first, so that an inner one is read without it."""
    backends: Any = torch.backends
    attention: Any = backends.cuda
    yield Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32)
    anomaly = lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())  # noqa: E731
    yield Setting(anomaly, lambda pair: torch.set_anomaly_enabled(*pair), (False, True))
    yield precision("generic", "all")
    for operation in ("all", "matmul", "conv", "rnn"):
        yield precision("mkldnn", operation)
    yield Setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True)
    yield Setting(_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic, False)
    yield Setting(_C._get_nnpack_enabled, _C._set_nnpack_enabled, True)
    yield Setting(attention.flash_sdp_enabled, attention.enable_flash_sdp, True)
    yield Setting(attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp, True)
    yield Setting(attention.math_sdp_enabled, attention.enable_math_sdp, True)
    yield Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True)
    if backends.opt_einsum.is_available():
        yield attribute(backends.opt_einsum, "enabled", True)
        yield attribute(backends.opt_einsum, "strategy", "auto")
    if device.type == "cpu":
        yield deterministic(False, False)
        return
    yield deterministic(True, True)
    yield attribute(torch.utils.deterministic, "fill_uninitialized_memory", False)
    yield Setting(_C._get_cudnn_enabled, _C._set_cudnn_enabled, True)
    yield Setting(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark, False)
    yield Setting(_C._get_cudnn_deterministic, _C._set_cudnn_deterministic, True)
    yield precision("cuda", "all")
    for operation in ("matmul", "conv", "rnn"):
        yield precision("cuda", operation, "tf32" if tf32 else "ieee")


@lru_cache
def of_thread(device: torch.device, threads: int | None) -> tuple[Setting, ...]:
    """The settings of the calling thread that are numbers or flags."""
    return tuple(_of_thread(device, threads))


def autocast(kind: str) -> tuple[Setting, Setting]:
    """Whether operations on devices of a kind choose their precision, and which one."""
    dtype = torch.bfloat16 if kind == "cpu" else torch.float16
    return (
        Setting(lambda: torch.is_autocast_enabled(kind), lambda value: torch.set_autocast_enabled(kind, value), False),
        Setting(lambda: torch.get_autocast_dtype(kind), lambda value: torch.set_autocast_dtype(kind, value), dtype),
    )


def _of_thread(device: torch.device, threads: int | None) -> Iterator[Setting]:
    for kind in ("cpu", device.type) if device.type not in ("cpu", "meta") else ("cpu",):
        yield from autocast(kind)
    tiny = 5e-324  # the smallest number, which a processor that flushes denormal numbers takes for 0
    yield Setting(lambda: tiny * 1.0 == 0.0, torch.set_flush_denormal, False)
    if threads is not None:
        yield Setting(torch.get_num_threads, torch.set_num_threads, threads)
    if device.type == "cuda" and device.index is not None:  # streams and graphs are made on the current device
        yield Setting(lambda: torch.cuda.current_device(), lambda index: torch.cuda.set_device(index), device.index)


def put(setting: Setting, value: Any) -> None:
    """Give a setting a value, unless it has it."""
    if setting.read() != value:
        setting.write(value)


class Made:
    """Settings that have been made, with the values that they had before."""

    def __init__(self, settings: tuple[Setting, ...]) -> None:
        self.settings, self.before = settings, list[Any]()

    def make(self) -> None:
        self.before = []
        for setting in self.settings:
            self.before.append(before := setting.read())
            if before != setting.value:
                setting.write(setting.value)

    def restore(self) -> None:
        """Restore all, in the opposite order."""
        for setting, before in zip(reversed(self.settings[: len(self.before)]), reversed(self.before), strict=True):
            put(setting, before)
        self.before = []


@contextmanager
def without_default_device() -> Iterator[None]:
    """A context in which this thread has no default device, neither by `set_default_device` nor by a context."""
    default: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT")  # noqa: B009 it has no public name
    given, current = getattr(default, "device_context", None), _device.CURRENT_DEVICE
    modes = [_modes._pop_mode() for _ in range(_modes._len_torch_function_stack())]  # the innermost first
    others = [mode for mode in modes if not isinstance(mode, _device.DeviceContext)]
    for mode in reversed(others):
        _modes._push_mode(mode)
    default.device_context = _device.CURRENT_DEVICE = None
    try:
        yield
    finally:
        for _ in others:
            _modes._pop_mode()
        for mode in reversed(modes):
            _modes._push_mode(mode)
        default.device_context, _device.CURRENT_DEVICE = given, current


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """A context without the hooks of the calling thread for tensors that are saved for a backward pass."""
    graph, hooks = _C._autograd, []
    while pair := graph._top_saved_tensors_default_hooks(False):
        hooks.append(pair)
        graph._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            graph._push_saved_tensors_default_hooks(*pair)


class Turns:
    """Whose turn it is. Who has waited is served before the one that has just had it."""

    def __init__(self) -> None:
        self.next, self.turn, self.mine = threading.Lock(), threading.Lock(), threading.local()
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """A process that was forked has none of the threads that may have held the locks, except for its own."""
        self.next, self.turn = threading.Lock(), threading.Lock()
        if self.held:
            self.turn.acquire()

    @property
    def held(self) -> list[Made]:
        """The process's settings that this thread has made, the innermost last. It has the turn if there are any."""
        if not hasattr(self.mine, "held"):
            self.mine.held = []
        return self.mine.held

    def take(self) -> None:
        with self.next:
            self.turn.acquire()


_turns = Turns()


def apply(device: torch.device, tf32: bool = False, threads: int | None = None) -> None:
    """Make the settings of a run for the rest of this process, which has no other task.

    tf32: whether a device may compute products of float32 in TF32. threads: of torch's kernels, None to leave them. On
    a GPU this is called before the first product, because cuBLAS reads its environment then. A kernel without a
    deterministic form runs all the same; `kernels_without_form` finds its name.
    """
    fix_workspace(device)
    for setting in (*of_process(device, tf32), *of_thread(device, threads)):
        put(setting, setting.value)


def fix_workspace(device: torch.device) -> None:
    if device.type != "cpu":
        os.environ.setdefault(WORKSPACE, WORKSPACES[0])


@contextmanager
def applied(device: torch.device = CPU, tf32: bool = False, threads: int | None = None) -> Iterator[None]:
    """A context in which this thread has the turn and the settings of `apply`, and gradients are enabled.

    At its end, everything is as it was before. It may be entered again within itself.
    """
    fix_workspace(device)
    held = _turns.held
    if not held:
        _turns.take()
    shared, own = Made(of_process(device, tf32)), Made(of_thread(device, threads))
    held.append(shared)
    try:
        with torch.inference_mode(False), without_default_device(), without_saved_tensors_hooks():
            own.make()
            shared.make()
            yield
    finally:
        shared.restore()
        own.restore()
        held.pop()
        if not held:
            _turns.turn.release()


def in_turns(
    steps: Generator[Yielded, Sent | None, Returned], context: Callable[[], AbstractContextManager[None]]
) -> Generator[Yielded, Sent | None, Returned]:
    """The same steps, each of which is computed in a context of its own. So what uses them is outside of it."""
    given = None
    try:
        while True:
            with context():
                try:
                    item = steps.send(given)
                except StopIteration as end:
                    return end.value
            given = yield item
    finally:
        with context():
            steps.close()


@contextmanager
def in_any_order() -> Iterator[None]:
    """A context in which kernels need no deterministic form, for a call whose result cannot depend on any order."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    asked = torch.are_deterministic_algorithms_enabled()
    _C._set_deterministic_algorithms(False, warn_only=warns)  # torch's own function sets more, which takes longer
    try:
        yield
    finally:
        _C._set_deterministic_algorithms(asked, warn_only=warns)


def workspace_clause() -> str:
    """What to say where the user's own value of the environment variable makes cuBLAS nondeterministic, "" else."""
    given = os.environ.get(WORKSPACE, WORKSPACES[0])
    if given in WORKSPACES:
        return ""
    return f"{WORKSPACE}={given}: products on the GPU may differ from run to run; set it to {' or '.join(WORKSPACES)}"


@contextmanager
def kernels_without_form() -> Iterator[set[str]]:
    """While it lasts, the set gets the names of kernels that ran and have no deterministic form.

    It stays empty where torch was not asked to be deterministic, as on the processor.
    """
    found: set[str] = set()
    if not torch.are_deterministic_algorithms_enabled():
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for warning in caught:
        if named := NO_FORM.search(str(warning.message)):
            found.add(named[1])
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
