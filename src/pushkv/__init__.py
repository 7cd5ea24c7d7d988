"""Push-based KV cache transfer between prefill and decode engines."""
