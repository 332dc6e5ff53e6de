"""Hooks of mkdocs: decision records join the book by themselves; pictures and pipes become what it can show."""

import re
from pathlib import Path

FOLDER = "decisions"
PICTURE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EDGE = re.compile(r"^\s*(\S+) (?:-->) (\S+?)(?:: (.*))?$", re.MULTILINE)
NAME = re.compile(r"^\s*participant (\w+) as (.*)$", re.MULTILINE)
WORD = re.compile(r"^\s*(\w+)-+>>(\w+): (.*)$|^\s*Note over [\w,]+: (.*)$|^\s*par (.*)$", re.MULTILINE)


def on_config(config):
    """The navigation gains a group with all decision records, in their order."""
    records = sorted(path.name for path in (Path(config.docs_dir) / FOLDER).glob("*.md"))
    config.nav = [*config.nav, {"Decisions": [f"{FOLDER}/{name}" for name in records]}]
    return config


def on_page_markdown(markdown, **_page):
    """A pipe in code in a table is escaped for other readers of Markdown; pictures that they draw are tables here."""
    markdown = PICTURE.sub(lambda found: _table(found[1]), markdown)
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _unescaped, row[0]), markdown, flags=re.MULTILINE)


def _unescaped(code):
    return code[0].replace("\\|", "|")


def _table(picture):
    edges = [(_state(start), event or "", _state(end)) for start, end, event in EDGE.findall(picture)]
    if edges:
        return "\n".join(["| state | event | next |", "|---|---|---|", *(f"| {' | '.join(edge)} |" for edge in edges)])
    names = dict(NAME.findall(picture))
    rows = ["| from | to | what |", "|---|---|---|"]
    for sender, receiver, text, note, span in WORD.findall(picture):
        rows.append(f"| {names[sender]} | {names[receiver]} | {text} |" if text else f"| | | *{note or span}* |")
    return "\n".join(rows)


def _state(name):
    return "(begin or end)" if name == "[*]" else name
