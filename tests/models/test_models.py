"""Models: a fully connected network, and an AFNO with channels sharded over ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardfield import runtime
from shardfield.comm import collectives
from shardfield.distributed.utils import compute_split_shapes
from shardfield.layout import starts
from shardfield.models.afno.distributed import DistributedAFNO
from shardfield.models.afno.distributed.channels import param_shardings_of
from shardfield.models.mlp.activations import ACTIVATIONS
from shardfield.models.mlp.fully_connected import FullyConnected
from shardfield.testing import run_on_ranks
from tests.distributed.test_utils import groups

# ---------------------------------------------------------------------- fully connected


def test_fully_connected_equals_its_definition():
    torch.manual_seed(0)
    model = FullyConnected(3, 5, 2, num_layers=4, activation_fn=["tanh", "relu"], skip_connections=True)
    x = torch.randn(7, 3)
    w = [(layer.linear.weight, layer.linear.bias) for layer in model.layers]
    linear = torch.nn.functional.linear
    h0 = torch.tanh(linear(x, *w[0]))
    h1 = torch.relu(linear(h0, *w[1]))
    h2 = torch.relu(linear(h1, *w[2]))
    h3 = torch.relu(linear(h2 + h0, *w[3]))
    torch.testing.assert_close(model(x), linear(h3, model.final_layer.linear.weight, model.final_layer.linear.bias))
    assert not any(bias.any() for _, bias in w)
    assert model(torch.zeros(2, 4, 3)).shape == (2, 4, 2)


def test_fully_connected_defaults():
    model = FullyConnected()
    assert model(torch.zeros(1, 512)).shape == (1, 512) and len(model.layers) == 6
    assert set(dict(model.named_parameters())) == {
        f"{layer}.linear.{p}"
        for layer in [*(f"layers.{i}" for i in range(6)), "final_layer"]
        for p in ("weight", "bias")
    }


def test_fully_connected_options():
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    plain = FullyConnected(3, 5, 2, 2, "tanh")
    adaptive = FullyConnected(3, 5, 2, 2, "tanh", adaptive_activations=True)
    adaptive.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(adaptive(x), plain(x))
    adaptive.layers[0].activation_par.data.fill_(2.0)  # one parameter for all layers
    assert adaptive.layers[1].activation_par is adaptive.layers[0].activation_par
    assert not torch.allclose(adaptive(x), plain(x))

    normed = FullyConnected(3, 5, 2, 2, "tanh", weight_norm=True)
    factored = FullyConnected(3, 5, 2, 2, "tanh", weight_fact=True)
    for i, layer in enumerate(plain.layers):
        weight, bias = layer.linear.weight.data, layer.linear.bias.data
        norm = weight.norm(dim=1, keepdim=True)
        normed.layers[i].linear.load_state_dict({"weight": 3 * weight, "weight_g": norm, "bias": bias})
        g = factored.layers[i].linear.g.data
        assert bool(((g > 1.5) & (g < 4.5)).all())
        factored.layers[i].linear.load_state_dict({"g": g, "v": weight / g, "bias": bias})
    for model in (normed, factored):
        model.final_layer.load_state_dict(plain.final_layer.state_dict())
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_fully_connected_activations():
    for name in ACTIVATIONS:
        model = FullyConnected(3, 4, 2, 1, name)
        assert model(torch.randn(5, 3)).isfinite().all(), name
        pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="no activation is named 'swosh'; there are relu"):
        FullyConnected(activation_fn="swosh")
    with pytest.raises(ValueError, match="exclude each other"):
        FullyConnected(weight_norm=True, weight_fact=True)
    with pytest.raises(ValueError, match="0 hidden layers"):
        FullyConnected(num_layers=0)


# ---------------------------------------------------------------------- AFNO

SHAPE = dict(inp_shape=(8, 12), in_channels=5, out_channels=3, patch_size=4, embed_dim=16, depth=2, num_blocks=4)


def test_afno_on_one_process_equals_its_definition():
    """Compare with a second implementation that uses complex numbers and one block after the other."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = DistributedAFNO(**SHAPE)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        x = torch.randn(2, 5, 8, 12)
        torch.testing.assert_close(model(x), reference_afno(model.state_dict(), x))
    finally:
        torch.set_default_dtype(torch.float32)


