"""Run every code block of the README and the docs and check every command; CONTRIBUTING.md has the convention.

```python          the plain blocks of a page are one program, run in one process in page order
```python ranks=2  a program of its own, run on that many ranks by torchrun
```python ranks=2 needs=package  the same, skipped where the package is not installed (`make test-integrations` has it)
```output          right after a block: everything that the block prints (rank by rank on several ranks)
```bash            commands: make targets exist, scripts that launchers start exist
```bash run        commands that are run, from the root of the repository
```text, toml, ... nothing to run
"""

import importlib.util
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.launch import ROOT, run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLAIN = {"text", "toml", "yaml", "ini", "make", "mermaid"}
# Started by hand on other machines or under a scheduler: the command is not run, the script it names must exist.
LAUNCHERS = {"python", "torchrun", "mpirun", "srun", "sbatch"}
END = "<end of block>"
# Guarded, because ranks that a block starts may import its file again.
MARK = f"if __name__ == '__main__': print({END!r})"


@dataclass
class Block:
    page: Path
    line: int  # of the first line of code, counted from 1
    lang: str
    options: dict[str, str]
    code: str
    output: str | None = None
    where: str = field(init=False)

    def __post_init__(self):
        self.where = f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, each output block joined to the block above it."""
    blocks: list[Block] = []
    lines = (page.read_text() if text is None else text).splitlines()
    start, fence, previous_end = 0, None, -1
    for number, line in enumerate(lines, 1):
        opening = re.match(r"( *)(`{3,})(.*)$", line)
        if fence is None and opening:
            fence, start = opening, number
        elif fence is not None and line.strip() == fence[2]:
            indent = len(fence[1])
            code = "".join(f"{x[indent:]}\n" for x in lines[start : number - 1])
            words = fence[3].split() or [""]
            block = Block(page, start + 1, words[0], dict((w.split("=", 1) + [""])[:2] for w in words[1:]), code)
            if block.lang == "output":
                between = "".join(lines[previous_end : start - 1]).strip() if blocks else "no block"
                assert not between, f"{block.where}: an output block follows right after the block that prints it"
                blocks[-1].output = code
            else:
                blocks.append(block)
            fence, previous_end = None, number
    assert fence is None, f"{page.name}: the block that opens on line {start} does not close"
    return blocks


def program(blocks: list[Block], path: Path) -> Path:
    """Write the blocks into one file, each on the line numbers of its page, so that a traceback points there."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines() + [MARK]
    path.write_text("\n".join(lines) + "\n")
    return path


def check_output(block: Block, printed: str) -> None:
    if block.output is not None:
        assert printed == block.output, f"{block.where} printed\n{printed}\nand the page says\n{block.output}"


BLOCKS = [b for page in PAGES for b in blocks_of(page)]


def name(value):
    return value.where if isinstance(value, Block) else value.name


def plain_blocks(page: Path) -> list[Block]:
    return [b for b in BLOCKS if b.page == page and b.lang == "python" and "ranks" not in b.options]


@pytest.mark.parametrize("page", [p for p in PAGES if plain_blocks(p)], ids=name)
def test_python(page, forks, tmp_path):
    blocks = plain_blocks(page)
    (printed,) = forks.run(program(blocks, tmp_path / f"{page.stem}.py"), tmp_path)
    for block, text in zip(blocks, printed.split(f"{END}\n"), strict=False):
        check_output(block, text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.lang == "python" and "ranks" in b.options], ids=name)
