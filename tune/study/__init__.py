"""Studies: the file of methods × levels × seeds, and the folder with the results. The package study_run runs them.

spec          the study file
cells         the runs of a study, and the choice of tuned settings
searches      the searches of methods with ranges instead of grids
check         refuses a study that could not run, and finds whether larger or smaller values of its metrics are better
folder        the results in the study's folder
kept_results  the results of all runs in one file, from which the folders are made again
"""
