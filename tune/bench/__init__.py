"""`fedfleet bench`: the speed of the engine and of a plain PyTorch loop, measured alternately.

works        the federations that are timed, as a plug-in; those of other measurements are in benchmarks/works.py
plain_loop   the plain PyTorch loop
fused        its networks, with torch's own layers
measure      runs both alternately; ratios, and the parts of a round's time
command      the tables and the chart
"""
