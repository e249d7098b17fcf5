"""The connections between the driver of a run on several nodes and the agents of its nodes.

Messages of every round go through one socket for each agent. A call of Ray does the same, but occupies several threads
of both processes and Ray's own processes: `benchmarks/links.py` has what each of them costs. Ray still starts the
agents, says when one is dead, and carries what is not needed in every round.

The driver listens at the address by which its node is known to Ray. Agent and driver prove to each other, with a token
that the agent got through Ray, that they belong to the run, before either of them reads anything else: messages are
pickled, and whoever sends them could execute code. Strangers at the port keep no agent waiting, whatever they send.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from ...errors import WorkersLost

SEPARATE = 16 * 1024
"""An array of at least so many bytes is sent from where it is, and not copied into the message."""
TOKEN = 32  # bytes
INTRODUCTION_SECONDS = 20.0
"""The time in which an agent must have connected and proved that it belongs to the run."""
MOST_STRANGERS = 256
"""The most connections that may be without a proof at once; a further one ends the oldest of them."""
MOST_LINES = 20
"""The most lines for the log about strangers."""
PAUSE_SECONDS = 0.1
"""How long no connection is taken if the system has no room for another one."""
ANSWER_SECONDS = 120.0
"""The time after which an agent that takes nothing, or stops in the middle of a message, counts as lost."""
COUNT = struct.Struct("<Q")
AGENT, DRIVER = b"agent", b"driver"
"""Who makes a proof, which is part of it: nobody can send the other one's proof back."""
INTRODUCTION = TOKEN + COUNT.size + TOKEN
"""The bytes of an agent's introduction: its proof, its name and its challenge for the driver."""


class Address(NamedTuple):
    """Where a driver listens, and the secret with which agents prove that they belong to its run."""

    host: str
    port: int
    token: bytes


class Link:
    """One end of a connection. One thread may send while another one receives."""

    def __init__(self, connected: socket.socket, seconds: float | None = None) -> None:
        """seconds: after which `send` and `receive` give up, None for never."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(seconds)
        self.socket = connected

    @staticmethod
    def to(address: Address, name: int) -> Link:
        """Connect an agent with its driver. name: of the agent. Raises OSError and EOFError."""
        link = Link(socket.create_connection(address[:2], INTRODUCTION_SECONDS), INTRODUCTION_SECONDS)
        try:
            challenge, ours, packed = link._read(TOKEN), secrets.token_bytes(TOKEN), COUNT.pack(name)
            link.socket.sendall(proof(address.token, AGENT, challenge, packed) + packed + ours)
            if not hmac.compare_digest(link._read(TOKEN), proof(address.token, DRIVER, ours)):
                raise ConnectionError("another program answers there")
            link.socket.settimeout(None)
        except (OSError, EOFError):
            link.close()
            raise
        return link

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Any) -> None:
        """Send anything that can be pickled. Raises OSError."""
        large: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= SEPARATE:
                large.append(raw)
            return raw.nbytes < SEPARATE

        head = pickle.dumps(message, protocol=5, buffer_callback=stays)
        sizes = [len(head), *(raw.nbytes for raw in large)]
        self.socket.sendall(b"".join([COUNT.pack(len(sizes)), *map(COUNT.pack, sizes), head]))
        for raw in large:
            self.socket.sendall(raw)

    def receive(self) -> Any:
        """The next message, which a process of the same run sent. Raises OSError, and EOFError at the end."""
        (count,) = COUNT.unpack(self._read(COUNT.size))
        sizes = [size for (size,) in COUNT.iter_unpack(self._read(COUNT.size * count))]
        head, *large = [self._read(size) for size in sizes]
        return pickle.loads(head, buffers=large)

    def _read(self, size: int) -> bytearray:
        memory = bytearray(size)
        rest = memoryview(memory)
        while rest:
            count = self.socket.recv_into(rest)
            if not count:
                raise EOFError("the connection has ended")
            rest = rest[count:]
        return memory

    def close(self) -> None:
        """End the connection: also a thread that waits in `receive` gets EOFError."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Stranger:
    """Who has connected and has not proved yet that it belongs to the run."""

    def __init__(self, connected: socket.socket, host: str) -> None:
        """Send a challenge. Raises OSError."""
        connected.setblocking(False)
        self.socket, self.host, self.received = connected, host, b""
        self.challenge, self.end = secrets.token_bytes(TOKEN), time.monotonic() + INTRODUCTION_SECONDS
        connected.sendall(self.challenge)

    def introduced(self, token: bytes) -> int | None:
        """Read what has come. Returns the name of the agent if it is one, which gets the driver's proof, or None if
        something is missing. Raises OSError with the reason if it is none."""
        try:
            part = self.socket.recv(INTRODUCTION - len(self.received))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("left without a word" if not self.received else "broke off")
        self.received += part
        if len(self.received) < INTRODUCTION:
            return None
        answer, name, theirs = self.received[:TOKEN], self.received[TOKEN:-TOKEN], self.received[-TOKEN:]
        if not hmac.compare_digest(answer, proof(token, AGENT, self.challenge, name)):
            raise ConnectionError("did not have the run's token")
        self.socket.sendall(proof(token, DRIVER, theirs))
        return COUNT.unpack(name)[0]


