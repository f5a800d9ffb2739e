"""The decode step as a GPU wants it: static buffers, nothing asked of the host, captured once and replayed.

``state`` holds what lives on the device, ``step`` is the step itself (draft; plan, verify, accept, commit), ``graphs``
captures it, ``decoder`` feeds it and turns what it did into events, one step late. Everything but the capture also runs
on a CPU, where tests compare it with ``engine/loop.py``. docs/decisions/captured-step.md says why it is built so.
"""
