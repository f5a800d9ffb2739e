"""Training of DSpark drafters: the target writes the data, the paper's losses fit the drafter to it.

Nothing here may import the engine, a front end or the server.
"""
