"""Draw how fields are sharded and what ranks send: shards, halo exchange, ring attention, partial DFT."""

from math import cos, pi, sin

from shardfield.bench.svg import COLORS, INK, Drawing


def grid(drawing: Drawing, x: float, y: float, owners: list[list[int]], cell: float = 22) -> None:
    """Draw cells in the color of the rank that owns each."""
    for i, row in enumerate(owners):
        for j, rank in enumerate(row):
            drawing.rect(x + j * cell, y + i * cell, cell, cell, COLORS[rank], INK, stroke_width="0.6")


def rank_label(drawing: Drawing, x: float, y: float, rank: int) -> None:
    drawing.text(x, y, f"rank {rank}", 11, "middle", "#fff", bold=True)


def shards() -> str:
    """Draw the four placements: one dim, two dims, replicated, partial sums."""
    drawing = Drawing(760, 236, "A 5 x 4 tensor as Shard(0), as Shard(0) x Shard(1), as Replicate and as Partial")
    titles = ("(Shard(0),)", "(Shard(0), Shard(1))", "(Replicate(),)", "(Partial(),)")
    notes = ("rows 3 + 2 on 2 ranks", "rows 3 + 2, columns 3 + 1", "every rank has all of it", "the sum is the tensor")
    for i, (title, note) in enumerate(zip(titles, notes, strict=True)):
        x = 20 + 190 * i
        drawing.text(x, 24, title, 13, bold=True)
        drawing.text(x, 44, note, 12, opacity="0.85")
    grid(drawing, 20, 62, [[0] * 4] * 3 + [[1] * 4] * 2)
    rank_label(drawing, 64, 99, 0)
    rank_label(drawing, 64, 143, 1)
    grid(drawing, 210, 62, [[0, 0, 0, 1]] * 3 + [[2, 2, 2, 3]] * 2)
    for rank, (x, y) in enumerate(((243, 99), (288, 99), (243, 143), (288, 143))):
        drawing.text(x, y, str(rank), 11, "middle", "#fff", bold=True)
    for start, sign in ((400, ""), (590, "+")):
        for rank in range(2):
            y = 62 + 88 * rank
            for row in range(5):
                for column in range(4):
                    drawing.rect(start + column * 14, y + row * 14, 14, 14, COLORS[rank], INK, stroke_width="0.5")
            drawing.text(start + 64, y + 38, f"rank {rank}", 11)
        if sign:
            drawing.text(start + 24, 146, sign, 15, bold=True)
    return str(drawing)


def halo_exchange() -> str:
    """Draw a 3 x 3 convolution of 8 rows on two ranks: each receives one row from its neighbor."""
    drawing = Drawing(760, 330, "Halo exchange of a 3 x 3 convolution: rank 0 receives row 4, rank 1 receives row 3")
    height, width, tops = 24, 150, (40, 204)  # of a row, of the field, of the two shards
    for x, title in ((20, "1. Each rank owns 4 rows"), (275, "2. The halo is sent"), (530, "3. Each rank convolves")):
        drawing.text(x, 24, title, 13, bold=True)
        for rank, top in enumerate(tops):
            for row in range(4):
                y = top + row * height
                drawing.rect(x + 20, y, width, height - 2, COLORS[rank], INK, stroke_width="0.6")
                drawing.text(x + 14, y + 16, str(4 * rank + row), 11, "end", opacity="0.8")
    for rank, top in enumerate(tops):
        rank_label(drawing, 20 + 20 + width / 2, top + 39, rank)  # inside the second row
    below, above = tops[0] + 4 * height, tops[1] - height
    for x in (275, 530):
        drawing.rect(x + 20, below, width, height - 2, COLORS[1], INK, opacity="0.4", dash="3 2")
        drawing.text(x + 14, below + 16, "4", 11, "end", opacity="0.8")
        drawing.rect(x + 20, above, width, height - 2, COLORS[0], INK, opacity="0.4", dash="3 2")
        drawing.text(x + 14, above + 16, "3", 11, "end", opacity="0.8")
    drawing.arrow((335, tops[1]), (335, below + height + 2), COLORS[1], "2.5")
    drawing.arrow((405, tops[0] + 4 * height - 2), (405, above - 2), COLORS[0], "2.5")
    for top in (tops[0] + 2 * height, above):
        drawing.rect(590, top - 1, 60, 3 * height, stroke=INK, stroke_width="2.5")
    drawing.text(20, 322, "rows beyond the field are the padding of the call", 12, opacity="0.85")
    drawing.text(530, 322, "rows 0-3 read rows 0-4", 12, opacity="0.85")
    return str(drawing)


