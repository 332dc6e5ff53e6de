"""Which programs are here and run: what a PATH names may be a shim of a version manager that ends with 127."""

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache


@cache
def working(*programs: str) -> str | None:
    """Path of the first of these programs, given by name or path, that tells its version; None where none does."""
    for path in _found(programs):
        try:
            done = subprocess.run(
                [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return path
    return None


def _found(programs: Iterable[str]) -> list[str]:
    return [path for program in programs if (path := shutil.which(program))]
