"""Clients' devices in virtual time, and which results an update of the server uses. All of it is known before training.

contract        what devices, availability and local work are; the parts that plug-ins may add
client_devices  kinds of devices; distributions: of their speeds
availability    when clients are online; traces: sessions from a file
work            how many local steps a client takes
table           the names of samplers and of these parts
visits          the fleet of a run: durations of visits, losses, who is online
planner         updates; the planner of synchronous rounds, whose clients a sampler draws
timeline        the dispatches, arrivals and updates of an asynchronous run
asynchronous    the planner whose updates follow from the timeline
"""
