"""The transport over NIXL."""
