"""The ComfyUI side of a worker group. Imports no comfy.

runtime    the one group of this process; group is a group, launch and torchrun start its processes
sent       what the ranks have; waiting hears their answers, room is memory for a result
planning   from a request to degrees and devices; choosing takes the best of those that work, by cost and storing
headroom   whether a run has room at this moment
cluster    other machines: endpoint is where they come in, join what they run
report     a plan in words for CP Plan; picture draws it, decoding and races have lines of their own, devices are as a
           user writes them
status     what the group is doing; activity follows it, history its runs; journal is what it printed, limits what a
           user chose
"""
