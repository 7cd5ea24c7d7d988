"""Drives the core: one task owns the endpoint and its transport."""
