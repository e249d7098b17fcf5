"""Pure functions of tensors that are recorded once, as the operations of torch that they consist of, and replayed.

A local step of a small network consists of some dozens of operations of microseconds, under vmap of some hundred. To
find out which ones they are, by the modules of the network, the graph of autograd, the rules of vmap and the trees of
the states, takes as long as they take, or longer. They are the same in every step as long as the shapes are the same,
because the functions of a method and of a workload take no branch on a value.

What is recorded must be what would have run. A function that reads the numbers of a tensor, which is what a branch on
a value needs, is not recorded. Nor is one with an operation whose result has a shape that depends on numbers, such as
`nonzero`: sizes that the function took from it would be those of the recording. The first calls with each recording are
made both ways, and so is the first one in the rounds that are 1, 2, 4, 8 … rounds later; if the bits differ, nothing is
replayed any more. Other inputs than those of the recording, and another round, show whatever the function took from
anywhere else than its arguments.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import type_and_first_line
from .agreement import agrees
from .replacements import Replacements

Replay = Callable[..., list[Tensor]]
"""(leaves of the arguments) -> leaves of the result."""

MOST = 256
"""The largest number of recordings that are kept."""
TRIES = 64
"""After so many recordings, each must have been replayed once on average; otherwise no further ones are made."""
PROOFS = 2
"""The number of calls with a recording that are made both ways, before one more in some of the later rounds."""
READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
"""Methods that give away the numbers of a tensor and are no operations. (The others, such as `item`, are.)"""


class NotRecordable(Exception):
    """A function does something that a replay of its operations would not do."""


class Operation(NamedTuple):
    """A line of a program: the names of its results, its text, and the names that it reads. pure: whether it writes to
    none of its arguments."""

    targets: tuple[str, ...]
    text: str
    reads: frozenset[str]
    pure: bool


def refuse_read(name: str, *given: Any, **more: Any) -> None:
    """Raise NotRecordable in the place of a method in READS."""
    raise NotRecordable(f"{name} reads the numbers of a tensor")


def refuse_list(name: str, place: int, *given: Any, **more: Any) -> None:
    """Raise NotRecordable for a list of tensors, whose numbers a new tensor gets; other calls are left to torch. place:
    of the list among the arguments."""
    data = given[place] if len(given) > place else more.get("data")
    if isinstance(data, tuple | list) and any(isinstance(each, Tensor) for each in pytree.tree_leaves(data)):
        raise NotRecordable(f"{name} reads the numbers of the tensors in a list")


def refuse_places(name: str, *given: Any, **more: Any) -> None:
    """Raise NotRecordable for a tensor of places at which another one is split; other calls are left to torch."""
    if any(isinstance(each, Tensor) for each in (*given[1:], *more.values())):
        raise NotRecordable(f"{name} reads the numbers of a tensor")


NO_READS: dict[Any, Callable[..., Any]] = {
    **{read: partial(refuse_read, read.__name__) for read in READS},
    **{make: partial(refuse_list, make.__name__, 0) for make in (torch.tensor, torch.as_tensor, torch.asarray)},
    Tensor.new_tensor: partial(refuse_list, "new_tensor", 1),
    **{split: partial(refuse_places, "tensor_split") for split in (torch.tensor_split, Tensor.tensor_split)},
}


class Tape(TorchDispatchMode):
    """Records the operations of a call as a program in Python, in which every tensor has a name."""

    def __init__(self, inputs: Sequence[Tensor], most_bytes: float) -> None:
        """most_bytes: the largest memory of all tensors together. They all stay in memory until the call has ended."""
        super().__init__()
        self.bytes, self.most_bytes = 0, most_bytes
        self.names: dict[int, str] = {}  # id of a tensor -> its name
        self.values: dict[str, Any] = {}  # name -> value of everything that is the same in each replay
        self.seen: list[Any] = []  # all tensors, which stay alive so that none of their ids is used twice
        self.storages: set[int] = set()  # addresses of what a replay has anew
        self.operations: list[Operation] = []
        self.inputs = [self._name(tensor) for tensor in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler has to pass over this class. It would be loaded for that, which costs every process
        1.4 s and memory, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordable(f"{func} draws random numbers, or is no operation of its own")
        if shape_depends_on_numbers(func, args):
            raise NotRecordable(f"the shape of what {func} gives depends on the numbers of a tensor")
        reads: set[str] = set()
        given = [self._text(arg, reads) for arg in args]
        given += [f"{name}={self._text(arg, reads)}" for name, arg in (kwargs or {}).items()]
        if func._schema.is_mutable and any(self.names[id(each)] in self.values for each in written(func, args, kwargs)):
            raise NotRecordable(f"{func} writes into a tensor that no operation of the step made")
        result = func(*args, **(kwargs or {}))
        if func in SAME:
            self.seen.append(result)
            self.names[id(result)] = given[0]
            return result
        several = isinstance(result, tuple | list)
        targets = tuple(self._target(one) for one in (result if several else (result,)))
        taken = ", ".join(targets) + ("," if several else "")
        text = f"{taken} = {self._value(func)}({', '.join(given)})"
        self.operations.append(Operation(targets, text, frozenset(reads), not func._schema.is_mutable))
        return result

    def _target(self, result: Any) -> str:
        if result is None:
            return "_"
        if not isinstance(result, Tensor):
            raise NotRecordable(f"an operation gives {type(result).__name__}, not a tensor")
        return self.names.get(id(result)) or self._name(result)  # an operation in place returns its argument

    def _name(self, tensor: Tensor) -> str:
        self.seen.append(tensor)
        storage = memory_of(tensor)
        if tensor.numel() and storage.data_ptr() not in self.storages:
            self.storages.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            if self.bytes > self.most_bytes:
                raise NotRecordable("its operations take so long that a recording would not make them faster")
        return self.names.setdefault(id(tensor), f"t{len(self.seen)}")

    def _value(self, value: Any) -> str:
        self.seen.append(value)
        name = f"v{len(self.seen)}"
        self.values[name] = value
        return name

    def _text(self, value: Any, reads: set[str]) -> str:
        """An argument of an operation. reads: takes the names of the tensors in it."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                if memory_of(value).data_ptr() in self.storages:
                    raise NotRecordable("a tensor that no operation made has the memory of one of the step's tensors")
                self.names[id(value)] = self._value(value)
            reads.add(self.names[id(value)])
            return self.names[id(value)]
        if isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value):
            return f"[{', '.join(self._text(each, reads) for each in value)}]"
        return repr(value) if value is None or isinstance(value, bool | int) else self._value(value)

    def replay(self, outputs: Sequence[Tensor]) -> Replay:
        """What gives these tensors again, from other inputs."""
        wanted: set[str] = set()
        results = [self._text(tensor, wanted) for tensor in outputs]
        lines: list[str] = []
        alive = set(wanted)  # the names that are read further down
        for targets, text, reads, pure in reversed(self.operations):
            if pure and alive.isdisjoint(targets):
                continue
            done = sorted({*reads, *targets} - alive - self.values.keys() - {"_"})
            lines.append(f"{text}; del {', '.join(done)}" if done else text)
            alive |= reads
        head, end = f"def replay({', '.join(self.inputs)}):", f"return [{', '.join(results)}]"
        source = "\n    ".join([head, *reversed(lines), end])
        made: dict[str, Any] = dict(self.values)
        exec(source, made)  # the text has names of this class and whole numbers only
        return made.pop("replay")  # whose globals they are: a cycle would keep the tensors in them


