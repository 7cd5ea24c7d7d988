"""What can be seen of a running endpoint: counters and a trace of its steps."""
