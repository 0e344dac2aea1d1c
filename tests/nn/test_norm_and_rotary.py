import pytest
import torch

from parallel_attn import AxisGroup, SettingsError
from parallel_attn.nn import Placement, RMSNorm, Rotary
from parallel_attn.nn.norm import rms_norm


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_against_its_formula(zero_centered):
    norm = RMSNorm(Placement(AxisGroup(), "n", dtype=torch.float64), 6, eps=1e-3, zero_centered=zero_centered)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, dtype=torch.float64))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gain = norm.weight + 1 if zero_centered else norm.weight
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain)


def test_gradients_of_the_norm_by_finite_differences():
    x, gain = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-2), (x, gain.requires_grad_()))
    torch.testing.assert_close(rms_norm(x, gain, 1e-2), torch.nn.functional.rms_norm(x, (5,), gain, 1e-2))
    frozen = rms_norm(x, gain.detach(), 1e-2).sum()
    torch.testing.assert_close(torch.autograd.grad(frozen, x), torch.autograd.grad(rms_norm(x, gain, 1e-2).sum(), x))


def test_a_norm_of_zeros_is_finite():
    x = torch.zeros(1, 4, requires_grad=True)
    rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad.isfinite().all()


def test_a_new_norm_changes_nothing_but_the_scale():
    for zero_centered in (False, True):
        norm = RMSNorm(Placement(AxisGroup(), "n"), 4, eps=0.0, zero_centered=zero_centered)
        torch.testing.assert_close(norm(torch.full((1, 4), 3.0)), torch.ones(1, 4))


def test_norm_of_bfloat16_computes_in_float32():
    norm = RMSNorm(Placement(AxisGroup(), "n"), 512)
    x = (torch.randn(4, 512) * 100).bfloat16()
    assert torch.equal(norm(x), norm(x.float()).bfloat16()) and norm(x).dtype == torch.bfloat16
    norm.to(torch.bfloat16)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def rotated_by_complex_numbers(x, positions, width, theta, style):
    """Su 2021, eq. 13: pairs are complex numbers that are turned by position * theta^(-2i/R)."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double().unsqueeze(-1) * frequency).unsqueeze(-2)
    part = x[..., :width].double()
    if style == "interleaved":
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
        out = torch.view_as_real(pairs * turn).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        pairs = torch.complex(first, second) * turn
        out = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([out, x[..., width:].double()], -1)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("fraction, theta", [(1.0, 10000.0), (0.5, 500000.0), (0.25, 100.0)])
def test_rotary_against_complex_multiplication(style, fraction, theta):
    rotary = Rotary(16, theta=theta, fraction=fraction, style=style)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    wanted = rotated_by_complex_numbers(x, torch.arange(5), int(16 * fraction), theta, style)
    torch.testing.assert_close(rotary(x), wanted)
    positions = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    wanted = rotated_by_complex_numbers(x, positions, int(16 * fraction), theta, style)
    torch.testing.assert_close(rotary(x, positions), wanted)
    torch.testing.assert_close(rotary(x, offset=100), rotary(x, torch.arange(100, 105)))


def test_scores_depend_on_distance_only():
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [(rotary(q, torch.tensor([p + 7])) * rotary(k, torch.tensor([p]))).sum() for p in (0, 11, 32000)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))


def test_tables_survive_a_cast_of_the_model_to_bfloat16():
    """In bfloat16 the positions 0..299 would have 279 distinct values."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.rotary = Rotary(64)

    model = Model().to(torch.bfloat16)
    for position in (300, 4095, 32767):
        x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
        cos, sin = model.rotary.tables(torch.tensor([position]), x.dtype)
        angles = position * 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        assert cos.dtype == torch.float32
        assert (cos.double().flatten() - angles.cos()).abs().max() < 1e-3
        assert (sin.double().flatten() - angles.sin()).abs().max() < 1e-3


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(head_dim=15), "attention.head_dim=15 is a rotary width of 15: it must be even"),
        (dict(head_dim=16, fraction=0.2), "rotary width of 3"),
        (dict(head_dim=16, fraction=0.1), "rotary width of 1: .* or the fraction 0"),
        (dict(head_dim=16, fraction=-0.5), "attention.rope.fraction=-0.5"),
        (dict(head_dim=16, fraction=1.5), "attention.rope.fraction=1.5"),
        (dict(head_dim=16, theta=-1.0), "attention.rope.theta=-1.0"),
        (dict(head_dim=16, style="spiral"), "attention.rope.style=spiral is not one of: half, interleaved"),
    ],
)
def test_widths_and_styles_that_cannot_work(settings, message):
    with pytest.raises(SettingsError, match=message):
        Rotary(**settings)


def test_layers_share_their_tables_which_go_with_them():
    import gc

    from parallel_attn.nn import rotary as module

    layers = [Rotary(8, theta=123.0) for _ in range(3)] + [Rotary(8, theta=124.0)]
    for layer in layers:
        layer(torch.randn(1, 50, 1, 8))
    tables = [next(iter(layer._kept.values()))[0] for layer in layers]
    assert tables[0] is tables[1] is tables[2] is not tables[3]
    ours = {key for key in module._SHARED if key[1] in (123.0, 124.0)}
    assert len(ours) == 2
    del layers, layer, tables
    gc.collect()
    assert not ours & set(module._SHARED)
