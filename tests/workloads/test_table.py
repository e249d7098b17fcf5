"""Every entry of the tables can be built; reading the tables does not import torch; no global randomness is used."""

from __future__ import annotations

import importlib
import inspect
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedfleet.workloads import counted
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Iid
from fedfleet.workloads.table import MODELS, PARTITIONS, WORKLOADS
from fedfleet.workloads.workload import Model, Partition, Workload

WITH_FILES = ("table", "characters", "causal_lm", "instruct", "text_classes", "pretrained")
"""What needs to be told where its files are."""
TABLES = [(WORKLOADS, Workload), (MODELS, Model), (PARTITIONS, Partition)]


def build(entry, **arguments):
    module, _, name = entry.build.partition(":")
    part = getattr(importlib.import_module(module), name)
    if issubclass(part, Workload) and "of" in inspect.signature(part).parameters:
        arguments = {"of": Digits(), **arguments}
    return part(**arguments)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [(entry, kind) for table, kind in TABLES for name, entry in table.items() if name not in WITH_FILES],
    ids=lambda v: str(v)[:60],
)
def test_a_bare_name_builds(entry, kind):
    assert isinstance(build(entry), kind)
    assert entry.summary


@pytest.mark.parametrize("name", ["digits", "fashion_mnist"])
def test_model_and_partition_can_be_chosen(name):
    workload = build(WORKLOADS[name], model=Logistic(), partition=Iid())
    assert (workload.model, workload.partition) == (Logistic(), Iid())


def test_reading_the_tables_imports_no_torch():
    code = "import sys, fedfleet.workloads.table; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["digits", "quadratic", "linear", "logistic", "noisy"])
def test_global_randomness_is_neither_read_nor_written(name):
    def results(seed):
        for reseed in (random.seed, np.random.seed, torch.manual_seed):
            reseed(seed)
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        workload = build(WORKLOADS[name])
        workload.check()
        split, p = workload.split(0, 10), workload.init(0)
        train = {key: torch.from_numpy(np.array(rows)) for key, rows in split.train.items()}
        loss = workload.losses(p, {**train, "key": counted.key(0)})
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
        assert before[:2] == after[:2]
        assert torch.equal(before[2], after[2])
        return loss, split.client_index.rows

    build(WORKLOADS[name]).split(0, 10)  # importing scikit-learn draws from Python's generator
    one, other = results(1), results(2)
    assert torch.equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])


@pytest.mark.parametrize("entry", PARTITIONS.values(), ids=list(PARTITIONS))
def test_partitions_leave_global_randomness_alone(entry):
    before = str(np.random.get_state()), torch.get_rng_state()
    build(entry).deal(np.arange(100) % 10, 10, 0)
    assert str(np.random.get_state()) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
