"""The gauges of a run on Ray, read where Prometheus would read them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.engine.backends.ray.metrics import GAUGES

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "tune/monitoring/grafana.json"

SCRIPT = """
import sys, time, urllib.request
import ray
import fedfleet

port = int(sys.argv[1])
fast = {"metrics_report_interval_ms": 500}
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20,
         _node_ip_address="127.0.0.1", _metrics_export_port=port, _system_config=fast)

def scrape():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""

end, asked = time.monotonic() + 300, time.monotonic()
rounds = fedfleet.rounds(fedfleet.load("digits", ["federation.rounds=100000", "engine.workers=1", "engine.cpus=0.5",
                                                  "evaluate.every=0", "tracking.uri=none"]))
for record in rounds:
    if time.monotonic() - asked < 0.5:
        continue
    text, asked = scrape(), time.monotonic()
    if "ray_fedfleet_loss" in text or asked > end:
        break
print(f"last round {record['round']:.0f}")
print("\\n".join(line for line in text.splitlines() if "ray_fedfleet" in line))
"""


@pytest.mark.long
def test_prometheus_reads_the_gauges_of_a_run(tmp_path: Path):
    """A node of Ray on the loopback address exports every gauge, with the labels of the run, and with values that agree
    with the records."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(port)], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^ray_(fedfleet_\w+)\{.*\} (\S+)$", done.stdout, re.M))
    assert set(found) == set(GAUGES), done.stdout
    assert 0 < float(found["fedfleet_round"]) <= int(done.stdout.split("\n")[0].split()[-1])
    assert float(found["fedfleet_rounds"]) == 100000
    assert float(found["fedfleet_retries"]) == 0
    assert float(found["fedfleet_clients_per_second"]) > 1
    assert 0 < float(found["fedfleet_busy_share"]) <= 1
    assert 0 < float(found["fedfleet_loss"]) < 3
    assert float(found["fedfleet_state_bytes"]) % (4 * 4810) == 0, "a row is the control variate of 4,810 numbers"
    assert re.search(r'ray_fedfleet_round\{.*method="scaffold".*run="\d{8}-.*workload="digits"', done.stdout)


def test_the_dashboard_and_the_guide_have_every_gauge():
    board, guide = DASHBOARD.read_text("utf-8"), (ROOT / "docs/howto/monitoring.md").read_text("utf-8")
    drawn = set(
        re.findall(r"ray_(fedfleet_\w+)", " ".join(p["targets"][0]["expr"] for p in json.loads(board)["panels"]))
    )
    assert drawn == set(GAUGES)
    assert set(re.findall(r"^\| `ray_(fedfleet_\w+)`", guide, re.M)) == set(GAUGES)
