"""Code that breaks a rule of the contract is refused before round 1, and the message has its line; code that follows
the rules is not refused."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.local import Estimator, LocalMethod, Rule, ServerRule
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.api import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.planning import as_written
from fedfleet.engine.planning.trial_step import Trial, try_step
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads import counted
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from tests.engine.setups import Built
from tests.methods import ON_ANY_MODEL as METHODS
from tests.test_conformance import few

HERE = str(Path(__file__))


class Broken(Estimator):
    """Base of estimators that break a rule. Their attributes may be set."""

    def __init__(self) -> None:
        self.n = 0
        self.rng = np.random.default_rng(0)


def line_of(mark: str) -> int:
    """The line of this file that ends with `# mark`."""
    lines = Path(HERE).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return found


# --- never right, vectorised or not -----------------------------------------------------------------------------------
class TorchNoise(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        noise = torch.randn(y.flat.shape)  # torch
        return Tree(g.flat + 0.1 * noise, g.layout), trace


class NumpyNoise(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y) * float(np.random.rand()), trace  # numpy


class PythonNoise(Broken):
    def helper(self) -> float:
        return random.random()  # python

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y) * self.helper(), trace


class OwnGenerator(Broken):
    """Draws from a generator in an attribute instead of a global one."""

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y) * self.rng.random(), trace  # own


class FreshGenerator(Broken):
    """Draws from a new generator, which the operating system seeds."""

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y) * np.random.default_rng().random(), trace  # fresh


class Counts(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        self.n += 1  # attribute
        return oracle(y) / self.n, trace


@dataclass(frozen=True)
class Frozen(Estimator):
    n: int = 0

    def estimate(self, oracle, y, c, c_i, trace):
        self.n += 1  # pyright: ignore[reportAttributeAccessIssue] # frozen
        return oracle(y), trace


class OfTheClass(Broken):
    calls = 0

    def estimate(self, oracle, y, c, c_i, trace):
        OfTheClass.calls += 1  # class
        return oracle(y), trace


class Remembers(Broken):
    """Changes an attribute of another object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, list[float]] = {"seen": []}

    def begin(self, x, c, c_i):
        self.held["seen"].append(1.0)  # held
        return ()

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y), trace


class WritesY(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        y.flat.mul_(0.99)  # in place
        return g, trace


class WritesShared(Broken):
    def shared_init(self, x):
        return x.zeros()

    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        c.flat[:1] += 1  # shared
        return g, trace


class WritesByNumpy(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        y.flat.numpy()[0] = 0.0  # by numpy
        return g, trace


class Grows(Broken):
    def begin(self, x, c, c_i):
        return x.flat[:1]

    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return g, torch.cat([trace, g.flat[:1]])  # grows


class Widens(Broken):
    def begin(self, x, c, c_i):
        return x.zeros()

    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return g, Tree(trace.flat.to(torch.float16), g.layout)  # widens


class NoTensor(Broken):
    def begin(self, x, c, c_i):
        return x.flat.new_zeros(())

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y), 1.0  # no tensor


class KeepsMore(Broken):
    def own_init(self, x):
        return x.flat.new_zeros(())

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y), trace

    def finish(self, c, c_i, trace, steps, delta):
        return c_i.expand(2), ()  # keeps more


class Sends(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y), trace

    def update(self, c, sent, delta, round):
        return delta.flat.sum()  # server form


