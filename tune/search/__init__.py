"""Searches for the best values of the ranges in an experiment; docs/howto/search.md explains them.

plan            the ranges and the section `search`
paper_grids     the grids that papers give for their methods
run             runs a search
found           what a search has found: the object, the files and the text
folder          the folder of a search
trial_source    the source of trials for the executor
trial_store     the trials in Optuna's storage
optuna_storage  opens a storage; optuna_samplers: propose values; warm_start: the trials of earlier searches
observers       progress on standard error, and the search in MLflow
report, importance                 the page of a search
api             the function, and the command with the same arguments
"""
