"""The bytes that are sent: they are serialised and counted, and a client that gets only the broadcasts can follow the
model.

Models are float32, 4 bytes for each number; the number of the round and a key are int64, 8 bytes.
"""

import dataclasses
import io
import math

import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.contract import Algorithm, Known, Round, RunContext
from fedfleet.algorithms.ef21_p import ef21_p
from fedfleet.algorithms.fedbat import fedbat
from fedfleet.algorithms.fedhm import fedhm
from fedfleet.algorithms.fedlmt import fedlmt
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.fedmud_bkd import fedmud_bkd
from fedfleet.algorithms.fedmud_bkd_aad import fedmud_bkd_aad
from fedfleet.algorithms.fedmud_bkd_f import fedmud_bkd_f
from fedfleet.algorithms.fedmud_f import fedmud_f
from fedfleet.algorithms.fedpara import fedpara
from fedfleet.algorithms.parts.compression import Compressed, Factoring
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.method_form.state_spec import StateSpec, without_known
from fedfleet.workloads import counted
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.convolutional import Cnn4

torch.set_num_threads(1)

FACTORED = [fedmud, fedmud_bkd, fedmud_aad, fedmud_bkd_aad, fedmud_f, fedmud_bkd_f, fedhm, fedlmt, fedpara]


def model() -> Tree:
    """CNN4 on 28 x 28 grey images, 390,880 parameters."""
    net = initial(lambda: Cnn4(norm="group").build((1, 28, 28), 10), 0)
    return Tree.of({name: value.detach() for name, value in net.named_parameters()})


X = model()


def build(method: Compressed) -> Algorithm:
    return method.build(RunContext(2, 4, 5, None, 1, X.layout))


def serialised(state) -> bytes:
    """The bytes of all tensors, one after the other."""
    out = io.BytesIO()
    for leaf in pytree.tree_leaves(state):
        out.write(leaf.contiguous().numpy().tobytes())
    return out.getvalue()


class Pulls:
    """An oracle whose gradients point from random tensors to the iterate."""

    def __init__(self, client: int, round: int):
        self.key, self.done = counted.key("bytes", client, round), torch.tensor(0.9, dtype=torch.float64)
        self.examples = torch.tensor(1)

    def __call__(self, y: Tree, /) -> Tree:
        return y - Tree(0.1 * counted.normal(counted.key(self.key, "aim"), len(y.flat)).float(), y.layout)


def rounds(method: Algorithm, count: int):
    """For each round: (the server's state before it, the messages as they were sent)."""
    server = method.server_init(X)
    clients = {}
    for r in range(1, count + 1):
        public, messages = method.unpack(server.public), []
        for i in range(2):
            client = clients.get(i, method.client_init(public))
            local = method.client_step(public, client, method.client_begin(public, client), Pulls(i, r))
            message, clients[i] = method.client_finish(public, client, local)
            messages.append(message)
        yield server, messages
        decoded = [method.decode(public, message) for message in messages]
        mean = pytree.tree_map(lambda *leaves: sum(leaves) / len(leaves), *decoded)
        server = method.server_update(server, mean, Round(r, count, 2, 4))


