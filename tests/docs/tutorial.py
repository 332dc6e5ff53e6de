"""What tutorials have their readers type: blocks of shell, and scripts, as a test runs them."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs/tutorials"
BLOCK = re.compile(r"^(<!-- not run by the test.*?-->\n)?```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell_of(page):
    """All that is typed, one block behind the other."""
    return "".join(
        text for skipped, kind, text in BLOCK.findall((FOLDER / page).read_text()) if kind == "sh" and not skipped
    )


def scripts_of(page):
    """The scripts of a page, by the name that the docstring of each begins with (`loop.py: ...`)."""
    texts = [text for _, kind, text in BLOCK.findall((FOLDER / page).read_text()) if kind == "python"]
    return {found[1]: text for text in texts if (found := re.match(r'"""(\w+\.py): ', text))}
