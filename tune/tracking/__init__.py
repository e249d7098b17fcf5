"""Runs, searches and studies in MLflow.

stores      addresses of MLflow stores, opening one
entry       how a run appears in MLflow: name, tags, parameters
writer      one thread that does all the writing of a run, or of a search's or study's run and the runs below it
run         the observer that tracks a single run
"""
