"""The connections between a driver and the agents of nodes, without Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from fedfleet.engine.backends.ray.links import (
    COUNT,
    INTRODUCTION,
    SEPARATE,
    TOKEN,
    Address,
    Bell,
    Link,
    Listener,
    readable,
)
from fedfleet.engine.errors import WorkersLost


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def ends(listener: Listener) -> Iterator[tuple[Link, Link]]:
    """(the driver's end, the agent's end) of a connection."""
    agent = Link.to(listener.address, 7)
    driver = listener.link(7)
    yield driver, agent
    driver.close()
    agent.close()


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_arrays_of_all_kinds_arrive_as_they_were(ends: tuple[Link, Link]) -> None:
    driver, agent = ends
    draw = np.random.default_rng(0)
    large = draw.standard_normal((300, 100))
    arrays = [
        large,
        large[::2, ::-3],  # not contiguous
        np.asfortranarray(large),
        np.float64(3.5) * np.ones(()),
        np.zeros((0, 4), np.float32),
        draw.integers(0, 9, SEPARATE // 8),  # just as long as arrays that are sent separately
        draw.integers(0, 9, SEPARATE // 8 - 1),
    ]
    driver.send(("name", arrays, {"x": arrays[0]}))
    name, found, named = agent.receive()
    assert name == "name"
    assert all(map(same, found, arrays))
    assert same(named["x"], large)
    found[0][0, 0] = 1  # what has arrived can be written to


def test_messages_keep_their_order_in_both_directions(ends: tuple[Link, Link]) -> None:
    driver, agent = ends
    for number in range(10):
        driver.send(number)
        agent.send((number, np.full(SEPARATE // 8, number)))
    assert [agent.receive() for _ in range(10)] == list(range(10))
    assert [driver.receive()[0] for _ in range(10)] == list(range(10))


def test_both_sides_can_send_more_than_the_kernel_keeps(ends: tuple[Link, Link]) -> None:
    driver, agent = ends
    message, found = np.ones(4 << 20), []  # 32 MiB, several times the largest buffer of a socket
    reader = threading.Thread(target=lambda: found.append(agent.receive()))
    reader.start()
    sender = threading.Thread(target=lambda: agent.send(message))
    sender.start()
    driver.send(message)
    assert same(driver.receive(), message)
    reader.join()
    sender.join()
    assert same(found[0], message)


def test_the_end_of_the_other_side_is_noticed_also_within_a_message(ends: tuple[Link, Link]) -> None:
    driver, agent = ends
    agent.socket.sendall(COUNT.pack(2) + COUNT.pack(10))
    agent.close()
    assert readable([driver], 5) == [driver]
    with pytest.raises(EOFError):
        driver.receive()


def test_someone_without_the_token_is_sent_away_and_keeps_nobody_waiting(listener: Listener) -> None:
    host, port, token = listener.address
    with suppress(OSError, EOFError):  # whether the end comes before or after the first message
        stranger = Link.to(Address(host, port, b"?" * len(token)), 1)
        stranger.send("hello")
        assert stranger.receive() is None
    with socket.create_connection((host, port)):
        pass  # leaves at once
    agent = Link.to(listener.address, 2)
    assert listener.link(2).socket.getpeername() == agent.socket.getsockname()
    assert not listener.links  # nobody was let in under the number 1
    agent.close()


SILENT, GARBAGE, TOO_MUCH, HALF = b"", b"GET / HTTP/1.1\r\n\r\n".ljust(INTRODUCTION), b"x" * 10**6, b"x" * 40
"""What strangers send."""


def strangers(listener: Listener, sent: bytes, count: int = 1) -> list[socket.socket]:
    """Connections that have the driver's challenge, have sent these bytes, and stay open."""
    lines = [socket.create_connection(listener.address[:2]) for _ in range(count)]
    for line in lines:
        assert len(line.recv(TOKEN, socket.MSG_WAITALL)) == TOKEN
        with suppress(OSError):
            line.sendall(sent)
    return lines