def memory_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor. Raises NotRecordable for one that is not dense."""
    if tensor.layout != torch.strided:
        raise NotRecordable(f"a tensor has the layout {str(tensor.layout).removeprefix('torch.')}")
    return tensor.untyped_storage()


def written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation writes into, of its arguments."""
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (each for each in pytree.tree_leaves(given) if isinstance(each, Tensor))


def shape_depends_on_numbers(func: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether the numbers of its arguments determine the shape of an operation's result. `index` has torch's tag for
    such operations, and needs it for masks only; packing of sequences lacks it."""
    if func is torch.ops.aten._pack_padded_sequence.default:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return func is not torch.ops.aten.index.Tensor or any(i is not None and i.dtype in masks for i in args[1])


SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
"""Operations whose result is their argument, where no gradient is computed."""


@dataclass
class Program:
    """A recorded function for arguments of some shapes. form: what it gave beside its tensors. proofs: how many calls
    are still to be made both ways. rounds: how many have begun since it was recorded."""

    replay: Replay
    form: Any
    proofs: int = PROOFS
    rounds: int = 0


def shapes_of(leaves: Sequence[Tensor]) -> Hashable:
    """What tensors must have in common so that the same operations do the same with them."""
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves])


class Tapes:
    """Calls functions of tensors without gradients, by recordings where these are possible."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """most_bytes: what works on more memory is not recorded."""
        self.most_bytes = most_bytes
        self.kept: OrderedDict[Hashable, Program] = OrderedDict()
        self.recorded: int = 0
        self.replayed: int = 0
        self.round: int = 0
        self.refused: str = ""  # why nothing is recorded any more
        self.doubt: str = ""  # why earlier replays may have been wrong

    def begin_round(self, round: int) -> None:
        """The calls that follow are of this round."""
        if round == self.round:
            return
        self.round = round
        for known in self.kept.values():
            known.rounds += 1
            known.proofs += known.rounds.bit_count() == 1  # 1, 2, 4, 8 …

    def call(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """The result of a function. given: its arguments, trees of tensors. name: of the function, which must do the
        same in all calls with this name."""
        leaves, spec = pytree.tree_flatten(given)
        found, form = self.call_flat(
            (name, spec), lambda *leaves: pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, spec))), leaves
        )
        return pytree.tree_unflatten(found, form)

    @torch.no_grad()
    def call_flat(
        self, name: Hashable, function: Callable[..., tuple[Sequence[Tensor], Any]], leaves: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Any]:
        """`call` for a function of tensors, which returns tensors and whatever depends on no value of its arguments."""
        if self.refused:
            return function(*leaves)
        key = (name, shapes_of(leaves))
        known = self.kept.get(key)
        if known is None:
            return self._record(key, function, leaves)
        self.kept.move_to_end(key)
        self.replayed += 1
        if known.proofs:
            return self._prove(known, function, leaves)
        return known.replay(*leaves), known.form

    def _prove(
        self, known: Program, function: Callable[..., tuple[Sequence[Tensor], Any]], leaves: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Any]:
        """Call the function, and compare what it gives with what its recording gives."""
        known.proofs -= 1
        result, form = function(*leaves)
        try:
            found = known.replay(*leaves)
        except RuntimeError as error:  # an operation that refuses its arguments
            self._refuse(type_and_first_line(error))
        else:
            if form != known.form or not agrees(result, found):
                self._refuse("a replay gave other bits")
                if known.rounds > 2:  # there have been rounds without a proof
                    self.doubt = (
                        f"a recorded gradient has other bits in round {self.round}, and perhaps in some rounds before: "
                        "the losses read something besides their arguments; from here on none is replayed"
                    )
        return result, form

    def _record(
        self, key: Hashable, function: Callable[..., tuple[Sequence[Tensor], Any]], leaves: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Any]:
        """Call the function, and record the call."""
        given = [leaf.detach() for leaf in leaves]  # so that no tensor is there twice
        if self.recorded >= TRIES and self.replayed < self.recorded:
            self._refuse("shapes change too often")
            return function(*given)
        self.recorded += 1
        try:
            with Replacements(NO_READS), Tape(given, self.most_bytes) as tape:
                result, form = function(*given)
            self.kept[key] = Program(tape.replay(result), form)
        except NotRecordable as error:
            self._refuse(str(error))
            return function(*given)
        while len(self.kept) > MOST:
            self.kept.popitem(last=False)
        return result, form

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.kept.clear()
