"""Comparison of runs: `fedfleet compare` and `fedfleet.compare`. Runs that differ only in the seed form one line.

labels      the settings in which runs differ, as labels
findings    the findings of a report on runs: the text and the page of the command
data_frame  the table for Python
paired      differences of runs on common random numbers
"""
