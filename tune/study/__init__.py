"""Studies: methods × levels × seeds as one file; run to the end whatever single cells do, and on where they stopped.

spec        what a study file says
cells       the runs that it comes to, and which settings the tuned ones take
folder      what has been run
pool        processes that run cells, worker what they do
runner      all of it
track       the study in MLflow
"""
