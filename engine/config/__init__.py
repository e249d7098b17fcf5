"""What an experiment says: typed, frozen data that YAML can hold. Nothing is built here.

schema       the keys, each explained below its field; the place to look for a key
conflicts    what does not go together, as rows of one table
registry     parts by name, those of plug-ins included
schedules    hyperparameters that change from round to round, or from local step to local step
over_steps   which numbers of a method the latter are
earlier      configurations of earlier versions, read with today's keys
differences  the settings in which two experiments differ: those that may, when a run is resumed or forked
finite       numbers that are infinite or not a number are refused
yaml_text    YAML by the safe loader, with one sentence for whatever is wrong
"""
