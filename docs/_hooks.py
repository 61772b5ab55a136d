"""Let mkdocs render the blocks that the tests read: see "Code in the docs" in CONTRIBUTING.md."""

import re


def on_page_markdown(markdown: str, **_) -> str:
    """Keep the language of a fence and drop what only the tests read (`ranks=2`, `run`); mkdocs knows neither."""
    return re.sub(r"^( *```(?:python|bash)) (?:ranks=\d+|run)$", r"\1", markdown, flags=re.M)
