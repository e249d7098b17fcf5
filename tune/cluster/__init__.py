"""Runs on a cluster of Ray.

runs     detached runs: started, listed and followed
submit   a run as a job, and what is sent with it
doctor   what would stop a run
"""
