"""Settings under which two methods are one method: a table that a test runs and the documentation prints.

Both methods are written as experiments write them. `exact`: both do the same operations in the same order, so the
models are equal to the bit after every round. Otherwise the order differs, and they agree within ROUNDING
(ROUNDING_SADDLE for min-max problems): float64 and some 100 roundings of values near 1, with step sizes that do not
amplify them (not much, for min-max problems); this leaves a factor of 1e2 (1e3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.yaml_text import parse
from tests.algorithms.problems import Quadratic, everyone, partial
from tests.algorithms.saddles import Descent

ROUNDING, ROUNDING_SADDLE = 1e-12, 1e-11


class Where(NamedTuple):
    """A problem and who takes part in it. text: for the documentation. timetable: (cohorts, (round, client) -> K)."""

    text: str
    problem: Any
    timetable: tuple[list[list[int]], dict[tuple[int, int], int]]

    @property
    def rounding(self) -> float:
        """The tolerance, relative and absolute, where both methods do their operations in another order."""
        return ROUNDING_SADDLE if isinstance(self.problem, Descent) else ROUNDING

    @property
    def context(self) -> RunContext:
        """What a method learns of the run before it is built."""
        cohorts, steps = self.timetable
        return RunContext(len(cohorts[0]), self.problem.clients, len(cohorts), max(steps.values()))


def partial_with(count: int) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
    """The timetable `partial` with the same number of local steps for all clients."""
    cohorts, steps = partial()
    return cohorts, dict.fromkeys(steps, count)


PARTIAL = Where("cohorts of 3 of 5 clients, 1 to 4 local steps", Quadratic(), partial())
ONE_STEP = Where("cohorts of 3 of 5 clients, one local step", Quadratic(), partial_with(1))
EVEN = Where("cohorts of 3 of 5 clients, 3 local steps", Quadratic(), partial_with(3))
ALL = Where("all 5 clients, 3 local steps", Quadratic(), everyone(5, 6, 3))
ALL_ONE_STEP = Where("all 5 clients, one local step", Quadratic(), everyone(5, 6, 1))
FIRST_ROUND = Where("the first round of all 5 clients, 4 local steps", Quadratic(), everyone(5, 1, 4))
ONE_CLIENT = Where("one client, 3 local steps", Quadratic(clients=1), everyone(1, 6, 3))
ONE_CLIENT_ONE_STEP = Where("one client, one local step", Quadratic(clients=1), everyone(1, 8, 1))

SADDLE = Where("min-max: cohorts of 3 of 5 clients, 1 to 4 local steps", Descent(), partial())
SADDLE_ALL = Where("min-max: all 5 clients, 3 local steps", Descent(), everyone(5, 6, 3))
SADDLE_EXACT = Where("min-max without noise: all 5 clients, 3 local steps", Descent(noise=0.0), everyone(5, 6, 3))
SADDLE_THREE = Where("min-max: cohorts of 3 of 5 clients, 3 local steps", Descent(), partial_with(3))
SADDLE_FIRST = Where(
    "min-max: the first round of 3 clients", Descent(), ([[0, 2, 3]], {(0, i): 2 + i % 2 for i in range(5)})
)
SADDLE_ONE_CLIENT = Where("min-max: one client, 3 local steps", Descent(clients=1), everyone(1, 6, 3))
SADDLE_ONE_EXACT = Where(
    "min-max without noise: one client, 3 local steps", Descent(clients=1, noise=0.0), everyone(1, 6, 3)
)
COLUMNS = Where(
    "min-max: tensors of one column, cohorts of 3 of 5 clients",
    Descent(shapes=(("primal.x", (4, 1)), ("dual.y", (3, 1)))),
    partial(),
)
LONE_DUAL = Where(
    "min-max: a vector and a number, cohorts of 3 of 5 clients",
    Descent(shapes=(("primal.x", (4,)), ("dual.y", ()))),
    partial(),
)


class SameMethod(NamedTuple):
    """One row. why: what makes the two the same, in one sentence. apart: where they must differ, so that the row says
    something; None where they never do."""

    one: str
    other: str
    where: Where
    exact: bool
    why: str
    apart: Where | None = None

    @property
    def name(self) -> str:
        return f"{self.one} = {self.other} | {self.where.text}"


def built(text: str, where: Where) -> Any:
    """The method that an experiment writes as `text`."""
    method = Registry().build("METHODS", parse(text, "identity"), "method")
    return method.build(where.context) if isinstance(method, Deferred) else method


SGD, MOMENTUM, ADAM = "{name: sgd, lr: 0.1}", "{name: momentum, lr: 0.05}", "{name: adam, lr: 0.03}"
ADAMW = "{name: adamw, lr: 0.03, betas: [0.9, 0.95]}"
KEPT_MUON = (
    "{name: muon, lr: 0.02, vector_lr: 0.1, mu: 0.75, nesterov: false, "
    "ball: {name: newton_schulz, scheme: classic}, scale: moonlight}"
)
OPEN = "{name: biclip, lr: 0.1, d: 0, u: .inf}"
LR, GAMMA = "{primal: 0.02, dual: 0.1}", "{primal: 0.05, dual: 0.2}"
TIMES = "{primal: 0.048, dual: 0.24}"
"""LR, times 3 local steps, times 0.8."""

ONE_MEMBER = "With one client c = c_i, so that the correction is zero."
NO_CONTROLS_YET = "In the first round all control variates are zero."
CANCELS = "The corrections cancel in the mean, because the rule is linear."
MEAN_OF_ONE = "With one step, the mean, the last and the first gradient are one gradient."
OPEN_THRESHOLDS = "Thresholds of 0 and infinity clip nothing."

TABLE = [
    SameMethod(
        f"{{name: ifca, clusters: 1, rule: {ADAM}}}",
        f"{{name: fedavg, rule: {ADAM}}}",
        PARTIAL,
        exact=True,
        why="There is nothing to choose.",
        apart=None,
    ),
    SameMethod(
        f"{{name: qffl, q: 0, rule: {ADAM}, L: 7}}",
        f"{{name: fedavg, rule: {ADAM}}}",
        PARTIAL,
        exact=False,
        why="No loss counts, and h is L for all.",
    ),
    *(
        SameMethod(
            "{name: fedmuon_bc, matrix_lr: 0.1, vector_lr: 0.1, alpha: 1, ball: identity, scale: none, "
            f"start: {start}}}",
            f"{{name: scaffold, rule: {SGD}, control: last, start: {start}, over: all}}",
            PARTIAL,
            exact=True,
            why="Without orthogonalisation and memory, a step is one along g - c_i + c, and c_i is the last gradient.",
        )
        for start in ("zeros", "gradient")
    ),
    SameMethod(
        "{name: local_muon, matrix_lr: 0.02, vector_lr: 0.1, alpha: 0.25}",
        f"{{name: fedavg, rule: {KEPT_MUON}, carry: keep, over: all}}",
        PARTIAL,
        exact=True,
        why="The momentum is in the estimator of one method and in the rule of the other (mu = 1 - alpha).",
    ),
    *(
        SameMethod(
            f"{{name: {name}, matrix_lr: 0.02, vector_lr: 0.1, alpha: 0.25}}",
            f"{{name: fedavg, rule: {KEPT_MUON}, carry: keep}}",
            where,
            exact=False,
            why=ONE_MEMBER,
        )
        for name in ("fedmuon_bc", "local_muon")
        for where in (ONE_CLIENT, ONE_CLIENT_ONE_STEP)
    ),
    *(
        SameMethod(
            f"{{name: {name}, matrix_lr: 0.3, vector_lr: 0.1, aux: ['*']}}",
            f"{{name: {name}, matrix_lr: 0.1, vector_lr: 0.1, ball: identity, scale: none}}",
            PARTIAL,
            exact=True,
            why="With all matrices in `aux` nothing is orthogonalised, and each takes the rule of vectors.",
        )
        for name in ("local_muon", "fedmuon_bc", "fedmuon_ma")
    ),
    *(
        SameMethod(
            f"{{name: scaffold, rule: {rule}, start: {start}}}",
            f"{{name: fedavg, rule: {rule}}}",
            ONE_CLIENT,
            exact=False,
            why=ONE_MEMBER,
            apart=PARTIAL,
        )
        for rule in (SGD, MOMENTUM, ADAM)
        for start in ("zeros", "gradient")
    ),
    *(
        SameMethod(
            f"{{name: scaffold, rule: {rule}}}",
            f"{{name: fedavg, rule: {rule}}}",
            FIRST_ROUND,
            exact=False,
            why=NO_CONTROLS_YET,
        )
        for rule in (SGD, MOMENTUM, ADAM)
    ),
    SameMethod(
        f"{{name: scaffold, rule: {SGD}}}",
        f"{{name: fedavg, rule: {SGD}}}",
        ALL_ONE_STEP,
        exact=False,
        why=CANCELS,
    ),
    *(
        SameMethod(
            f"{{name: scaffold, rule: {SGD}}}",
            f"{{name: scaffold, rule: {SGD}, control: {control}}}",
            ONE_STEP,
            exact=True,
            why=MEAN_OF_ONE,
            apart=PARTIAL,
        )
        for control in ("last", "server")
    ),
    SameMethod(
        f"{{name: scaffold, rule: {SGD}, control: server}}",
        f"{{name: fedavg, rule: {SGD}}}",
        ONE_CLIENT,
        exact=False,
        why=ONE_MEMBER,
    ),
    *(
        SameMethod(
            f"{{name: scaffold, rule: {rule}}}",
            f"{{name: scaffold, rule: {rule}, control: {control}}}",
            where,
            exact=False,
            why="A displacement by plain steps is the sum of the gradients; momentum gives them other weights.",
            apart=apart,
        )
        for control in ("normalised", "literal")
        for rule, where, apart in ((SGD, PARTIAL, None), (MOMENTUM, ONE_STEP, PARTIAL))
    ),
    SameMethod(
        "{name: scaffold, rule: {name: momentum, lr: 0.1, mu: 0}}",
        f"{{name: scaffold, rule: {SGD}}}",
        PARTIAL,
        exact=True,
        why="Momentum with the weight 0 is the gradient.",
    ),
    SameMethod(
        "{name: fedavg, rule: {name: momentum, lr: 0.1, mu: 0}, carry: keep}",
        f"{{name: fedavg, rule: {SGD}}}",
        PARTIAL,
        exact=True,
        why="Momentum with the weight 0 is the gradient.",
    ),
    *(
        SameMethod(
            f"{{name: {name}, rule: {SGD}, over: all}}",
            f"{{name: {name}, rule: {SGD}, server_lr: 0.6}}",
            PARTIAL,
            exact=True,
            why="If clients that were not sampled count as not having moved, the server's step is S / N of the mean.",
        )
        for name in ("fedavg", "scaffold")
    ),
    SameMethod(
        f"{{name: avg_biclip, rule: {OPEN}}}",
        f"{{name: fedavg, rule: {SGD}}}",
        PARTIAL,
        exact=True,
        why=OPEN_THRESHOLDS,
    ),
    SameMethod(
        f"{{name: adagrad_biclip, rule: {OPEN}}}",
        f"{{name: fedadagrad, rule: {SGD}}}",
        PARTIAL,
        exact=True,
        why=OPEN_THRESHOLDS,
    ),
    SameMethod(
        f"{{name: adam_biclip, rule: {OPEN}}}",
        f"{{name: fedadam, rule: {SGD}}}",
        PARTIAL,
        exact=True,
        why=OPEN_THRESHOLDS,
    ),
    SameMethod(
        "{name: bi2clip, server_d: 0, server_u: .inf}",
        "{name: avg_biclip}",
        PARTIAL,
        exact=True,
        why="The server's thresholds clip nothing.",
    ),
    SameMethod(
        "{name: avg_biclip, rule: {name: biclip, lr: 0.1, d: 0, u: 2, mode: norm}}",
        f"{{name: fedavg, rule: {{name: clip, rule: {SGD}, radius: 2}}}}",
        PARTIAL,
        exact=False,
        why="With one threshold, the upper one, of the norm, BiClip is clipping.",
    ),
    SameMethod(
        "{name: adam_biclip, betas: [0, 0.95]}",
        "{name: rmsprop_biclip, beta2: 0.95}",
        PARTIAL,
        exact=True,
        why="Adam without a first moment is RMSProp.",
    ),
    *(
        SameMethod(
            f"{{name: diloco, rule: {ADAMW}, outer_lr: 1, outer_mu: 0, carry: {carry}}}",
            f"{{name: fedavg, rule: {ADAMW}, carry: {carry}}}",
            PARTIAL,
            exact=True,
            why="An outer step of size 1 without momentum is the mean of the clients' models.",
        )
        for carry in ("keep", "reset")
    ),
    SameMethod(
        f"{{name: data_parallel, rule: {SGD}}}",
        f"{{name: fedavg, rule: {SGD}}}",
        ONE_STEP,
        exact=False,
        why="A client that takes one step of plain descent moves by its gradient times the step size.",
        apart=PARTIAL,
    ),
    *(
        SameMethod(
            f"{{name: fedavgm, server_lr: 0.7, beta: 0, nesterov: {nesterov}}}",
            "{name: fedavg, server_lr: 0.7}",
            PARTIAL,
            exact=True,
            why="The server's momentum has the weight 0.",
        )
        for nesterov in ("false", "true")
    ),
    SameMethod(
        "{name: feddc, alpha: 0.4, control: none}",
        "{name: feddyn, alpha: 0.4}",
        PARTIAL,
        exact=True,
        why="FedDC without control variates is FedDyn.",
    ),
    *(
        SameMethod(
            f"{{name: {name}, rule: {rule}, alpha: 0.4}}",
            f"{{name: fedprox, rule: {rule}, mu: 0.4, server_lr: 2}}",
            FIRST_ROUND,
            exact=False,
            why="In the first round nothing is added up yet, and the server adds the mean displacement twice.",
        )
        for name in ("feddyn", "feddc")
        for rule in (SGD, ADAM)
    ),
    SameMethod(
        f"{{name: fedadmm, rule: {SGD}, rho: 0.4, server_lr: 0.5}}",
        f"{{name: fedprox, rule: {SGD}, mu: 0.4}}",
        FIRST_ROUND,
        exact=True,
        why="In the first round all dual variables are zero, and the message is twice the displacement.",
    ),
    SameMethod(
        "{name: feddyn, alpha: 0.4}",
        "{name: fedadmm, rho: 0.4, begin: server}",
        ALL,
        exact=False,
        why="With all clients the server's model is the mean of w_i + p_i / rho, and p_i = alpha d_i.",
        apart=PARTIAL,
    ),
    *(
        SameMethod(
            f"{{name: mifa, rule: {SGD}, over: {over}}}",
            f"{{name: fedavg, rule: {SGD}}}",
            ALL,
            exact=False,
            why="With all clients in every round nobody's last update is older.",
            apart=PARTIAL,
        )
        for over in ("all", "seen")
    ),
    *(
        SameMethod(
            f"{{name: fedsam, rule: {rule}, rho: 0{kind}}}",
            f"{{name: fedavg, rule: {rule}}}",
            PARTIAL,
            exact=True,
            why="The worst point at the distance 0 is the point itself.",
        )
        for rule in (SGD, MOMENTUM)
        for kind in ("", ", kind: asam")
    ),
    SameMethod(
        "{name: mofedsam, rho: 0}",
        "{name: fedcm}",
        PARTIAL,
        exact=True,
        why="The worst point at the distance 0 is the point itself.",
    ),
    SameMethod(
        f"{{name: mofedsam, rule: {SGD}, beta: 1}}",
        f"{{name: fedsam, rule: {SGD}}}",
        EVEN,
        exact=False,
        why="All weight is on the new gradient.",
        apart=PARTIAL,
    ),
    SameMethod(
        "{name: fedcm, beta: 0.3, server_lr: 0.7}",
        "{name: fedavg_m, beta: 0.3, server_lr: 0.7}",
        PARTIAL,
        exact=True,
        why="FedCM's server takes the mean model, as FedAvg-M's does unless gamma is given.",
    ),
    SameMethod(
        "{name: fedadam, local: prox, mu: 0}",
        "{name: fedadam}",
        PARTIAL,
        exact=False,
        why="The proximal term has the weight 0.",
    ),
    SameMethod(
        "{name: fedadam, local: prox, mu: 0.7}",
        "{name: fedadam}",
        ONE_STEP,
        exact=False,
        why="The proximal term is zero at the server's model, where the only step begins.",
        apart=PARTIAL,
    ),
    *(
        SameMethod(
            one,
            other,
            where,
            exact=True,
            why="The sign is in the workload; with the same numbers in both groups the steps are those of descent.",
        )
        for one, other in (
            ("{name: local_sgda, lr: 0.1, server_lr: 0.7}", f"{{name: fedavg, rule: {SGD}, server_lr: 0.7}}"),
            ("{name: sagda, lr: 0.1, server_lr: 0.7}", f"{{name: scaffold, rule: {SGD}, server_lr: 0.7}}"),
            ("{name: fess_gda, lr: 0.1, server_lr: 0.7, rho: 0}", f"{{name: fedavg, rule: {SGD}, server_lr: 0.7}}"),
        )
        for where in (PARTIAL, SADDLE)
    ),
    SameMethod(
        f"{{name: sagda, lr: {LR}, server_lr: 0.8}}",
        f"{{name: local_sgda, lr: {LR}, server_lr: 0.8}}",
        SADDLE_FIRST,
        exact=True,
        why=NO_CONTROLS_YET,
        apart=SADDLE,
    ),
    SameMethod(
        f"{{name: sagda, lr: {LR}, server_lr: 0.8}}",
        f"{{name: local_sgda, lr: {LR}, server_lr: 0.8}}",
        SADDLE_ONE_CLIENT,
        exact=False,
        why=ONE_MEMBER,
    ),
    SameMethod(
        f"{{name: fess_gda, lr: {LR}, server_lr: 0.8, rho: 0}}",
        f"{{name: local_sgda, lr: {LR}, server_lr: 0.8}}",
        SADDLE,
        exact=True,
        why="The smoothing has the weight 0.",
    ),
    *(
        SameMethod(
            method,
            f"{{name: local_sgda, lr: {LR}}}",
            SADDLE_ONE_EXACT,
            exact=False,
            why="Without memory each step is along the gradient at the current point. With more clients the first step "
            "would be along the mean of the gradients at the clients' own points.",
            apart=SADDLE_EXACT,
        )
        for method in (
            f"{{name: local_sgdam, lr: {LR}, beta: 1, start: gradient}}",
            f"{{name: fed_sgda_m, lr: {LR}, a: 1, start: gradient}}",
        )
    ),
    *(
        SameMethod(
            f"{{name: fed_sgda_clip, lr: {LR}, gamma: {TIMES}, beta: 1, radius: 1000000}}",
            f"{{name: sagda, lr: {LR}, server_lr: 0.8}}",
            where,
            exact=False,
            why="Without clipping and memory, gamma = server_lr lr K, it is SAGDA.",
        )
        for where in (SADDLE_ALL, SADDLE_THREE)
    ),
    SameMethod(
        f"{{name: fed_sgda_clip, lr: {LR}, gamma: {GAMMA}, beta: 0.3, radius: 0.001}}",
        "{name: fed_nsgda_m, lr: {primal: 0.00002, dual: 0.0001}, gamma: {primal: 0.00005, dual: 0.0002}, beta: 0.3}",
        SADDLE,
        exact=False,
        why="All norms are larger than the radius, so that each direction is normalised.",
    ),
    SameMethod(
        f"{{name: fedmuon_da, lr: {LR}, gamma: {GAMMA}, beta: 0.3, ball: svd}}",
        f"{{name: fed_nsgda_m, lr: {LR}, gamma: {GAMMA}, beta: 0.3}}",
        COLUMNS,
        exact=False,
        why="The polar factor of a matrix of one column is the column divided by its norm.",
    ),
    SameMethod(
        f"{{name: fedmuon_da, lr: {LR}, gamma: {GAMMA}, beta: 0.3}}",
        f"{{name: fed_nsgda_m, lr: {LR}, gamma: {GAMMA}, beta: 0.3}}",
        LONE_DUAL,
        exact=False,
        why="There are no matrices.",
    ),
]
