"""Adapt docstrings for mkdocs: examples become code blocks, and descriptions of parameters become lists.

In the source both are plain text, which Markdown takes for quotes (`>>>`) and for one paragraph.
"""

import re
from itertools import groupby

import griffe

PARAMETER = re.compile(r"(\w+): (?=\S)")


class ProseDocstrings(griffe.Extension):
    """Rewrite every docstring that is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(markdown, paragraphs(obj.docstring.value)))


def paragraphs(text: str) -> list[list[str]]:
    """Return the lines of each paragraph."""
    return [list(lines) for blank, lines in groupby(text.splitlines(), lambda line: not line.strip()) if not blank]


def markdown(lines: list[str]) -> str:
    """Return one paragraph as a code block, a list or as it is."""
    if lines[0].lstrip().startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if PARAMETER.match(lines[0]) and sum(bool(PARAMETER.match(line)) for line in lines) > 1:
        return "\n".join(PARAMETER.sub(r"- `\1`: ", line, count=1) if PARAMETER.match(line) else line for line in lines)
    return "\n".join(lines)
