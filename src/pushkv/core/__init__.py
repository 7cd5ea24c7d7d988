"""The protocol: pure state machines, typed events in, ordered effects out. No I/O, no clock."""
