"""Workloads around another workload: noise, poisoned data, weight decay."""
