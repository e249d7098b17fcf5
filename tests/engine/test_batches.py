"""The stream of batches against its slow definition: shuffled passes one after the other, which go on from round to
round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedfleet.engine.clients.batches import Stream, recent_draws, stream
from fedfleet.engine.config.schema import Local
from fedfleet.workloads import counted
from fedfleet.workloads.client_index import ClientIndex

SIZES = [1, 5, 7, 16, 30]
PARTS = ClientIndex.of(np.array_split(np.random.default_rng(0).permutation(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def rows_of(client: int) -> list[int]:
    return PARTS.rows[PARTS.offsets[client] : PARTS.offsets[client + 1]].tolist()


def batches(client: int, visit: int, local: Local) -> list[list[int]]:
    """The batches of one client in one round, drawn for this client alone. visit: in how many rounds it took part
    before."""
    found = stream(PARTS, np.array([client]), np.array([visit]), local, seed=3)
    weight = torch.ones_like(found.rows, dtype=torch.float64) if found.weight is None else found.weight
    return [
        [int(r) for r, w in zip(found.rows[0, k], weight[0, k], strict=True) if w > 0]
        for k in range(int(found.steps[0]))
    ]


@pytest.mark.parametrize("local", [Local(steps=3, batch=4), Local(epochs=2, batch=4), Local(steps=11, batch=100)])
@pytest.mark.parametrize("client", range(len(SIZES)))
def test_every_pass_has_every_row_once(client, local):
    passes = -(-SIZES[client] // local.batch)
    found = [batch for visit in range(2 * passes) for batch in batches(client, visit, local)]
    for begin in range(0, len(found) - passes + 1, passes):
        one = found[begin : begin + passes]
        assert sorted(row for batch in one for row in batch) == sorted(rows_of(client))
        assert all(len(batch) == local.batch for batch in one[:-1])


def test_passes_are_shuffled_anew():
    orders = {tuple(batches(4, visit, Local(epochs=1, batch=30))[0]) for visit in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("local", [Local(steps=3, batch=4), Local(epochs=2, batch=4)])
def test_a_client_draws_the_same_in_any_company(local):
    clients, visits = np.array([3, 0, 4, 2]), np.array([5, 0, 2, 7])
    company = stream(PARTS, clients, visits, local, seed=3)
    for i, (client, visit) in enumerate(zip(clients, visits, strict=True)):
        alone = stream(PARTS, clients[i : i + 1], visits[i : i + 1], local, seed=3)
        steps = int(alone.steps[0])
        assert torch.equal(company.keys[i, :steps], alone.keys[0, :steps])
        assert company.weight is not None
        real = company.weight[i, :steps] > 0
        expected = [row for batch in batches(int(client), int(visit), local) for row in batch]
        assert company.rows[i, :steps][real].tolist() == expected
        assert torch.allclose(company.weight[i, :steps].sum(-1), torch.ones(steps, dtype=torch.float64))


def test_keys_differ_by_client_and_step_and_visit():
    clients = np.arange(5)
    keys = [stream(PARTS, clients, np.full(5, visit), Local(steps=4, batch=2), seed=0).keys for visit in range(3)]
    assert len(set(torch.cat(keys).flatten().tolist())) == 5 * 4 * 3


def test_a_task_with_more_than_a_million_passes():
    """The clients' batches do not depend on how many passes the task has: 240 clients with 5000 passes each."""
    client_index = ClientIndex.of(np.array_split(np.arange(240 * 4), 240))
    local = Local(steps=5000, batch=8)
    together = stream(client_index, np.arange(240), np.zeros(240, dtype=np.int64), local, seed=3).rows
    for client in (0, 239):
        alone = stream(client_index, np.array([client]), np.array([0]), local, seed=3).rows
        assert torch.equal(together[client], alone[0])


