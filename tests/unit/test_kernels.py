"""Each fused kernel against its plain PyTorch twin: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from jevany_backend.engine.kernels.add_rms_norm import add_rms_norm, add_rms_norm_twin
from jevany_backend.engine.kernels.delta_inputs import DeltaInputs, DeltaShape, delta_inputs, delta_inputs_twin
from jevany_backend.engine.kernels.delta_rule import PLANS, DeltaPlan, delta_rule, delta_rule_twin
from jevany_backend.engine.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_twin
from jevany_backend.engine.kernels.qk_norm_rotary import AttentionShape, qk_norm_rotary, qk_norm_rotary_twin
from jevany_backend.engine.kernels.sigmoid_gate import sigmoid_gate, sigmoid_gate_twin
from jevany_backend.engine.kernels.skinny_product import (
    SkinnyPlan,
    skinny_plans,
    skinny_product,
    skinny_product_twin,
)
from jevany_backend.engine.kernels.swiglu import swiglu, swiglu_twin

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2, 320), (1, 1280)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_rms_norm(rows: int, width: int, adds: bool, dtype: torch.dtype) -> None:
    residual, weight = _noise(rows, width, dtype=dtype), _noise(width, dtype=dtype)
    delta = _noise(rows, width, dtype=dtype) if adds else None
    ours, twin = residual.clone(), residual.clone()
    _close(add_rms_norm(ours, delta, weight, 1e-6), add_rms_norm_twin(twin, delta, weight, 1e-6))
    if COMPILED or dtype == torch.float32:
        assert torch.equal(ours, twin)
    assert torch.equal(ours, residual) != adds


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_up_parts(dtype: torch.dtype) -> None:
    residual, weight, parts = _noise(3, 96, dtype=dtype), _noise(96, dtype=dtype), _noise(4, 3, 96)
    ours, twin = residual.clone(), residual.clone()
    _close(add_rms_norm(ours, parts, weight, 1e-6), add_rms_norm_twin(twin, parts, weight, 1e-6))
    _close(ours, twin)
    _close(ours, (residual.float() + parts.sum(0)).to(dtype))


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
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = _noise(rows, 2 * width, dtype=dtype)
    _close(swiglu(gate_up), swiglu_twin(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "half"),
    [(AttentionShape(4, 2, 32), 4), (AttentionShape(6, 1, 96), 8), (AttentionShape(4, 0, 64), 8)],
)
@pytest.mark.parametrize("placed", [True, False])
def test_qk_norm_rotary(shape: AttentionShape, half: int, placed: bool, dtype: torch.dtype) -> None:
    rows = 5
    # Values behind the keys, as in the engine's packed rows.
    packed = _noise(rows, (2 * shape.queries + 2 * shape.keys) * shape.width, dtype=dtype)
    angles = torch.rand(40, half, device=DEVICE) * 6
    positions = torch.tensor([7, 0, 39, 7, 12], device=DEVICE, dtype=torch.int32) if placed else None
    arguments = (packed, shape, _noise(shape.width, dtype=dtype), _noise(shape.width, dtype=dtype))
    rest = (angles.cos(), angles.sin(), positions, 1e-6)
    for ours, twin in zip(qk_norm_rotary(*arguments, *rest), qk_norm_rotary_twin(*arguments, *rest), strict=True):
        _close(ours, twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate(dtype: torch.dtype) -> None:
    # As attention returns it: heads outside, so that a row's heads do not lie next to each other.
    attended = _noise(4, 3, 96, dtype=dtype).transpose(0, 1)
    packed = _noise(3, 4 * 2 * 96 + 2 * 96, dtype=dtype)
    _close(sigmoid_gate(attended, packed), sigmoid_gate_twin(attended, packed))


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
