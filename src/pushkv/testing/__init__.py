"""For authors of transports and adapters: conformance tests and a small engine."""
