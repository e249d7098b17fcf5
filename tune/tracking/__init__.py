"""Tracking of runs, searches and studies: in MLflow, for TensorBoard, in Weights & Biases, and as CSV.

writer       the thread that writes to a tracker, in batches
mlflow_writer, tensorboard_writer, wandb_writer, csv_writer     what it writes to each kind of tracker; folder_writer:
             what the last three have in common
mlflow_process    the process in which a command writes its run to MLflow
writers      the kinds by their names
run          the observers that track a single run
many_runs    the observer that tracks a search or a study
run_header   name, tags, parameters and data set of a run; origin: the user, the program and the commit
model        the final model of a run, for MLflow; from_folder: what is taken from the files of the run
stores       addresses of MLflow stores; opens a store
"""
