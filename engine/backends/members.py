"""Several runs in one process, whose local training is done together. Such runs are called members.

Each member is a run as any other, with its own driver, records, checkpoints and folder, in a thread of its own. Threads
take turns: a member has the turn until it needs a phase of local training or an evaluation, waits for somebody, or
ends. When no member can go on, the evaluations that they need are made in one pass over the rows, and then the phases
of local training are run at once, see `clients.members`.

That it computes the same is checked, once for all members whose methods have the same form and differ in the same
numbers. The first round of such a member is trained alone as well, and what is kept is the result of the run alone. If
the two do not agree, no member of this form is trained with others. Nor is it if its method cannot have tensors as
numbers under vmap, as a method that branches on the value of a number. Phases of other kinds, and local training that
cannot be done together, are run by the member itself during its turn.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ..accelerators import settings
from ..accelerators.notes import as_facts
from ..clients.batches import Draws
from ..clients.evaluation import LossProbe
from ..clients.members import (
    Evaluation,
    Part,
    Trainers,
    can_be_joined,
    common_form,
    evaluate_together,
    evaluated_form,
    taken_apart,
    train_together,
)
from ..clients.worker import Data
from ..errors import Interrupted, type_and_first_line
from ..kernels.agreement import Rounding, agrees, excess
from ..method_form.numbers import Path, differing
from ..reduction.tree import TaskResult
from ..rounds.pool import Outcome, Phase
from ..run_spec import RunSpec
from ..state.row_files import StateLayout
from .local import LocalPool


class Way(NamedTuple):
    """What a proof is for: the form of members that are trained together, and which numbers differ among them."""

    form: Hashable
    paths: tuple[Path, ...]


class Member:
    """A run that takes turns with others. Its thread calls `enter` first, and `leave` at the end."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.turn = threading.Semaphore(0)
        self.phase: tuple[MemberPool, Phase] | None = None  # that it needs
        self.results: list[TaskResult] = []  # of those tasks of the phase that were done
        self.way = Way(None, ())  # in which they were done
        self.waits: Callable[[], bool] | None = None  # returns False when the member can go on
        self.seconds = 0.0  # that its turns and its shares of phases have taken
        self.since = 0.0  # when its turn began

    def enter(self) -> None:
        """Wait for the first turn."""
        self.turn.acquire()

    def leave(self) -> None:
        """The run is over."""
        self.lockstep.members.remove(self)
        self.lockstep.given_back.release()

    def wait_while(self, waits: Callable[[], bool]) -> None:
        """Let the others go on until `waits` returns False."""
        self.waits = waits
        self._give_back()

    def let_others(self) -> None:
        """Let the others have a turn."""
        self._give_back()

    def together(self, pool: MemberPool, phase: Phase) -> list[TaskResult] | None:
        """The results of a phase of local training or of an evaluation, done together with those of the others; None if
        the member must run it by itself."""
        self.phase, self.results = (pool, phase), []
        self._give_back()
        if len(self.results) < len(phase.tasks):
            return None
        return sorted(self.results, key=lambda result: result.index)

    def _give_back(self) -> None:
        with settings.released():
            self.lockstep.given_back.release()
            self.turn.acquire()

    def clock(self) -> float:
        """The seconds of this member alone: those of its turns, and its shares of phases that were run together."""
        return self.seconds + time.perf_counter() - self.since


