"""The methods, one file for each, named after it, and what a method may be combined with.

Where to read first: `contract`, what the engine asks of a method; `local`, which implements it for methods of local
steps; `scaffold`, a method with client states. `parts` has what methods are put together from, `aggregation` the rules
of aggregation, `attacks` what Byzantine clients send, `privacy` mechanisms of noise. `table` has all names.
"""
