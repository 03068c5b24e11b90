"""The pages of the documentation: the README, the contributors' guide, and everything under docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return [code for name, code in _FENCED.findall(page.read_text()) if name == language]


def command_lines(text: str, program: str) -> list[list[str]]:
    """Return the words after each call of a program in indented lines and in code within a sentence.

    >>> command_lines("Run `make lint`.\\n\\n    make \\\\\\n      docs  # the site\\n", "make")
    [['docs'], ['lint']]
    """
    text = _FENCED.sub("", text).replace("\\\n", " ")
    indented = re.findall(r"^(?: {4}|\t)(.*)$", text, flags=re.MULTILINE)
    within = re.findall(r"`([^`]+)`", re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE))
    # A word that starts with a slash is no argument: "sudo -u fl-elastic /opt/..." names a user.
    calls = re.compile(rf"(?:^|[\s/]){program}\s+((?=[\w.-])[^#;|`]+)")
    return [
        found[1].split()
        for line in (*indented, *within)
        if (found := calls.search(" ".join(line.split())))
    ]
