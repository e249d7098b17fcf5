"""The connections between the driver of a run on several nodes and the agents of its nodes.

Messages of every round go through one socket for each agent. A call of Ray does the same, but occupies several threads
of both processes and Ray's own processes: `benchmarks/links.py` has what each of them costs. Ray still starts the
agents, says when one is dead, and carries what is not needed in every round.

The driver listens at the address by which its node is known to Ray. An agent proves with a token, which it got through
Ray, that it belongs to the run.
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
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from ...errors import WorkersLost

SEPARATE = 16 * 1024
"""An array of at least so many bytes is sent from where it is, and not copied into the message."""
TOKEN = 32  # bytes
INTRODUCTION_SECONDS = 20.0
"""The time in which an agent must have connected and proved that it belongs to the run."""
ANSWER_SECONDS = 120.0
"""The time after which an agent that takes nothing, or stops in the middle of a message, counts as lost."""
COUNT = struct.Struct("<Q")


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
        """Connect an agent with its driver. name: of the agent. Raises OSError."""
        link = Link(socket.create_connection(address[:2], INTRODUCTION_SECONDS), INTRODUCTION_SECONDS)
        challenge = link._read(TOKEN)
        link.socket.sendall(proof(address.token, challenge) + COUNT.pack(name))
        link.socket.settimeout(None)
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


class Listener:
    """The driver's side, where agents introduce themselves. A thread takes their connections."""

    def __init__(self, host: str, port: int = 0) -> None:
        """port: 0 for any. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, port), family=family)
        self.address = Address(host, self.socket.getsockname()[1], secrets.token_bytes(TOKEN))
        self.links: dict[int, Link] = {}  # by the agents' names
        self.changed = threading.Condition()
        threading.Thread(target=self._accept, name="agents", daemon=True).start()

    def link(self, name: int) -> Link:
        """The connection of the agent with this name, which says that it has connected. Raises WorkersLost."""
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.links, INTRODUCTION_SECONDS):
                raise WorkersLost("the connection with the agent of a node is gone")
            return self.links.pop(name)

    def _accept(self) -> None:
        with suppress(OSError):  # at the end, the socket is closed
            while True:
                link = Link(self.socket.accept()[0], INTRODUCTION_SECONDS)
                try:
                    self._introduce(link)
                except (OSError, EOFError):  # a stranger
                    link.close()

    def _introduce(self, link: Link) -> None:
        challenge = secrets.token_bytes(TOKEN)
        link.socket.sendall(challenge)
        expected = proof(self.address.token, challenge)
        answer, name = link._read(len(expected)), link._read(COUNT.size)
        if not hmac.compare_digest(answer, expected):
            link.close()
            return
        link.socket.settimeout(ANSWER_SECONDS)
        with self.changed:
            self.links[COUNT.unpack(name)[0]] = link
            self.changed.notify_all()

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread's `accept`
        self.socket.close()
        for link in self.links.values():
            link.close()


def proof(token: bytes, challenge: bytes | bytearray) -> bytes:
    """The answer to a challenge of someone who has the token."""
    return hmac.digest(token, bytes(challenge), "sha256")


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