METHODS = {
    **{recipe.__name__ + str(n): (lambda recipe=recipe: recipe()) for n, recipe in enumerate(FACTORED)},
    "ef21_p": ef21_p,
    "ef21_p_layers": lambda: ef21_p(masks="layer", memory="shift"),
    "fedbat": fedbat,
    "fedbat_both": lambda: fedbat(both_ways=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_counted_is_serialised(name):
    """The recorded bytes, which follow from the state specification, are those of the messages of every round."""
    method = build(METHODS[name]())
    state_spec = StateSpec(method, X)
    for server, messages in rounds(method, 2):
        assert len(serialised(without_known(server.public))) == state_spec.down
        for message in messages:
            assert len(serialised((message.delta, message.sent, message.averaged))) == state_spec.up


@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_the_models_size_is_sent(name):
    """At 1/32 every message is smaller than a tenth of the model, except for FedBAT's broadcast."""
    method, whole = build(METHODS[name]()), 4 * len(X.flat)
    state_spec = StateSpec(method, X)
    assert state_spec.up < whole / 10
    assert state_spec.down < whole / 10 or name == "fedbat"


@pytest.mark.parametrize("recipe", FACTORED)
def test_factors_cost_the_real_ratio(recipe):
    """L13: a client sends ratio times the model. The server sends the same and, if factors are drawn anew, the number
    of the round."""
    method = build(recipe())
    state_spec, ratio = StateSpec(method, X), method.report.ratio
    assert ratio <= 1 / 32 + 0.001
    assert state_spec.up == round(ratio * len(X.flat)) * 4
    assert state_spec.down == state_spec.up + (0 if recipe in (fedhm, fedlmt, fedpara) else 8)


@pytest.mark.parametrize("name", METHODS)
def test_who_follows_the_broadcasts_knows_what_is_not_sent(name):
    """A client that is never sampled knows the weights that are not sent, from the first state and the bytes of the
    broadcasts alone."""
    method = build(METHODS[name]())
    held = None
    for server, _ in rounds(method, 3):
        truth = {key: part for key, part in server.public._asdict().items() if isinstance(part, Known)}
        if held is None:
            held = truth
        for key, part in truth.items():
            for a, b in zip(pytree.tree_leaves(part), pytree.tree_leaves(held[key]), strict=True):
                assert torch.equal(a, b)
        unpacked = method.unpack(server.public._replace(**held))
        held = {key: Known(followed(method, unpacked)) for key in held}


def followed(method, unpacked):
    """The model that a client knows after a broadcast."""
    if hasattr(unpacked, "base"):
        return unpacked.base
    x = unpacked if isinstance(unpacked, Tree) else unpacked.x
    return method.halves.split(x)[0] if method.down.codec is not None else ()


# --- codecs: the widths -----------------------------------------------------------------------------------------------
def test_places_and_values():
    """k values of 4 bytes are sent, with their indices of ceil(log2 d) bits each down, and with a key of 8 bytes up.
    Everything else is sent in full."""
    state_spec, halves = StateSpec(build(ef21_p()), X), build(ef21_p()).halves
    (d,) = halves.sizes
    rest, k = 4 * (len(X.flat) - d), d // 32
    assert state_spec.up == 4 * k + 8 + rest
    assert state_spec.down == 4 * k + math.ceil(k * math.ceil(math.log2(d)) / 8) + rest


def test_bits():
    """One bit is sent for each weight, padded to whole bytes in every layer, with a scale of 4 bytes per layer.
    Everything else is sent in full."""
    state_spec, sizes = StateSpec(build(fedbat()), X), build(fedbat()).halves.sizes
    rest = 4 * (len(X.flat) - sum(sizes))
    assert state_spec.up == sum(math.ceil(n / 8) + 4 for n in sizes) + rest
    assert state_spec.down == 4 * len(X.flat)
    assert StateSpec(build(fedbat(both_ways=True)), X).down == state_spec.up


@pytest.mark.parametrize("layers", ["inner", "all"])
@pytest.mark.parametrize("masks", ["global", "layer"])
@pytest.mark.parametrize("ratio", [1 / 32, 1 / 16, 1 / 4])
def test_a_ratio_of_the_whole_model(ratio, masks, layers):
    """budget = "model": the bytes in each direction are at most `ratio` times those of the model, and as near as whole
    entries allow: with one more entry in each encoded vector, and a byte, they would be more."""
    method = build(ef21_p(ratio=ratio, masks=masks, layers=layers, budget="model"))
    state_spec, whole, parts = StateSpec(method, X), 4 * len(X.flat), len(method.halves.sizes)
    assert state_spec.model == whole
    for sent in (state_spec.up, state_spec.down):
        assert ratio * whole - 8 * parts <= sent <= ratio * whole


def test_a_ratio_below_what_is_sent_in_full_is_refused():
    with pytest.raises(ValueError, match=r"ratio=0\.005 of the whole model cannot be reached: .* raise ratio"):
        build(ef21_p(ratio=0.005, budget="model"))


def test_shares_on_one_definition():
    """Bytes sent relative to the bytes of the model, at 1/32 on CNN4 for FashionMNIST; the heads of the methods' files
    state these numbers."""
    shares = {}
    for name, method in {"fedmud": fedmud(), "ef21_p": ef21_p(), "fedbat": fedbat(both_ways=True)}.items():
        state_spec = StateSpec(build(method), X)
        shares[name] = (round(state_spec.up / state_spec.model, 3), round(state_spec.down / state_spec.model, 3))
    assert shares == {"fedmud": (0.030, 0.030), "ef21_p": (0.041, 0.059), "fedbat": (0.041, 0.041)}


def test_fedbat_forgets_unless_told():
    """By default there is no error feedback for what the binarisation of the server's change loses."""
    assert build(fedbat(both_ways=True)).down.feedback is False


@pytest.mark.parametrize("rho", [0.0, 6.0])
def test_fedbat_learns_no_scale_from_the_first_step_on(rho):
    """phi = 0: mean |u| = 0 when binarising begins, so that alpha is the lower bound, where theta has no gradient."""
    method = dataclasses.replace(build(fedbat(phi=0.0)), rho=rho)
    for _, messages in rounds(method, 2):
        for message in messages:
            assert all(float(bits.alpha) == pytest.approx(method.bounds[0]) for bits in message.delta.codes)


def test_what_clients_know_is_what_they_keep():
    kept = {name: StateSpec(build(make()), X).kept for name, make in METHODS.items()}
    inner = sum(X[name].numel() for name in ("conv2.weight", "conv3.weight", "conv4.weight"))
    assert kept["fedbat"] == 0
    assert kept["ef21_p"] == kept["fedbat_both"] == 4 * inner
    assert kept["ef21_p_layers"] == 2 * 4 * inner  # x_hat and h_i
    for n, recipe in enumerate(FACTORED):
        based = isinstance(recipe().compression, Factoring) and recipe().compression.based
        assert kept[f"{recipe.__name__}{n}"] == 4 * inner * based
