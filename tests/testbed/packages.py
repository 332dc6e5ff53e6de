"""Packages as an installer leaves them in a folder: one with policies of its own, and those that are not installed."""

from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/smallest_first.py"
SERVER_ONLY = (
    "cryptography", "matplotlib", "msgpack", "numpy", "prometheus_client", "pynvml", "scipy", "uvloop",
)  # fmt: skip
"""Modules of the extras, which a workstation does not have."""


def own_policies(folder: Path) -> Path:
    """Install docs/examples/smallest_first.py as a policy of that name, and one that cannot be imported."""
    record = folder / "own_policies-1.0.dist-info"
    record.mkdir(parents=True)
    (folder / EXAMPLE.name).write_text(EXAMPLE.read_text())
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policies\nVersion: 1.0\n")
    entries = "smallest-first = smallest_first:KIND\nbroken = no_such_package:KIND\n"
    (record / "entry_points.txt").write_text(f"[swarmsched.policies]\n{entries}")
    return record


def without(folder: Path, modules: tuple[str, ...] = SERVER_ONLY) -> Path:
    """A folder for PYTHONPATH under which these modules are not there."""
    folder.mkdir()
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError({f'No module named {name!r}'!r}, name={name!r})")
    return folder
