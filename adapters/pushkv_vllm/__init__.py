"""pushkv as a KV connector of vLLM."""