def test_python_on_ranks(block, forks, tmp_path):
    if "needs" in block.options:
        pytest.importorskip(block.options["needs"])
    # Another name than the page's: the folder of a program is on its path, and a page may have the name of a package.
    path = program([block], tmp_path / f"page_{block.page.stem}.py")
    printed = forks.run(path, tmp_path, int(block.options["ranks"]))
    check_output(block, "".join(text.removesuffix(f"{END}\n") for text in printed))


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a shell block as lists of words, without comments and leading variables."""
    text = block.code.replace("\\\n", " ")
    words = [shlex.split(line, comments=True) for line in text.splitlines()]
    words = [[w for i, w in enumerate(ws) if not (re.match(r"\w+=", w) and i == 0)] for ws in words]
    return [ws for ws in words if ws]


def problem(words: list[str]) -> str | None:
    """Return what is wrong with a command that is shown and not run, or None."""
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        missing = [w for w in words[1:] if "=" not in w and w not in targets]
        return f"no target {missing} in the Makefile" if missing or len(words) == 1 else None
    if words[0] in LAUNCHERS:
        missing = [w for w in words[1:] if re.search(r"\.(py|sh|sbatch)$", w) and not (ROOT / w).is_file()]
        return f"no file {missing}" if missing else None
    return "is not run: write the block as ```bash run, or ```text if it is no command"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.lang == "bash"], ids=name)
def test_bash(block):
    if "run" in block.options:
        check_output(block, run("bash", "-euo", "pipefail", "-c", block.code))
    else:
        wrong = [f"{' '.join(c)}: {problem(c)}" for c in commands(block) if problem(c)]
        assert not wrong, f"{block.where}: {wrong}"


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_every_block_is_of_a_known_kind(block):
    known = {"python": {"ranks", "needs"}, "bash": {"run"}}
    assert block.lang in PLAIN | known.keys(), f"{block.where}: {block.lang or 'no language'}; see CONTRIBUTING.md"
    assert block.options.keys() <= known.get(block.lang, set()), f"{block.where}: unknown option in {block.options}"


def has_examples(module: Path) -> bool:
    """Return whether a module has examples to run; those of `run_on_ranks` need ranks: test_run_on_ranks.py."""
    return bool(re.search(r"^\s*>>> ", module.read_text(), re.M)) and module.name != "_run.py"


@pytest.mark.parametrize("module", [p for p in sorted((ROOT / "src").rglob("*.py")) if has_examples(p)], ids=name)
def test_docstring_examples(module, forks, tmp_path):
    dotted = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    path = tmp_path / "examples.py"
    path.write_text(
        f"import doctest, importlib, os, sys\n"
        f"if __name__ == '__main__':\n"
        f"    found = doctest.testmod(importlib.import_module({dotted!r}))\n"
        f"    sys.stdout.flush()\n"
        f"    os._exit(found.failed > 0 or found.attempted == 0)\n"  # skip the interpreter's shutdown
    )
    forks.run(path, tmp_path)


def test_architecture_page_lists_existing_paths():
    rows = re.findall(r"^\| `([\w.]+/[\w/.]*)`( \(to come\))? \|", (ROOT / "docs/architecture.md").read_text(), re.M)
    assert len(rows) > 10
    wrong = [path for path, to_come in rows if exists(ROOT / path) == bool(to_come)]
    assert not wrong, f"docs/architecture.md, 'Where things live': correct the mark 'to come' of {wrong}"


def test_architecture_page_lists_every_package():
    page = (ROOT / "docs/architecture.md").read_text()
    paths = [p for p in (ROOT / "src/shardfield").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    names = {p.name + "/" * p.is_dir() for p in paths} - {"__main__.py"}
    assert sorted(n for n in names if f"| `src/shardfield/{n}` |" not in page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_of_tests_exist(page):
    paths = set(re.findall(r"\btests/[\w/]+\.py\b", page.read_text()))
    assert sorted(path for path in paths if not (ROOT / path).is_file()) == []


def test_import_lines_of_the_physicsnemo_page(forks, tmp_path):
    page = (ROOT / "docs/moving-from-physicsnemo.md").read_text()
    rows = re.findall(r"^\| `(.*physicsnemo.*)` \| `(.*)` \|$", page, re.M)
    assert len(rows) > 10
    for there, here in rows:
        assert there.split(" import ")[1] == here.split(" import ")[1], f"not the same names: {there}"
    path = tmp_path / "imports.py"
    path.write_text("\n".join(here for _, here in rows))
    forks.run(path, tmp_path)


def exists(path: Path) -> bool:
    """Return whether the path is a file or a folder with Python files in it."""
    return path.is_file() or any(path.rglob("*.py"))


def test_the_site_and_the_index_list_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert all(isinstance(entry, dict) and len(entry) == 1 for entry in nav)
    listed = re.findall(r"'([\w-]+\.md)'", str(nav))
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(listed) == pages
    index = (ROOT / "docs/index.md").read_text()
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_page_parser():
    page = ROOT / "README.md"
    one, two = blocks_of(page, "a\n```python ranks=2\nx = 1\n```\n\n```output\n1\n```\n\n  ```bash run\n  ls\n  ```\n")
    assert (one.line, one.options, one.code, one.output) == (3, {"ranks": "2"}, "x = 1\n", "1\n")
    assert (two.lang, two.options, two.code, two.output) == ("bash", {"run": ""}, "ls\n", None)
    with pytest.raises(AssertionError, match="right after"):
        blocks_of(page, "```python\n```\nwords\n```output\n```\n")
    with pytest.raises(AssertionError, match="does not close"):
        blocks_of(page, "```python\n")
    with pytest.raises(AssertionError, match="printed"):
        check_output(one, "2\n")
    assert problem(["make", "no-such-target"]) and not problem(["make", "test"])
    assert problem(["srun", "-n", "2", "python", "no_such.py"]) and problem(["rm", "x"])
    assert not problem(["mpirun", "-np", "2", "python", "examples/train_ddp.py"])


def test_the_site_shows_every_block_as_code():
    """mkdocs takes a fence with anything but a language for text; the hook removes what only the tests read."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", hooks.on_page_markdown(page.read_text()), re.M)
        assert [fence for fence in fences if not re.fullmatch(r"\w*", fence)] == [], page.name
