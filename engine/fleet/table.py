"""The tables of samplers and of the parts of a fleet that experiments choose by name."""

from __future__ import annotations

from ...workloads.entry import Entry

_HERE = "fedfleet.engine.fleet."

DEVICES = {
    "lognormal": Entry(_HERE + "client_devices:lognormal", "log-normal speeds and bandwidths"),
    "equal": Entry(_HERE + "client_devices:equal", "the same device for all"),
    "phones": Entry(_HERE + "client_devices:phones", "phones with the percentiles of published measurements"),
    "drawn": Entry(_HERE + "client_devices:Drawn", "speeds, bandwidths and memory from distributions"),
    "table": Entry(_HERE + "client_devices:DeviceFile", "the devices of a Parquet file"),
}

DISTRIBUTIONS = {
    "equal": Entry(_HERE + "distributions:equal", "one number for all"),
    "lognormal": Entry(_HERE + "distributions:lognormal", "log-normal"),
    "uniform": Entry(_HERE + "distributions:uniform_between", "uniform"),
    "halfnormal": Entry(_HERE + "distributions:halfnormal", "half-normal"),
    "gaussian": Entry(_HERE + "distributions:gaussian", "normal, cut below"),
    "exponential": Entry(_HERE + "distributions:exponential", "exponential"),
    "zipf": Entry(_HERE + "distributions:zipf", "multiples of a number by Zipf's law"),
    "tiers": Entry(_HERE + "distributions:tiers", "some kinds of devices with their shares"),
    "percentiles": Entry(_HERE + "distributions:percentiles", "given percentiles"),
}

AVAILABILITIES = {
    "always": Entry(_HERE + "availability:Always", "all clients are online at all times"),
    "bernoulli": Entry(_HERE + "availability:bernoulli", "a coin for each client and slot of time"),
    "sine": Entry(_HERE + "availability:sine", "a coin whose probability follows the day"),
    "sessions": Entry(_HERE + "availability:sessions", "sessions and pauses"),
    "diurnal": Entry(_HERE + "availability:diurnal", "one session in a night"),
    "trace": Entry(_HERE + "availability:Trace", "the sessions of a Parquet file"),
}

LOCAL_WORK = {
    "full": Entry(_HERE + "work:full", "all of it"),
    "uniform": Entry(_HERE + "work:uniform_steps", "some clients stop at a random step"),
    "range": Entry(_HERE + "work:range_of_epochs", "a random number of epochs"),
    "speed": Entry(_HERE + "work:by_speed", "slow clients take fewer steps"),
}

_SAMPLERS = "fedfleet.engine.cohorts.samplers:"

SAMPLERS = {
    "uniform": Entry(_SAMPLERS + "UniformSampler", "S clients, each set with the same probability"),
    "binomial": Entry(_SAMPLERS + "Binomial", "each client with probability S / N, as differential privacy counts"),
    "turns": Entry(_SAMPLERS + "Turns", "random groups of clients that take turns"),
    "replacement": Entry(_SAMPLERS + "Replacement", "S draws with replacement"),
    "poisson": Entry(_SAMPLERS + "PoissonSampler", "a coin for each client"),
    "separated": Entry(_SAMPLERS + "Separated", "S clients that were not drawn for some rounds"),
    "weighted": Entry(_SAMPLERS + "WeightedSampler", "S clients in proportion to their numbers of examples"),
    "cyclic": Entry(_SAMPLERS + "CyclicSampler", "the next S clients of an order"),
    "power_of_choice": Entry(_SAMPLERS + "PowerOfChoice", "those of d candidates with the largest losses"),
    "agnostic": Entry(
        "fedfleet.engine.cohorts.agnostic:Agnostic", "weights that move towards clients or groups with large losses"
    ),
    "tilted": Entry("fedfleet.engine.cohorts.tilted:Tilted", "S clients that weigh by an exponential of their losses"),
    "oort": Entry("fedfleet.engine.cohorts.oort:Oort", "clients with large losses and short durations"),
}
