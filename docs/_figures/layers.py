"""Draw who holds what under FSDP x domain, and one call through the layers of the package."""

from shardfield.bench.svg import COLORS, INK, Drawing


def fsdp_domain() -> str:
    """Draw 2 x 2 ranks: the data axis has two samples, the domain axis halves of each, parameters are in quarters."""
    drawing = Drawing(
        760, 300, "A mesh of 2 x 2 ranks: samples over data, fields over domain, parameters over all four"
    )
    drawing.text(150, 24, 'axis "domain": the halves of one field', 13, bold=True)
    drawing.text(26, 165, 'axis "data": samples', 13, "middle", bold=True, turn=-90)
    for row in range(2):
        for column in range(2):
            rank, x, y = 2 * row + column, 60 + 250 * column, 44 + 122 * row
            drawing.rect(x, y, 226, 106, stroke=INK, radius=8)
            drawing.text(x + 12, y + 20, f"rank {rank}", 12, bold=True)
            for half in range(2):
                mine = half == column
                drawing.rect(x + 12 + 32 * half, y + 32, 30, 60, COLORS[row], INK, opacity=None if mine else "0.12")
            drawing.text(x + 90, y + 48, f"sample {row}, {'left' if column == 0 else 'right'} half", 11)
            for quarter in range(4):
                at = x + 90 + 28 * quarter
                drawing.rect(at, y + 62, 26, 14, COLORS[3], INK, opacity=None if quarter == rank else "0.12")
            drawing.text(x + 90, y + 94, f"parameters {rank + 1}/4", 11)
    drawing.text(560, 80, "A step sends", 13, bold=True)
    lines = (
        "halos along the domain,",
        "all-gathers of parameters,",
        "one reduce-scatter of",
        "gradients: the sum over",
        "the domain, the mean over",
        "the data.",
    )
    for i, line in enumerate(lines):
        drawing.text(560, 104 + 20 * i, line, 12)
    return str(drawing)


def one_call() -> str:
    """Draw one call from torch to the messages and back."""
    drawing = Drawing(760, 400, "One call through the layers: dispatch, rule, plan, executor, collectives")
    steps = (
        ("F.conv2d(x, weight, padding=1)", "your code: torch", 7),
        ("dispatch/registry.py", "finds the rule of the function", 0),
        ("dispatch/call_cache.py", "key: function, layouts, dtypes, arguments", 0),
        ("ops/stencil/conv.py", "the rule: layouts in, Plan out; no data, no messages", 2),
        ("dispatch/executor.py", "runs the plan, wraps the result", 0),
        ("ops/stencil/padded_conv.py", "local computation, with its backward", 2),
        ("comm/", "halo rows to the neighbors, counted for explain()", 1),
    )
    for i, (where, what, tone) in enumerate(steps):
        y = 16 + 54 * i
        drawing.rect(150, y, 250, 36, COLORS[tone], radius=6)
        drawing.text(275, y + 23, where, 13, "middle", "#fff", bold=True)
        drawing.text(416, y + 23, what, 12)
        if i + 1 < len(steps):
            drawing.arrow((275, y + 38), (275, y + 52))
    drawing.line([(150, 142), (96, 142), (96, 250)], COLORS[0], "2")
    drawing.arrow((96, 250), (148, 250), COLORS[0], "2")
    drawing.text(88, 198, "cached:", 12, "end")
    drawing.text(88, 214, "no planning", 12, "end")
    return str(drawing)
