"""The privacy of a run: what its section `privacy` means for the clients' messages, the noise and the accounting.

Which adjacency and which accountant go with a run follows from its sampler and its mechanism:

    sampler           mechanism           adjacency        t rounds are, to the accountant
    binomial          gaussian            add or remove    t Poisson samples with q = S / N
    uniform, S = N    gaussian            zero-out         t releases
    uniform, S < N    gaussian            replace          t samples without replacement, noise z / 2 (rdp only)
    turns             gaussian, banded    zero-out         ceil(t / b) Poisson samples with q = S b / N of a group
    turns             tree, others        zero-out         one release of the mechanism's sensitivity
    as_if             gaussian            add or remove    t Poisson samples of the larger federation
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Clip, Noise
from ...algorithms.contract import Algorithm, Message
from ...algorithms.privacy.clipping import Clipped, group_names
from ...algorithms.privacy.mechanism import Mechanism
from ...algorithms.privacy.noise import ClientNoise, Quantile
from ..config import schedules
from ..config.conflicts import Conflict, refuse
from ..config.registry import Registry, check
from ..config.schema import Experiment, part_name
from ..errors import ConfigError
from .accounting import Adjacency, Kind, Releases, Sequence, calibrate, epsilon, last_round, library_version

if TYPE_CHECKING:
    import torch

WORDS = {
    "add_or_remove": "one client added or removed",
    "zero_out": "one client's messages replaced by zeros",
    "replace": "one client's data replaced",
}
"""Adjacencies, as they are printed beside epsilon."""
COUNT_SHARE = 20
"""The default noise on the count for a quantile: the cohort over this."""


@dataclass(frozen=True, eq=False)
class PrivacyPlan(Clip):
    """The privacy of one run. It is the stage's bound on messages; `noise` is the stage's noise.

    `calibrated`: the z of the checkpoint that the run goes on from, because another version of the library might
    calibrate another one; None without one. `multiplier`: z, NaN if it follows a schedule.
    """

    experiment: Experiment
    mechanism: Mechanism
    quantile: Quantile | None
    dtype: torch.dtype
    calibrated: float | None = None

    @staticmethod
    def of(experiment: Experiment, registry: Registry, dtype: torch.dtype) -> PrivacyPlan | None:
        """The plan of an experiment; None without a section `privacy`. Raises ConfigError for settings that do not fit
        each other, see also `check_method`."""
        if experiment.privacy is None:
            return None
        built = registry.build("MECHANISMS", experiment.privacy.mechanism, "privacy.mechanism")
        if not isinstance(built, Mechanism):
            raise ConfigError(f"privacy.mechanism: {experiment.privacy.mechanism!r} is not a mechanism; give a name")
        plan = PrivacyPlan(experiment, built, quantile_of(experiment), dtype)
        plan._check()
        return plan

    # --- settings -----------------------------------------------------------------------------------------------------
    @property
    def settings(self) -> Any:
        return self.experiment.privacy

    @property
    def rounds(self) -> int:
        return self.experiment.federation.rounds

    @property
    def separation(self) -> int | None:
        """The fewest rounds from one turn of a client to its next; None if it may take part in any round."""
        return self.experiment.federation.separation

    @cached_property
    def stands_for(self) -> tuple[int, int]:
        """(N, S) of the federation whose privacy is accounted for."""
        as_if, federation = self.settings.as_if, self.experiment.federation
        return (as_if.clients, as_if.cohort) if as_if else (federation.clients, federation.cohort)

    @property
    def shrunk(self) -> float:
        """The factor on the noise of the sum, for a cohort that stands for a larger one."""
        return self.experiment.federation.cohort / self.stands_for[1]

    @property
    def has_schedule(self) -> bool:
        """Whether the bound on messages differs from round to round by a schedule."""
        return self.quantile is None and schedules.has_schedule(self.settings.clip)

    def bound_of(self, t: int) -> float:
        """C_t by the configuration; with a quantile C_1."""
        if self.quantile:
            return self.quantile.start
        return float(schedules.resolve(self.settings.clip, t, self.rounds, "privacy.clip"))

    def multiplier_of(self, t: int) -> float:
        """z_t."""
        if schedules.has_schedule(self.settings.noise):
            return float(schedules.resolve(self.settings.noise, t, self.rounds, "privacy.noise"))
        return self.multiplier

    @cached_property
    def multiplier(self) -> float:
        """z, given or calibrated to `epsilon` at the last round; NaN if it follows a schedule."""
        given = self.settings.noise
        if self.calibrated is not None:
            return self.calibrated
        if schedules.has_schedule(given):
            return math.nan
        if given != "auto":
            return float(given)
        try:
            return calibrate(self.settings.epsilon, lambda z: self._epsilon(self.rounds, z))
        except ValueError as error:
            raise ConfigError(f"privacy.epsilon: {error}") from None

    # --- accounting ---------------------------------------------------------------------------------------------------
    @property
    def adjacency(self) -> Adjacency:
        federation = self.experiment.federation
        if self.settings.as_if or federation.sampled == "binomial":
            return "add_or_remove"
        return "replace" if federation.sampled == "uniform" and federation.cohort < federation.clients else "zero_out"

    @property
    def kind(self) -> Kind:
        if self.settings.accountant != "auto":
            return self.settings.accountant
        return "rdp" if self.adjacency == "replace" else "pld"

    def releases(self, t: int, z: float) -> Releases:
        """The first t rounds with the noise multiplier z."""
        clients, cohort = self.stands_for
        if self.adjacency == "replace":
            return Releases(t, z / 2, subset=(cohort, clients))  # a replacement moves the sum by up to 2 C
        separation = None if self.settings.as_if else self.separation
        composed = self.mechanism.composition(t, separation, self.rounds)
        rate = cohort * (separation or 1) / clients if composed.sampled else 1.0
        return Releases(composed.times, z / composed.sensitivity, rate if rate < 1 else None)

    def _epsilon(self, t: int, z: float) -> float:
        return epsilon(self.releases(t, z), self.settings.delta, self.kind, self.adjacency) if t else 0.0

    @cached_property
    def _sequence(self) -> Sequence:
        """Epsilon after every round, for noise that follows a schedule."""
        return Sequence(
            lambda t: self.releases(1, self.multiplier_of(t)), self.settings.delta, self.kind, self.adjacency
        )

    @property
    def is_noisy(self) -> bool:
        return self.settings.noise != 0

    @cached_property
    def epsilon(self) -> Any:
        """The function t -> epsilon after t rounds."""

        def after(t: int) -> float:
            return self._sequence.epsilon(t) if math.isnan(self.multiplier) else self._epsilon(t, self.multiplier)

        return lru_cache(8)(after)

    @property
    def column(self) -> str:
        """The column of epsilon in the record of a round."""
        return "privacy/epsilon_as_if" if self.settings.as_if else "privacy/epsilon"

    @cached_property
    def last_round(self) -> int:
        """The round after which the run ends: R, or the last one that the budget allows."""
        budget = self.settings.epsilon
        if budget is None or self.settings.noise == "auto" or not self.is_noisy:
            return self.rounds
        return last_round(budget, self.rounds, self.epsilon)

    def columns(self, t: int) -> dict[str, float]:
        """Epsilon after round t, for its record."""
        return {self.column: self.epsilon(t)} if self.is_noisy else {}

    def description(self, t: int) -> str:
        """One line: epsilon after t rounds, and everything that it depends on."""
        if not self.is_noisy:
            return "privacy: messages are clipped, no noise is added, there is no epsilon"
        settings, (clients, cohort) = self.settings, self.stands_for
        federation = self.experiment.federation
        sampling = "Poisson" if settings.as_if or federation.sampled == "binomial" else federation.sampled
        rate = cohort / clients
        if federation.sampled == "turns" and not settings.as_if:
            rate *= self.separation or 1
        standing = f" as if for {clients:,} clients and cohorts of {cohort:,}" if settings.as_if else ""
        z = "by its schedule" if math.isnan(self.multiplier) else f"{self.multiplier:.4g}"
        return (
            f"privacy: epsilon = {self.epsilon(t):.4g} at delta = {settings.delta:g}{standing}, "
            f"{WORDS[self.adjacency]}; {sampling}, q = {rate:.4g}, {t} rounds, z = {z}; "
            f"{self.kind.upper()}, dp-accounting {library_version()}; simulated, no deployable mechanism, see "
            "docs/privacy.md"
        )

    # --- parts of the stage -------------------------------------------------------------------------------------------
    def wrap(self, method: Algorithm, round: int = 1) -> Algorithm:
        scales, shares = self.settings.scales, self.settings.shares
        adaptive = self.quantile is not None
        return Clipped(method, self.bound_of(round), adaptive, tuple(scales.items()), tuple(shares.items()))

    @staticmethod
    def unwrapped(method: Algorithm) -> Algorithm:
        """The method without the bound on its messages."""
        return method.method if isinstance(method, Clipped) else method

    @property
    def noise(self) -> Noise:
        return ClientNoise(
            self.experiment.seed,
            self.experiment.federation.cohort,
            self.rounds,
            self.mechanism,
            self.multiplier_of,
            self.bound_of,
            noisy=self.is_noisy,
            scheduled=schedules.has_schedule(self.settings.noise),
            quantile=self.quantile,
            shrunk=self.shrunk,
            scales=tuple(self.settings.scales.items()),
            shares=tuple(self.settings.shares.items()),
            dtype=self.dtype,
        )

    @property
    def follows_rounds(self) -> bool:
        """Whether the noise depends on the number of rounds of the run."""
        noise = self.settings.noise
        optimised = getattr(self.mechanism, "coefficients", "") == "optimised"
        return noise == "auto" or optimised or schedules.has_schedule(noise)

    # --- refusals -----------------------------------------------------------------------------------------------------
    def _check(self) -> None:
        """Raise ConfigError for settings that are no bounds or no noise, or that do not go with the mechanism."""
        for t in {1, self.rounds}:
            check_bound(self.bound_of(t), self.is_noisy)
        check_noise(self.settings.noise)
        quantile = self.quantile
        if quantile is not None and not (quantile.start > 0 and quantile.lr > 0 and 0 < quantile.below < 1):
            raise refusal(
                f"clip: start > 0, lr > 0 and 0 < below < 1 must hold, got start={quantile.start}, lr={quantile.lr}, "
                f"below={quantile.below}; change them"
            )
        for name, numbers in (("scales", self.settings.scales), ("shares", self.settings.shares)):
            if wrong := [group for group, number in numbers.items() if not 0 < number < math.inf]:
                raise refusal(f"{name} > 0 must hold, got {wrong[0]}={numbers[wrong[0]]}; give a positive number")
        refuse(MECHANISM_CONFLICTS, self, self.experiment)
        try:
            self.mechanism.check(self.rounds, self.separation)
        except ValueError as error:
            raise refusal(str(error)) from None

    def check_spending(self) -> None:
        """Raise ConfigError if the noise cannot be calibrated, or if the budget allows no round. May take seconds."""
        if not self.is_noisy:
            return
        if self.quantile is not None:
            for t in {1, self.rounds}:
                if not (z := self.multiplier_of(t)) < 2 * self.quantile.count_noise:
                    raise refusal(
                        f"noise < 2 * count_noise must hold, got noise={z:.4g}, "
                        f"count_noise={self.quantile.count_noise:g}; raise count_noise"
                    )
        if self.last_round == 0:
            raise refusal(
                f"epsilon={self.settings.epsilon:g} allows not one round at noise={self.settings.noise}, which costs "
                f"{self.epsilon(1):.2g}; raise noise or epsilon"
            )
        self.epsilon(self.last_round)

    def check_method(self, method: Algorithm, buffers: int) -> None:
        """Raise ConfigError for a method, or a model, whose clients send what is neither bounded nor noised. method:
        not wrapped. buffers: the number of the model's running statistics."""
        if buffers:
            raise refusal(
                "the model has running statistics (BatchNorm), which are neither clipped nor noised, got "
                f"{buffers} of them; choose a model with GroupNorm, or none"
            )
        if method.warm_start is not None:
            raise refusal("start: gradient is a pass over all clients, which has no bound; choose start: zeros")
        if uses_norm2(method):
            raise refusal(
                f"{part_name(self.experiment.method)} uses the mean of |y_K - x|^2, which no bound on a message's norm "
                "makes private; choose another server rule"
            )
        if method.not_private:
            raise refusal(f"{part_name(self.experiment.method)} has no private form: {method.not_private}")

    def check_message(self, message: Message) -> None:
        """Raise ConfigError for a message with single numbers, or if `scales` or `shares` name what is not sent.
        message: a decoded one."""
        names, leaves = group_names(message), pytree.tree_leaves((message.delta, message.sent, message.averaged))
        for name, leaf in zip(names, leaves, strict=True):
            if not leaf.ndim:
                remedy = "choose another method, or carry: keep" if name == "carried" else "choose another method"
                raise refusal(
                    f"{part_name(self.experiment.method)} sends a number of steps ({name}), which would take up the "
                    f"bound on its messages, and which noise would falsify; {remedy}"
                )
        sent = list(dict.fromkeys(names))
        for name, numbers in (("scales", self.settings.scales), ("shares", self.settings.shares)):
            wrong = set(numbers) - set(sent) if name == "scales" else set(numbers) ^ set(sent)
            if numbers and wrong:
                got = ", ".join(numbers)
                raise refusal(
                    f"{name} must name what is sent, got {{{got}}}; {part_name(self.experiment.method)} sends "
                    f"{', '.join(sent)}"
                )


