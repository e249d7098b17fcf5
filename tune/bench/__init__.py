"""`fedfleet bench`: the engine against a plain PyTorch loop, alternated in one run.

works        the federations that are timed, as a plug-in
plain_loop   the yardstick
measure      runs both in turn, ratios, where a round's time goes
command      what is printed and drawn
"""