class Lockstep:
    """The members of a process, one of which has the turn. Only one thread uses it, beside the one with the turn."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.given_back = threading.Semaphore(0)
        self.trainers, self.draws = Trainers(), Draws()
        # form of trainers -> why members of this form cannot be trained together
        self.refused: dict[Hashable, str] = {}
        # how well members that were trained in this way agree with runs alone
        self.proven: dict[Way, str] = {}

    def join(self) -> Member:
        """A new member, whose thread is about to start."""
        member = Member(self)
        self.members.append(member)
        return member

    def advance(self) -> bool:
        """Give every member that can go on a turn, then run the phases that members need; returns whether any member
        did anything."""
        able = [m for m in self.members if m.phase is None and not (m.waits and m.waits())]
        self._give_turns(able)
        while evaluating := self._needing("evaluate"):
            self._evaluate(evaluating)
            self._give_turns(evaluating)
        if needing := self._needing("train"):
            self._run_phases(needing)
        return bool(able or needing)

    def _give_turns(self, members: Sequence[Member]) -> None:
        """Give each of these members a turn."""
        for member in members:
            member.waits, member.since = None, time.perf_counter()
            member.turn.release()
            self.given_back.acquire()
            member.seconds += time.perf_counter() - member.since

    def _needing(self, call: str) -> list[Member]:
        """The members that need a phase of this kind."""
        return [m for m in self.members if m.phase is not None and m.phase[1].call == call]

    def _evaluate(self, members: Sequence[Member]) -> None:
        """Make the evaluations that these members need, and share the time among those that have a pass in common."""
        groups: dict[Hashable, list[tuple[Member, Evaluation]]] = defaultdict(list)
        for member in members:
            assert member.phase is not None
            pool, phase = member.phase
            evaluation = Evaluation(pool.worker, phase.tasks, phase.broadcast)
            groups[evaluated_form(evaluation)].append((member, evaluation))
            member.phase = None
        for group in groups.values():
            if len(group) == 1:
                continue  # it is made by the member itself
            began = time.perf_counter()
            alike = settings.computing(group[0][1].worker.run_spec)
            with alike, suppress(Exception):  # each member meets the failure of a report, or a stop, again by itself
                for (member, _), results in zip(group, evaluate_together([one for _, one in group]), strict=True):
                    member.results = results
            for member, _ in group:
                member.seconds += (time.perf_counter() - began) / len(group)

    def _run_phases(self, members: Sequence[Member]) -> None:
        """Run the phases that these members need, and share the time among them."""
        began = time.perf_counter()
        parts: list[tuple[Member, Part]] = []
        for member in members if len(members) > 1 else ():
            assert member.phase is not None
            pool, phase = member.phase
            with settings.computing(pool.worker.run_spec), torch.no_grad():
                parts += [(member, part) for part in pool.parts(phase)]
        groups: dict[Hashable, list[tuple[Member, Part]]] = defaultdict(list)
        for member, part in parts:
            groups[common_form(part)].append((member, part))
        alone = {id(member) for member in members}  # that have no task in common with another member
        for group in groups.values():
            if len(group_members := {id(member) for member, _ in group}) > 1:
                alone -= group_members
        for group in groups.values():
            self._train([(member, part) for member, part in group if id(member) not in alone])
        for member in members:
            member.phase = None
            member.seconds += (time.perf_counter() - began) / len(members)

    def _train(self, group: list[tuple[Member, Part]]) -> None:
        """Train the tasks of members that have a common form."""
        if not group:
            return
        apart = [taken_apart(part.under_way.trainer) for _, part in group]
        form = apart[0].form
        if form not in self.refused:
            way = Way(form, tuple(differing([each.numbers for each in apart])))
            try:
                with settings.computing(group[0][1].worker.run_spec), torch.no_grad():
                    results = train_together([part for _, part in group], self.trainers)
            except Interrupted:  # a member is to stop, and finds that out when it begins the phase by itself
                return
            except Exception as error:  # whatever a method does with tensors as numbers, or a client's failure
                self.refused[form] = f"to train them together raised {type_and_first_line(error)}"
            else:
                for (member, _), result in zip(group, results, strict=True):
                    member.results.append(result)
                    member.way = way
                return
        for member, _ in group:
            member.way = Way(form, ())


class MemberPool(LocalPool):
    """The pool of a member."""

    def __init__(
        self, member: Member, run_spec: RunSpec, data: Data, layout: StateLayout, beat: Callable[[], None]
    ) -> None:
        super().__init__(run_spec, data, layout, beat)
        self.member, self.lockstep = member, member.lockstep
        self.worker.draws = self.lockstep.draws
        self.noted = False  # whether the log says how well the run agrees with the run alone
        self.alone = ""  # why it is not trained with others; "" if it may be

    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        self.beat()
        results = None
        if phase.call == "train":
            joined = not phase.repeated and not self.alone and can_be_joined(self.worker, phase.tasks)
        else:
            joined = phase.call == "evaluate" and not any(isinstance(task, LossProbe) for task in phase.tasks)
        if joined:
            results = self.member.together(self, phase)
        elif phase.call == "train":
            self.member.let_others()
        if phase.call != "train":
            yield from super().run_phase(phase) if results is None else results
            return
        if joined and (why := self.lockstep.refused.get(self.member.way.form)):
            self.alone, results = why, None
        if results is None:
            notes = [f"trained without the other runs of this process: {self.alone}"] if self.alone else []
            yield from self._noted(super().run_phase(phase), notes)
        elif self.member.way in self.lockstep.proven:
            yield from self._noted(results, self._agreement("another run"))
        else:
            yield from self._prove(phase, results)

    def _agreement(self, where: str) -> list[str]:
        """A note on how well the run agrees with the run alone, unless the log has one. where: it was found out."""
        how, noted, self.noted = self.lockstep.proven[self.member.way], self.noted, True
        return [] if noted else [f"clients are trained together with those of other runs, {how} in {where}"]

    def clock(self) -> float:
        return self.member.clock()

    def parts(self, phase: Phase) -> list[Part]:
        """The tasks of a phase, before their first blocks."""
        return [Part(self.worker, self.worker.begin(task, phase.broadcast)) for task in phase.tasks]

    def _prove(self, phase: Phase, together: list[TaskResult]) -> Iterator[Outcome]:
        """Run a phase alone that was run together with others, and compare the results. Yields those of the run alone.

        The rounding that is allowed is the difference between the two ways in which a run trains its clients, one after
        another and in blocks, times `FACTOR`, and `ROUNDINGS` of a tensor's largest entry in any case.
        """
        self.worker.vectorise = False
        try:
            one_by_one = list(super().run_phase(phase))
        finally:
            self.worker.vectorise = True
        outcomes = list(super().run_phase(phase))
        if not all(isinstance(outcome, TaskResult) for outcome in (*one_by_one, *outcomes)):
            yield from outcomes  # a client failed: the round is repeated, and so is the proof
            return
        alone: list[TaskResult] = outcomes  # pyright: ignore[reportAssignmentType]
        exact, off = compared(alone, together, one_by_one)  # pyright: ignore[reportArgumentType]
        if off:
            self.alone = self.lockstep.refused[self.member.way.form] = off
            notes = [f"trained without the other runs of this process: {off}"]
        else:
            self.lockstep.proven[self.member.way] = f"{'to the bit' if exact else 'within rounding'} to the same result"
            notes = self._agreement("this round")
        yield from self._noted(outcomes, notes)

    def _noted(self, outcomes: Any, notes: list[str]) -> Iterator[Outcome]:
        """The outcomes, whose results have notes for the log."""
        for outcome in outcomes:
            if notes and isinstance(outcome, TaskResult):
                outcome = outcome._replace(facts={**outcome.facts, **as_facts(notes)})
            yield outcome


def compared(
    alone: Sequence[TaskResult], together: Sequence[TaskResult], one_by_one: Sequence[TaskResult]
) -> tuple[bool, str]:
    """(whether two results are equal to the bit, why they do not agree within rounding or ""). one_by_one: the result
    of clients that were trained one after another."""
    plain, fast, other = (
        [torch.from_numpy(leaf) for result in results for leaf in result.leaves or []]
        for results in (alone, together, one_by_one)
    )
    if found := excess(plain, fast, Rounding(other)):
        return False, f"its sums differ by {found.off:.1e}, where rounding explains {found.allowed:.1e}"
    return agrees(plain, fast), ""
