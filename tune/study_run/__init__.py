"""Runs a study: its cells through the executor, MLflow, and the report. What a study is lies in the package study.

runner      all of it, and the source of cells for the executor
tracking    the study in MLflow
command     the command line's side
"""
