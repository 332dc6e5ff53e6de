"""A hook of mkdocs: decision records come into the book by themselves, one page a file."""

from pathlib import Path

FOLDER = "decisions"


def on_config(config):
    """The navigation gains a group with all decision records, in their order."""
    records = sorted(path.name for path in (Path(config.docs_dir) / FOLDER).glob("*.md"))
    config.nav = [*config.nav, {"Decisions": [f"{FOLDER}/{name}" for name in records]}]
    return config