MECHANISM_CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        *("privacy.as_if", "privacy.mechanism", "goes with mechanism gaussian", "drop it"),
        lambda plan: plan.settings.as_if and "binomial" not in plan.mechanism.samplers,
    ),
    Conflict(
        *("privacy.clip", "privacy.mechanism", "quantile goes with mechanism gaussian", "give clip as a number"),
        lambda plan: plan.quantile and "binomial" not in plan.mechanism.samplers,
    ),
    Conflict(
        *("privacy.mechanism", "federation.sampler", "needs rounds between two turns of a client"),
        "choose federation.sampler: {name: turns, separation: …}",
        lambda plan: plan.experiment.federation.sampled not in plan.mechanism.samplers,
    ),
    Conflict(
        *("privacy.noise", "privacy.mechanism", "a schedule goes with mechanism gaussian", "give noise as a number"),
        lambda plan: schedules.has_schedule(plan.settings.noise) and part_name(plan.settings.mechanism) != "gaussian",
    ),
    Conflict(
        *("privacy.noise", "federation.sampler", "a schedule goes with uniform or binomial", "give noise as a number"),
        lambda plan: schedules.has_schedule(plan.settings.noise) and plan.experiment.federation.sampled == "turns",
    ),
    Conflict(
        *("privacy.accountant", "federation.sampler", "pld has no bound for a fixed cohort of S < N"),
        "choose accountant: rdp, or federation.sampler: binomial",
        lambda plan: plan.is_noisy and plan.settings.accountant == "pld" and plan.adjacency == "replace",
    ),
)


