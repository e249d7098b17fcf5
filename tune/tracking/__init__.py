"""Tracking of runs, searches and studies in MLflow.

stores      addresses of MLflow stores; opens a store
run_header  name, tags and parameters of a run in MLflow
writer      the thread that writes everything to MLflow
run         the observer that tracks a single run
"""
