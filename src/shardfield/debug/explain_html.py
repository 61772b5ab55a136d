"""The report of `explain()` as a picture: one HTML file, with a bar for the bytes of each module and call."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #5b6875; --page: #ffffff; --line: #d9dfe5; --band: #f3f6f9;
  --forward: #2f6fb5; --backward: #c77f1a; --bad: #b3261e; --badpage: #fbe9e7; --lost: #7b4ba8; --lostpage: #f1e8f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --dim: #9aa8b6; --page: #14191f; --line: #323b45;
  --band: #1c232b; --forward: #69a7ea; --backward: #e5ab55; --bad: #ff9c92; --badpage: #41201d; --lost: #d0a8f2;
  --lostpage: #33234a; } }
body { background: var(--page); color: var(--ink); margin: 0 auto; max-width: 76rem; padding: 1.2rem;
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 .8rem; color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--dim); font-weight: 600; border-bottom: 2px solid var(--line);
  padding: .3rem .5rem; }
td { padding: .22rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tr.module td { background: var(--band); font-weight: 600; }
td.op { padding-left: 1.6rem; white-space: nowrap; }
td.by { min-width: 8rem; } td.by .mark { white-space: normal; }
td.layout { font: 12px/1.35 ui-monospace, monospace; color: var(--dim); min-width: 11rem; }
td.number { text-align: left; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bars { width: 20%; min-width: 6rem; padding-top: .45rem; }
.bar { height: .5rem; border-radius: 2px; margin: 2px 0; min-width: 1px; }
.forward { background: var(--forward); } .backward { background: var(--backward); }
.mark { border-radius: 3px; padding: 0 .35rem; font-size: 13px; white-space: nowrap; }
.gather { background: var(--badpage); color: var(--bad); font-weight: 600; }
.lost { background: var(--lostpage); color: var(--lost); font-weight: 600; }
.key { display: inline-block; width: 1.6rem; height: .5rem; border-radius: 2px; margin: 0 .3rem 0 .8rem; }
"""


def page(report: Any) -> str:
    """Return the HTML of a report: modules as rows in the order of their first call, their calls below them."""
    modules: dict[str, list[Any]] = {}
    for row in report._all_rows():
        modules.setdefault(row.module or "(outside any module)", []).append(row)
    largest = max((_largest(rows) for rows in modules.values()), default=0)
    body = "".join(_module(name, rows, largest) for name, rows in modules.items())
    calls = sum(len(rows) for rows in modules.values())
    summary = (
        f"{calls} calls, {report.messages} messages, {_bytes(report.bytes)} sent by this rank. "
        f"{_mark('gather', f'{len(report.gathers)} gathered')} {_mark('lost', f'{len(report.lost)} lost sharding')} "
        f"{_mark('lost', f'{len(report.unbalanced)} unbalanced')}"
    )
    head = "".join(f"<th>{name}</th>" for name in ("module, op", "bytes", "messages", "sent", "by", "in", "out"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>shardfield explain</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>What each module sent</h1><p>{summary}"
        f'<span class="key forward"></span>forward<span class="key backward"></span>backward</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></body></html>\n'
    )


def _largest(rows: list[Any]) -> int:
    return max(sum(r.bytes for r in rows), sum(r.back_bytes for r in rows))


def _module(name: str, rows: list[Any], largest: int) -> str:
    forward, backward = sum(r.bytes for r in rows), sum(r.back_bytes for r in rows)
    messages = sum(r.messages + r.back_messages for r in rows)
    marks = " ".join(
        _mark(kind, f"{count} {text}")
        for kind, text, count in (
            ("gather", "gathered", sum(r.ending == "gather" for r in rows)),
            ("lost", "lost sharding", sum(bool(r.lost) for r in rows)),
            ("lost", "unbalanced", sum(bool(r.unbalanced) for r in rows)),
        )
        if count
    )
    line = (
        f'<tr class="module"><td>{escape(name)}</td>{_numbers(forward, backward, messages, largest)}'
        f'<td colspan="3">{marks}</td></tr>'
    )
    return line + "".join(_calls(rows, largest))


def _calls(rows: list[Any], largest: int) -> list[str]:
    """Return a line for each call; calls in a row that are alike share one."""
    runs: list[list[Any]] = []
    for row in rows:
        if runs and _alike(runs[-1][0]) == _alike(row):
            runs[-1].append(row)
        else:
            runs.append([row])
    lines = []
    for run in runs:
        row = run[0]
        times = f" x {len(run)}" if len(run) > 1 else ""
        forward, backward = sum(r.bytes for r in run), sum(r.back_bytes for r in run)
        messages = sum(r.messages + r.back_messages for r in run)
        inputs = "<br>".join(escape(str(layout)) for layout in row.inputs)
        output = escape(str(row.output or ""))
        lines.append(
            f'<tr><td class="op">{escape(row.op)}{times}</td>{_numbers(forward, backward, messages, largest)}'
            f'<td class="by">{_outcome(row)}</td><td class="layout">{inputs}</td><td class="layout">{output}</td></tr>'
        )
    return lines


def _alike(row: Any) -> tuple[Any, ...]:
    return row.op, row.outcome, [str(layout) for layout in row.inputs], str(row.output), sorted(row.kinds.items())


def _outcome(row: Any) -> str:
    kind = "gather" if row.ending == "gather" else "lost" if row.lost or row.unbalanced else ""
    return _mark(kind, row.outcome)


def _mark(kind: str, text: str) -> str:
    return f'<span class="mark {kind}">{escape(text)}</span>'


def _numbers(forward: int, backward: int, messages: int, largest: int) -> str:
    bars = "".join(
        f'<div class="bar {kind}" style="width:{100 * nbytes / largest:.2f}%" title="{kind}: {nbytes} bytes"></div>'
        for kind, nbytes in (("forward", forward), ("backward", backward))
        if nbytes
    )
    counts = f'<td class="number">{messages or ""}</td><td class="number">{_bytes(forward + backward)}</td>'
    return f'<td class="bars">{bars}</td>{counts}'


def _bytes(nbytes: float) -> str:
    if not nbytes:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
