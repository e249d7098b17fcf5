"""Runs a study: executes its cells, tracks them in MLflow and writes the report. The package study defines studies.

runner      runs a study; the source of cells for the executor
progress    progress on standard error
tracking    tracks the study in MLflow
command     the part of `fedfleet study` besides running
"""
