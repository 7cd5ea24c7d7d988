"""The in-process transport."""
