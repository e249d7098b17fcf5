"""Studies: methods × levels × seeds as one file, and the folder of what has been run. The package study_run runs them.

spec        what a study file says
cells       the runs that it comes to, and which settings the tuned ones take
folder      what has been run
grids       values to try, ranges what is searched instead
"""
