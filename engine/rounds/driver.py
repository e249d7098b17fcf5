"""The driver makes the updates of a run: it asks the planner whose results are used, has the workers train, updates the
server and commits. In a synchronous run an update is a round."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Round, Server
from ...algorithms.tree import Tree
from ...workloads.client_index import ClientIndex
from ..aggregation.passes import PassTask
from ..aggregation.rule import Aggregated, StageState
from ..aggregation.stage import StageRunner
from ..clients.evaluation import evaluations, loss_probes
from ..clients.own_columns import OfClients, own_columns
from ..clients.own_models import evaluated_clients, kinds_of, own_models_tasks, rows_of, targets_of
from ..clients.worker import keep_freed_memory
from ..cohorts.tasks import ClientTask, TrainingTask
from ..errors import BlockTooLarge, ConfigError, Diverged, EvaluationFailed, FedFleetError, MethodFailed, RowsLost
from ..fleet.asynchronous import AsynchronousPlanner, planner_of
from ..fleet.planner import Planner, PlanState, Update
from ..memory import available_memory
from ..method_form.state_spec import StateSpec, traffic_columns
from ..planning.execution_plan import write_plan
from ..records.best_model import FILE as BEST
from ..records.best_model import Best
from ..records.client_models import FILE as CLIENT_MODELS
from ..records.client_models import name_of, write_client_models
from ..records.history import UNTRAINED, Event, History, Record
from ..records.lineage import lineage_of
from ..records.metrics import EVALUATION, Metric, why_stop
from ..records.per_client import write_clients
from ..reduction.tree import RoundTotals, TaskResult
from ..run_spec import ExecutionPlan, RunSpec
from ..state.checkpoint import Checkpoints
from ..state.checkpoint_store import Snapshot
from ..state.folders import (
    checkpoint_seconds,
    forget_copies,
    keeps_last,
    make_checkpoints,
    make_table,
    message_folder,
    release_disk,
    reserve_disk,
)
from ..state.row_files import remove_files
from ..state.row_table import RowTable
from ..storage.atomic_write import write
from ..user_code import plugin_errors
from ..workload.model import wider_than
from ..workload.split import natural_names
from .divergence import check, check_personal, growth_limit
from .pool import Call, Phase, Phases, Pool, finished, played
from .resuming import check_usable
from .retry import Retry
from .stream import Stream
from .training import PhaseMaker, Training
from .under_way import Outcome


def divisor_to_tell(update: Update, facts: Mapping[str, float], count: int) -> float | None:
    """`Round.divisor`: None where it is the number of clients but for rounding, see `Update.by_sampler`. facts: of the
    update's results. count: of the clients."""
    divisor = facts.get("divisor", facts["weight"])
    return divisor if update.by_sampler and not math.isclose(divisor, count, rel_tol=1e-12) else None