def refusal(sentence: str) -> ConfigError:
    return ConfigError(f"privacy: {sentence}")


def uses_norm2(method: Any) -> bool:
    """Whether the server's rule of a method, or of one that it wraps, uses the mean squared norm of the messages."""
    if getattr(getattr(method, "server", None), "uses_norm2", False):
        return True
    inner = getattr(method, "method", None)
    return inner is not None and uses_norm2(inner)


def check_bound(bound: Any, noisy: bool) -> None:
    """Raise ConfigError unless a bound on messages is a positive number; infinite only without noise."""
    if math.isnan(bound) or bound <= 0:
        raise refusal(f"clip > 0 must hold, got clip={bound}; give a bound on the norm of what one client sends")
    if bound < 1e-20:
        raise refusal(f"clip >= 1e-20 must hold, got clip={bound}; float32 has no smaller products, raise it")
    if math.isinf(bound) and noisy:
        raise refusal("clip: an infinite bound goes with noise: 0, got clip=inf; give a number")


def check_noise(noise: Any) -> None:
    """Raise ConfigError unless the noise is auto, a number from 0, or a schedule."""
    if noise == "auto" or schedules.has_schedule(noise):
        return
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < math.inf:
        raise refusal(f"noise must be a number from 0, a schedule or auto, got {noise!r}; change it")