def reference_afno(state, x):
    F = torch.nn.functional

    def norm(x, name):
        return F.layer_norm(x, (16,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def complex_(name):
        return torch.view_as_complex(state[name])

    def parts(fn, z):
        return torch.complex(fn(z.real), fn(z.imag))

    t = F.conv2d(x, state["embedding.weight"], state["embedding.bias"], stride=4).permute(0, 2, 3, 1)
    t = t + state["embedding.position"]
    for i in range(2):
        n = norm(t, f"blocks.{i}.norm1")
        spectrum = torch.fft.rfft2(n, dim=(1, 2), norm="ortho")
        mixed = torch.empty_like(spectrum)
        for k in range(4):
            z = spectrum[..., 4 * k : 4 * k + 4]
            z = parts(torch.relu, z @ complex_(f"blocks.{i}.mixing.w1")[k] + complex_(f"blocks.{i}.mixing.b1")[k])
            z = z @ complex_(f"blocks.{i}.mixing.w2")[k] + complex_(f"blocks.{i}.mixing.b2")[k]
            mixed[..., 4 * k : 4 * k + 4] = parts(lambda r: r.sign() * (r.abs() - 0.01).clamp(min=0), z)
        t = t + n + torch.fft.irfft2(mixed, s=n.shape[1:3], dim=(1, 2), norm="ortho")
        mlp = {p: state[f"blocks.{i}.mlp.{p}"] for p in ("w1", "b1", "w2", "b2")}
        hidden = F.gelu(F.linear(norm(t, f"blocks.{i}.norm2"), mlp["w1"], mlp["b1"]))
        t = t + F.linear(hidden, mlp["w2"], mlp["b2"])
    return F.conv_transpose2d(t.permute(0, 3, 1, 2), state["head.weight"].permute(3, 0, 1, 2), stride=4)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_afno_equals_one_process(world):
    run_on_ranks(afno_equals_one_process, world)


def afno_equals_one_process():
    torch.set_default_dtype(torch.float64)
    reference = DistributedAFNO(**SHAPE)
    for parameter in reference.parameters():  # not the initial zeros and ones
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 5, 8, 12)
    weight = torch.randn(2, 3, 8, 12)
    world = dist.get_world_size()
    with groups(model_parallel=world):
        for own_inputs in (False, True):
            for own_outputs in (False, True):
                compare(reference, x, weight, own_inputs, own_outputs)


def compare(reference, x, weight, own_inputs, own_outputs):
    def own(t, yes):
        return part(t, 1, compute_split_shapes(t.shape[1], world)) if yes else t

    rank, world = dist.get_rank(), dist.get_world_size()
    reference.zero_grad()
    x = x.clone().requires_grad_()
    expected = reference(x)
    (expected * weight).sum().backward()

    model = DistributedAFNO(**SHAPE, channel_parallel_inputs=own_inputs, channel_parallel_outputs=own_outputs)
    model.load_full_state_dict(reference.state_dict())
    mine = own(x.detach(), own_inputs).clone().requires_grad_()
    got = model(mine)
    close(got, own(expected, own_outputs))
    (got * own(weight, own_outputs)).sum().backward()
    close(mine.grad, own(x.grad, own_inputs))
    shardings = param_shardings_of(model)
    full = dict(reference.named_parameters())
    assert set(shardings) == set(full) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        close(parameter.grad, shardings[name].of(full[name].grad, rank))
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, full[name])
    # No parameter is stored twice.
    held = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in full.values()) == int(collectives.all_reduce(torch.tensor(held), dist.group.WORLD))


