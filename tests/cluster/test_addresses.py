"""If a server that is not Ray answers at an address, every command says so soon."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray

from fedfleet.engine.backends.ray.connect import clusters_here, is_ray, join, own_cluster, speaks_http2
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.cluster.submit import client

from ..tune.commands import invoke

pytestmark = pytest.mark.timeout(300)  # a limit for hanging; Ray by itself would wait for minutes


def silent(line: socket.socket) -> None:
    """A server that reads everything and never answers."""
    while line.recv(1024):
        pass


def closing(line: socket.socket) -> None:
    """A server that closes every connection at once."""


def garbling(line: socket.socket) -> None:
    """A server that sends bytes of another protocol, one at a time and without end."""
    while True:
        line.sendall(b"\x00")
        time.sleep(0.05)


@pytest.fixture(params=["a dashboard", "silent", "closing", "garbling"])
def address(request) -> Iterator[str]:
    if request.param == "a dashboard":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
        server.server_close()
        return
    talk = {"silent": silent, "closing": closing, "garbling": garbling}[request.param]
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, talk), daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def serve(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=one, args=(line, talk), daemon=True).start()


def one(line: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    with line:
        try:
            talk(line)
        except OSError:
            return


@pytest.mark.parametrize("kind", ["", "ray://"])
def test_what_is_no_ray_is_told_soon(kind, address):
    with pytest.raises(ConfigError, match=r"engine.address=.*something answers there, but it is no Ray; give the port"):
        join(f"{kind}{address}")


def test_by_every_command(address):
    """Every command ends in time with one sentence and status 2; the doctor has the sentence among its findings."""
    for command in (("run", "digits"), ("attach",), ("attach", "some-run")):
        done = invoke(*command, "--address", address)
        assert done.exit_code == 2, done.output
        assert "something answers there, but it is no Ray" in done.stderr
        assert "Traceback" not in done.output
    done = invoke("doctor", "--address", address)
    assert "it is no Ray" in done.output


def test_a_dashboard_that_is_none(address):
    with pytest.raises(ConfigError, match="--address http://"):
        client(f"http://{address}")


def test_a_ray_is_one(ray_here):
    """The head of a cluster counts as Ray, and its other servers do not. A process of a cluster knows the address of
    its cluster."""
    head = ray.get_runtime_context().gcs_address
    assert speaks_http2(head)
    assert is_ray(head)
    node = next(node for node in ray.nodes() if node["Alive"])
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    assert speaks_http2(raylet)
    assert not is_ray(raylet)
    asked = ray.remote(num_cpus=0)(own_cluster).remote()
    assert ray.get(asked) == head
    assert own_cluster() is None
    assert head in clusters_here()


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ([], r"no cluster runs on this machine \(a run that has started a Ray for itself is none\); start one by"),
        (["10.0.0.1:1", "10.0.0.1:2"], r"2 clusters run on this machine; give the HOST:PORT of one: 10\.0\.0\.1:1, 10"),
    ],
    ids=["none", "two"],
)
def test_auto_where_there_is_not_one_cluster(there, told, monkeypatch):
    """It is told at once, also by `attach`, and Ray does not choose one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("fedfleet.engine.backends.ray.connect.clusters_here", lambda: there)
    with pytest.raises(ConfigError, match=told):
        join("auto")
    done = invoke("attach")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
