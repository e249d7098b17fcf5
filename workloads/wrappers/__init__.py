"""Workloads around another workload: noise, wrong labels, images that clients see differently, poisoned data, weight
decay."""
