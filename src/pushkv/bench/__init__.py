"""Benchmarks of whole systems: one traffic mix over several of them, in one run.

`trace_file` and `workload` say which requests come when; `fleet` starts the engines; `client` sends
a request as a router would; `replay` runs everything; `meters` reads what it cost; `results` is
what comes out, `table` and `page` show it.
"""
