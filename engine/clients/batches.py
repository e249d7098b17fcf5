"""The stream of mini-batches of each client.

A client passes over its own rows again and again, in an order that is shuffled anew for every pass. Its stream goes on
from round to round. A pass over n rows has ceil(n / B) batches, and the last one may be short. If a client takes K
local steps in each round, its visit number v gets the batches vK … vK + K - 1 of its stream, wherever passes begin and
end. The permutation of pass e depends on (seed, client, e) only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ..accelerators.columns import DeviceColumns
from ..accelerators.transfer import to_device
from ..cohorts.tasks import steps_of
from ..config.schema import Local
from ..memory import Recent

MOST_SEGMENTS = 2**20
"""So many permutations can be numbered above 43 random bits in an int64."""


class Stream(NamedTuple):
    """The batches of c clients for one round. K is the largest number of local steps among these clients."""

    rows: Tensor  # (c, K, B) int64, rows of the training set; short batches repeat their first row
    weight: Tensor | None  # (c, K, B) float64, 1 / examples in the batch, 0 on repeats; None if all batches are full
    steps: Tensor  # (c,) int64, the number of local steps of each client
    keys: Tensor  # (c, K) int64, each step's source of randomness


class BlockForm(NamedTuple):
    """The form of the batches of one block. width: the examples of its largest batch; full: whether all have as many.

    The last bits of a gradient depend on both, so that they follow from the block alone: which blocks are in the same
    task depends on the number of workers, which may split tasks, and in an asynchronous run on where it was resumed.
    """

    width: int
    full: bool

    @staticmethod
    def of(drawn: Stream, block: slice) -> BlockForm:
        """drawn: of a task; block: the positions of the block's clients in the task."""
        if drawn.weight is None:
            return BlockForm(drawn.rows.shape[2], True)
        taken = int(drawn.steps[block].max())
        sizes = (drawn.weight[block, :taken] > 0).sum(-1)
        width = int(sizes.max())
        return BlockForm(width, bool((sizes == width).all()))


DRAWS_BYTES = 1 << 26
"""The most bytes of batches that are kept for other runs of a process."""


def recent_draws() -> Recent[tuple[ClientIndex, Stream]]:
    """Batches of earlier tasks, for runs of one process that have the same seed, data and cohorts. They have the client
    index that they were drawn from, so that no other one gets the id by which a key names it."""
    return Recent(DRAWS_BYTES, lambda drawn: sum(tensor.nbytes for tensor in drawn[1] if tensor is not None))