def ring_attention() -> str:
    """Draw ring attention on four ranks: blocks of keys and values visit every rank."""
    return ring(
        "Ring attention: queries stay, blocks of keys and values visit every rank",
        "Queries stay, keys and values are sent on",
        "Block of keys and values on each rank",
        "K{} V{}",
        ("Each step merges one block by log-sum-exp;", "the next blocks are in flight while a step computes."),
    )


def ring_neighbors() -> str:
    """Draw a search for nearest neighbors on four ranks: blocks of points visit every rank."""
    return ring(
        "Nearest neighbors with a ring: queries stay, blocks of points visit every rank",
        "Queries stay, points are sent on",
        "Block of points on each rank",
        "P{}",
        ("Each step searches one block for the queries of the rank;", "the nearest points found so far are kept."),
    )


def ring(title: str, left: str, right: str, block: str, notes: tuple[str, str]) -> str:
    """Draw four ranks in a ring, and the block that each has in each step; `block` formats a rank's number."""
    drawing = Drawing(760, 290, title)
    drawing.text(20, 24, left, 13, bold=True)
    center_x, center_y, radius = 165, 160, 92
    places = [(center_x + radius * cos(a), center_y + radius * sin(a)) for a in (-pi / 2, 0, pi / 2, pi)]
    for i, (x, y) in enumerate(places):
        next_x, next_y = places[(i + 1) % 4]
        start = (x + 0.32 * (next_x - x), y + 0.32 * (next_y - y))
        drawing.arrow(start, (x + 0.68 * (next_x - x), y + 0.68 * (next_y - y)), width="2")
    for rank, (x, y) in enumerate(places):
        drawing.rect(x - 38, y - 24, 76, 48, COLORS[rank], radius=6)
        drawing.text(x, y - 5, f"rank {rank}", 12, "middle", "#fff", bold=True)
        drawing.text(x, y + 13, f"Q{rank}  {block.format(rank, rank)}", 11, "middle", "#fff")
    drawing.text(370, 24, right, 13, bold=True)
    for rank in range(4):
        drawing.text(440, 72 + 40 * rank, f"Q{rank} on rank {rank}", 12, "end")
        for step in range(4):
            source = (rank - step) % 4
            x, y = 460 + 70 * step, 50 + 40 * rank
            drawing.rect(x, y, 58, 32, COLORS[source], radius=4)
            drawing.text(x + 29, y + 21, block.format(source, source), 11, "middle", "#fff")
    for step in range(4):
        drawing.text(489 + 70 * step, 226, f"step {step}", 11, "middle", opacity="0.8")
    drawing.text(370, 258, notes[0], 12)
    drawing.text(370, 276, notes[1], 12)
    return str(drawing)


def partial_dft() -> str:
    """Draw how the kept modes of a sharded field are computed: a local matrix product and a sum over ranks."""
    drawing = Drawing(760, 280, "Partial DFT: local rows times kept columns of the DFT matrix, then a sum over ranks")
    drawing.text(20, 24, "Field, rows on 4 ranks", 13, bold=True)
    drawing.text(220, 24, "Kept columns of the DFT", 13, bold=True)
    drawing.text(440, 24, "Partial modes", 13, bold=True)
    drawing.text(610, 24, "Modes, sharded", 13, bold=True)
    for rank in range(4):
        y = 44 + 52 * rank
        drawing.rect(20, y, 130, 46, COLORS[rank], radius=3)
        rank_label(drawing, 85, y + 28, rank)
        drawing.text(175, y + 30, "x", 14, "middle")
        drawing.rect(220, y, 26, 46, COLORS[rank], radius=3, opacity="0.65")
        drawing.text(258, y + 28, "its rows, kept modes", 11, opacity="0.85")
        drawing.text(415, y + 30, "=", 14, "middle")
        drawing.rect(440, y + 12, 130, 22, COLORS[rank], radius=3, opacity="0.45")
        drawing.arrow((580, y + 23), (606, y + 23))
        drawing.rect(610, y + 17, 130, 11, COLORS[rank], radius=2)
    drawing.text(
        20, 270, "The messages have the size of the kept modes, not of the field: one reduce-scatter forward.", 12
    )
    return str(drawing)
