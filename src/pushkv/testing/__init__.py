"""For tests and for those who build on pushkv: strategies, and an engine small enough to read."""