Visits = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What determines the batches of c clients in one round: (clients, the position of each client's first row in
`ClientIndex.rows`, its rows, how often it has taken part before, its local steps), all (c,) int64."""


def stream(
    client_index: ClientIndex,
    clients: np.ndarray,
    visits: np.ndarray,
    local: Local,
    seed: int,
    taken: np.ndarray | None = None,
) -> Stream:
    """The batches of these clients (c,).

    visits: (c,) how often each client has taken part before. taken: (c,) the local steps that each client takes, the
    first ones of its visit; None for all.
    """
    clients, visits = clients.astype(np.int64), visits.astype(np.int64)
    offsets, ends = (client_index.offsets[clients + shift].astype(np.int64) for shift in (0, 1))
    sizes = ends - offsets
    steps = steps_of(sizes, local).astype(np.int64)
    shape = (len(clients), int(steps.max()), min(local.examples, int(sizes.max())))
    rows, weight, keys = _draw(client_index.rows, (clients, offsets, sizes, visits, steps), shape, local, seed)
    if taken is None:
        return Stream(rows, weight, torch.from_numpy(steps), keys)
    most = int(taken.max())
    kept = None if weight is None else weight[:, :most]
    return Stream(rows[:, :most], kept, torch.from_numpy(taken.astype(np.int64)), keys[:, :most])


def _draw(
    all_rows: np.ndarray, visits: Visits, shape: tuple[int, int, int], local: Local, seed: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, weight, keys) of a Stream of this shape (c, K, B). all_rows: `ClientIndex.rows`."""
    clients, offsets, sizes, visited, steps = visits
    first_batch, batches_per_pass = visited * steps, -(-sizes // local.examples)
    shuffled, start = _shuffle(clients, sizes, first_batch, steps, batches_per_pass, seed)
    step, per_pass = np.arange(shape[1]), batches_per_pass[:, None]
    number = first_batch[:, None] + np.minimum(step, steps[:, None] - 1)  # (c, K) batches of the whole stream
    pass_start = start[:, None] + (number // per_pass - number[:, :1] // per_pass) * sizes[:, None]
    within_pass = ((number % per_pass) * local.examples)[..., None] + np.arange(shape[2])  # (c, K, B)
    real = within_pass < sizes[:, None, None]
    full = bool(real.all())
    if not full:
        within_pass = np.where(real, within_pass, within_pass[..., :1])
    rows = all_rows[shuffled[pass_start[..., None] + within_pass] + offsets[:, None, None]]
    weight = None if full else torch.from_numpy(real / real.sum(-1, keepdims=True))
    keys = counted.key(seed, "step", clients[:, None], first_batch[:, None] + step)
    return torch.from_numpy(rows), weight, torch.from_numpy(keys)


def _shuffle(
    clients: np.ndarray,
    sizes: np.ndarray,
    first_batch: np.ndarray,
    steps: np.ndarray,
    batches_per_pass: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(the permutations of all passes of this round, one after another; (c,) where each client's first one begins)."""
    first_pass = first_batch // batches_per_pass
    passes = (first_batch + steps - 1) // batches_per_pass - first_pass + 1  # (c,) that this round touches
    position = np.repeat(np.arange(len(clients)), passes)  # the client of each permutation
    pass_number = first_pass[position] + np.arange(len(position)) - (passes.cumsum() - passes)[position]
    lengths = sizes[position]
    starts = lengths.cumsum() - lengths
    segment = np.repeat(np.arange(len(position)), lengths)  # the permutation of each entry
    entry = np.arange(len(segment)) - starts[segment]
    draws = counted.key(counted.key(seed, "order", clients[position], pass_number)[segment], entry)
    # One sort for all permutations, by 43 random bits within each.
    bits = counted.high_bits(draws, 43)
    if len(position) <= MOST_SEGMENTS:
        order = np.argsort((segment << 43) | bits, kind="stable")
    else:  # the same order, which takes longer
        order = np.lexsort((bits, segment))
    return entry[order], starts[passes.cumsum() - passes]


# --- gathering --------------------------------------------------------------------------------------------------------
Gather = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""(columns, rows (n,)) -> these rows of the columns, on the device."""


def gathered(columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """`Gather` where the columns are on the device."""
    return {name: column.index_select(0, rows) for name, column in columns.items()}


class TaskBatches(NamedTuple):
    """The batches of a task's clients. `drawn`: as they were drawn, in the processor's memory. `columns`: what rows are
    gathered from, by `gather`. `rows`, `keys`, `weight`: as in a Stream, but where the columns are; the weights are on
    the device, in the dtype of the model.
    """

    drawn: Stream
    columns: Mapping[str, Tensor]
    rows: Tensor
    keys: Tensor
    weight: Tensor | None
    gather: Gather

    @staticmethod
    def of(drawn: Stream, columns: DeviceColumns, dtype: torch.dtype, gather: Gather = gathered) -> TaskBatches:
        placed, device = columns.place(drawn.rows), columns.device
        weight = None if drawn.weight is None else to_device(drawn.weight, device).to(dtype)
        return TaskBatches(drawn, *placed, to_device(drawn.keys, device), weight, gather)

    def of_block(self, form: BlockForm) -> TaskBatches:
        """The same for the clients of a block of this form: without the padding that other blocks need."""
        weight = None if form.full or self.weight is None else self.weight[..., : form.width]
        return self._replace(rows=self.rows[..., : form.width], weight=weight)

    def at(self, place: tuple[Any, Any]) -> dict[str, Tensor]:
        """n batches of B rows, short ones padded: columns (n, B, …), "key" (n,), and "weight" (n, B) if there are short
        batches. place: the index of these n batches, by client and step."""
        weight = () if self.weight is None else self.weight[place]
        return Places(self.rows[place], self.keys[place], weight).batches(self.columns, self.gather)


LEAST_ROOM = 8
"""The least number of local steps that have places in a recording."""


class Places(NamedTuple):
    """Where the batches of some clients are. The axes in the middle, of local steps, may be missing."""

    rows: Tensor  # (c, K, B) int64, rows of the columns
    keys: Tensor  # (c, K) int64
    weight: Any  # (c, K, B), or () if no batch is short

    def batches(self, columns: Mapping[str, Tensor], gather: Gather = gathered) -> dict[str, Tensor]:
        """These batches: columns (c, K, B, …), "key" (c, K), and "weight" (c, K, B) if there are short ones."""
        batch = gather(columns, self.rows.reshape(-1))
        batch = {name: column.view(*self.rows.shape, *column.shape[1:]) for name, column in batch.items()}
        batch["key"] = self.keys
        return batch if isinstance(self.weight, tuple) else {**batch, "weight": self.weight}

    def of_step(self, k: Tensor) -> Places:
        """Those of local step k, () int64 on the device, which the processor does not ask for."""
        return Places(*pytree.tree_map(lambda each: each.index_select(1, k.view(1)).squeeze(1), tuple(self)))


@dataclass(frozen=True)
class BlockBatches:
    """The batches of a block of a task's clients. batches: those of the task, in the form of the block. block: the
    positions of its clients in the task. beat: gives a sign of life when a local step begins."""

    batches: TaskBatches
    block: slice
    beat: Callable[[], None] = lambda: None

    def __call__(self, k: int) -> dict[str, Tensor]:
        """The batches of local step k: columns (c, B, …), "key" (c,), and "weight" (c, B) if some are short."""
        return self.batches.at((self.block, k))

    def places(self) -> Places:
        """Where the batches of all local steps are. There is room for more steps, up to LEAST_ROOM or a power of two,
        so that blocks of clients with about as many steps have places of one shape."""
        steps = int(self.batches.drawn.steps[self.block].max())
        room = max(LEAST_ROOM, 1 << (steps - 1).bit_length())

        def of_block(tensor: Tensor) -> Tensor:
            own = tensor[self.block, :steps]
            return own if steps == room else torch.cat([own, own[:, :1].expand(-1, room - steps, *own.shape[2:])], 1)

        weight = () if self.batches.weight is None else of_block(self.batches.weight)
        return Places(of_block(self.batches.rows), of_block(self.batches.keys), weight)


@dataclass(frozen=True)
class ClientBatches:
    """The batches of one client of a task. position: of the client. beat: gives a sign of life when a local step
    begins."""

    batches: TaskBatches
    position: int
    beat: Callable[[], None] = lambda: None

    def __call__(self, steps: slice) -> dict[str, Tensor]:
        """The batches of these K local steps: columns (K, B, …), "key" (K,), and "weight" (K, B) if some batches are
        short. Short batches are padded at their end."""
        return self.batches.at((self.position, steps))

    def examples(self, step: int) -> int | None:
        """The number of examples in the batch of this local step, None if no batch is short. It is known without
        asking the device."""
        weight = self.batches.drawn.weight
        return None if weight is None else int((weight[self.position, step] > 0).sum())


def only_batch(batch: Mapping[str, Tensor]) -> ClientBatches:
    """A client's only batch: columns (B, …), "key" (), and "weight" (B,) if it is padded."""
    columns = {name: column for name, column in batch.items() if name not in ("key", "weight")}
    rows = torch.arange(len(next(iter(columns.values())))).view(1, 1, -1)
    weight = batch["weight"].view(1, 1, -1) if "weight" in batch else None
    drawn = Stream(rows, weight, torch.ones(1, dtype=torch.int64), batch["key"].view(1, 1))
    dtype = torch.float64 if weight is None else weight.dtype
    return ClientBatches(TaskBatches.of(drawn, DeviceColumns(columns, torch.device("cpu")), dtype), 0)
