"""Several runs in one process, whose local training is done together. Such runs are called members.

Each member is a run as any other, with its own driver, records, checkpoints and folder. It is a generator: it is sent
on until it needs a phase of local training or an evaluation, waits for somebody, or ends. When no member can go on, the
evaluations that they need are made in one pass over the rows, and then the phases of local training are run at once,
see `clients.members`. A phase that cannot be run with others is run by the member's own pool.

That it computes the same bits is checked, once for all members whose methods have the same form and differ in the same
numbers. The first round of such a member is trained alone as well, and what is kept is the result of the run alone. If
the two are not equal to the bit, no member of this form is trained with others, since a run's result must not depend on
which other runs have shared its process. Nor is it if its method cannot have tensors as numbers under vmap, as a method
that branches on the value of a number.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...workloads.workload import Split
from ..backends.local import LocalPool
from ..clients.batches import recent_draws
from ..clients.members import (
    Evaluation,
    can_be_joined,
    common_form,
    evaluate_together,
    evaluated_form,
    recent_trainers,
    train_together,
)
from ..clients.own_models import OwnModels
from ..clients.worker import TaskUnderWay
from ..errors import Interrupted, type_and_first_line
from ..kernels.agreement import agrees
from ..method_form.numbers import Path, differing
from ..records.history import Event
from ..reduction.tree import TaskResult
from ..rounds.driver import Driver
from ..rounds.pool import Phase, Results
from ..run_spec import RunSpec
from .host import Host
from .shared_data import SharedData

Way = tuple[Hashable, tuple[Path, ...]]
"""What a proof is for: (the form of members that are trained together, which numbers differ among them)."""


class Member(Host):
    """A run of a process with several."""

    def __init__(
        self,
        members: Members,
        planned: Callable[[RunSpec], None] = lambda run_spec: None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        """planned: called when the run's execution plan is known. waits: whether the run waits for somebody, which is
        asked after each round."""
        self.members, self.planned, self.waits = members, planned, waits
        self.phase: Phase | None = None  # that it needs
        self.together: list[TaskResult] = []  # of the tasks of this phase that were run together with others
        self.way: Way = (None, ())  # in which they were
        self.noted = False  # whether the log says how well the run agrees with the run alone
        self.alone = ""  # why it is not trained with others; "" if it may be
        self.seconds = 0.0  # that its steps and its shares of phases have taken
        self.since = 0.0  # when its step began

    # --- a host -------------------------------------------------------------------------------------------------------
    def split(self, run_spec: RunSpec) -> Split:
        return self.members.data.split(run_spec)

    def plan(self, run_spec: RunSpec, split: Split) -> tuple[RunSpec, str]:
        planned, line = super().plan(run_spec.with_proofs(self.members.data.proofs_of(run_spec)), split)
        self.planned(planned)
        return planned, line

    def steps(self, driver: Driver) -> Iterator[Event | Phase]:
        assert isinstance(driver.pool, LocalPool)
        self.pool, self.run, driver.clock = driver.pool, driver.retry.run, self.clock
        self.pool.worker.draws = self.members.draws
        return driver.steps()

    def clock(self) -> float:
        """The seconds of this member alone: those of its steps, and its shares of phases that were run together."""
        return self.seconds + time.perf_counter() - self.since

    # --- the run ------------------------------------------------------------------------------------------------------
    def begin(self, run: Generator[Any, Results | None, object]) -> None:
        """Join the members of the process. run: the run, as `launch.play` executes it with this host."""
        self.generator = run
        self.members.running.append(self)

    def go_on(self, results: Results | None = None) -> None:
        """Send the run on to its next phase, until it waits, or to its end. results: of its last phase."""
        self.phase, self.together, self.since = None, [], time.perf_counter()
        try:
            while self.phase is None:
                item = self.generator.send(results)
                results = None
                if isinstance(item, Phase):
                    self.phase = item
                elif self.waits():
                    break
        except StopIteration:
            self.members.running.remove(self)
        finally:
            self.seconds += time.perf_counter() - self.since

    def results(self, phase: Phase) -> Results:
        """The results of the phase that the member needs: those of the tasks that were run together, or its own."""
        if why := self.members.refused.get(self.way[0]):
            self.alone, self.together = why, []
        if len(self.together) < len(phase.tasks):
            notes = [f"trained without the other runs of this process: {self.alone}"] if self.alone else []
            return noted(self.run(phase), notes)
        if self.way in self.members.proven:
            return noted(self.together, self._agreement("another run"))
        return self._proved(phase, self.together)

    def _agreement(self, where: str) -> list[str]:
        """A note that the run agrees with the run alone, unless the log has one. where: it was found out."""
        before, self.noted = self.noted, True
        how = f"clients are trained together with those of other runs, to the same bits in {where}"
        return [] if before else [how]

    def _proved(self, phase: Phase, together: list[TaskResult]) -> Results:
        """Run a phase alone that was run together with others, and compare the results. Yields those of the former."""
        outcomes = list(self.pool.run_phase(phase))
        alone = [outcome for outcome in outcomes if isinstance(outcome, TaskResult)]
        if len(alone) < len(outcomes):  # a client failed: the next round is the proof
            yield from self.run(phase)
            return
        if agrees(sums(alone), sums(sorted(together, key=lambda result: result.index))):
            self.members.proven.add(self.way)
            notes = self._agreement("this round")
        else:
            self.alone = self.members.refused[self.way[0]] = "its sums would have other bits"
            notes = [f"trained without the other runs of this process: {self.alone}"]
        yield from noted(alone, notes)


class Members:
    """The runs of a process."""

    def __init__(self) -> None:
        self.data = SharedData()
        self.running: list[Member] = []
        self.trainers, self.draws = recent_trainers(), recent_draws()
        # form of trainers -> why members of this form cannot be trained together
        self.refused: dict[Hashable, str] = {}
        self.proven = set[Way]()  # members that were trained in this way have the bits of runs alone

    def advance(self) -> bool:
        """Send every member on that can go on, then run the phases that members need; returns whether any member did
        anything."""
        able = [member for member in self.running if member.phase is None and not member.waits()]
        for member in able:
            member.go_on()
        while evaluating := self._needing("evaluate"):
            self._evaluate(evaluating)
        if training := self._needing("train"):
            self._train(training)
        return bool(able or training)

    def _needing(self, call: str) -> list[tuple[Member, Phase]]:
        """The members that need a phase of this kind."""
        return [(each, each.phase) for each in self.running if each.phase is not None and each.phase.call == call]

    def _evaluate(self, needing: Sequence[tuple[Member, Phase]]) -> None:
        """Make the evaluations that these members need, and share the time among those that have a pass in common."""
        groups: dict[Hashable, list[tuple[Member, Phase, Evaluation]]] = defaultdict(list)
        for member, phase in needing:
            evaluation = Evaluation(member.pool.worker, phase.tasks, phase.broadcast)
            own = any(isinstance(task, OwnModels) for task in phase.tasks)  # of this member alone
            groups[id(member) if own else evaluated_form(evaluation)].append((member, phase, evaluation))
        for group in groups.values():
            began, made = time.perf_counter(), list[list[TaskResult]]()
            alike = group[0][2].worker.run_spec.computing()
            if len(group) > 1:
                with alike, suppress(Exception):  # each member meets the failure of a report, or a stop, by itself
                    made = evaluate_together([evaluation for _, _, evaluation in group])
            took = (time.perf_counter() - began) / len(group)
            for place, (member, phase, _) in enumerate(group):
                member.seconds += took
                member.go_on(iter(made[place]) if made else member.run(phase))

    def _train(self, needing: Sequence[tuple[Member, Phase]]) -> None:
        """Run the phases of local training that these members need, and share the time of what is run together."""
        began, groups = time.perf_counter(), defaultdict[Hashable, list[tuple[Member, TaskUnderWay]]](list)
        joined = [(member, phase) for member, phase in needing if can_be_trained_together(member, phase)]
        for member, phase in joined if len(joined) > 1 else ():
            with member.pool.worker.run_spec.computing(), torch.no_grad():
                for task in phase.tasks:
                    begun = member.pool.worker.begin(task, phase.broadcast)
                    groups[common_form(begun)].append((member, begun))
        others = set[int]()  # members that have a task in common with another one
        for group in groups.values():
            if len(found := {id(member) for member, _ in group}) > 1:
                others |= found
        for group in groups.values():
            if shared := [(member, task) for member, task in group if id(member) in others]:
                self._train_tasks(shared)
        took = (time.perf_counter() - began) / max(1, len(joined))
        for member, _ in joined:
            member.seconds += took
        for member, phase in needing:
            member.go_on(member.results(phase))

    def _train_tasks(self, group: list[tuple[Member, TaskUnderWay]]) -> None:
        """Train the tasks of members that have a common form."""
        trainers = [task.trainer for _, task in group]
        form, paths = trainers[0].form, tuple(differing([trainer.numbers for trainer in trainers]))
        results: list[TaskResult] = []
        if form not in self.refused:
            try:
                with group[0][1].worker.run_spec.computing(), torch.no_grad():
                    results = train_together([task for _, task in group], self.trainers)
            except Interrupted:  # a member is to stop, and finds that out when it begins the phase by itself
                return
            except Exception as error:  # whatever a method does with tensors as numbers, or a client's failure
                self.refused[form] = f"to train them together raised {type_and_first_line(error)}"
        for place, (member, _) in enumerate(group):
            member.way = form, paths
            member.together += results[place : place + 1]


def can_be_trained_together(member: Member, phase: Phase) -> bool:
    """Whether a phase of local training may be run together with those of other members."""
    return not member.alone and can_be_joined(member.pool.worker, phase.tasks)


def noted(results: Iterable[Any], notes: list[str]) -> Results:
    """The results, which have notes for the log."""
    for result in results:
        if notes and isinstance(result, TaskResult):
            result = result._replace(notes=(*result.notes, *notes))
        yield result


def sums(results: Sequence[TaskResult]) -> list[torch.Tensor]:
    return [torch.from_numpy(leaf) for result in results for leaf in result.leaves or []]
