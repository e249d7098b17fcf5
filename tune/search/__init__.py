"""Searches for the best values of the ranges in an experiment; docs/howto/search.md explains them.

plan            the ranges and the section `search`
paper_grids     the grids that papers give for their methods
run             runs a search, and gives what it has found
folder          the folder of a search
trial_store     the trials in Optuna's storage
optuna_storage  opens a storage; samplers: propose values; warm_start: the trials of earlier searches
trial_source    the source of trials for the executor
progress, tracking, report, importance    what is shown of a search
api, command    the function and the command
"""