def dismissed(line: socket.socket) -> bool:
    """Whether the driver ends the connection without a word; waits for it."""
    with suppress(ConnectionResetError):  # it had not read everything
        return line.recv(1) == b""
    return True


@pytest.mark.parametrize("sent", [SILENT, GARBAGE, TOO_MUCH, HALF], ids=["silent", "garbage", "too much", "half"])
def test_strangers_keep_no_agent_waiting(sent: bytes, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is let in while they are connected. Nothing of what they send is unpickled."""
    monkeypatch.setattr("pickle.loads", None)
    there = strangers(listener, sent, 10)
    agent = Link.to(listener.address, 3)
    assert listener.link(3).socket.getpeername() == agent.socket.getsockname()
    if len(sent) >= INTRODUCTION:
        assert all(map(dismissed, there))
        assert list(listener.news()) == [
            f"port {listener.address.port}: a connection from 127.0.0.1 is no agent of this run: it did not have the "
            "run's token"
        ]
    for line in (*there, agent):
        line.close()


def test_who_says_too_little_is_sent_away_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfleet.engine.backends.ray.links.INTRODUCTION_SECONDS", 0.05)
    there = strangers(listener, HALF, 3)
    assert all(map(dismissed, there))
    (line,) = listener.news()
    assert "a connection from 127.0.0.1 is no agent of this run: it sent too little within" in line
    for each in there:
        each.close()


def test_the_number_of_strangers_is_bounded(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them makes room, for an agent too."""
    monkeypatch.setattr("fedfleet.engine.backends.ray.links.MOST_STRANGERS", 3)
    oldest, *others = strangers(listener, SILENT, 4)
    assert dismissed(oldest)
    agent = Link.to(listener.address, 3)
    assert dismissed(others[0])
    assert listener.link(3)
    assert all("was one of 3" in line for line in listener.news())
    for line in (oldest, *others, agent):
        line.close()


def test_the_log_has_few_lines_about_strangers(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfleet.engine.backends.ray.links.MOST_LINES", 1)
    for sent in (GARBAGE, HALF, GARBAGE):
        (line,) = strangers(listener, sent)
        line.shutdown(socket.SHUT_WR)
        assert dismissed(line)
        line.close()
    assert len(list(listener.news())) == 1


@pytest.mark.parametrize("answer", ["nothing", "garbage", "the agent's own proof"])
def test_an_agent_believes_no_other_program(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens at the driver's port, after the driver has ended for example, and could send pickles."""
    monkeypatch.setattr("pickle.loads", None)
    token = b"t" * TOKEN
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            line, _ = server.accept()
            with line:
                line.sendall(bytes(TOKEN))
                said = line.recv(INTRODUCTION, socket.MSG_WAITALL)
                line.sendall({"nothing": b"", "garbage": b"x" * 1000}.get(answer, said[:TOKEN]))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(
            (EOFError, ConnectionError), match="has ended" if answer == "nothing" else "another program"
        ):
            Link.to(Address(server.getsockname()[0], server.getsockname()[1], token), 1)
        thread.join()


def test_an_agent_that_has_not_connected_is_missed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfleet.engine.backends.ray.links.INTRODUCTION_SECONDS", 0.05)
    with pytest.raises(WorkersLost, match="connection with the agent"):
        listener.link(3)


def test_the_bell_wakes_whoever_waits_and_is_silent_when_closed() -> None:
    bell = Bell()
    answer: Any = Future()
    reference: Any = type("Reference", (), {"future": lambda self: answer})()
    bell.watch(reference)
    assert readable([bell], 0) == []
    assert not bell.rang()
    answer.set_exception(ValueError("the node is gone"))
    assert readable([bell], 5) == [bell]
    assert [bell.rang(), bell.rang()] == [True, False]
    bell.close()
    bell.watch(reference)  # rings at once, but nobody listens any more
