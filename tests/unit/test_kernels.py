"""Each fused kernel against its plain PyTorch twin: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from jevany_backend.engine.kernels.add_rms_norm import Norm, add_rms_norm, add_rms_norm_twin
from jevany_backend.engine.kernels.delta_inputs import DeltaInputs, DeltaShape, delta_inputs, delta_inputs_twin
from jevany_backend.engine.kernels.delta_rule import PLANS, DeltaPlan, delta_rule, delta_rule_twin
from jevany_backend.engine.kernels.flash_attention import (
    FlashPlan,
    flash_attention,
    flash_attention_twin,
    flash_plans,
)
from jevany_backend.engine.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_twin
from jevany_backend.engine.kernels.glu import ACTIVATIONS, glu, glu_twin
from jevany_backend.engine.kernels.per_layer_inputs import per_layer_inputs, per_layer_inputs_twin
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape, Rotary, qk_norm_rotary, qk_norm_rotary_twin
from jevany_backend.engine.kernels.sigmoid_gate import sigmoid_gate, sigmoid_gate_twin
from jevany_backend.engine.kernels.skinny_product import (
    SkinnyPlan,
    skinny_plans,
    skinny_product,
    skinny_product_twin,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = DEVICE.type == "cuda"
# Both sides round once from float32, so they differ by one step of the dtype at most. Triton's interpreter cuts off
# where it should round to bfloat16, which is another step.
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-9} if COMPILED else {"rtol": 2**-6, "atol": 2**-6}
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: BFLOAT16}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _close(ours: torch.Tensor, twin: torch.Tensor) -> None:
    tolerance = TOLERANCE[twin.dtype]
    torch.testing.assert_close(ours, twin, rtol=tolerance["rtol"], atol=tolerance["atol"])


def _norm(width: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> Norm:
    return Norm(_noise(width, dtype=dtype), eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2, 320), (1, 1280)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_rms_norm(rows: int, width: int, adds: bool, dtype: torch.dtype) -> None:
    residual, norm = _noise(rows, width, dtype=dtype), _norm(width, dtype=dtype)
    delta = _noise(rows, width, dtype=dtype) if adds else None
    ours, twin = residual.clone(), residual.clone()
    _close(add_rms_norm(ours, delta, norm), add_rms_norm_twin(twin, delta, norm))
    if COMPILED or dtype == torch.float32:
        assert torch.equal(ours, twin)
    assert torch.equal(ours, residual) != adds


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_up_parts(dtype: torch.dtype) -> None:
    residual, norm, parts = _noise(3, 96, dtype=dtype), _norm(96, dtype=dtype), _noise(4, 3, 96)
    ours, twin = residual.clone(), residual.clone()
    _close(add_rms_norm(ours, parts, norm), add_rms_norm_twin(twin, parts, norm))
    _close(ours, twin)
    _close(ours, (residual.float() + parts.sum(0)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_add_rms_norm_norms_what_it_adds(parts: int, scaled: bool, normed: bool, dtype: torch.dtype) -> None:
    residual, inner, outer = _noise(3, 96, dtype=dtype), _norm(96, 1e-3), _norm(96)
    delta = _noise(3, 96, dtype=dtype) if parts == 1 else _noise(parts, 3, 96)
    scale = torch.tensor([0.625], device=DEVICE, dtype=dtype) if scaled else None
    ours, twin = residual.clone(), residual.clone()
    result = add_rms_norm(ours, delta, outer if normed else None, delta_norm=inner, scale=scale)
    _close(result, add_rms_norm_twin(twin, delta, outer if normed else None, delta_norm=inner, scale=scale))
    _close(ours, twin)
    assert (result is ours) != normed
    whole = delta.float() if parts == 1 else delta.sum(0)
    added = torch.nn.functional.rms_norm(whole, (96,), inner.weight, inner.eps)
    _close(ours, ((residual.float() + added) * (0.625 if scaled else 1)).to(dtype))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("rows", "shape"), [(1, (40, 96)), (33, (64, 64)), (100, (70, 128))])
def test_skinny_product(rows: int, shape: tuple[int, int], parts: int) -> None:
    # 32 inputs at a time: parts of different sizes, one of them empty.
    plan = SkinnyPlan(outputs=32, inputs=32, parts=parts, stages=2, warps=4)
    # The interpreter multiplies bfloat16 matrices by their bits.
    dtype = torch.bfloat16 if COMPILED else torch.float32
    left, right = _noise(rows, shape[1], dtype=dtype), _noise(*shape, dtype=dtype)
    product = skinny_product(left, right, plan)
    whole = product if parts == 1 else product.sum(0)
    close = {"rtol": 2e-2, "atol": 1e-1} if COMPILED else {"rtol": 1e-4, "atol": 1e-4}
    true = left.float() @ right.float().T
    torch.testing.assert_close(whole.float(), true, rtol=close["rtol"], atol=close["atol"])
    assert product.dtype == (dtype if parts == 1 else torch.float32)
    twin = skinny_product_twin(left, right, parts)
    assert twin.shape == product.shape
    twin = twin if parts == 1 else twin.sum(0)
    torch.testing.assert_close(whole, twin, rtol=close["rtol"], atol=close["atol"])


def test_skinny_plans_fit_the_weight() -> None:
    assert all(plan.parts == 1 for plan in skinny_plans((34816, 5120), summed=False))
    assert {plan.parts for plan in skinny_plans((5120, 17408), summed=True)} == {1, 2, 3, 4, 6, 8}
    assert skinny_plans((5120, 100), summed=True) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 96), (1, 1040)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    gate, up = _noise(rows, 2 * width, dtype=dtype).chunk(2, dim=1)
    _close(glu(gate, up, activation), glu_twin(gate, up, activation))
    of_layer = _noise(rows, 3, width, dtype=dtype)[:, 1]
    _close(glu(gate, of_layer, activation), glu_twin(gate, of_layer, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "half"),
    [
        (AttentionShape(4, 2, 32), 4),
        (AttentionShape(6, 1, 96), 8),
        (AttentionShape(4, 0, 64), 8),
        (AttentionShape(4, 2, 32, "behind"), 16),
        (AttentionShape(4, 2, 32, "behind"), None),
        (AttentionShape(4, 2, 32, "none", values_normed=True), 16),
        (AttentionShape(0, 2, 32, "none", values_normed=True), 8),
        (AttentionShape(3, 0, 32, "none"), 16),
    ],
)
@pytest.mark.parametrize("placed", [True, False])
def test_qk_norm_rotary(shape: AttentionShape, half: int | None, placed: bool, dtype: torch.dtype) -> None:
    rows = 5
    # Values behind the keys, as in the engine's packed rows.
    packed = _noise(rows, shape.keys_begin + 2 * shape.keys * shape.width, dtype=dtype)
    angles = torch.rand(40, half or 1, device=DEVICE) * 6
    rotary = Rotary(angles.cos(), angles.sin()) if half else None
    positions = torch.tensor([7, 0, 39, 7, 12], device=DEVICE, dtype=torch.int32) if placed else None
    arguments = (packed, shape, _norm(shape.width, 1e-5, dtype), _norm(shape.width, dtype=dtype), rotary, positions)
    for ours, twin in zip(qk_norm_rotary(*arguments), qk_norm_rotary_twin(*arguments), strict=True):
        _close(ours, twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [AttentionShape(4, 1, 96, "beside"), AttentionShape(4, 1, 96, "behind")])
def test_sigmoid_gate(shape: AttentionShape, dtype: torch.dtype) -> None:
    # As attention returns it: heads outside, so that a row's heads do not lie next to each other.
    attended = _noise(4, 3, 96, dtype=dtype).transpose(0, 1)
    packed = _noise(3, 4 * 2 * 96 + 2 * 96, dtype=dtype)
    gate = packed[:, 96:192] if shape.gates == "beside" else packed[:, 4 * 96 : 5 * 96]
    _close(sigmoid_gate(attended, packed, shape), sigmoid_gate_twin(attended, packed, shape))
    first_head = (attended[:, 0].float() * torch.sigmoid(gate.float())).to(dtype)
    _close(sigmoid_gate_twin(attended, packed, shape)[:, :96], first_head)


@pytest.mark.parametrize("dtype", DTYPES)
def test_per_layer_inputs(dtype: torch.dtype) -> None:
    projected, table = _noise(3, 10 * 24, dtype=dtype), _noise(20, 10 * 24, dtype=dtype)
    ids = torch.tensor([7, 0, 19], device=DEVICE, dtype=torch.int32)
    arguments = (projected, ids, table, _norm(24, dtype=dtype), 0.125)
    _close(per_layer_inputs(*arguments), per_layer_inputs_twin(*arguments))


_FLASH = (FlashPlan(16, 16, 1, 4), FlashPlan(32, 16, 2, 4), FlashPlan(16, 64, 2, 4))


@pytest.mark.parametrize("plan", _FLASH, ids=str)
@pytest.mark.parametrize("window", [None, 5, 40, 200])
@pytest.mark.parametrize(("rows", "width", "heads"), [(1, 32, (2, 1)), (70, 48, (4, 2))])
def test_flash_attention(rows: int, width: int, heads: tuple[int, int], window: int | None, plan: FlashPlan) -> None:
    # The interpreter multiplies bfloat16 matrices by their bits.
    dtype = torch.bfloat16 if COMPILED else torch.float32
    query, key = (_noise(rows, count, width, dtype=dtype) for count in heads)
    value = _noise(rows, heads[1] * width + 7, dtype=dtype)[:, 7:].unflatten(1, (heads[1], width))
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if COMPILED else {"rtol": 1e-5, "atol": 1e-5}
    rest = (window, width**-0.5)
    ours = flash_attention(query, key, value, None, *rest, plan)
    torch.testing.assert_close(ours, flash_attention_twin(query, key, value, None, *rest), **tolerance)
    # Some rows alone, in any order and more than once.
    positions = torch.tensor([rows - 1, 0, rows // 2, rows - 1], device=DEVICE, dtype=torch.int32)
    some = flash_attention(query[positions], key, value, positions, *rest, plan)
    torch.testing.assert_close(some, ours[positions], **tolerance)


def test_flash_attention_is_that_of_pytorch() -> None:
    query, key, value = (_noise(30, heads, 16) for heads in (4, 2, 2))
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    theirs = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True, enable_gqa=True, scale=0.3)
    ours = flash_attention_twin(query, key, value, None, None, 0.3)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [128, 256, 512])
def test_there_is_a_flash_plan_for_every_head(width: int, itemsize: int) -> None:
    assert flash_plans(width, itemsize)
    assert len(flash_plans(width, 2)) >= 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (12, 48)])
def test_gated_rms_norm(heads: int, width: int, dtype: torch.dtype) -> None:
    values, weight = _noise(3, heads, width, dtype=dtype), _noise(width, dtype=dtype)
    gate = _noise(3, heads * width + 7, dtype=dtype)[:, : heads * width]
    _close(gated_rms_norm(values, gate, weight, 1e-6), gated_rms_norm_twin(values, gate, weight, 1e-6))


def _inputs(rows: int, shape: DeltaShape, dtype: torch.dtype) -> DeltaInputs:
    packed = _noise(rows, shape.columns, dtype=dtype)
    filters, a_log, bias = _noise(shape.convolved, 4, dtype=dtype), _noise(shape.values), _noise(shape.values)
    return delta_inputs_twin(packed, shape, filters, a_log, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "shape"), [(1, DeltaShape(2, 16, 4, 16)), (21, DeltaShape(2, 16, 6, 32)), (17, DeltaShape(1, 32, 2, 16))]
)
def test_delta_inputs(rows: int, shape: DeltaShape, dtype: torch.dtype) -> None:
    packed = 2 * _noise(rows, shape.columns, dtype=dtype)
    filters = _noise(shape.convolved, 4, dtype=dtype)
    a_log, bias = _noise(shape.values, dtype=dtype), 20 * _noise(shape.values, dtype=dtype)
    ours, twin = (make(packed, shape, filters, a_log, bias) for make in (delta_inputs, delta_inputs_twin))
    for name in vars(twin):
        _close(getattr(ours, name), getattr(twin, name))


def test_delta_inputs_see_no_later_token() -> None:
    shape = DeltaShape(1, 16, 2, 16)
    packed, filters = _noise(20, shape.columns), _noise(shape.convolved, 4)
    before = delta_inputs(packed, shape, filters, _noise(2), _noise(2)).values
    torch.manual_seed(0)
    packed[11:] = torch.nan
    after = delta_inputs(packed, shape, filters, _noise(2), _noise(2)).values
    assert torch.equal(before[:11], after[:11])
    assert after[11:].isnan().all()


def _recurrence(inputs: DeltaInputs) -> torch.Tensor:
    """The rule token by token, as its definition has it."""
    group = inputs.values.shape[1] // inputs.keys.shape[1]
    queries, keys = (part.double().repeat_interleave(group, 1) for part in (inputs.queries, inputs.keys))
    values, decay, step = inputs.values.double(), inputs.decay.double().exp(), inputs.step.double()
    state = values.new_zeros(values.shape[1], keys.shape[2], values.shape[2])
    out = []
    for q, k, v, a, b in zip(queries, keys, values, decay, step, strict=True):
        state = state * a[:, None, None]
        new = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * new[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(out) * keys.shape[-1] ** -0.5


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 150])
def test_delta_rule_twin_is_the_recurrence(rows: int) -> None:
    inputs = _inputs(rows, DeltaShape(2, 16, 6, 32), torch.float32)
    torch.testing.assert_close(delta_rule_twin(inputs).double(), _recurrence(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [*PLANS, DeltaPlan(64, 16, prepared=False, base=16)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 65, 100])
def test_delta_rule(plan: DeltaPlan, rows: int) -> None:
    inputs = _inputs(rows, DeltaShape(1, 16, 2, 32), torch.float32)
    torch.testing.assert_close(delta_rule(inputs, plan), delta_rule_twin(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_delta_rule_in_half_precision(plan: DeltaPlan) -> None:
    # The interpreter multiplies bfloat16 matrices by their bits, as if they were integers.
    inputs = _inputs(100, DeltaShape(1, 32, 2, 32), torch.bfloat16 if COMPILED else torch.float16)
    ours, twin = delta_rule(inputs, plan).float(), delta_rule_twin(inputs).float()
    assert (ours - twin).norm() < 0.01 * twin.norm()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_delta_rule_stands_a_row_that_repeats_one_token(plan: DeltaPlan) -> None:
    # Equal keys, full steps and no decay: the system is as far from the identity as it gets.
    rows, shape = 130, DeltaShape(1, 16, 1, 16)
    unit = torch.nn.functional.normalize(_noise(1, 1, 16), dim=-1).expand(rows, 1, 16).contiguous()
    full = torch.ones(rows, 1, device=DEVICE)
    inputs = DeltaInputs(unit, unit, _noise(rows, shape.values, 16), -1e-4 * full, full)
    torch.testing.assert_close(delta_rule(inputs, plan).double(), _recurrence(inputs), rtol=1e-4, atol=1e-4)
