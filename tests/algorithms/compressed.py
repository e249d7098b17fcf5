"""Helpers for the tests of compression: methods that are built for a problem, and their random factors in the form that
the reference expects."""

import torch

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.parts.compression import Compressed
from fedfleet.algorithms.parts.factors import Frozen
from fedfleet.workloads import counted
from tests.algorithms.driver import run, tree
from tests.algorithms.keyed import COHORTS, PROBLEM, STEPS, TOLERANCE, play
from tests.reference.kronecker import Blocks
from tests.reference.lowrank import HadamardMatrix, HadamardTensor, Matrix

__all__ = ["COHORTS", "PROBLEM", "STEPS", "TOLERANCE", "build", "play", "trained"]

SEED = 3
X0 = tree(PROBLEM.start)


def build(method, layout=X0.layout, seed=SEED):
    return method.build(RunContext(3, 5, 6, None, seed, layout)) if isinstance(method, Compressed) else method


def trained(method):
    """The models of the fast version on the shared problem, cohorts and numbers of steps."""
    return run(build(method), PROBLEM, COHORTS, STEPS)


# --- the reference's forms and draws from the engine's plan ---------------------------------------------------------
OURS = {"U": "u", "V": "v", "X1": "u1", "Y1": "v1", "X2": "u2", "Y2": "v2"}
OURS |= {"T1": "core1", "O1": "u1", "I1": "v1", "T2": "core2", "O2": "u2", "I2": "v2"}
OURS |= {"fixed U": "fixed.u", "fixed V": "fixed.v"}


def forms(method, reshape="raw", kind="product"):
    """layer -> the reference's form, with the sizes that the method chose."""
    made = {}
    for sized in build(method).space.sized:
        size, shape = sized.size, sized.weight.shape
        if kind != "product":
            made[sized.weight.name] = HadamardTensor(*size) if len(shape) == 4 else HadamardMatrix(*size)
        else:
            product = build(method).space.form.product
            layout = getattr(product, "layout", None)
            made[sized.weight.name] = Blocks(*size, layout, reshape) if layout else Matrix(*size, reshape)
    return made


def draw(method, reset=0):
    """The factors that the method draws; r: the round in which they are first used."""
    space = build(method).space

    def factor(r, i, layer, name, shape):
        place = (r // reset if reset else 0, space.layout.names.index(layer))
        ours = "fixed.u" if isinstance(space.form, Frozen) else OURS[name]
        return space._drawn(ours, tuple(shape), place, X0.flat).numpy()

    return factor


# --- the clients' draws ---------------------------------------------------------------------------------------------
def step_key(i, r, k):
    return counted.key("step", i, r, k)


def last_key(i, r):
    return step_key(i, r, STEPS[r, i] - 1)


def pieces(key, names):
    """The uniform numbers of a key, divided among the layers."""
    sizes = [PROBLEM.start[name].size for name in names]
    parts = counted.uniform(key, sum(sizes)).split(sizes)
    return {name: p.view(PROBLEM.start[name].shape).numpy() for name, p in zip(names, parts, strict=True)}


def close(a, b):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=TOLERANCE, atol=TOLERANCE)
