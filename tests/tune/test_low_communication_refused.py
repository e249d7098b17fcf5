"""What has no meaning in training with little communication: each is refused within two seconds of processor time, with
status 2 and one sentence that says what to change, and leaves no folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .commands import LOCAL, invoke

pytestmark = pytest.mark.usefixtures("here")

ALL = ("federation.clients=4", "federation.cohort=4")
BUFFERED = ("federation.pace={name: buffered, buffer: 2}", "systems={}")
OVER_STEPS = "method.rule={name: sgd, lr: {schedule: linear, start: 0.1, over: steps}}"
TOP = "name: coded, codec: {name: top_k, ratio: 0.1}"
PRIVATE = "privacy={clip: 1.0, noise: 1.0, delta: 0.001}"
GROUPS = "method.rule={name: groups, rule: {name: sgd}, groups: [{match: ['*'], "

REFUSED = {
    "one bit of statistical": (
        ("method=diloco", "method.compression={name: coded, codec: {name: statistical, bits: 1}}"),
        "2 <= bits <= 8 must hold for statistical, got bits=1, which would send the mean alone; choose sign",
    ),
    "overlap of a round": (
        ("method=streaming_diloco", "method.fragments=1", "method.overlap=5", "federation.local.steps=5", *ALL),
        "overlap < local.steps must hold, got overlap=5, steps=5; raise steps or lower overlap",
    ),
    "a tensor in no fragment": (
        ("method=streaming_diloco", "method.fragments=[['*weight']]", *ALL),
        "bias is in no fragment; add a pattern that it matches, as *",
    ),
    "streaming with a cohort": (
        ("method=streaming_diloco", "method.fragments=1", "federation.clients=4", "federation.cohort=2"),
        "its clients keep models of their own, of which fragments are averaged in turns",
    ),
    "eager with a cohort": (
        ("method=eager_diloco", "federation.clients=4", "federation.cohort=2"),
        "its clients keep models of their own, which follow from the means of all",
    ),
    "streaming without rounds": (
        ("method=streaming_diloco", "method.fragments=1", *ALL, *BUFFERED),
        "its clients keep models of their own",
    ),
    "ef21 without rounds": (
        ("method=diloco", f"method.compression={{{TOP}, memory: ef21}}", *ALL, *BUFFERED),
        "ef21's server follows the memories of all clients",
    ),
    "steps without rounds": (
        (OVER_STEPS, *ALL, *BUFFERED),
        "counts the steps of all clients together",
    ),
    "steps with epochs": ((OVER_STEPS, "federation.local.epochs=1"), "give federation.local.steps"),
    "the mean over those that sent, of a dense code": (
        ("method=diloco", "method.compression={name: coded, codec: sign, mean: sent}"),
        "mean: sent is for codecs that leave places out (top_k, sparse); leave it out",
    ),
    "decay of ef21": (
        ("method=diloco", f"method.compression={{{TOP}, memory: ef21, decay: 0.9}}"),
        "it is error feedback's, and memory is ef21; leave it out, or choose memory: error",
    ),
    "memory in private runs": (
        ("method=diloco", "method.compression={name: coded, codec: sign}", PRIVATE),
        "coded messages have no bounded sensitivity with memory; give memory: none, or leave privacy out",
    ),
    "two compressions": (
        ("method=sparse_loco", "method.compression={name: coded, codec: sign}"),
        "method.compression is not an argument of sparse_loco",
    ),
    "a group without numbers": ((f"{GROUPS}}}]}}",), "groups.0 changes nothing; give it lr or weight_decay"),
    "a group of an unknown number": ((f"{GROUPS}rate: 1}}]}}",), "method.rule.groups.0.rate is not a key of it"),
    "a group of no tensor": (
        ("method.rule={name: groups, rule: sgd, groups: [{match: ['*bais*'], lr: 0.1}]}",),
        "method.rule.groups.0.match: every pattern must name a tensor, got *bais*; did you mean out.bias? valid: fc1.w",
    ),
    "a group of no tensor, around which gradients are clipped": (
        ("method.rule={name: clip, rule: {name: groups, rule: sgd, groups: [{match: ['*bais*'], lr: 0.1}]}}",),
        "method.rule.rule.groups.0.match: every pattern must name a tensor, got *bais*; did you mean out.bias?",
    ),
    "a matrix that is not there among those of vector_lr": (
        ("method={name: fedmuon_bc, aux: ['oot.*']}",),
        "method.aux: every pattern must name a tensor, got oot.*; valid: fc1.weight, ",
    ),
    "the same of a rule": (
        ("method.rule={name: muon, aux: ['oot.*']}",),
        "method.rule.aux: every pattern must name a tensor, got oot.*; valid: fc1.weight, ",
    ),
    "an offset in rounds": (
        ("method.rule={name: sgd, lr: {schedule: linear, start: 0.1, offset: -1}}",),
        "offset is for schedules over steps, got offset=-1; leave it out, or give over: steps",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_sentence_before_anything_starts(what: str, here: Path):
    changes, said = REFUSED[what]
    began = time.process_time()
    done = invoke("run", "digits", *LOCAL, "federation.rounds=2", *changes, "--out", "run")
    took = time.process_time() - began
    assert done.exit_code == 2, done.output
    (line,) = [text for text in done.stderr.splitlines() if not text.startswith("changed: ")]
    assert line.startswith("error: ")
    assert said in line
    assert "Traceback" not in line
    assert list(here.iterdir()) == []
    assert took < 2
