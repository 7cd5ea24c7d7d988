"""How long requests wait for their KV cache, by design: a simulation in virtual time.

Engines, links and routers are models (`engine`, `fabric`, `world`); where a design pushes, the
hand-over between them is done by the real machines of `pushkv.core`. docs/simulate.md has the model
on one page, what it was fitted to, and what it gets wrong.
"""
