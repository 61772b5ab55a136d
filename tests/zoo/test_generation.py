"""transformers' Llama generates from a prompt that is sharded along the sequence, with its own cache, unmodified."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard
from tests.zoo.vision import Llama

pytest.importorskip("transformers")
PROMPT, NEW = 23, 7


def model():
    torch.manual_seed(0)
    return Llama().double().eval().model


def prompt():
    return torch.randint(0, 61, (2, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def step_by_step(model, tokens):
    """Return the logits of greedy generation with the model's own cache, the chosen tokens, and the cache."""
    embed = model.get_input_embeddings()
    out = model(inputs_embeds=embed(tokens), use_cache=True)
    logits, chosen = [out.logits[:, -1:]], []
    for _ in range(NEW):
        chosen.append(logits[-1].argmax(-1))
        out = model(inputs_embeds=embed(chosen[-1]), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1:])
    return torch.cat(logits, 1), torch.cat(chosen, 1), out.past_key_values


def on_rank(sizes: tuple[int, ...]):
    mesh = init_device_mesh("cpu", (len(sizes),), mesh_dim_names=("domain",))
    full = prompt()
    layout = Layout.of(mesh, [Shard(1)], full.shape, {1: sizes})
    with explain() as report:
        logits, chosen, cache = step_by_step(model(), ShardTensor(local_shard(full, layout), layout))
    keys = cache.layers[0].keys
    return logits.full_tensor(), chosen.full_tensor(), str(keys.placements), len(report.gathers), len(report.lost)


@pytest.mark.parametrize("sizes", [(12, 11), (15, 0, 8)])
def test_logits_and_tokens(sizes):
    expected, tokens, _ = step_by_step(model(), prompt())
    for logits, chosen, placements, gathers, lost in run_on_ranks(on_rank, len(sizes), sizes, timeout=120):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
        assert torch.equal(chosen, tokens)
        assert placements == "(Shard(dim=2),)" and not gathers and not lost


def generated(sizes: tuple[int, ...]):
    mesh = init_device_mesh("cpu", (len(sizes),), mesh_dim_names=("domain",))
    full = prompt()
    layout = Layout.of(mesh, [Shard(1)], full.shape, {1: sizes})
    tokens = ShardTensor(local_shard(full, layout), layout)
    out = model().generate(tokens, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return out.full_tensor() if isinstance(out, ShardTensor) else out


def test_generate():
    """`generate` itself: its loop, stopping criteria and cache."""
    expected = model().generate(prompt(), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for found in run_on_ranks(generated, 2, (12, 11), timeout=120):
        assert torch.equal(found, expected)
