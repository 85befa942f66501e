"""`blockyard bench suite`: the performance figures of one GPU, each an item with its target and its floor.

`items` is the table, `measures` has a function for each kind of figure, `served` runs the servers, `shapes` writes
models of true shapes with random weights. `command` measures and prints the table.
"""