NEVER = {
    "torch": (TorchNoise, "torch's global generator"),
    "numpy": (NumpyNoise, "NumPy's global generator"),
    "python": (PythonNoise, "Python's module random"),
    "own": (OwnGenerator, "changes the attribute OwnGenerator.rng"),
    "fresh": (FreshGenerator, "gives other numbers when it is called again"),
    "attribute": (Counts, "changes the attribute Counts.n"),
    "frozen": (Frozen, "changes an attribute (cannot assign to field 'n')"),
    "class": (OfTheClass, "changes the attribute OfTheClass.calls"),
    "held": (Remembers, "client_begin changes the attribute Remembers.held['seen']"),
    "in place": (WritesY, "client_step writes in place into the local state"),
    "shared": (WritesShared, "writes in place into the public state"),
    "by numpy": (WritesByNumpy, "writes in place into the local state"),
    "grows": (Grows, "local state: .trace was float32 (1,), becomes float32 (2,)"),
    "widens": (Widens, ".trace was float32"),
    "no tensor": (NoTensor, ".trace is 1.0, which is no tensor"),
    "keeps more": (KeepsMore, "client's state: .own was float32 (), becomes float32 (2,)"),
    "server form": (Sends, "server_update changes the form of the server's state: .public.shared, float32 ()"),
}


@dataclass(frozen=True)
class RandomServer(ServerRule):
    def step(self, x, delta, norm2, state, round):
        return x + delta * float(np.random.rand()), state  # server


@dataclass(frozen=True)
class NumpyServer(ServerRule):
    """Converts to numpy, which is allowed on the server, because the server is never vectorised."""

    def step(self, x, delta, norm2, state, round):
        scale = np.sqrt(float(norm2)) + 1.0
        return x + delta / (scale if scale > 0 else 1.0), state


@dataclass(frozen=True)
class WritingServer(ServerRule):
    def step(self, x, delta, norm2, state, round):
        x.flat.add_(delta.flat)  # server in place
        return x, state


@dataclass(frozen=True)
class RandomRule(Rule):
    def step(self, y, v, state):
        return y.add(v, -0.1 * float(torch.rand(()))), state  # rule


