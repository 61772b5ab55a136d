"""Run every example and check its output: one under torchrun, the others forked, which saves their imports."""

import re
from pathlib import Path

import pytest

from tests.launch import ROOT, torchrun

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_tested(path):
    assert len(path.read_text().splitlines()) <= 80
    tested = path.name in Path(__file__).read_text() or path.stem.startswith("gallery_")  # test_gallery.py
    assert tested, f"{path.name} is run by no test in {Path(__file__).name}"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_named_on_a_page(path):
    pages = [page for page in (ROOT / "docs").glob("*.md") if f"examples/{path.name}" in page.read_text()]
    assert pages, f"no page of docs/ names examples/{path.name}"


def trained(out: str) -> tuple[float, str]:
    """Return the final loss and parameter norm that a rank of train_ddp.py prints."""
    loss, norm = re.fullmatch(r"rank \d of \d on cpu: loss ([\d.]+), \|parameters\| ([\d.]+)\n", out).groups()
    return float(loss), norm


def test_train_ddp_in_one_process(forks, tmp_path):
    (out,) = forks.run(EXAMPLES / "train_ddp.py", tmp_path)
    loss, _ = trained(out)
    # 128 x 64 targets of variance 1, and a model that can only learn their mean.
    assert loss == pytest.approx(128 * 64, rel=0.1)


def test_train_ddp(tmp_path):
    losses, norms = zip(*map(trained, torchrun(EXAMPLES / "train_ddp.py", 2, tmp_path)), strict=True)
    assert len(set(losses)) == 2, "each rank draws its own batches"
    assert len(set(norms)) == 1, "all ranks end with the same parameters"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["device_mesh_2d.py", "device_mesh.py"])
def test_device_mesh_by_hand_and_by_mesh(name, ranks, forks, tmp_path):
    out = forks.run(EXAMPLES / name, tmp_path, ranks)
    size = max(ranks // 2, 1)
    for rank, text in enumerate(out):
        row = list(range(rank // size * size, rank // size * size + size))
        assert f"{rank=} shards with {row} and replicates with {list(range(rank % size, ranks, size))}" in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hsdp_on_fewer_ranks(ranks, forks, tmp_path):
    for text in forks.run(EXAMPLES / "hsdp.py", tmp_path, ranks):
        assert f"holds {-(-165 // max(ranks // 2, 1))} of 165 parameters" in text


def test_hsdp(forks, tmp_path):
    out = forks.run(EXAMPLES / "hsdp.py", tmp_path, 8)
    held, norms = zip(*(re.findall(r"holds (\d+) of .* norm ([\d.]+)", text)[0] for text in out), strict=True)
    # Four ranks shard the 165 parameters, padded to a multiple of four; all print the norm of the same gradient.
    assert set(held) == {"42"}
    assert len(set(norms)) == 1 and float(norms[0]) > 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vector_add(ranks, forks, tmp_path):
    first, *others = forks.run(EXAMPLES / "vector_add.py", tmp_path, ranks)
    assert f"{ranks} ranks: c is (1000000,) (Shard(dim=0),), agrees: True" in first and not any(others)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vector_dot(ranks, forks, tmp_path):
    first, *others = forks.run(EXAMPLES / "vector_dot.py", tmp_path, ranks)
    numbers = re.findall(r"-?\d+\.\d\d", "".join([first, *others]))
    assert len(numbers) == 2 * ranks + 1 and len(set(numbers)) == 1, "one device, the rule and the handler agree"
    assert "(Replicate(),)" in first


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reshape_subtract(ranks, forks, tmp_path):
    first, *_ = forks.run(EXAMPLES / "reshape_subtract.py", tmp_path, ranks)
    assert first.splitlines() == [
        "a_sharded shape and placement: torch.Size([234567, 3]), (Shard(dim=0),)",
        "b_sharded shape and placement: torch.Size([12345, 3]), (Shard(dim=0),)",
        "a_sharded shape and placement: torch.Size([1, 234567, 3]), (Shard(dim=1),)",
        "b_sharded shape and placement: torch.Size([12345, 1, 3]), (Shard(dim=0),)",
        "distance_vec shape and placement: torch.Size([300, 2000, 3]), (Shard(dim=1),)",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_knn_by_broadcasting(ranks, forks, tmp_path):
    assert re.match(r"broadcasting \(303, 17\) .* agrees: True", forks.run(EXAMPLES / "knn.py", tmp_path, ranks)[0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_knn_by_a_ring(ranks, forks, tmp_path):
    out, *_ = forks.run(EXAMPLES / "knn.py", tmp_path, ranks, "--ring")
    assert "ring (303, 17) (Shard(dim=0),) agrees: True" in out


def test_graph(forks, tmp_path):
    first, second = forks.run(EXAMPLES / "graph.py", tmp_path, 2)
    before, after = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", first)[0])
    share = int(re.findall(r"sends at most (\d+)% of the nodes", first)[0])
    assert after < before and 0 < share < 15 and "agrees: True" in first and not second


@pytest.mark.parametrize("ranks", [2, 4])
def test_unet(ranks, forks, tmp_path):
    first, *others = forks.run(EXAMPLES / "unet.py", tmp_path, ranks)
    assert "gradients within 1e-5: True" in first and not any(others)
    loss, alone = re.findall(r"loss ([\d.]+), on one process ([\d.]+)", first)[0]
    assert float(loss) == pytest.approx(float(alone), rel=1e-4)
    assert "conv2d" in first and "gather " not in first


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_train_cnn(ranks, forks, tmp_path):
    first, *others = forks.run(EXAMPLES / "train_cnn.py", tmp_path, ranks)
    assert not any(others) and re.findall(r"^Epoch (\d)$", first, re.M) == ["1", "2", "3", "4", "5"]
    losses = [float(x) for x in re.findall(r"^Step [02468], Loss: ([\d.]+)$", first, re.M)]
    # Labels are noise, so a model of ten classes stays at log(10).
    assert len(losses) == 25 and sum(losses) / 25 == pytest.approx(2.3026, abs=0.1)


def test_tfno_fsdp(forks, tmp_path):
    first, second = forks.run(EXAMPLES / "tfno_fsdp.py", tmp_path, 2)
    errors = re.findall(r"^epoch (\d), (\d+) x \d+: h1 ([\d.]+) l2 ([\d.]+)$", first, re.M)
    assert [(int(epoch), int(points)) for epoch, points, _, _ in errors] == [(e, r) for e in range(4) for r in (16, 46)]
    assert float(errors[-2][2]) < 0.9 * float(errors[0][2]), "the loss decreases"
    held = [re.findall(r"holds (\d+) of (\d+) parameters", out)[0] for out in (first, second)]
    assert all(int(part) == -(-int(full) // 2) for part, full in held), "each rank holds half of the parameters"


def test_tfno(forks, tmp_path):
    for rank, text in enumerate(forks.run(EXAMPLES / "tfno.py", tmp_path, 2)):
        header, row = text.splitlines()
        assert header == f"rank {rank}: (1, 1, 32, 64) of (1, 1, 64, 64), (Shard(dim=2),)"
        here, alone = re.search(r"loss ([\d.]+), on one device ([\d.]+);", row).groups()
        # 8 channels of 8 x 5 modes, and the consensus on a slice, on the write into zeros and on an inverse
        assert here == alone and row.endswith("{'convs.0': 2632, 'convs.1': 2632}")
