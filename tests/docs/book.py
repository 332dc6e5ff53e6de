"""Hooks of mkdocs: decision records come into the book by themselves, and pipes in tables look as they do elsewhere."""

import re
from pathlib import Path

FOLDER = "decisions"


def on_config(config):
    """The navigation gains a group with all decision records, in their order."""
    records = sorted(path.name for path in (Path(config.docs_dir) / FOLDER).glob("*.md"))
    config.nav = [*config.nav, {"Decisions": [f"{FOLDER}/{name}" for name in records]}]
    return config


def on_page_markdown(markdown, **_page):
    """A pipe in code in a table is escaped for other readers of Markdown, and must not be for this one."""
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _unescaped, row[0]), markdown, flags=re.MULTILINE)


def _unescaped(code):
    return code[0].replace("\\|", "|")
