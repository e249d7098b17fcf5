"""Tracking of runs, searches and studies in MLflow.

stores         addresses of MLflow stores; opens a store
origin         the user, the program and the commit
model          the final model of a run
run_header     name, tags, parameters and data set of a run in MLflow
writer         the thread that writes to a tracker, in batches
mlflow_writer  what it writes to MLflow
run            the observer that tracks a single run
many_runs      the observer that tracks a search or a study
"""
