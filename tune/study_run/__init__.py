"""Runs a study: executes its cells, tracks them in MLflow and writes the report. The package study defines studies.

runner           runs a study; the source of cells for the executor
searching        runs the searches of methods with ranges
study_progress   progress on standard error
study_tracker    tracks the study in MLflow
study_command    the part of `fedfleet study` besides running
"""
