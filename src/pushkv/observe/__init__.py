"""What the endpoint did, as records and counters."""
