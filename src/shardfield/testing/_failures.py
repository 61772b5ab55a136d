"""The errors of a failed call by rank, and the report that combines them."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import ShardfieldError


@dataclass(frozen=True)
class RankError:
    """The error of one rank.

    `kind` is one of three. "raised": the function raised; `type_name`, `message` and `traceback` are those of the
    exception, and `exception` is the exception itself if it can be pickled. "stuck": the function had not returned when
    the call timed out; `message` names the innermost call and `traceback` is the stack. "died": the process ended;
    `message` gives the exit code or signal. `type_name` is empty unless `kind` is "raised".
    """

    kind: Literal["raised", "stuck", "died"]
    type_name: str
    message: str
    traceback: str = ""
    exception: BaseException | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.type_name, self.message) if part)


class RanksFailed(ShardfieldError):
    """A call of `run_on_ranks` failed on at least one rank; `errors` maps those ranks to their `RankError`."""

    def __init__(self, call: str, errors: dict[int, RankError]) -> None:
        self.call = call
        self.errors = errors
        super().__init__(_report(call, errors))

    def __reduce__(self) -> tuple[type, tuple[str, dict[int, RankError]]]:
        return type(self), (self.call, self.errors)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format a list of ranks: [0, 1, 2, 5] -> "ranks 0-2, 5"; [3] -> "rank 3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    word = "rank" if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks"
    return f"{word} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def describe_exit(code: int | None) -> str:
    """Describe an exit code; a negative one is the signal that killed the process."""
    if code is None:
        return "died"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _report(call: str, errors: dict[int, RankError]) -> str:
    """Return one line per distinct error, then one traceback each. Dead ranks come first: they cause other errors."""
    groups: dict[tuple[int, str, str], list[int]] = {}
    for rank, error in sorted(errors.items()):
        text = re.sub(r"\]:\d+", "]", str(error))  # gloo's errors differ in the port of the peer
        # A bare assert has no message: distinguish errors by the line that raised, too.
        location = re.findall(r"^  File .*$", error.traceback, re.MULTILINE)[-1:] if error.kind == "raised" else []
        key = ("died", "raised", "stuck").index(error.kind), text, "".join(location)
        groups.setdefault(key, []).append(rank)
    ordered = [ranks for _, ranks in sorted(groups.items(), key=lambda item: (item[0][0], item[1]))]
    lines = [f"{call} failed on {format_ranks(errors)}"]
    lines += [f"  {format_ranks(ranks)}: {errors[ranks[0]]}" for ranks in ordered]
    for ranks in ordered:
        if text := errors[ranks[0]].traceback.rstrip():
            lines += ["", f"--- {format_ranks(ranks)} ---", text]
    return "\n".join(lines)
