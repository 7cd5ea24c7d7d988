"""The parts of the demo: a model without a download, supervised vLLM servers, and a small proxy.

Each part works by itself and imports only what it needs; nothing here imports an adapter, a
transport, vLLM or torch.
"""