def quantile_of(experiment: Experiment) -> Quantile | None:
    """The settings of a bound that follows a quantile; None for a number or a schedule."""
    clip, federation = experiment.privacy.clip if experiment.privacy else None, experiment.federation
    if isinstance(clip, dict) and "name" in clip:
        arguments = {key: value for key, value in clip.items() if key != "name"}
        known = {"start", "below", "lr", "count_noise"}
        if clip["name"] != "quantile" or (unknown := set(arguments) - known):
            got = clip["name"] if clip["name"] != "quantile" else ", ".join(sorted(map(str, unknown)))
            raise refusal(
                "clip must be a number, a schedule or {name: quantile, start, below, lr, count_noise}, got "
                f"{got}; change it"
            )
        as_if = experiment.privacy.as_if if experiment.privacy else None
        shrunk = federation.cohort / as_if.cohort if as_if else 1.0
        cohort = as_if.cohort if as_if else federation.cohort
        wanted = arguments.pop("count_noise", "auto")
        count_noise = cohort / COUNT_SHARE if wanted == "auto" else check(float, wanted, "privacy.clip.count_noise")
        numbers = {key: check(float, value, f"privacy.clip.{key}") for key, value in arguments.items()}
        return Quantile(**numbers, count_noise=count_noise, shrunk=shrunk)
    if not schedules.has_schedule(clip) and (isinstance(clip, bool) or not isinstance(clip, int | float)):
        raise refusal(f"clip must be a number, a schedule or {{name: quantile}}, got {clip!r}; change it")
    return None
