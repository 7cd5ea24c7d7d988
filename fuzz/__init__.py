"""What strangers and peers may send, as functions of bytes; see `fuzz/README.md`."""
