"""Adapt pages for mkdocs: the blocks that the tests read, and pictures that follow the colors of the page.

"Code in the docs" in CONTRIBUTING.md describes the blocks.
"""

import re
from pathlib import Path

FIGURES = Path(__file__).parent / "figures"
PATH = re.compile(r"<code>([^<\s]+/[^<\s]+)</code>")
OPTION = re.compile(r"--[\w-]+")
IMAGE = re.compile(r'<p>\s*<img alt="[^"]*" src="(?:\.\./)*figures/([\w-]+)\.svg"\s*/?>\s*</p>')


def on_page_markdown(markdown: str, **_) -> str:
    """Keep the language of a fence and drop what only the tests read (`ranks=2 needs=lightning`, `run`).

    mkdocs knows none of it, and would show the block as text.
    """
    return re.sub(r"^( *```(?:python|bash)) (?:\w+(?:=\w+)? ?)+$", r"\1", markdown, flags=re.M)


def on_page_content(html: str, **_) -> str:
    """Put SVG pictures into the page: as images they could not see whether it is light or dark.

    Paths may break after a slash, so that those in tables do not widen their column. Options break nowhere.
    """

    def inline(image: re.Match) -> str:
        picture = (FIGURES / f"{image[1]}.svg").read_text()
        return f'<figure class="sf-figure">{re.sub("<style>.*</style>", "", picture)}</figure>'

    html = re.sub(
        r"<code>[^<]*--[^<]*</code>", lambda code: OPTION.sub(r'<span class="sf-option">\g<0></span>', code[0]), html
    )
    html = PATH.sub(lambda path: f"<code>{path[1].replace('/', '/<wbr>')}</code>", html)
    return IMAGE.sub(inline, html)