class Listener:
    """The driver's side, where agents introduce themselves, all at once. A thread takes their connections."""

    def __init__(self, host: str, port: int = 0) -> None:
        """port: 0 for any. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, port), family=family)
        self.address = Address(host, self.socket.getsockname()[1], secrets.token_bytes(TOKEN))
        self.links: dict[int, Link] = {}  # by the agents' names
        self.changed, self.closed = threading.Condition(), threading.Event()
        self.lines: deque[str] = deque()  # for the log
        self.told: set[str] = set()
        self.thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self.thread.start()

    def link(self, name: int) -> Link:
        """The connection of the agent with this name, which says that it has connected. Raises WorkersLost."""
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.links, INTRODUCTION_SECONDS):
                raise WorkersLost("the connection with the agent of a node is gone")
            return self.links.pop(name)

    def news(self) -> Iterator[str]:
        """Lines for the log about strangers, each once."""
        while self.lines:
            yield self.lines.popleft()

    def _serve(self) -> None:
        strangers: dict[int, Stranger] = {}  # by the handles of their sockets, the oldest first
        while not self.closed.is_set():
            poll = select.poll()
            for handle in (self.socket.fileno(), *strangers):
                poll.register(handle, select.POLLIN)
            first = min((stranger.end for stranger in strangers.values()), default=None)
            ready = poll.poll(None if first is None else max(0.0, 1e3 * (first - time.monotonic())))
            for handle, _ in ready:
                if handle in strangers:
                    self._hear(strangers, handle)
            if any(handle == self.socket.fileno() for handle, _ in ready):
                self._accept(strangers)
            for handle, stranger in list(strangers.items()):
                if time.monotonic() > stranger.end:
                    self._dismiss(strangers, handle, f"sent too little within {INTRODUCTION_SECONDS:g} s")
        for each in (self, *strangers.values()):
            each.socket.close()

    def _accept(self, strangers: dict[int, Stranger]) -> None:
        if len(strangers) >= MOST_STRANGERS:
            self._dismiss(strangers, next(iter(strangers)), f"was one of {MOST_STRANGERS} without a word")
        connected = None
        try:
            connected, (host, *_) = self.socket.accept()
            strangers[connected.fileno()] = Stranger(connected, host)
        except OSError as error:
            if connected is not None:  # it has gone already
                connected.close()
            elif not self.closed.is_set():
                self._tell(f"no connection can be taken ({error.strerror})")
                self.closed.wait(PAUSE_SECONDS)

    def _hear(self, strangers: dict[int, Stranger], handle: int) -> None:
        stranger = strangers[handle]
        try:
            name = stranger.introduced(self.address.token)
        except OSError as error:
            self._dismiss(strangers, handle, str(error))
            return
        if name is not None:
            del strangers[handle]
            with self.changed:
                self.links[name] = Link(stranger.socket, ANSWER_SECONDS)
                self.changed.notify_all()

    def _dismiss(self, strangers: dict[int, Stranger], handle: int, why: str) -> None:
        stranger = strangers.pop(handle)
        stranger.socket.close()
        self._tell(f"a connection from {stranger.host} is no agent of this run: it {why}")

    def _tell(self, line: str) -> None:
        """Put a line into the log, each line once and not more than MOST_LINES."""
        if line not in self.told and len(self.told) < MOST_LINES:
            self.told.add(line)
            self.lines.append(f"port {self.address.port}: {line}")

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread's `poll`
        self.thread.join(INTRODUCTION_SECONDS)
        for link in self.links.values():
            link.close()


def proof(token: bytes, *parts: bytes | bytearray) -> bytes:
    """TOKEN bytes that only someone who has the token can compute. parts: who makes it, and the challenge."""
    return hmac.digest(token, b"".join(parts), "sha256")


class Bell:
    """Wakes a thread that waits in `readable` when an answer of Ray has come, or cannot come any more."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)
        self.lock, self.open = threading.Lock(), True

    def fileno(self) -> int:
        return self.reading

    def watch(self, reference: Any) -> None:
        """Ring when the answer to a call of Ray has come."""
        reference.future().add_done_callback(self._ring)

    def _ring(self, _: Future[Any]) -> None:
        with self.lock, suppress(BlockingIOError):  # a full pipe wakes as well
            if self.open:
                os.write(self.writing, b"\n")

    def rang(self) -> bool:
        """Whether it rang since the last call."""
        with suppress(BlockingIOError):
            return bool(os.read(self.reading, 1 << 16))
        return False

    def close(self) -> None:
        with self.lock:
            self.open = False
            os.close(self.reading)
            os.close(self.writing)


def readable(sources: Iterable[Link | Bell], seconds: float) -> list[Link | Bell]:
    """Those from which something can be read, as soon as there is one; [] after so many seconds."""
    by_handle, poll = {source.fileno(): source for source in sources}, select.poll()
    for handle in by_handle:
        poll.register(handle, select.POLLIN)
    return [by_handle[handle] for handle, _ in poll.poll(1e3 * seconds)]