class Driver:
    """The state of the server and the table of client states, and the loop over the rounds.

    Use: make a driver, `start` the workers, iterate over `rounds`, and `close` it in any case. Instead of `rounds`,
    `steps` leaves it to the caller who runs the phases of local training and evaluation.
    """

    def __init__(self, run_spec: RunSpec, client_index: ClientIndex, test_rows: int) -> None:
        """client_index: the rows of every client. test_rows: the number of rows of the test set."""
        experiment, self.process = run_spec.experiment, os.getpid()
        self.run_spec, self.federation = run_spec, experiment.federation
        self.client_index, self.test_rows = client_index, test_rows
        self.last_round, self.workers, self.privacy = run_spec.last_round, run_spec.workers, run_spec.privacy
        keep_freed_memory()
        torch.set_num_threads(experiment.engine.threads)
        x = run_spec.initial_model()
        self.method = run_spec.method()
        self.state_spec = StateSpec(self.method, x)
        self.limit = growth_limit(x)
        self.parameters = x.flat.numel()
        self.planner = self._planner()
        self.phases, self.clock = PhaseMaker(self.log), time.perf_counter
        self.asked_to_end: Callable[[], str] = lambda: ""  # why the caller ends the run after the last round
        self.stopped = ""  # why the run has ended before its last round
        self.stage = StageRunner(run_spec.stage_plan, self._run_pass, str(message_folder(run_spec.state_folder)))
        self._begin()
        self.client_models: OfClients | None = None  # what an evaluation has found, not yet written
        self.log_lines: list[str] = []  # that `rounds` has not yielded yet
        if run_spec.frozen:
            self.log(f"frozen, neither trained nor sent: {run_spec.frozen_text}")
        if run_spec.personal_text:
            self.log(f"personal, trained and never sent: {run_spec.personal_text}")
        if run_spec.workload.converted:
            self.log(f"model, converted: {run_spec.workload.converted}")
        if run_spec.workload.outline is not None and (wider := wider_than(run_spec.dtype, run_spec.workload.outline)):
            self.log(f"rounded to engine.dtype={experiment.engine.dtype}, in which the run computes: {wider}")
        self.consistent = True  # False in the middle of a commit
        self.table = make_table(
            experiment,
            self.state_spec,
            run_spec.state_folder,
            run_spec.directory,
            run_spec.resume,
            warm_start=self.method.warm_start is not None,
        )
        if self.stage.collects:
            self.stage.check_memory(available_memory())
            folder = self.stage.make_rows(self.method, x)
            self.table.layout = self.table.layout._replace(messages=folder)
        self.checkpoints = self._make_checkpoints()
        self.checkpoint_seconds = checkpoint_seconds(experiment.checkpoint, run_spec.directory)
        self.last_checkpoint = time.monotonic()  # or the start of the run
        self.by_time: set[int] = set()  # rounds whose checkpoints were written because of the time
        self.training = self._training()
        if self.checkpoints is not None and run_spec.resume:
            self._resume(self.checkpoints)
        reserve_disk(run_spec.directory, self.federation, pytree.tree_leaves((self.server, self.stage_state)))

    @torch.no_grad()
    def _begin(self) -> None:
        """Take the state before round 1."""
        self.server = self.run_spec.method().server_init(self.run_spec.initial_model())
        self.stage_state = self.stage.init(self.state_spec)
        self.plan_state = self.planner.start()
        self.visits = np.zeros(self.federation.clients, dtype=np.int64)
        self.last_visit = np.zeros(self.federation.clients, dtype=np.int64)  # the round of each client's, 0 for none
        self.round = 0
        self.records = History(capacity=self.federation.rounds)
        self.evaluated = True  # whether the last round has an evaluation
        self.counted = True  # whether it would have one if the run were longer
        self.best: Best | None = None  # of the rounds that a longer run would have evaluated too

    def start(self, make_pool: Callable[[RowTable], Pool]) -> None:
        """Start the workers. make_pool: starts them, given the table of client states."""
        self.pool = make_pool(self.table)
        on_failure = self.run_spec.experiment.engine.on_failure
        at_once = self.run_spec.experiment.engine.vectorise
        self.retry = Retry(self.pool, on_failure, self.log, lambda: self.run_spec.memory_remedy(), at_once)

    def log(self, line: str) -> None:
        """Add a line to the log of the run."""
        self.log_lines.append(line)

    def close(self) -> None:
        """Stop the workers. Remove the client states, unless they are to be kept or the run can be resumed.

        A run can be resumed until its result is on the disk; then `discard` removes the states.
        """
        if os.getpid() != self.process:  # a process that was forked meanwhile has only a copy of the run
            return
        release_disk(self.run_spec.directory, beside_launcher=False)
        if hasattr(self, "pool"):
            if self.run_spec.experiment.engine.keep_state:
                with suppress(RowsLost):  # which the log has
                    self.table.write_back()
            self.pool.close()
        if self.checkpoints is not None:
            self.checkpoints.finish()
        remove_files(self.table.layout.messages)
        if self.run_spec.experiment.engine.keep_state or (self.checkpoints is not None and self.checkpoints.pinned):
            return
        self.table.remove()
        if self.checkpoints is not None:
            self.checkpoints.remove()

    # --- rounds -----------------------------------------------------------------------------------------------------
    def rounds(self) -> Iterator[Event]:
        """Run to the last round. Yields the record of each round, and lines for the log."""
        return played(self.steps(), self.retry.run)

    def steps(self) -> Generator[Event | Phase, Any, None]:
        """The same, step by step: also yields the phases of local training and evaluation, and is sent the results of
        each."""
        try:
            if self.records:
                yield list(self.records)
            self._tell_privacy(self.last_round, "until the end")
            while (goes_on := self._goes_on()) or not self.evaluated:
                try:
                    record = yield from (self._next_round() if goes_on else self._evaluate_end())
                except RowsLost as lost:
                    self._rewind(lost)
                    continue
                except BlockTooLarge as error:
                    self._halve_blocks(error)
                    continue
                yield from self._new_lines()
                yield record
            if self.stopped:
                self.log(f"stopped after round {self.round} of {self.last_round}: {self.stopped}")
            self._save_last()
            self._tell_privacy(self.round, "spent")
            if self.records.untrained:
                self.log(UNTRAINED)
            yield from self._new_lines(last=True)
        except Diverged:
            self.table.abort()
            self._drop_unasked_checkpoints()  # with them the folder of each diverged run would keep its client states
            self._tell_privacy(self.round + 1, "spent, with the round that diverged")
            yield from self._new_lines(last=True)
            raise
        except (FedFleetError, KeyboardInterrupt):
            if self.consistent:
                self.table.abort()
                release_disk(self.run_spec.directory)
                self._save()
                self._tell_privacy(self.round, "spent")
            yield from self._new_lines(last=True)
            raise

    def _tell_privacy(self, t: int, when: str) -> None:
        """Log the epsilon of a private run after t rounds. when: the state of the run in words."""
        if self.privacy is not None and t:
            self.log(f"{self.privacy.description(t)} ({when})")

    def _new_lines(self, last: bool = False) -> list[str]:
        """The lines for the log since the last call. last: first wait for the checkpoint under way."""
        if last and self.checkpoints is not None:
            self.log_lines += self.checkpoints.finish()
        lines, self.log_lines[:] = list(self.log_lines), []
        return lines

    def _next_round(self) -> Phases[Record]:
        """Run the next round, with the pass before round 1, and begin to write a checkpoint if it is due."""
        record = yield from self.run_round((yield from self.warm_start()) if self.round == 0 else {})
        self._checkpoint()
        return record

    @torch.no_grad()
    def warm_start(self) -> Phases[Record]:
        """Run the pass over all clients that some methods begin with.

        Returns its traffic, gradients and seconds, which are added to the record of round 1.
        """
        method = self.method.warm_start
        if method is None:
            return {}
        started = self.clock()
        everyone, state_spec = self.planner.everyone(), StateSpec(method, self.model())
        mean, totals, round = yield from self._train(method, state_spec, 0, everyone)
        mean = mean.mean
        with plugin_errors("before round 1: the method's step on the server raised", MethodFailed):
            self.server = method.server_update(self.server, mean, round)
        self.table.commit(totals.digests(everyone.clients), totals.dropped)
        self.plan_state = self.planner.after_warm_start(self.plan_state, method, self.model())
        gradients = {"client/gradients": totals.facts["gradients"]}
        return {
            **traffic_columns(state_spec, everyone.selected),
            **gradients,
            "time/seconds": self.clock() - started,
        }

    @torch.no_grad()
    def run_round(self, warm_start: Record) -> Phases[Record]:
        """Run the next round, and return its record. warm_start: what `warm_start` returned before round 1; empty in
        other rounds, and to do without that pass.

        Everything that can fail or be interrupted comes before the commit, so that no record can be missing.
        """
        started, number = self.clock(), self.round + 1
        if self.run_spec.method_has_schedule:
            self.method = self.run_spec.method(number)
        update = self.planner.update(number, self.plan_state, self.visits, partial(self._losses, number))
        planned, sampled = self.clock() - started, update.clients
        aggregated, totals, round = yield from self._train(self.method, self.state_spec, number, update)
        trained, mean, count = self.clock(), aggregated.mean, round.cohort
        # A cohort that is left out as a whole leaves the server as it was; a private one still releases its noise.
        skipped = update.skipped or (len(sampled) > 0 and not count and self.privacy is None)
        if self.privacy is not None:  # the number of clients that were drawn depends on who there is
            round = round._replace(cohort=self.federation.cohort)
        with plugin_errors(f"round {number}: the method's step on the server raised", MethodFailed):
            server = self.server if skipped else self.method.server_update(self.server, mean, round)
            model = self.method.model(server)
            metrics = {} if skipped else self.method.server_metrics(self.server, mean, round)
        try:
            check(number, server, model, self.limit, totals, self.model)
            check_personal(number, mean.facts.get("personal_norm2", 0.0))
        except Diverged as error:
            if not (liars := int(aggregated.columns.get("robust/byzantine", 0))):
                raise
            detail = f"{liars} of {len(sampled)} messages were Byzantine; {error.detail}"
            raise Diverged(number, detail, "choose a rule with aggregate that tolerates them") from None
        updated = self.clock()
        record = {
            "round": number,
            **totals.record(
                count, trained - started - planned - aggregated.columns.get("time/aggregate", 0.0), self.workers
            ),
            **traffic_columns(self.state_spec, update.selected, count, self._traffic(number, update, totals, count)),
            **update.columns,
            **({"time/probe": planned} if "comm/bytes_probe" in update.columns else {}),
            **{f"client/{name}": float(value) for name, value in mean.facts.items()},
            **{f"server/{name}": float(value) for name, value in metrics.items()},
            **aggregated.columns,
            **self._epsilon(number),
            "time/server": updated - trained,
            **self.pool.facts(),
        }
        plan_state = self.planner.after(self.plan_state, update, totals.clients)
        counted = self._evaluates(number, plan_state)
        if counted or number == self.last_round:
            record.update((yield from self._evaluate(model)))
            rows = self.training.row_after(update, totals)
            record.update((yield from self._evaluate_own_models(model, server, number, rows)))
            record["time/evaluate"] = self.clock() - updated
        record["time/seconds"] = self.clock() - started
        for column, value in warm_start.items():
            record[column] += value
        self._commit(server, aggregated.state, plan_state, update, totals, record)
        self.evaluated, self.counted = number == self.last_round or (counted and not self.of_a_sample), counted
        self._keep_best(counted)
        self._write_client_models()
        if self.run_spec.experiment.tracking.clients and self.run_spec.directory is not None:
            write_clients(self.run_spec.directory, number, totals.clients, update.visits)
        return record

    def _traffic(self, number: int, update: Update, totals: RoundTotals, count: int) -> tuple[int, int]:
        """(down, up): the bytes of all clients of a round. count: how many of them have sent a message."""
        if not self.method.own_traffic:
            down, up = self.state_spec.traffic(self.method, number)
            return update.selected * down, count * up
        public = self.method.broadcast(self.server)
        each = {
            client: self.state_spec.traffic(self.method, number, client, public) for client in update.clients.tolist()
        }
        sent = {*each} - {*totals.dropped}
        return sum(down for down, _ in each.values()), sum(each[client][1] for client in sent)

    def _commit(
        self, server: Server, stage_state: StageState, plan_state: PlanState, update: Update, totals: RoundTotals,
        record: Record,
    ) -> None:  # fmt: skip
        """Make the outcome of a round the state of the run: the server, the stage, the sampler and the virtual clock,
        the client states, the record."""
        self.consistent = False
        self.server, self.stage_state, self.plan_state = server, stage_state, plan_state
        self.round += 1
        self.last_visit[self.training.commit(update, totals)] = self.round
        self.records.append(record)
        self.consistent = True

    def _train(
        self, method: Algorithm, state_spec: StateSpec, number: int, update: Update
    ) -> Phases[tuple[Aggregated, RoundTotals, Round]]:
        """The results of an update: (the mean message, or what the rule of aggregation gives in its place; the totals;
        the round). Parameters and errors: see `Training.totals`."""
        meanwhile = partial(self._prepare, number, update)
        totals = yield from self.training.totals(method, state_spec, self.server, number, update, meanwhile)
        if self.stage.rule.extra == "trusted":
            self._train_on_trusted(method, number)
        count = len(update.clients) - len(totals.dropped)
        divisor = divisor_to_tell(update, totals.facts, count)
        round = Round(number, self.federation.rounds, count, self.federation.clients, divisor)
        state = self.stage.init(state_spec) if number == 0 else self.stage_state
        parts = (lambda messages: method.parts(self.server, messages, round)) if method.compares else None
        aggregated = self.stage.aggregate(state_spec, state, round, update.clients, update.weights, totals, parts)
        for note in aggregated.notes:
            self.phases.tell_once(number, note, "aggregate")
        return aggregated, totals, round

    def _losses(self, number: int, clients: np.ndarray, rows: int | None) -> np.ndarray:
        """(c,) the losses of the model on rows of these clients (c,), see `LossProbe`. number: of the round."""
        tasks = loss_probes(self.client_index, clients, rows, number, self.run_spec.experiment.evaluate.batch)
        return finished(self._totals("evaluate", tasks, self.model().flat), self.retry.run).clients["loss"]

    def _train_on_trusted(self, method: Algorithm, number: int) -> None:
        """Have a worker train on the server's trusted examples, as client number N without a state. Its message becomes
        the extra row of the round's messages."""
        server, nowhere = np.array([self.federation.clients]), np.array([-1])
        columns = (np.array([max(0, number - 1)]), np.ones(1), nowhere, nowhere, np.array([self.stage.extra_row]))
        task = TrainingTask(ClientTask(0, server, (1,)), number, number == 0, *columns)
        finished(self._totals("train", [task], method.broadcast(self.server)), self.retry.run)

    def _prepare(self, number: int, update: Update) -> None:
        """What the driver does while workers train round `number`: results that are needed later are remembered."""
        following = self.planner.ahead(number + 1)
        if following is not None and len(following.clients) and 0 < number < self.last_round:
            self.pool.ahead(partial(self.training.tasks_after, update, number + 1, following))
        self._epsilon(number)

    def _epsilon(self, number: int) -> Record:
        """The column of a private run that says what the rounds up to this one cost."""
        return {} if self.privacy is None or not number else self.privacy.columns(number)

    def _totals(self, call: Call, tasks: Sequence[Any], state: Any) -> Phases[RoundTotals]:
        """The results of a phase besides those of updates, see `PhaseMaker.totals`."""
        self.training.pause()
        return self.phases.totals(call, tasks, state)

    def _run_pass(self, tasks: Sequence[PassTask]) -> Iterator[TaskResult]:
        """Run a pass over the messages of a round."""
        for result in self.retry.run(self.phases.of_pass(tasks)):
            assert isinstance(result, TaskResult)
            yield result

    # --- evaluation -------------------------------------------------------------------------------------------------
    def _evaluates(self, number: int, after: PlanState) -> bool:
        """Whether round `number` is evaluated in a run that goes on after it. after: the state of the plan at its
        end."""
        evaluate = self.run_spec.experiment.evaluate
        if evaluate.seconds is not None:
            before, now = (state.seconds // evaluate.seconds for state in (self.plan_state, after))
            return now > before
        return evaluate.every > 0 and number % evaluate.every == 0

    def _evaluate(self, x: Tree) -> Phases[Record]:
        """The columns of an evaluation of the model x."""
        record, evaluate = Record(), self.run_spec.experiment.evaluate
        if not self.run_spec.trains_the_servers_model:
            return record
        for tasks, columns in evaluations(self.run_spec.workload, evaluate, self.test_rows, self.client_index):
            record |= columns((yield from self._totals("evaluate", tasks, x.flat)))
        if lost := [name for name, value in record.items() if math.isnan(value)]:
            self.log(f"{', '.join(lost)}: not a number, though the model is finite; look at the workload's report")
        return record

    @torch.no_grad()
    def _evaluate_end(self) -> Phases[Record]:
        """Evaluate the models after the last round, and return the round's record with it. It is for a run that ends
        after a round which would not have been evaluated otherwise, or not with all clients' own models."""
        began, record = self.clock(), self.records[-1]
        self.evaluated, self.counted = True, any(name.startswith(EVALUATION) for name in record)
        model, rows = self.model(), self.table.row
        record.update((yield from self._evaluate(model)))
        record.update((yield from self._evaluate_own_models(model, self.server, self.round, rows, ends=True)))
        seconds = self.clock() - began
        record["time/evaluate"] = record.get("time/evaluate", 0.0) + seconds
        record["time/seconds"] += seconds
        self.records.replace(record)
        self._write_client_models()
        return record

    def _goes_on(self) -> bool:
        """Whether a round follows the last one."""
        if self.round == self.last_round:
            return False
        stop = self.run_spec.experiment.evaluate.stop
        if stop is not None and self.round:
            metric = Metric.of(stop.metric, stop.best, self.run_spec.workload.lower)
            self.stopped = why_stop(stop, metric, self.records.measured(metric.name), self.round)
        self.stopped = self.stopped or (self.asked_to_end() if self.round else "")
        return not self.stopped

    # --- the best model ---------------------------------------------------------------------------------------------
    @property
    def best_by(self) -> Metric | None:
        """The metric by which the best model is kept, None if it is not."""
        keep = self.run_spec.experiment.checkpoint.best
        return keep and Metric.of(keep.metric, keep.best, self.run_spec.workload.lower)

    def _keep_best(self, counted: bool) -> None:
        """Keep the model of the last round if it is the best so far. counted: whether a longer run would have evaluated
        it too."""
        metric = self.best_by
        if metric is not None and (counted or not metric.name.startswith(EVALUATION)):
            before, self.best = self.best, self._best_with_last()
            if self.best is not before:
                self._write_best()

    def _best_with_last(self) -> Best | None:
        """The best model so far, which may be that of the last round."""
        metric, record = self.best_by, self.records[-1]
        if metric is None or metric.name not in record:
            return self.best
        value = record[metric.name]
        if not metric.beats(value, math.nan if self.best is None else self.best.value):
            return self.best
        model = {name: leaf.detach().clone() for name, leaf in self.model().items()}
        return Best(*metric, int(record["round"]), value, model)

    def _write_best(self) -> None:
        """Write the best model so far into the folder of the run, which the end of the run does again."""
        if self.run_spec.directory is None or self.best is None:
            return
        try:
            write(Path(self.run_spec.directory) / BEST, self._with_frozen(self.best).saved(tuple(self.run_spec.frozen)))
        except OSError as error:
            self.log(f"round {self.round}: {BEST} cannot be written now ({error.strerror or error}); the run goes on")

    def _resume_best(self, best: Best | None) -> None:
        """Take the best model of a checkpoint if it is by the metric of this run."""
        metric = self.best_by
        self.best = best if metric is not None and best is not None and (best.metric, best.mode) == metric else None
        if metric is not None and self.best is None and self.records.measured(metric.name):
            self.log(f"checkpoint.best: the best model by {metric.name} of the rounds up to {self.round} was not kept")
        self._write_best()

    def _with_frozen(self, best: Best) -> Best:
        return best._replace(model={**best.model, **self.run_spec.frozen})

    # --- the model --------------------------------------------------------------------------------------------------
    def outcome(self) -> Outcome:
        """What the run ends with."""
        best = self._best_with_last() if self.records else None
        return Outcome(self.tensors(), self.stopped, best and self._with_frozen(best))

    @property
    def of_a_sample(self) -> bool:
        """Whether evaluations before the last one are of some clients' own models alone."""
        return self.run_spec.evaluates_own_models and self.run_spec.client_models.sample > 0

    def _evaluate_own_models(
        self, x: Tree, server: Server, number: int, rows: np.ndarray, ends: bool = False
    ) -> Phases[Record]:
        """The columns of an evaluation of clients' own models, beside the model x that the server has after round
        `number`. rows: (N,) of the clients' states. ends: whether the run ends with it, before its last round. What is
        known of each client is kept for `_write_client_models`."""
        spec = self.run_spec
        if not spec.evaluates_own_models:
            return {}
        began = self.clock()
        index, seen = self.client_index.everyone, self.federation.clients
        unseen = len(index.sizes) - seen
        rows = np.concatenate([rows, np.full(unseen, -1)])  # they never have a state
        settings, evaluate = spec.client_models, spec.experiment.evaluate
        sample = 0.0 if ends or number == self.last_round else settings.sample
        clients = evaluated_clients(seen, sample, spec.experiment.seed, unseen)
        kinds, whole = kinds_of(index, evaluate.fairness), spec.trains_the_servers_model
        tasks = own_models_tasks(index, clients, rows, kinds, whole, number, evaluate.batch)
        totals = yield from self._totals("evaluate", tasks, (x.flat, self.method.broadcast(server)))
        found, lower = OfClients.of(totals.clients), spec.workload.lower
        if isinstance(settings.adapt, tuple) and "validation" in kinds:
            found = found.with_choice(lower)
        self.client_models = found
        record = own_columns(found, lower, index, kinds, self._populations(len(index.sizes)))
        record["eval/own/never"] = float((rows[clients[clients < seen]] < 0).sum())
        if gradients := totals.facts["gradients"]:
            record["eval/gradients"] = gradients
        if gradients := totals.facts["statistics"]:
            record["eval/gradients_statistics"] = gradients
        if kept := spec.personal_numbers(self.state_spec.client):
            record["personal/parameters"] = float(kept)
            record["personal/stored"] = float((rows >= 0).sum() * kept * spec.dtype.itemsize)
        record["time/clients"] = self.clock() - began
        return record

    def _populations(self, everyone: int) -> dict[str, np.ndarray]:
        """The clients over whom their own models' numbers are, as in `own_columns`: neither Byzantine ones nor those
        of `federation.without`. everyone: the number of all clients."""
        counted = np.arange(everyone) < self.federation.clients
        unseen = ~counted
        counted[np.flatnonzero(self.run_spec.byzantine)] = False
        counted[list(self.federation.without)] = False
        return {"": counted, "unseen/": unseen}

    def _write_client_models(self) -> None:
        """Write the numbers of each client that the last evaluation has found, if the run has a folder."""
        if self.client_models is not None and self.run_spec.directory is not None:
            index = self.client_index.everyone
            sizes = {kind: rows_of(index, kind).sizes for kind in kinds_of(index, training=True)}
            with plugin_errors("the workload's summary_of_clients raised", EvaluationFailed):
                metrics = self.client_models.columns(sizes, self.run_spec.workload.summary_of_clients)
            clients, targets = self.client_models.clients, targets_of(index)
            files = {"none": (), "last": (CLIENT_MODELS,), "every": (CLIENT_MODELS, name_of(self.round))}
            names = natural_names(index, self.run_spec.workload)
            for name in files[self.run_spec.client_models.table]:
                path = Path(self.run_spec.directory) / name
                write_client_models(path, clients, metrics, self.visits, self.last_visit, sizes, targets, names)
        self.client_models = None

    def model(self) -> Any:
        """The tree to evaluate."""
        return self.method.model(self.server)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the model, the frozen ones last."""
        return {name: leaf.detach().clone() for name, leaf in [*self.model().items(), *self.run_spec.frozen.items()]}

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def _checkpoint(self) -> None:
        """Begin to write a checkpoint if it is due by the number of rounds or by the time."""
        every, seconds = self.run_spec.experiment.checkpoint.every, self.checkpoint_seconds
        due = seconds is not None and time.monotonic() - self.last_checkpoint >= seconds
        if self.round == self.last_round:
            return
        if every and self.round % every == 0:
            self._save()
        elif (due or self.by_time) and self._has_room_for_checkpoints(due) and due:
            self.by_time.add(self.round)
            self._save()

    def _has_room_for_checkpoints(self, another: bool) -> bool:
        """Whether checkpoints by time may go on. Where the user did not ask for them, they are given up when the disk
        gets short of space, because each may keep one more state of every client: a run that fits on the disk without
        them must not end because of them. Another one needs space for two states, those that are there for one."""
        if self.run_spec.experiment.checkpoint.seconds != "auto" or self.table.room() >= (2 if another else 1):
            return True
        self.log(
            "no more checkpoints are written because of the time: the disk of the client states has too little space "
            "(checkpoint.seconds)"
        )
        self._drop_unasked_checkpoints()
        return False

    def _drop_unasked_checkpoints(self) -> None:
        """Remove the checkpoints that were written because of the time though the user did not ask for it."""
        if self.checkpoints is not None and self.run_spec.experiment.checkpoint.seconds == "auto":
            self.log_lines += self.checkpoints.drop(self.by_time)
            self.checkpoint_seconds, self.by_time = None, set()

    def _save_last(self) -> None:
        """Begin to write the checkpoint from which the run can be made longer, if it is to be kept. Its copies are
        removed when the run is complete, so that it gets none."""
        experiment, server = self.run_spec.experiment, pytree.tree_leaves((self.server, self.stage_state))
        count = self.table.used * self.table.width + sum(leaf.numel() * leaf.element_size() for leaf in server)
        exports = self.run_spec.client_models.export != "none"  # for which the state must be there for a moment
        if exports or keeps_last(experiment.checkpoint, experiment.engine, self.run_spec.directory, count):
            self._save(copied=False)

    def _save(self, copied: bool = True) -> None:
        """Begin to write a checkpoint of the last committed round, unless it has one. copied: see `Checkpoints.save`.

        An evaluation that was made only because the run ends is not in it: in a longer run there is none.
        """
        if self.checkpoints is None or self.round == 0:
            return
        self.log_lines += self.checkpoints.finish()
        if self.round in self.checkpoints.pinned:
            return
        try:
            self.table.write_back()
        except RowsLost as lost:
            self.log(f"round {self.round}: no checkpoint can be written ({lost})")
            return
        leaves = [leaf.clone() for leaf in pytree.tree_leaves((self.server, self.stage_state))]
        leaves += [torch.from_numpy(array.copy()) for array in pytree.tree_leaves(self.plan_state)]
        leaves += self.training.leaves()
        table = (self.table.row.copy(), self.table.digest.copy(), self.visits.copy(), self.last_visit.copy())
        config, plan = self.run_spec.experiment.plain(), self.run_spec.plan_for_checkpoint()
        frozen = self.run_spec.frozen_facts
        ends = () if self.counted else (EVALUATION, "time/evaluate")
        records = self.records.without_at_end(ends) if ends else self.records.frozen()
        snapshot = Snapshot(self.round, leaves, *table, records, config, plan, frozen, self.best)
        self.checkpoints.save(snapshot, copied)
        self.last_checkpoint = time.monotonic()

    def _rewind(self, why: RowsLost) -> None:
        """Go back to the last sound checkpoint, or to the beginning if there is none. why: the loss of client states.

        The run continues to the same bits, because every random number depends on its counters only.
        """
        self.log(f"round {self.round + 1}: {why}")
        self.log_lines += self.checkpoints.finish() if self.checkpoints is not None else []
        self.table.clear()
        if self.checkpoints is not None and (self.checkpoints.pinned or self.checkpoints.copies):
            self.checkpoints.pinned.clear()
            return self._resume(self.checkpoints)
        self.log("there is no checkpoint yet (checkpoint.every, checkpoint.seconds): the run begins again")
        self._begin()
        self.training = self._training()

    def _halve_blocks(self, why: BlockTooLarge) -> None:
        """Go on with blocks of half the size, as if the run had begun with them.

        Rounds that were committed had larger blocks, and so other bits. They are run again. A device's memory is
        almost always too small in round 1 already, where nothing is lost.
        """
        if lineage_of(self.run_spec.directory) is not None:
            raise ConfigError(
                f"{why}; a fork keeps the blocks of its parent, whose rounds had them: begin the parent again with a "
                "smaller engine.block"
            )
        plan = ExecutionPlan(**self.run_spec.plan_for_checkpoint())
        smaller = plan._replace(block=plan.block // 2)
        self.log(f"{why}; blocks have {smaller.block} clients instead of {plan.block} from here on")
        if self.round:
            self.log(f"the run begins again, because {self.round} rounds had blocks of {plan.block} clients")
        if self.checkpoints is not None:
            self.checkpoints.remove()
            forget_copies(self.run_spec.experiment.checkpoint, self.run_spec.run_id)
            self.checkpoints = self._make_checkpoints()
        self.run_spec = self.run_spec.with_plan(smaller, self.run_spec.proven_kernels)
        self.planner = self._planner()
        self.table.clear()
        self._begin()
        self.training = self._training()
        write_plan(self.run_spec, f"halved, because the memory of the device ran out with blocks of {plan.block}")

    def _make_checkpoints(self) -> Checkpoints | None:
        run = self.run_spec
        return make_checkpoints(run.experiment.checkpoint, run.run_id, run.directory, self.table, self.state_spec)

    def _planner(self) -> Planner:
        block = self.run_spec.block(self.parameters)
        return planner_of(self.run_spec, self.state_spec, self.client_index, block)

    def _training(self) -> Training:
        """What gets the results of updates, from the committed state on."""
        parts = (self.phases, self.stage, self.table, self.visits)
        if isinstance(self.planner, AsynchronousPlanner):
            return Stream(*parts, self.planner, self.state_spec, self.checkpoints is not None)
        return Training(*parts)

    def _resume(self, checkpoints: Checkpoints) -> None:
        """Take the state of the newest sound checkpoint. Raises ConfigError if it cannot be used."""
        snapshot, lines = checkpoints.load(self.state_spec.client)
        self.log_lines += lines
        snapshot = check_usable(snapshot, self.run_spec, lines)
        spec = pytree.tree_structure(self.server)
        stage_spec, plan_spec = pytree.tree_structure(self.stage_state), pytree.tree_structure(self.plan_state)
        server, rest = snapshot.server[: spec.num_leaves], snapshot.server[spec.num_leaves :]
        stage_state, rest = rest[: stage_spec.num_leaves], rest[stage_spec.num_leaves :]
        plan_state, in_flight = rest[: plan_spec.num_leaves], rest[plan_spec.num_leaves :]
        self.server = pytree.tree_unflatten(server, spec)
        before = pytree.tree_leaves(self.stage_state)  # a longer run may have states that the shorter one did not need
        stage_state = [fresh if not leaf.numel() else leaf for leaf, fresh in zip(stage_state, before, strict=True)]
        self.stage_state = pytree.tree_unflatten(stage_state, stage_spec)
        self.plan_state = pytree.tree_unflatten([leaf.numpy() for leaf in plan_state], plan_spec)
        self.table.restore(snapshot.row, snapshot.digest, list(checkpoints.pinned.values()))
        self.visits, self.last_visit = snapshot.visits.copy(), snapshot.last_visit.copy()
        self.round, self.records = snapshot.round, snapshot.records
        if self.privacy is not None:
            self.privacy = replace(self.privacy, calibrated=float(self.stage_state.noise.multiplier))
        self.training = self._training()
        self.training.restore(self.round, in_flight)
        evaluated = any(name.startswith(EVALUATION) for name in self.records[-1])
        self.evaluated = evaluated and (self.round == self.last_round or not self.of_a_sample)
        self._resume_best(snapshot.best)
        self.log(f"resumes after round {self.round}")
        self._save()  # a checkpoint of its own, if this one was a copy
