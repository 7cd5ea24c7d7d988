"""The command line, `pushkv`."""
