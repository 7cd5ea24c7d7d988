"""An explicit-state checker over the run-time machines, a network, transports, time and crashes."""
