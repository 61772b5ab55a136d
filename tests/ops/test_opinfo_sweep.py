"""A fixed sample of the sweep over PyTorch's operator database; `make sweep` runs all of it."""

from __future__ import annotations

import pytest

from tests.ops import opinfo_sweep as sweep

FINE = {"rule", "gather", "refused", "one device refuses", "no samples"}


def test_sample_of_the_operator_database():
    names = [(o.name, o.variant_test_name) for o in sweep.operators()][3::20]
    assert len(names) > 25
    table = sweep.sweep(names, world=2, limit=3, per_sample=3)
    bad = [v for rows in table.values() for v in rows if v[0] not in FINE]
    assert not bad, "\n".join(f"{kind}: {where}: {why}" for kind, where, why in bad)
    counts = sweep.counted(table)
    assert counts["rule"] + counts["gather"] >= 0.98 * sweep.judged(counts)


def test_page_with_lower_numbers_is_not_written(tmp_path):
    better = {"a": [("rule", "a", "")] * 9 + [("gather", "a", "")]}
    worse = {"a": [("rule", "a", "")] * 8 + [("gather", "a", "")] * 2}
    sweep.write_page(worse, tmp_path / "page.md", "first")
    sweep.write_page(better, tmp_path / "page.md", "second")
    assert sweep.shares((tmp_path / "page.md").read_text()) == (100.0, 90.0)
    with pytest.raises(SystemExit, match="fell"):
        sweep.write_page(worse, tmp_path / "page.md", "third")
