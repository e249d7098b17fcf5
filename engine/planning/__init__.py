"""Decisions before round 1: the execution plan, the proof of compiled kernels, and a trial step."""
