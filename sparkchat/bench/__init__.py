"""Measurements by whole answers: what calibration is fitted to, and baselines beside every verify mode.

Runs in the parent process and asks the engine process like any front end; never imports torch.
"""
