"""Screens that open over the chat."""