def test_every_order_is_about_as_likely():
    """In 720 shuffles of three rows, each of the six orders occurs 120 times, within 4 standard deviations of 10."""
    client_index = ClientIndex.of([np.arange(3)])
    found = [
        tuple(stream(client_index, np.array([0]), np.array([v]), Local(epochs=1, batch=3), seed=0).rows[0, 0].tolist())
        for v in range(720)
    ]
    counts = [found.count(order) for order in set(found)]
    assert len(counts) == 6
    assert all(80 <= count <= 160 for count in counts)


def by_definition(
    client_index: ClientIndex, client: int, visit: int, local: Local, seed: int
) -> Iterator[tuple[list[int], int]]:
    """(rows, key) of each batch of a client's visit, one after the other. In pass e rows are sorted by 43 bits of one
    draw for each, whose key is (seed, "order", client, e). Batch b of the stream has the key (seed, "step", client, b).
    """
    rows = client_index.rows[client_index.offsets[client] : client_index.offsets[client + 1]].tolist()
    per_pass = -(-len(rows) // local.batch)
    steps = local.steps or (local.epochs or 0) * per_pass
    for number in range(visit * steps, (visit + 1) * steps):
        key = int(counted.key(seed, "order", client, number // per_pass))
        draws = [(int(counted.key(key, place)) % 2**64) >> 21 for place in range(len(rows))]
        order = sorted(range(len(rows)), key=draws.__getitem__)
        begin, step_key = number % per_pass * local.batch, int(counted.key(seed, "step", client, number))
        yield [rows[place] for place in order[begin : begin + local.batch]], step_key


def test_they_are_those_of_the_definition():
    rng = np.random.default_rng(1)
    for case in range(40):
        sizes = rng.integers(1, 30, int(rng.integers(1, 8)))
        client_index = ClientIndex.of(np.array_split(rng.permutation(int(sizes.sum())), np.cumsum(sizes)[:-1]))
        clients = rng.permutation(len(sizes))[: int(rng.integers(1, len(sizes) + 1))]
        visits, length = rng.integers(0, 50, len(clients)), {"steps" if case % 2 else "epochs": int(rng.integers(1, 5))}
        local = Local(batch=int(rng.integers(1, 40)), **length)
        found = stream(client_index, clients, visits, local, seed=case - 20)
        for i, (client, visit) in enumerate(zip(clients.tolist(), visits.tolist(), strict=True)):
            expected = list(by_definition(client_index, client, visit, local, case - 20))
            assert int(found.steps[i]) == len(expected)
            for k, (rows, key) in enumerate(expected):
                padding = found.rows.shape[2] - len(rows)
                assert found.rows[i, k].tolist() == rows + rows[:1] * padding
                assert int(found.keys[i, k]) == key
                if found.weight is None:
                    assert not padding
                else:
                    assert found.weight[i, k].tolist() == [1 / len(rows)] * len(rows) + [0] * padding


def test_batches_of_earlier_runs_are_kept_up_to_a_size():
    local, other, drawn = Local(steps=2, batch=4), PARTS._replace(rows=PARTS.rows[::-1].copy()), []

    def batches_of(index: ClientIndex, visit: int) -> Stream:
        def draw() -> Stream:
            drawn.append(visit)
            return stream(index, np.array([4]), np.array([visit]), local, 3)

        return draws.of((id(index), visit), lambda: (index, draw()))[1]

    draws = recent_draws()
    first = batches_of(PARTS, 0)
    assert batches_of(PARTS, 0) is first
    assert not torch.equal(batches_of(other, 0).rows, first.rows)  # the same key, other data
    assert drawn == [0, 0]
    size = sum(tensor.nbytes for tensor in first if tensor is not None)
    draws.most = 2 * size
    batches_of(PARTS, 0)
    batches_of(PARTS, 1)  # the batches of the other data were needed longest ago
    assert draws.total == 2 * size
    batches_of(PARTS, 0)
    batches_of(other, 0)
    assert drawn == [0, 0, 1, 0]
