"""Fates of mutants that are kept: in the source, and while a long run is under way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from attrs import asdict

from .digest import core_digest
from .scripts import ROOT
from .trials import Fate

__all__ = ["EQUIVALENT_MOST", "KEPT", "RENEW", "Keeper", "chosen", "read", "summary", "write"]

KEPT = ROOT / "tests" / "check" / "mutants.json"
"""What the last full run came to."""
RENEW = "pushkv check --mutants --keep"
EQUIVALENT_MOST = 0.05
"""The share of mutants that may change nothing."""


def summary(fates: Iterable[Fate]) -> dict[str, object]:
    """What a run came to, as it is written to a file."""
    fates = list(fates)
    survivors = [fate.name for fate in fates if fate.survives]
    equivalent = sum(fate.equivalent for fate in fates)
    return {
        "mutants": len(fates),
        "killed": len(fates) - equivalent - len(survivors),
        "equivalent": equivalent,
        "survivors": survivors,
    }


def write(path: Path, fates: Iterable[Fate]) -> None:
    """Keep fates, without their stories, under the digest of the core that they belong to."""
    fates = list(fates)
    rows = [
        {
            "name": each.name,
            "rule": each.rule,
            "fate": each.told,
            "by": each.by,
            "where": each.where,
        }
        for each in fates
    ]
    whole = {"digest": core_digest(), **summary(fates)}
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    head = json.dumps(whole, indent=1, ensure_ascii=False)[:-2]
    path.write_text(f'{head},\n "fates": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read(path: Path) -> tuple[str, dict[str, Fate]]:
    """The digest of the core that fates were kept for, and the fates by name."""
    found = json.loads(path.read_text(encoding="utf-8"))
    fates = (
        Fate(
            each["name"],
            each["rule"],
            each["where"],
            each["by"],
            equivalent=each["fate"] == "equivalent",
        )
        for each in found["fates"]
    )
    return found["digest"], {each.name: each for each in fates}


def chosen(digest: str, names: Iterable[str], count: int) -> list[str]:
    """So many of the names, others for each digest, the same everywhere."""
    return sorted(names, key=lambda name: sha256(f"{digest} {name}".encode()).digest())[:count]


class Keeper:
    """Fates in a file of one line each, which is read again when a run is taken up.

    The file is named after the digest of the core, so that no other core's fates are taken.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"mutants-{core_digest()}.ndjson"

    def known(self) -> Mapping[str, Fate]:
        """What was found out before. A last line that was cut off is left out."""
        if not self._path.exists():
            return {}
        found: dict[str, Fate] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                fate = Fate(**json.loads(line))
                found[fate.name] = fate
        return found

    def keep(self, fate: Fate) -> None:
        """Add one."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(fate), ensure_ascii=False) + "\n")
