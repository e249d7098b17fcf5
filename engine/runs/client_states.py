"""The models of the clients of a finished run, from the states that its folder has kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..config.schema import Experiment, part_name
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
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


class ClientStates:
    """What every client of a finished run has kept, and the last state of the server.

    Raises ConfigError if the clients have no models of their own, or if the states were not kept or are damaged.
    """

    def __init__(self, folder: Path, run_id: str, experiment: Experiment, rounds: int) -> None:
        """folder: of the run. rounds: how many it has."""
        refuse_unusual(folder, FOLDERS)
        self._folder, self._experiment = folder, experiment
        self._run_spec = RunSpec.of(run_id, experiment, str(folder), initial_model=initial_model(folder))
        if self._run_spec.device.type != "cpu":
            self._run_spec = self._run_spec.on_cpu()
        self._method_name = part_name(experiment.method)
        with self._run_spec.computing(), torch.no_grad():
            self._method = self._run_spec.method(rounds)
            if not self._method.own_models:
                raise ConfigError(
                    f"{folder}: clients have no models of their own, all have the server's, "
                    f"model.safetensors, got {self._method_name}; choose a run whose clients keep parts of a model"
                )
            self._snapshot = kept_snapshot(folder, experiment, rounds)
            x = self._run_spec.initial_model()
            server = self._method.server_init(x)
            leaves, form = pytree.tree_flatten(server)
            server = pytree.tree_unflatten(self._snapshot.server[: len(leaves)], form)
            self._x = self._method.model(server)
            self._public = self._method.unpack(self._method.broadcast(server))
            self._fresh = self._method.client_init(self._public)
            if self._method.own_view and self._method.looks(self._public, self._fresh):
                raise ConfigError(
                    f"{folder}: clients make their models from the losses on their rows when they are evaluated, got "
                    f"{self._method_name}; choose a run whose clients keep parts of a model"
                )
            sample = StateSpec(self._method, x).client
            self._row_files = self._rows(sample) if pytree.tree_leaves(sample) else None

    def _rows(self, sample: Any) -> RowFiles:
        """The files of the rows. sample: a client state."""
        engine = self._experiment.engine
        folder = str(state_folder(engine, self._run_spec.run_id, str(self._folder)))
        layout = StateLayout(folder, 0, engine.state_dtype == "bfloat16", True, shared=shared_ends(folder))
        try:
            return RowFiles(layout, sample)
        except OSError as error:
            raise ConfigError(f"{folder}: the states of clients cannot be read ({error.strerror})") from None

    @property
    def clients(self) -> range:
        """All clients."""
        return range(len(self._snapshot.row))

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
        self.check([client])
        row = int(self._snapshot.row[client])
        with self._run_spec.computing(), torch.no_grad():
            if row < 0 or self._row_files is None:
                state = self._fresh
            else:
                self._check_row(self._row_files, client, row)
                state = self._row_files.read_one(row)
            public = self._public
            if self._method.own_view:
                public = self._method.view(public, torch.tensor(client), torch.zeros(0))
            tree = self._method.client_model(self._x, public, state)
            return {name: leaf.detach().clone() for name, leaf in [*tree.items(), *self._run_spec.frozen.items()]}

    def _check_row(self, files: RowFiles, client: int, row: int) -> None:
        try:
            sound = np.array_equal(files.digests(np.array([row]))[0], self._snapshot.digest[client])
        except OSError:  # the file ends before it
            sound = False
        if not sound:
            raise ConfigError(
                f"{self._folder}: the state of client {client} is damaged or gone; put the files in state/ back, or "
                f"run it again with {KEPT}"
            )

    def save(self, client: int, file: Path) -> None:
        """Write the model of a client. The file's metadata have, as texts: client, round, visits, method, and the names
        of the personal and the frozen tensors, separated by commas, if there are any."""
        spec = self._run_spec
        facts = {
            "client": str(client),
            "round": str(self._snapshot.round),
            "visits": str(int(self._snapshot.visits[client])),
            "method": self._method_name,
            "personal": ",".join(spec.kept_apart.personal),
            "frozen": ",".join(spec.frozen),
        }
        tensors = {name: value.contiguous() for name, value in self.model(client).items()}
        from safetensors.torch import save_file

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = cleared(temporary_path(file))
            save_file(tensors, temporary, {name: text for name, text in facts.items() if text})
            temporary.replace(file)
        except OSError as error:
            raise ConfigError(f"--out {file} cannot be written ({error.strerror or error})") from None


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
