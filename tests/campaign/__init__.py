"""Campaigns of random faults, and a judge over what happened in each.

`frame` runs one: it draws faults from a seed (`schedule`), performs them on a field of processes and servers (`field`),
and turns the judge's verdict into a report and an exit code. Two scenarios are set in it: `relay`, harvesters under
load (scripts/faults), and `coordination`, consumers that share partitions (scripts/coordination-faults).
"""