def part(t, dim, lengths):
    return t.narrow(dim, starts(lengths)[dist.get_rank()], lengths[dist.get_rank()])


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_afno_by_seed_and_copied():
    run_on_ranks(by_seed, 2)


def by_seed():
    torch.manual_seed(3)
    full = DistributedAFNO(**SHAPE)
    x = torch.randn(1, 5, 8, 12)
    with groups(model_parallel=2):
        torch.manual_seed(3)
        model = DistributedAFNO(**SHAPE)
        torch.testing.assert_close(model(x), full(x))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), model(x))
        half = model.bfloat16()
        torch.testing.assert_close(half(x.bfloat16()).float(), full(x), rtol=0.05, atol=0.05)
        with pytest.raises(
            ValueError, match=r"blocks.0.mlp.w1 has shape \(3, 3\), the one-process model's is \(64, 16\)"
        ):
            model.load_full_state_dict(full.state_dict() | {"blocks.0.mlp.w1": torch.zeros(3, 3)})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_full_state_dict({})


def test_afno_messages():
    run_on_ranks(afno_messages, 2)


def afno_messages():
    """Check the messages of a block: two norms of two numbers per token, an all_gather and a reduce_scatter."""
    sent = []
    with groups(model_parallel=2), torch.no_grad():
        model = DistributedAFNO(**SHAPE)
        x = torch.randn(1, 5, 8, 12)
        runtime.active.meter = lambda kind, messages, nbytes: sent.append((kind, nbytes))
        model(x)
        runtime.active.meter = None
    tokens, width, image = 2 * 3, 16, 3 * 8 * 12
    norm, half = ("all_gather", 2 * tokens * 4), tokens * width * 4 // 2
    block = [norm, norm, ("all_gather", half), ("exchange", half)]
    assert sorted(sent) == sorted([*block, *block, ("all_reduce", image * 4)])


def test_afno_with_data_parallel():
    run_on_ranks(with_data_parallel, 4)


def with_data_parallel():
    """Shard channels over two ranks and samples over two: gradients are those of the mean over all samples."""
    torch.set_default_dtype(torch.float64)
    full = DistributedAFNO(**SHAPE)
    x = torch.randn(2, 5, 8, 12)
    full(x).square().mean().backward()
    with groups(model_parallel=2) as manager:
        manager.create_orthogonal_process_group("data_parallel", "model_parallel")
        model = DistributedAFNO(**SHAPE)
        model.load_full_state_dict(full.state_dict())
        ddp = DistributedDataParallel(model, process_group=manager.group("data_parallel"))
        sample = manager.group_rank("data_parallel")
        ddp(x[sample : sample + 1]).square().mean().backward()
        gradients = dict(full.named_parameters())
        for name, sharding in param_shardings_of(model).items():
            own = sharding.of(gradients[name].grad, manager.group_rank("model_parallel"))
            close(model.get_parameter(name).grad, own)
        del ddp  # before its process group


def test_afno_refuses_bad_arguments():
    for change, match in (
        (dict(inp_shape=(8, 10)), "8 x 10 is not divisible into patches of 4"),
        (dict(embed_dim=18), "18 channels are not divisible into 4 equal blocks"),
    ):
        with pytest.raises(ValueError, match=match):
            DistributedAFNO(**SHAPE | change)
    with pytest.raises(ValueError, match=r"expected \(batch, 5, 8, 12\), got \(1, 5, 12, 8\)"):
        DistributedAFNO(**SHAPE)(torch.zeros(1, 5, 12, 8))
    run_on_ranks(too_many_ranks, 4)


def too_many_ranks():
    with groups(model_parallel=4), pytest.raises(ValueError, match="2 blocks of channels are too few for the 4 ranks"):
        DistributedAFNO(**SHAPE | dict(num_blocks=2))
