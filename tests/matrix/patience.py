"""Peers whose NIXL agents wait for events, so that two engines can share two cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from pushkv.demo import engine_site
from pushkv.demo.engine_site.sitecustomize import DELAY
from pushkv.demo.systems import PUSHKV, System

__all__ = ["PROGRESS_DELAY_US", "patient"]

PROGRESS_DELAY_US = 1_000
"""An idle agent takes 2 % of a core then, and a whole one as shipped."""


def patient(system: System) -> System:
    """The same, with a delay for the progress threads of NIXL's Python API.

    As shipped they spin, which on two cores starves engines and clients alike. The delay is in the
    peers' favour; pushkv's agents have one of their own.
    """
    if system is PUSHKV:
        return system

    def environment(port: int) -> Mapping[str, str]:
        site = str(Path(engine_site.__file__).parent)
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        return {
            **system.environment(port),
            "PYTHONPATH": path,
            DELAY: str(PROGRESS_DELAY_US),
        }

    return evolve(system, environment=environment)
