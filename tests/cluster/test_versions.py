"""Messages about versions that differ, and about commands that cannot run on a cluster."""

from __future__ import annotations

import pytest
from ray._private.utils import check_version_info

from fedfleet.engine.backends.ray.connect import version_mismatch
from fedfleet.engine.backends.ray.placement import Node
from fedfleet.tune.cluster.doctor import PACKAGES, look, of_node

NODE = Node("1", "10.0.0.6 (1)", {"CPU": 4.0}, {})


def test_a_cluster_of_another_ray():
    """The message is made from the lines that Ray writes when a process joins."""
    theirs = {"ray_version": "2.9.0", "python_version": "3.9.1"}
    with pytest.raises(RuntimeError) as caught:
        check_version_info(theirs, "process 1", raise_on_mismatch=True)
    said = version_mismatch(str(caught.value))
    assert said.startswith("versions differ: the cluster has Ray: 2.9.0, Python: 3.9.1, here is Ray: ")
    assert said.endswith("; install the cluster's here, or use another")
    assert "\n" not in said


def test_a_node_with_another_fedfleet():
    report = look("", PACKAGES)
    ours = dict(report["versions"])
    (same,) = of_node(NODE, report, ours, [])
    assert same.well
    assert str(same).endswith("4 CPU, 0 GPU; same versions as here")
    report["versions"]["fedfleet"] = "9.9"
    (other,) = of_node(NODE, report, ours, [])
    assert other.well is False
    assert str(other).startswith("PROBLEM node 10.0.0.6 (1): ")
    assert str(other).endswith(f"fedfleet 9.9 (here {ours['fedfleet']})")
    report["versions"]["fedfleet"] = "none"
    (none,) = of_node(NODE, report, ours, [])
    assert "install fedfleet there, or use `fedfleet submit`" in str(none)
