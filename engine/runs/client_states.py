"""The models of the clients of a finished run, from the states that its folder has kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Viewer
from ...algorithms.tree import Tree
from ..clients.own_models import OwnModels, adapted
from ..clients.worker import Data, Worker
from ..cohorts.tasks import Broadcast
from ..config.schema import Experiment, part_name
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..run_spec import ExecutionPlan, RunSpec
from ..state.checkpoint import checkpoints_in
from ..state.checkpoint_store import Damaged, Snapshot
from ..state.folders import state_folder
from ..state.row_files import RowFiles, StateLayout
from ..state.sharing import shared_ends
from ..storage.atomic_write import cleared, temporary_path
from ..storage.plain_files import refuse_unusual
from .saved_files import FOLDERS, initial_model

KEPT = "checkpoint.last=true"
"""The setting with which a complete run keeps what is needed here, however large it is."""


FOLDER = "client-models"
"""The folder in that of the run where the files of clients' models lie."""
IN_A_FOLDER = 1000
"""The largest number of files of clients' models in a folder."""
Form = Literal["personal", "whole"]
"""What a file has: the tensors that stay with the client, or all of its model."""


class ClientStates:
    """What every client of a finished run has kept, and the last state of the server.

    Raises ConfigError if the clients have no models of their own and do not adapt the server's, or if the states were
    not kept or are damaged.
    """

    def __init__(self, folder: Path, run_id: str, experiment: Experiment, rounds: int, adapt: int = 0) -> None:
        """folder: of the run. rounds: how many it has. adapt: the number of the adaptation after which clients are
        served, from 1; 0 for none."""
        refuse_unusual(folder, FOLDERS)
        self._folder, self._experiment, self._adapt = folder, experiment, adapt
        self._run_spec = RunSpec.of(run_id, experiment, str(folder), initial_model=initial_model(folder))
        if self._run_spec.device.type != "cpu":
            self._run_spec = self._run_spec.on_cpu()
        self._method_name = part_name(experiment.method)
        with self._run_spec.computing(), torch.no_grad():
            self._method = self._run_spec.method(rounds)
            adaptations = len(self._run_spec.adaptations(self._method))
            if not 0 <= adapt <= adaptations:
                raise ConfigError(
                    f"{folder}: the run has {adaptations or 'no'} adaptations, got adapt {adapt}; choose "
                    f"{f'1 to {adaptations}' if adaptations else 'a run with evaluate.clients.adapt'}"
                )
            if not self._method.own_models and not adapt:
                raise ConfigError(
                    f"{folder}: clients have no models of their own, all have the server's, "
                    f"model.safetensors, got {self._method_name}; choose a run whose clients keep parts of a model"
                )
            self._snapshot = kept_snapshot(folder, experiment, rounds)
            x = self._run_spec.initial_model()
            server = self._method.server_init(x)
            leaves, form = pytree.tree_flatten(server)
            server = pytree.tree_unflatten(self._snapshot.server[: len(leaves)], form)
            self._x, self._broadcast = self._method.model(server), self._method.broadcast(server)
            self._public = self._method.unpack(self._broadcast)
            self._fresh, sample = self._method.client_init(self._public), StateSpec(self._method, x).client
            self._looks = self._method.own_view and bool(self._method.looks(self._public, self._fresh))
            self._layout = self._layout_of_rows()
            self._row_files = self._rows(sample) if pytree.tree_leaves(sample) else None

    def _layout_of_rows(self) -> StateLayout:
        engine = self._experiment.engine
        folder = str(state_folder(engine, self._run_spec.run_id, str(self._folder)))
        return StateLayout(folder, 0, engine.state_dtype == "bfloat16", True, shared=shared_ends(folder))

    def _rows(self, sample: Any) -> RowFiles:
        """The files of the rows. sample: a client state."""
        try:
            return RowFiles(self._layout, sample)
        except OSError as error:
            raise ConfigError(
                f"{self._layout.folder}: the states of clients cannot be read ({error.strerror}); put its files back, "
                "or run the experiment anew"
            ) from None

    @property
    def clients(self) -> range:
        """All clients, those that are never trained with last."""
        return range(self._experiment.federation.all_clients)

    def check(self, clients: Iterable[int]) -> None:
        """Raise ConfigError for the first client that the run does not have."""
        for client in clients:
            if client not in self.clients:
                raise ConfigError(
                    f"client: 0 <= client < {len(self.clients)} must hold, got {client}; choose a client of the run"
                )

    def model(self, client: int) -> dict[str, Tensor]:
        """The model that a client is served with after the last round, the frozen tensors last: name -> tensor. Of a
        client that has never taken part it is the one that it would begin with. Raises ConfigError for a client that
        the run does not have, and for a state that does not match its digest."""
        tensors = dict(self._tree(client).items())  # an adaptation may have tuned frozen ones
        tensors |= {name: leaf for name, leaf in self._run_spec.frozen.items() if name not in tensors}
        return {name: leaf.detach().clone() for name, leaf in tensors.items()}

    def own_part(self, client: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """(what the client alone has of that model: name -> tensor, the numbers by which methods mix it with the
        server's: name -> number). Raises ConfigError as `model`."""
        division, facts = self._run_spec.division, dict[str, float]()
        if self._needs_rows:
            tree = self._tree(client)
        else:
            public, state = self._kept(client)
            with self._run_spec.computing(), torch.no_grad():
                tree = self._method.own_part(self._x, public, state)
                facts = {name: value.item() for name, value in self._method.client_facts(public, state).items()}
        names = tree.layout.names if division is None else division.names
        return {name: tree[name].detach().clone() for name in names}, facts

    @property
    def _needs_rows(self) -> bool:
        """Whether a client's own rows say what its model is."""
        return bool(self._adapt or self._looks) or self._run_spec.client_models.statistics == "training"

    def _row(self, client: int) -> int:
        """The row of a client's state, -1 for none. Raises ConfigError as `model`."""
        self.check([client])
        if self._row_files is None or client >= len(self._snapshot.row) or self._snapshot.row[client] < 0:
            return -1
        row = int(self._snapshot.row[client])
        self._check_row(client, row)
        return row

    def _kept(self, client: int) -> tuple[Any, Any]:
        """(what a client makes of the server's last broadcast, what it has kept)."""
        row, public = self._row(client), self._public
        state = self._fresh if row < 0 or self._row_files is None else self._row_files.read_one(row)
        if self._method.own_view:
            viewer = Viewer(torch.tensor(client), torch.tensor(torch.nan))  # nobody trains with its share of the rows
            public = self._method.view(public, viewer, torch.zeros(0))
        return public, state

    def _tree(self, client: int) -> Tree:
        """The model of a client, without the frozen tensors that no adaptation has tuned."""
        with self._run_spec.computing(), torch.no_grad():
            if not self._needs_rows:
                return self._method.client_model(self._x, *self._kept(client))
            task = OwnModels(0, np.array([client]), np.array([self._row(client)]), (), False, self._snapshot.round)
            leaves = pytree.tree_leaves((self._x.flat, self._broadcast))
            served = self._worker.own_models(task, Broadcast(0, [leaf.numpy() for leaf in leaves]))
            return served.models[adapted(self._adapt) if self._adapt else "own"][0]

    @cached_property
    def _worker(self) -> Worker:
        """What makes models for which clients need their rows, of which the data of the run are read."""
        split = self._run_spec.split()
        data = Data.of(split.train, split.test, split.client_index)
        return Worker(self._run_spec.with_plan(ExecutionPlan(1, "torch")), data, self._layout, lambda: None)

    def _check_row(self, client: int, row: int) -> None:
        assert self._row_files is not None  # otherwise there is no row
        try:
            sound = np.array_equal(self._row_files.digests(np.array([row]))[0], self._snapshot.digest[client])
        except OSError:  # the file ends before it
            sound = False
        if not sound:
            raise ConfigError(
                f"{self._folder}: the state of client {client} is damaged or gone; put the files in state/ back, or "
                f"run it again with {KEPT}"
            )

    def save(self, client: int, file: Path, form: Form = "whole") -> None:
        """Write the model of a client. The file's metadata have, as texts: client, round, visits, method, the number of
        the adaptation, and the names of the personal and the frozen tensors, separated by commas, if there are any. In
        the form `personal` they also have the numbers of `own_part`, and `model`, the place of the server's model."""
        spec, visits = self._run_spec, self._snapshot.visits
        facts = {
            "client": str(client),
            "round": str(self._snapshot.round),
            "visits": str(int(visits[client])) if client < len(visits) else "0",
            "method": self._method_name,
            "adapt": str(self._adapt or ""),
            "personal": ",".join(spec.kept_apart.personal),
            "frozen": ",".join(spec.frozen),
        }
        if form == "whole":
            tensors = self.model(client)
        else:
            tensors, numbers = self.own_part(client)
            facts |= {name: repr(number) for name, number in numbers.items()}
            facts["model"] = os.path.relpath(self._folder / "model.safetensors", file.parent)
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        from safetensors.torch import save_file

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = cleared(temporary_path(file))
            save_file(tensors, temporary, {name: text for name, text in facts.items() if text})
            temporary.replace(file)
        except OSError as error:
            raise ConfigError(f"--out {file} cannot be written ({error.strerror or error})") from None

    def save_all(self, form: Form = "whole") -> None:
        """Write the models of all clients into the folder of the run."""
        for client in self.clients:
            self.save(client, self._folder / FOLDER / self.file_name(client), form)

    def file_name(self, client: int) -> str:
        """The file of a client's model, in a folder of its own for each thousand of clients if there are more."""
        name = f"{client:07}.safetensors"
        return name if len(self.clients) <= IN_A_FOLDER else f"{client // IN_A_FOLDER * IN_A_FOLDER:07}/{name}"


def kept_snapshot(folder: Path, experiment: Experiment, rounds: int) -> Snapshot:
    """The state after the last round of a finished run. Raises ConfigError if it was not kept, or is damaged."""
    store = checkpoints_in(folder)
    if rounds not in store.rounds():
        raise ConfigError(
            f"{folder}: the run has no clients' states any more, got checkpoint.last={experiment.checkpoint.last}; run "
            f"it again with {KEPT}"
        )
    try:
        return store.read(rounds)
    except Damaged as wrong:
        raise ConfigError(
            f"{folder}: the state after the last round is damaged ({wrong}); run it again with {KEPT}"
        ) from None
