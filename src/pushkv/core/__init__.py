"""The protocol as pure functions: no I/O, clock, randomness, thread or event loop."""
