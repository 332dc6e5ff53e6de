"""The version of this software, as installed."""

from importlib.metadata import PackageNotFoundError, version


def software_version() -> str:
    """For example `0.1.0`; `unknown` when it runs from a tree that was not installed."""
    try:
        return version("swarmsched")
    except PackageNotFoundError:
        return "unknown"
