"""Runs a study: executes its cells, tracks them in MLflow and writes the report. The package study defines studies.

runner      runs a study, as `fedfleet study` does; the source of cells for the executor, and the searches of ranges
observers   progress on standard error, and the study in MLflow
"""
