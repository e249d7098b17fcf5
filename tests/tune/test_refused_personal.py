"""What is refused of clients' own models and their evaluation: each with one sentence and exit status 2, before
anything of the run is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfleet.workloads.data.digits import Digits
from tests.tune.commands import invoke

pytestmark = pytest.mark.long


class Lossless(Digits):
    """Its report has no loss."""

    def report(self, p, batch):
        return {"accuracy": super().report(p, batch)["accuracy"]}


WORKLOADS = {"lossless": Lossless}
LOSSLESS = [f"plugins=[{__name__}]", "workload={name: lossless, model: {name: mlp, hidden: [8]}}"]

BASE = (
    *("engine.backend=local", "tracking.uri=none", "workload={name: digits, model: {name: mlp, hidden: [8]}}"),
    *("federation.clients=10", "federation.cohort=5", "federation.rounds=1", "federation.local.steps=5"),
)
HEAD = "personal.tensors=head"
NORMED = "workload={name: digits, model: {name: resnet18, norm: batch}}"
PRIVATE = "privacy={clip: 1, noise: 1, delta: 0.01}"
CLOCK = "systems={}"

REFUSED: dict[str, tuple[list[str], str]] = {
    # --- which tensors are personal
    "no match": (
        ["personal.tensors=[fc9.*]"],
        "personal.tensors: every pattern must name a tensor, got fc9.*; valid: fc1.weight, fc1.bias, out.weight",
    ),
    "nothing shared": (
        ["personal.tensors=['*']", "method=fedprox"],
        "personal.tensors: some parameter must be shared, got all 4 of fedprox's; choose a method that sends nothing",
    ),
    "overlap": (
        [HEAD, "personal.frozen=[out.weight]"],
        "personal.frozen: no tensor may be personal and frozen, got out.weight; take it out of one",
    ),
    "no normalisation": (
        ["personal.tensors=norm"],
        "personal.tensors: norm needs normalisation layers, got mlp, which has none; choose head, or a network with "
        "norm: batch",
    ),
    "head of a saddle": (
        ["workload=robust", "method=local_sgda", HEAD],
        "personal.tensors: head is not defined where the last tensors are dual, got dual.a; give patterns",
    ),
    "all layers": (
        ["personal.tensors={first: 2}"],
        "personal.tensors: 1 <= n < 2 layers must hold, got first: 2; choose a method that sends nothing",
    ),
    "split": (
        ["personal={tensors: head, split: [0, 4]}"],
        "personal.split: must be together, or two whole numbers of 1 or more, got [0, 4]",
    ),
    "split of nothing": (
        ["personal={frozen: head, split: [1, 1]}"],
        "personal.split: needs personal tensors, got [1, 1] with tensors=[]; leave it out",
    ),
    "split of few steps": (
        ["personal={tensors: head, split: [10, 1]}"],
        "personal.split: both parts must get a step, got [10, 1] with 5 local steps; choose [1, 1], or 11 steps",
    ),
    "rule of the method": (
        [HEAD, "method=fafed"],
        "personal.rule: same needs a method with the one option rule, got fafed; give a rule",
    ),
    # --- what methods go with
    "a whole model beside": (
        [HEAD, "method=ditto"],
        "personal: does not go with a method that gives clients whole models of their own, got method=ditto; choose",
    ),
    "fltrust": (
        [HEAD, "aggregate=fltrust"],
        "aggregate: the rule trains a model at the server, which has no personal tensors, got fltrust with",
    ),
    "states of half the bytes": (
        [HEAD, "engine.state_dtype=bfloat16"],
        "engine.state_dtype: bfloat16 would round clients' models between visits, got bfloat16 with method=fedavg; set",
    ),
    "private statistics": (
        [NORMED, PRIVATE],
        "privacy: the model has running statistics (BatchNorm), which are neither clipped nor noised, got 40 of them;",
    ),
    "private losses": (
        ["method=qffl", PRIVATE],
        "privacy: qffl has no private form: it weighs clients by their losses, for which there is no bound",
    ),
    "divisor": (
        ["method=qffl", "federation.mean=unbiased"],
        "federation.mean: unbiased is of one mean, and the method divides one by another, got unbiased with "
        "method=qffl; choose normalised",
    ),
    "robust ratio": (
        ["method=qffl", "aggregate=median"],
        "aggregate: the method divides by a mean that the rule does not guard, got median with method=qffl; choose",
    ),
    "agnostic": (
        ["federation.sampler={name: agnostic, by: all}"],
        "federation.sampler: by=all needs every client, got cohort 5 of 10; choose by: lambda",
    ),
    "weights twice": (
        ["federation.sampler={name: agnostic, by: all}", "federation.cohort=10", "federation.weights=examples"],
        "federation.sampler: it sets the weights itself, got federation.weights=examples; leave weights out",
    ),
    "asynchronous": (
        ["method=feddyn", "federation.pace={name: buffered}", CLOCK],
        "federation.pace.name: the method has no asynchronous form: the displacements that are added up must be from "
        "one version of the model, got buffered with method=feddyn; leave federation.pace out",
    ),
    "rule of mifa": (
        ["method={name: mifa, rule: adam}"],
        "method: rule must be plain descent, by whose step size mifa divides displacements, got adam; choose sgd",
    ),
    "steps of per_fedavg": (
        ["method={name: per_fedavg, variant: hf}", "federation.local.steps=10"],
        "method: variant hf takes batches in groups of 3, got 10 local steps; choose 9 or 12",
    ),
    "alpha of apfl": (
        ["method={name: apfl, alpha: 1.5}"],
        "method: alpha: 0 <= alpha <= 1 must hold, got alpha=1.5; choose a number in between",
    ),
    "alpha of feddyn": (
        ["method={name: feddyn, alpha: 0}"],
        "method: alpha must be more than 0, got 0.0; choose fedavg",
    ),
    "labels": (
        ["workload={name: calibrated, of: {name: linear}}"],
        "workload: calibrated needs the column label with class numbers, got Linear; choose another workload",
    ),
    "looks": (
        [*LOSSLESS, "method=ifca"],
        "method.name: ifca needs the loss of each row in the workload's report, got accuracy; add loss",
    ),
    "looks of qffl": (
        [*LOSSLESS, "method=qffl"],
        "method.name: qffl needs the loss of each row in the workload's report, got accuracy; add loss",
    ),
    # --- rows and choices
    "an end by test rows": (
        ["evaluate.validation=0.2", "evaluate.stop={patience: 2}"],
        "evaluate.stop.metric: choices are made on validation rows, got eval/accuracy; choose eval/validation_accuracy",
    ),
    "a best model by test rows": (
        [HEAD, "evaluate={validation: 0.2, held_out: 0.2}", "checkpoint.best=eval/own/test_accuracy"],
        "checkpoint.best.metric: choices are made on validation rows, got eval/own/test_accuracy; choose "
        "eval/own/validation_accuracy",
    ),
    "no validation": (
        [HEAD, "evaluate.stop={metric: eval/own/validation_accuracy, patience: 2}"],
        "evaluate.stop.metric: there are no validation rows, got eval/own/validation_accuracy; set evaluate.validation",
    ),
    "unseen clients": (
        ["federation.unseen=[120]"],
        "federation.unseen: the partition has the clients from 0 to clients + their number - 1, got [120] with",
    ),
    "cohort": (
        ["federation.unseen=2", "federation.cohort=11"],
        "federation.cohort: cohort <= clients must hold, got 11 with clients=10; lower it",
    ),
    # --- the evaluation
    "no adaptation": (
        ["evaluate.clients.adapt=5"],
        "evaluate.clients.adapt must be auto, none, {steps: n}, {epochs: n} or a list of such, got 5",
    ),
    "an adaptation without a length": (
        ["evaluate.clients.adapt=true"],
        "evaluate.clients.adapt must be auto, none, {steps: n}, {epochs: n} or a list of such, got True",
    ),
    "steps and epochs": (
        ["evaluate.clients.adapt={steps: 1, epochs: 1}"],
        "evaluate.clients.adapt.steps: give steps or epochs, got 1 with epochs=1; leave one out",
    ),
    "steps and epochs in a list": (
        ["evaluate.clients.adapt=[{steps: 1}, {steps: 1, epochs: 1}]"],
        "evaluate.clients.adapt.1.steps: give steps or epochs, got 1 with epochs=1; leave one out",
    ),
    "a misspelt key in a list": (
        ["evaluate.clients.adapt=[{steps: 1}, {stepz: 1}]"],
        "evaluate.clients.adapt.1.stepz is not a key; did you mean steps?",
    ),
    "an empty list": (
        ["evaluate.clients.adapt=[]"],
        "evaluate.clients.adapt: a list must have an adaptation at least, got []",
    ),
    "tensors that are not there": (
        ["evaluate.clients.adapt={steps: 1, tensors: [fc9.*]}"],
        "evaluate.clients.adapt.tensors: every pattern must name a tensor, got fc9.*; valid: fc1.weight",
    ),
    "nothing tuned": (
        [NORMED, "evaluate.clients.adapt={steps: 1, tensors: statistics}"],
        "evaluate.clients.adapt.tensors: some parameter must be tuned, got statistics; name one",
    ),
    "the server's model": (
        [HEAD, "evaluate.server=true"],
        "evaluate.server: not all tensors of the server's model are trained: out.weight is personal, got true with "
        "personal.tensors=head; leave it out",
    ),
    "statistics without any": (
        ["evaluate.clients.statistics=training"],
        "evaluate.clients.statistics: training needs layers with running statistics and a momentum, got training;",
    ),
    "files of the server's model": (
        ["evaluate.clients.export=whole"],
        "evaluate.clients.export: clients have no models of their own, all have the server's, got whole with method=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, tmp_path: Path):
    keys, sentence = REFUSED[name]
    file, out = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text("workload: digits\nmethod: fedavg\n")
    found = invoke("run", str(file), *BASE, *keys, "--out", str(out))
    assert found.exit_code == 2, found.output
    assert f"error: {sentence}" in found.output
    assert not out.exists()
