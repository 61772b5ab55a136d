"""Results as large as the field stay sharded: layouts, bytes, values and gradients of programs against one device."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardfield import ShardingError, ShardTensor, compile, explain, strict
from shardfield.dim_sharding import snapped
from shardfield.layout import Layout
from shardfield.planning import simulated, watch, without_data
from shardfield.testing import run_on_ranks
from tests.harness import any_rank, ignore_gather_warnings, local_shard, to_full_tensor, world_mesh
from tests.ops.layout_models import AFNOBlock, SpectralMLP

FIELD = (1, 30, 40, 64)  # more elements than `runtime.MIN_SCATTERED`
IMAGE = (2, 32, 34, 40)
ROWS = (1500, 50)
ENTRIES = torch.randint(ROWS[0], (1200,), generator=torch.Generator().manual_seed(1))  # fewer than rows


class Program(NamedTuple):
    """A call on a tensor of `shape` placed as `placements` (one per mesh axis).

    placed: the dims that the result is sharded on, axis by axis. bytes: the most that a rank sends in forward, as a
    multiple of the bytes of its share of the input.
    """

    run: Callable[[Any], Any]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    placed: tuple[int, ...]
    bytes: float


def written(write: Callable[[Tensor, Any], Any], plain: bool, pad: int = 0, factor: int = 1) -> Callable[[Any], Any]:
    """Return a program that writes a field into a buffer with twice the channels.

    The buffer has `factor` times the rows and columns, and `pad` more.
    """

    def run(x: Any) -> Any:
        shape = (x.shape[0], 2 * x.shape[1], factor * x.shape[2] + pad, factor * x.shape[3] + pad)
        buffer = torch.zeros(shape, dtype=x.dtype) if plain else x.new_zeros(shape)
        write(buffer, x)
        return buffer * 2

    return run


def assign(buffer, x):
    buffer[:, : x.shape[1]] = x


def assign_inside(buffer, x):
    buffer[:, 1 : 1 + x.shape[1], 1:-1, 1:-1] = x


def copy_inside(buffer, x):
    buffer[:, 1 : 1 + x.shape[1], 1:-1, 1:-1].copy_(x)


def add_inside(buffer, x):
    buffer[:, :, 1:-1][:, 1 : 1 + x.shape[1], :, 1:-1].add_(x)
    buffer[:, : x.shape[1], 1:-1, 1:-1] += x


def assign_nested(buffer, x):
    buffer[0][: x.shape[1], 1:-1, 1:-1] = x[0]


def assign_steps(buffer, x):
    buffer[:, ::2, ::2, 1::2] = x
    buffer[:, 1::2, 1::2, ::2] = 2 * x


def assign_halves(buffer, x):
    rows, columns = x.shape[2:]
    buffer[:, : x.shape[1], :rows, :columns] = x
    buffer[:, x.shape[1] :, rows:, columns:] = x.sin()


def assign_rows(buffer, x):
    buffer[:, : x.shape[1], torch.arange(x.shape[2]) * 2, 1 : 1 + x.shape[3]] = x


def assign_masked(buffer, x):
    buffer[:, : x.shape[1], torch.arange(buffer.shape[2]) % 2 > 0, : x.shape[3]] = x


def add_slice(buffer, x):
    buffer[:, x.shape[1] :].add_(x)


def add_in_place(buffer, x):
    buffer[:, : x.shape[1], : x.shape[2]] += x[:, :, :, :1]


def copy_narrow(buffer, x):
    buffer.narrow(1, 3, x.shape[1]).copy_(x)


def copy_sample(buffer, x):
    buffer[1, ::2].copy_(x[0])


def add_all(buffer, x):
    buffer += torch.cat([x, x], 1)


def pad_columns(x):
    """Pad columns periodically, in a buffer that has the rows of the field: `new_zeros` shards it along these."""
    buffer = x.new_zeros(*x.shape[:3], x.shape[3] + 4)
    buffer[..., 2:-2].copy_(x)
    buffer[..., :2] = x[..., -2:]
    buffer[..., -2:] = x[..., :2]
    return buffer * 2


def stack_rows(x):
    """Stack rows of a sharded dim, each of which is on the ranks of one coordinate."""
    return torch.stack([x[:, i].exp() for i in range(x.shape[1])], 1)


def put_rows(plain):
    """Return a program that writes rows, and adds rows, at places of an index."""

    def run(x):
        shape = (3 * len(x), x.shape[1] + 2)
        buffer = torch.zeros(shape, dtype=x.dtype) if plain else x.new_zeros(shape)
        places = torch.arange(len(x)) * 7 % len(buffer)
        buffer.index_put_((places, torch.tensor(3)), x[:, 0], accumulate=True)
        buffer[1:][places[: len(x) // 2], 1:-1] = x[: len(x) // 2]
        return buffer * 2

    return run


def marked_rows(x):
    """Return a matrix with ones in the rows of the largest sums."""
    order = x.sum(1).argsort()
    marks = x.new_zeros(2 * len(x), 40)
    marks[order[: len(x) // 2]] = 1
    return marks + x.amax()


def best_rows(x):
    """Select the rows of the largest sums, as pooling of graphs does: a mask takes the first of an order."""
    order = x.sum(1).argsort(descending=True)
    return x[order[torch.arange(len(x)) < len(x) // 3]] * 2


def scan_rows(x):
    """Stack the states of a scan along a sharded dim, each on the rank of the first row."""
    return torch.stack(list(itertools.accumulate(x.unbind(), lambda state, row: 0.9 * state + row)))


def one_hot(x):
    """Return the one-hot matrix of the nearest code of each row, as a codebook does, and its product with the codes."""
    codes = torch.arange(16 * x.shape[1], dtype=x.dtype).view(16, -1).sin()
    nearest = torch.cdist(x, codes).argmin(1)
    found = torch.zeros(len(x), 16, dtype=x.dtype).scatter_(1, nearest.unsqueeze(1), 1)
    return found @ codes + x


def squared_matrix(x):
    """Return the entries of the square of a sparse matrix of as many edges as rows."""
    nodes = torch.arange(len(x))
    edges = torch.stack([nodes, nodes * 7 % len(x)])
    matrix = torch.sparse_coo_tensor(edges, x[:, 0] * x[:, 1], (len(x), len(x)))
    return (matrix @ matrix).coalesce().values()


def attend_in_windows(x):
    """Attend in windows of 4 x 4, with a mask of each window and without."""
    n, h, w, c = x.shape
    windows = x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 1, 16, c)
    visible = (torch.arange(256 * len(windows)) % 7 > 0).view(-1, 1, 16, 16)
    for mask in (visible, None):
        windows = F.scaled_dot_product_attention(windows, windows, windows, mask)
    return windows.view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)


torch.manual_seed(0)
MODELS: dict[str, nn.Module] = {
    "spectral MLP": SpectralMLP(64).double(),
    "AFNO block": AFNOBlock(64).double(),
    "AFNO block, few modes": AFNOBlock(64, kept=0.4).double(),
    "conv": nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()).double(),
    "linear": nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False)).double(),
}
BY_ROWS, BY_CHANNELS, SUM = (Shard(1),), (Shard(3),), (Partial(),)
WRITES = {"assign": assign, "add slice": add_slice, "narrow": copy_narrow, "sample": copy_sample, "add all": add_all}
PROGRAMS: dict[str, Program] = {
    "fft, MLP": Program(MODELS["spectral MLP"], FIELD, BY_ROWS, (1,), 2.1),
    "AFNO": Program(MODELS["AFNO block"], FIELD, BY_ROWS, (1,), 1.2),
    "AFNO, few modes": Program(MODELS["AFNO block, few modes"], FIELD, BY_ROWS, (1,), 2.0),
    "linear of channels": Program(MODELS["linear"], FIELD, BY_CHANNELS, (2,), 0.6),
    "conv of channels": Program(MODELS["conv"], IMAGE, (Shard(1),), (0,), 0.6),
    "fft, conv": Program(
        lambda x: MODELS["conv"](torch.fft.ifft(torch.fft.fft(x, dim=2), dim=2).real), IMAGE, (Shard(2),), (3,), 2.4
    ),
    "gelu of a sum": Program(F.gelu, FIELD, SUM, (2,), 0.5),
    "softmax of a sum": Program(lambda x: x.softmax(-1), FIELD, SUM, (2,), 0.5),
    "layer_norm of a sum": Program(lambda x: F.layer_norm(x, x.shape[-1:]), FIELD, SUM, (2,), 0.5),
    "group_norm of a sum": Program(lambda x: F.group_norm(x, 4), IMAGE, SUM, (0,), 0.5),
    "sort of a sum": Program(lambda x: x.sort(-1)[0], FIELD, SUM, (2,), 0.5),
    "amax of two halves": Program(lambda x: x.unflatten(1, (2, 15)).amax(1), FIELD, BY_ROWS, (3,), 0.6),
    "max of two halves": Program(lambda x: x.unflatten(1, (2, 15)).max(1)[0], FIELD, BY_ROWS, (3,), 0.6),
    "a sum of sums, then tanh": Program(lambda x: torch.tanh(x + 2 * x), FIELD, SUM, (2,), 0.5),
    "cat of a sum": Program(lambda x: torch.cat([x, torch.ones_like(x)], 1), FIELD, SUM, (2,), 0.5),
    "index": Program(lambda x: x[ENTRIES].relu(), ROWS, (Shard(0),), (0,), 0.8),
    "index_select": Program(lambda x: x.index_select(0, ENTRIES), ROWS, (Shard(0),), (0,), 0.8),
    "best rows": Program(best_rows, ROWS, (Shard(0),), (0,), 0.5),
    "columns": Program(pad_columns, IMAGE, (Shard(3),), (3,), 0.3),
    "put rows, plain": Program(put_rows(True), ROWS, (Shard(0),), (0,), 1.1),
    "put rows, new_zeros": Program(put_rows(False), ROWS, (Shard(0),), (0,), 1.1),
    "marked rows": Program(marked_rows, ROWS, (Shard(0),), (0,), 0.5),
    "one-hot": Program(one_hot, ROWS, (Shard(0),), (0,), 0.01),
    "states of a scan": Program(scan_rows, (16, 4000), (Shard(0),), (1,), 1.1),
    "table of two rows": Program(lambda x: x[0][:, None] * x[1].exp(), (64, 400), (Shard(0),), (0,), 0.05),
    "squared sparse matrix": Program(squared_matrix, ROWS, (Shard(0),), (0,), 0.3),
    "gather": Program(lambda x: x.gather(0, ENTRIES[:, None].expand(-1, 50)), ROWS, (Shard(0),), (0,), 0.8),
    "take_along_dim": Program(lambda x: x.take_along_dim(ENTRIES[:, None], 0), ROWS, (Shard(0),), (0,), 0.8),
    "embedding": Program(lambda x: F.embedding(ENTRIES.view(24, 50), x), ROWS, (Shard(0),), (1,), 0.8),
    **{
        f"{name}, {'plain' if plain else 'new_zeros'}": Program(written(write, plain), IMAGE, (Shard(2),), (2,), 0.01)
        for name, write in WRITES.items()
        for plain in (True, False)
    },
    **{
        f"{name} inside, {'plain' if plain else 'new_zeros'}": Program(
            written(write, plain, 2), IMAGE, (Shard(dim),), (dim,), 0.01
        )
        for name, write in {"assign": assign_inside, "copy": copy_inside, "add": add_inside}.items()
        for plain, dim in ((True, 2), (False, 3))
    },
    **{
        f"{name}, {'plain' if plain else 'new_zeros'}": Program(
            written(write, plain, pad, factor), IMAGE, (Shard(2),), (2,), sent
        )
        for name, write, pad, factor, sent in (
            ("nested slices", assign_nested, 2, 1, 0.01),
            ("steps", assign_steps, 0, 2, 0.01),
            ("halves", assign_halves, 0, 2, 2.0),
            ("rows of an index", assign_rows, 2, 2, 1.1),
            ("rows of a mask", assign_masked, 0, 2, 1.1),
        )
        for plain in (True, False)
    },
    "add in place, plain": Program(written(add_in_place, True), IMAGE, (Shard(2),), (2,), 0.01),
}
TWO_AXES: dict[str, Program] = {
    "fft, MLP": Program(MODELS["spectral MLP"], FIELD, (Shard(1), Shard(2)), (1, 2), 4.2),
    "AFNO": Program(MODELS["AFNO block"], FIELD, (Shard(1), Shard(2)), (1, 2), 4.2),
    "gelu of a sum over both": Program(F.gelu, FIELD, (Partial(), Partial()), (2, 1), 0.8),
    "gelu of a sum over one": Program(F.gelu, (8, 30, 20, 40), (Shard(0), Partial()), (0, 2), 0.6),
    "rows of both": Program(F.gelu, (1, 4000, 40), (Shard(1), Partial()), (1, 1), 0.6),
    "maximum": Program(lambda x: x.relu(), FIELD, (Partial("max"), Replicate()), (2, None), 1.1),  # type: ignore
    "index": Program(lambda x: x[ENTRIES].relu(), ROWS, (Shard(0), Shard(1)), (0, 1), 0.8),
    "index by one axis": Program(lambda x: x[ENTRIES].relu(), ROWS, (Replicate(), Shard(0)), (None, 0), 0.8),  # type: ignore
    "narrow": Program(written(copy_narrow, True), IMAGE, (Shard(2), Shard(3)), (2, 3), 0.01),
    **{
        f"{name}, {'plain' if plain else 'new_zeros'}": Program(
            written(write, plain, 2), IMAGE, (Shard(2), Shard(3)), (2, 3), 0.01
        )
        for name, write in {"assign inside": assign_inside, "add inside": add_inside, "nested": assign_nested}.items()
        for plain in (True, False)
    },
    "columns": Program(pad_columns, IMAGE, (Shard(2), Shard(3)), (2, 3), 0.11),
    "stacked rows": Program(stack_rows, FIELD, (Shard(1), Shard(2)), (1, 2), 0.01),
    "stacked rows of both axes": Program(stack_rows, FIELD, (Shard(1), Shard(1)), (1, 1), 0.01),
    "windows of two samples": Program(attend_in_windows, (2, 32, 40, 16), (Shard(1), Shard(2)), (1, 2), 0.01),
    "columns of channels": Program(pad_columns, IMAGE, (Shard(1), Shard(3)), (1, 3), 0.11),
}


def uneven(layout: Layout) -> Layout:
    """Return the layout with uneven shards; the last one is empty where there are three."""
    for dim in layout.sharded_dims:
        (factor,) = layout.dims[dim]
        n, parts = factor.size, len(factor.shard_sizes)
        sizes = (n - n // 3, n // 3) if parts == 2 else (n // 3, n - n // 3, *[0] * (parts - 2))
        layout = layout.with_dim(dim, factor._replace(shard_sizes=sizes))
    return layout


def check(programs: str, mesh: tuple[int, ...], sizes: str) -> list[str]:
    """Return, on a rank, what differs from one device or from the stated layouts and bytes."""
    wrong = []
    for name, program in {"one": PROGRAMS, "two": TWO_AXES}[programs].items():
        full = torch.randn(program.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        layout = Layout.of(world_mesh(mesh), program.placements, program.shape)
        layout = layout if sizes == "even" else uneven(layout)
        local = local_shard(full, layout)
        if any(op == "max" for _, op in layout.partial):
            local = full - layout.coords[0]
        x = ShardTensor(local.requires_grad_(), layout)
        plain = full.requires_grad_()
        wrong += [f"{name}, {sizes}: {text}" for text in compare(program, x, plain, sizes == "even")]
    return wrong


def compare(program: Program, x: ShardTensor, plain: Tensor, even: bool) -> list[str]:
    model = program.run if isinstance(program.run, nn.Module) else None
    twin: Any = copy.deepcopy(model) or program.run
    with strict(), explain() as report:
        out = program.run(x)
        sent = sum(row.bytes for row in report.rows)
        out.sin().sum().backward()
    expected = twin(plain)
    expected.sin().sum().backward()
    found = []
    pairs = [("value", out, expected), ("gradient", x.grad, plain.grad)]
    if any(op == "max" for _, op in x._layout.partial):  # only the largest value has a gradient
        plain.grad *= x._layout.coords[0] == 0
    if model is not None:
        pairs += [(n, p.grad, q.grad) for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True)]
        model.zero_grad()
    for what, got, wanted in pairs:
        got = to_full_tensor(got) if isinstance(got, ShardTensor) else got
        if not torch.allclose(got, wanted, rtol=1e-9, atol=1e-10):
            found.append(f"{what} differs by {(got - wanted).abs().max():.1e}")
    dims = tuple(p.dim if p.is_shard() else None for p in getattr(out, "placements", ()))
    ranks = math.prod(out.device_mesh.size(a) for a in out._layout.shard_axes)
    skewed = [row for row in report.unbalanced if row.op != "__getitem__"]  # some programs write half of the rows
    if even and (skewed or any_rank(out.to_local().numel() * ranks > 1.25 * out.numel())):
        found.append(f"the result is {out._layout}, not balanced: {skewed}")
    lost = [d is None for d in dims] != [d is None for d in program.placed]
    if lost or (even and dims != program.placed):  # which dim divides best depends on the number of ranks
        found.append(f"the result is {getattr(out, '_layout', 'plain')}, not sharded on {program.placed}")
    share = plain.numel() * 8 / math.prod(x.device_mesh.size(a) for a in x._layout.shard_axes)
    if even and any_rank(sent > program.bytes * share):
        found.append(f"sent {sent} bytes, {sent / share:.2f} times the shard, not at most {program.bytes}")
    return found


@pytest.mark.parametrize(
    ("programs", "mesh", "sizes"), [("one", (2,), "even"), ("one", (3,), "uneven"), ("two", (2, 2), "even")]
)
def test_results_stay_sharded(programs, mesh, sizes):
    found = run_on_ranks(check, math.prod(mesh), programs, mesh, sizes, timeout=240)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    assert not wrong, "\n".join(wrong)


def compiled() -> list[str]:
    """Return, on a rank, programs whose compiled form has other values, gradients or layouts."""
    wrong = []
    for name in ("gelu of a sum", "narrow, plain", "add slice, new_zeros", "columns"):
        program = PROGRAMS[name]
        full = torch.randn(program.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        layout = Layout.of(world_mesh((2,)), program.placements, program.shape)
        found = []
        for run in (program.run, compile(program.run)):
            x = ShardTensor(local_shard(full, layout).requires_grad_(), layout)
            out = run(x)
            out.sin().sum().backward()
            found.append((out._layout.bare, out.to_local(), x.grad.to_local()))
        (layout_of_eager, *eager), (layout_of_compiled, *tensors) = found
        if layout_of_eager is not layout_of_compiled or not all(map(torch.allclose, eager, tensors)):
            wrong.append(f"{name}: {layout_of_compiled}, eager {layout_of_eager}")
    return wrong


def test_compiled_programs_have_these_layouts():
    assert run_on_ranks(compiled, 2, timeout=120) == [[], []]


def inferred() -> list[str]:
    """Return, on a rank, programs that write by slices of `new_zeros` and lose the sharding in inference mode."""
    wrong = []
    for name in ("copy inside, new_zeros", "add inside, new_zeros", "nested slices, new_zeros", "steps, new_zeros"):
        program = PROGRAMS[name]
        full = torch.randn(program.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        layout = Layout.of(world_mesh((2,)), program.placements, program.shape)
        with strict(), torch.inference_mode():
            out = program.run(ShardTensor(local_shard(full, layout), layout))
            if not torch.allclose(to_full_tensor(out), program.run(full)) or not out._layout.is_sharded(
                program.placed[0]
            ):
                wrong.append(f"{name}: {out._layout}")
    return wrong


def test_buffers_of_inference_mode():
    assert run_on_ranks(inferred, 2) == [[], []]


# ---------------------------------------------------------------------- buffers that others refer to


def aliased() -> None:
    """Check that a buffer with another view keeps its layout: values are gathered, and strict() refuses a plain one."""
    full = torch.randn(IMAGE, generator=torch.Generator().manual_seed(3))
    layout = Layout.of(world_mesh((2,)), [Shard(2)], IMAGE)
    x = ShardTensor(local_shard(full, layout), layout)
    for make in (lambda: torch.zeros(2, 64, *IMAGE[2:]), lambda: x.new_zeros(2, 64, 35, 40)[:, :, 1:]):
        for by_slice in (False, True):
            buffer = make()
            other = buffer[:, 5:10] if layout.coords[0] else None  # one rank alone keeps a view
            plain = buffer.__class__ is Tensor
            if plain:
                with pytest.raises(ShardingError), strict():
                    (buffer[:, :32] if by_slice else buffer.narrow(1, 0, 32)).copy_(x)
            with ignore_gather_warnings(), explain() as report:
                (buffer[:, :32] if by_slice else buffer.narrow(1, 0, 32)).copy_(x)
            assert len(report.gathers) == plain
            assert buffer.__class__ is (Tensor if plain else ShardTensor)
            value = buffer if plain else to_full_tensor(buffer)
            assert torch.equal(value[:, :32], full) and not value[:, 32:].any()
            if other is not None:
                assert torch.equal(other if plain else other._local_tensor, full[:, 5:10])


def test_aliased_buffers_keep_their_layout():
    run_on_ranks(aliased, 2, timeout=60)


# ---------------------------------------------------------------------- memory of a rank of eight


def step_memory(ranks: int, model: Callable[[], nn.Module]) -> int:
    """Return the peak memory of a training step on one simulated rank, at 721 x 1440."""
    with simulated(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("h",))
        with without_data(), watch() as seen:
            net = model()
            layout = Layout.of(mesh, [Shard(1)], (1, 721, 1440, 128))
            x = ShardTensor(torch.zeros(layout.local_shape, requires_grad=True), layout)
            seen.restart()
            out = net(x)
            assert ranks == 1 or out.placements[0] == Shard(1)
            out.sum().backward()
            return seen.peak


@pytest.mark.filterwarnings("ignore:shardfield. __getitem__ unbalanced")  # half of the modes
@pytest.mark.parametrize("model", [lambda: AFNOBlock(128), lambda: SpectralMLP(128)], ids=["AFNO", "fft, MLP"])
def test_a_rank_of_eight_needs_an_eighth_of_the_memory(model):
    assert step_memory(8, model) <= 0.16 * step_memory(1, model)


@pytest.mark.parametrize("unit", [1, 2, 4, 7])
@pytest.mark.parametrize("sizes", [(11, 5), (0, 13), (5, 0, 0, 23), (3, 1, 1, 2, 21), (7, 7, 7, 7), (1,) * 28])
def test_boundaries_between_windows(sizes, unit):
    """Check that boundaries move by less than a window, and no further than needed for the smallest largest shard."""
    sizes = (*sizes, -sum(sizes) % unit)
    found = snapped(sizes, unit)
    bounds, marks = (list(itertools.accumulate(n, initial=0)) for n in (sizes, found))
    assert marks[-1] * unit == bounds[-1] and min(found) >= 0
    assert all(abs(mark * unit - bound) < unit for mark, bound in zip(marks, bounds, strict=True))
    assert max(found) <= -(-max(sizes) // unit)
