"""Our forward pass of the Qwen3.5 family against transformers' own, in float32, to rounding."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from jevany_backend.checkpoint.plan import build_model
from jevany_backend.engine.families import qwen3_5
from jevany_backend.engine.families.qwen3_5 import Qwen35
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product, ProductPlan
from tests.checkpoint_factory import qwen_config, randomise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONGEST = 192


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = build_model(qwen_config(300, **changes), DEVICE, dtype)
    randomise(model)
    return model


def packed(model: Any, *, fused: bool) -> Qwen35:
    return Qwen35(copy.deepcopy(model), Measured(DEVICE), LONGEST, fused=fused)


def _ids(length: int) -> torch.Tensor:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@torch.inference_mode()
def _states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


SHAPES: dict[str, dict[str, Any]] = {
    "as 4B: two value heads a key head": {},
    "as 27B: three value heads a key head, six query heads a key head": {
        "linear_num_value_heads": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
    },
    "as 0.8B: one value head a key head": {"linear_num_value_heads": 2},
    "delta rule last": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fused", [False, True], ids=["twins", "fused"])
@torch.inference_mode()
def test_states_are_those_of_transformers(changes: dict[str, Any], fused: bool) -> None:
    model = small_model(**changes)
    ours = packed(model, fused=fused)
    for length in (1, 5) if fused else (1, 5, 64, 131):
        ids = _ids(length)
        reads = torch.tensor([length - 1, 0, length // 2, length - 1], device=DEVICE, dtype=torch.int32)
        theirs = _states(model, ids)[reads]
        torch.testing.assert_close(ours(ids.int(), reads), theirs, rtol=1e-4, atol=1e-4)
        assert theirs.std() > 0.1


@torch.inference_mode()
def test_fused_kernels_run_a_row_of_several_chunks() -> None:
    model = small_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    ids, reads = _ids(70), torch.tensor([69, 30], device=DEVICE)
    torch.testing.assert_close(packed(model, fused=True)(ids, reads), _states(model, ids)[reads], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_bfloat16_errs_no_more_than_transformers() -> None:
    # One model's error is chance; over a few, ours must not be the larger.
    ours, theirs = [], []
    for seed in range(6):
        half = small_model(torch.bfloat16, seed=seed)
        true = _states(copy.deepcopy(half).float(), _ids(100))
        reads = torch.arange(100, device=DEVICE)
        theirs.append((_states(half, _ids(100)).float() - true).norm() / true.norm())
        ours.append((packed(half, fused=False)(_ids(100), reads).float() - true).norm() / true.norm())
    assert sum(ours) < 1.1 * sum(theirs), (ours, theirs)


@torch.inference_mode()
def test_tokens_behind_the_row_change_no_bit() -> None:
    ours = packed(small_model(), fused=False)
    ids, reads = _ids(96), torch.tensor([79, 10], device=DEVICE)
    before = ours(ids, reads)
    ids[80:] = 299 - ids[80:]
    assert torch.equal(ours(ids, reads), before)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_puts_its_parts_side_by_side_and_takes_their_weights(transposed: bool) -> None:
    parts = [torch.nn.Linear(8, width, bias=False) for width in (3, 5)]
    rows = torch.randn(4, 8)
    separate = torch.cat([part(rows) for part in parts], dim=1)
    product = Product(parts, ProductPlan(transposed))
    torch.testing.assert_close(product(rows), separate)
    assert product.weight.is_contiguous()
    assert all(part.weight is None for part in parts)


def test_packing_leaves_no_second_copy() -> None:
    model = small_model()
    sources = [weakref.ref(p) for name, p in model.named_parameters() if "gate_proj" in name or "q_proj" in name]
    assert len(sources) == 5
    ours = Qwen35(model, Measured(DEVICE), LONGEST, fused=False)
    gc.collect()
    # The last layer's queries are a product of their own, in the memory they came in.
    assert sum(source() is not None for source in sources) <= 1
    assert ours.embedding.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_a_variant_that_is_not_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        Qwen35(small_model(hidden_act="gelu"), Measured(DEVICE), LONGEST, fused=False)


def test_a_plan_for_a_sum_is_not_given_to_another_reader() -> None:
    packer = qwen3_5._Packer(Measured(torch.device("cpu")), 64)
    packer.product(torch.nn.Linear(8, 4, bias=False), summed=True)
    packer.product(torch.nn.Linear(8, 4, bias=False))
    packer.product(torch.nn.Linear(8, 4, bias=False))
    assert list(packer.plans) == [(4, 8, True), (4, 8, False)]