# --- right alone, wrong in a block ------------------------------------------------------------------------------------
class Item(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return g / max(1.0, g.norm2().item()), trace  # item


class Float(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return g / max(1.0, float(g.norm2())), trace  # float


class Numpy(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return Tree(torch.from_numpy(np.sign(g.flat.numpy())), g.layout), trace  # to numpy


class Branch(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        if g.norm2() > 1:  # branch
            g = g / g.norm()
        return g, trace


class Mask(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        return g * len(g.flat[g.flat > 0]), trace  # mask


class FillsShared(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        total = torch.zeros(len(g.flat))
        total += g.flat  # fills
        return Tree(total, g.layout), trace


ALONE = {
    "item": (Item, "a number is read from a tensor"),
    "float": (Float, "a number is read from a tensor"),
    "to numpy": (Numpy, "given to NumPy"),
    "branch": (Branch, "a branch (if, while, and, or) depends on a tensor's value"),
    "mask": (Mask, "a shape follows from a tensor's values"),
    "fills": (FillsShared, "written to in place"),
}


# --- workloads --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dropped(Digits):
    """The loss has noise from torch's global generator."""

    model: Any = Mlp((4,))

    def losses(self, p, batch):
        losses = super().losses(p, batch)
        return losses * torch.rand(losses.shape)  # loss


@dataclass(frozen=True)
class Clipped(Digits):
    model: Any = Mlp((4,))

    def losses(self, p, batch):
        losses = super().losses(p, batch)
        return losses / max(1.0, losses.sum().item())  # loss item


@dataclass(frozen=True)
class Shifts(Digits):
    model: Any = Mlp((4,))

    def losses(self, p, batch):
        batch["label"].fill_(0)  # labels
        return super().losses(p, batch)


@dataclass(frozen=True)
class MeanLoss(Digits):
    """The loss of a batch is one number."""

    model: Any = Mlp((4,))

    def losses(self, p, batch):
        return super().losses(p, batch).mean()


@dataclass(frozen=True)
class Pairs(Digits):
    model: Any = Mlp((4,))

    def losses(self, p, batch):
        losses = super().losses(p, batch)
        return torch.stack([losses, losses], 1)


class Recurrent(nn.Module):
    """torch's own LSTM cannot be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x):
        hidden = self.lstm(x.flatten(1).unflatten(1, (8, 8)))[0]  # lstm
        return self.out(hidden[:, -1])


@dataclass(frozen=True)
class LongShort(Digits):
    model: Any = Mlp((4,))

    def build(self):
        return Recurrent()


# --- helpers ----------------------------------------------------------------------------------------------------------
def digits(method: Any, workload: Any = None, **engine: Any) -> Experiment:
    return experiment(
        {
            "workload": workload or Digits(model=Mlp((4,))),
            "method": method,
            "federation": {"clients": 10, "cohort": 6, "rounds": 2, "local": {"steps": 2, "batch": 8}},
            "engine": {"backend": "local", **engine},
            "tracking": {"uri": "none"},
        }
    )


def local(estimator: Any, rule: Any = None, server: Any = None) -> LocalMethod:
    return LocalMethod(rule or Sgd(0.1), estimator, server or Mean(1.0))


def refused(made: Experiment, mark: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(made)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{HERE}, line {line_of(mark)} in " in message, message
    return message


def tried(made: Experiment) -> None:
    """Run the trial step alone."""
    run_spec = prepare(made, "test")
    split = run_spec.split()
    with torch.no_grad():
        Trial(run_spec, split, run_spec.method()).run()


class Plain(Broken):
    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y), trace


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("mark", NEVER)
def test_never(mark: str, vectorise: bool):
    made, says = NEVER[mark]
    message = refused(digits(local(made()), vectorise=vectorise), mark)
    assert message.startswith("method: ")
    assert says in message
    assert "engine.vectorise" not in message


@pytest.mark.parametrize("mark", ALONE)
def test_only_where_clients_are_vectorised(mark: str):
    made, says = ALONE[mark]
    method = local(made())
    message = refused(digits(method), mark)
    assert message.startswith("engine.vectorise: ")
    assert says in message
    assert "engine.vectorise=false" in message
    assert len(run(digits(method, vectorise=False)).rows) == 2
    assert len(run(digits(method, block=1)).rows) == 2


def test_other_slots():
    plain = Plain()
    assert "client_step draws from torch's" in refused(digits(local(plain, rule=RandomRule())), "rule")
    assert "server_update draws from NumPy's" in refused(digits(local(plain, server=RandomServer())), "server")
    assert "server_update writes in place into the server's state" in refused(
        digits(local(plain, server=WritingServer())), "server in place"
    )
    assert len(run(digits(local(plain, server=NumpyServer()))).rows) == 2


def test_workloads():
    assert refused(digits("fedavg", Dropped()), "loss").startswith("workload: losses draw from torch's global")
    assert "a number is read" in refused(digits("fedavg", Clipped()), "loss item")
    assert "losses write in place into the batch" in refused(digits("fedavg", Shifts()), "labels")
    assert "engine.vectorise=false" in refused(digits("fedavg", LongShort()), "lstm")
    assert len(run(digits("fedavg", LongShort(), vectorise=False)).rows) == 2


@dataclass(frozen=True)
class Packaged(Built):
    """A network whose code is said to be a package's."""

    of_package: ClassVar[bool] = True


class Branches(nn.Module):
    """A layer that branches on the values of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1) if x.sum() > 0 else -x.flatten(1))  # network


def test_networks_of_packages_run_one_by_one(tmp_path: Path):
    """The log says so once, with the line; the user's own are refused, and so is what the user asked for."""
    packaged = digits("fedavg", Digits(Packaged(Branches)))
    assert len(run(packaged, tmp_path / "run").rows) == 2
    told = [line for line in (tmp_path / "run/run.log").read_text().splitlines() if "one after the other" in line]
    assert len(told) == 1
    assert re.search(r"a branch .* depends on a tensor's value \(.*line \d+ in forward.*\); engine.vectorise=", told[0])
    assert "cannot be run together" in refused(digits("fedavg", Digits(Packaged(Branches)), vectorise=True), "network")
    asked = refused(digits("fedavg", Digits(Packaged(Branches)), block=2), "network")
    assert asked.startswith("engine.block: 2 needs vmap, but a branch"), asked
    assert "cannot be run together" in refused(digits("fedavg", Digits(Built(Branches))), "network")


class Checkpointed(Branches):
    """A network whose layer is computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.utils.checkpoint.checkpoint(self.layer, x.flatten(1).tanh(), use_reentrant=False)
        return torch.as_tensor(found) * 2


def test_checkpointed_networks_run_one_by_one():
    """Torch's own words for why they cannot be vectorised name neither the reason nor a remedy."""
    with pytest.raises(ConfigError) as error:
        run(digits("fedavg", Digits(Built(Checkpointed))))
    told = str(error.value)
    assert told.startswith("engine.vectorise: clients cannot be run together under torch.func.vmap: gradient checkpoin")
    assert "ting keeps state in place" in told
    assert "engine.vectorise=false" in told
    one = run(digits("fedavg", Digits(Built(Checkpointed)), vectorise=False)).model
    plain = run(digits("fedavg", Digits(Built(Doubled)), vectorise=False)).model
    for name, value in plain.items():
        assert torch.equal(one[name], value), name


class Doubled(Branches):
    """The same network without that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1).tanh()) * 2


@pytest.mark.parametrize(("made", "shape"), [(MeanLoss, r"\(\)"), (Pairs, r"\(\d+, 2\)")])
def test_losses_are_one_number_per_example(made: type[Digits], shape: str):
    with pytest.raises(ConfigError, match=rf"workload: losses must return one number per example, .* got {shape}; "):
        run(digits("fedavg", made()))


def test_compressed_and_with_a_warm_start():
    """The rules also hold for a method inside a compression, and for the warm start of a method."""
    within = fedmud(ratio=0.5, layers="all", nearest=True, rule=RandomRule())
    assert refused(digits(within), "rule")

    class Warm(Plain):
        start = "gradient"

        def own_init(self, x):
            return x.zeros()

        def shared_init(self, x):
            return x.zeros()

        def own_from_gradient(self, gradient):
            return gradient * float(torch.rand(()))  # warm

    assert refused(digits(local(Warm())), "warm")


# --- what is not ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_rules(method: str):
    tried(few(method))


class Keyed(Plain):
    """Uses counted randomness, as the rules require."""

    def estimate(self, oracle, y, c, c_i, trace):
        g = oracle(y)
        noise = counted.normal(counted.key(oracle.key, "noise"), len(g.flat))
        return g + Tree(0.1 * noise.to(g.flat.dtype), g.layout), trace


def test_counted_randomness_and_numbers_left_as_they_were():
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    tried(digits(local(Keyed())))
    try_step(run_spec := prepare(digits(local(Keyed())), "test"), run_spec.split())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_what_raises_by_itself_is_left_to_the_run():
    """The run names the client for which the exception was raised."""

    class Raises(Plain):
        def estimate(self, oracle, y, c, c_i, trace):
            raise RuntimeError("out of luck")

    try_step(run_spec := prepare(digits(local(Raises())), "test"), run_spec.split())
    assert not as_written.under_way()


def test_it_takes_no_time():
    """The trial step of LeNet takes about 0.1 s of processor time, as this test measured it once; a run of one round
    takes some seconds."""
    made = experiment(
        {
            "workload": {"name": "fashion_mnist", "stand_in": 200, "model": "lenet"},
            "method": "scaffold",
            "federation": {"clients": 10, "cohort": 4, "local": {"steps": 2, "batch": 64}},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
    )
    run_spec = prepare(made, "test")
    split = run_spec.split()
    try_step(run_spec, split)
    began = time.process_time()
    try_step(run_spec, split)
    assert time.process_time() - began < 1.0


def test_the_bits_are_those_of_a_run_without_it(monkeypatch: pytest.MonkeyPatch):
    made = digits("scaffold")
    tested = run(made).model_sha256
    monkeypatch.setattr("fedfleet.engine.planning.data.try_step", lambda run_spec, split: None)
    assert run(made).model_sha256 == tested
