"""Widgets that draw their own lines: the cost of an update must not grow with the length of the chat."""
