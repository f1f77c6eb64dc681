"""Measures this machine as the planner needs it: products and attention by shape, memory, launches, collectives, disk.

`measure` does it, `entry` makes a file of the hardware catalogue out of it. Torch is imported here and not in
`shoal.plan`, which reads the file.
"""
