"""Our forward passes of each family against transformers' own, in float32, to rounding."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jevany_backend.checkpoint.plan import build_model
from jevany_backend.engine.families import family
from jevany_backend.engine.families.decoder import Decoder
from jevany_backend.engine.measured import Measured
from jevany_backend.engine.packed import Product, ProductPlan
from tests.checkpoint_factory import gemma_config, muse_config, qwen_config, randomise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONGEST = 192


def small_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, config: Callable[..., Any] = qwen_config, **changes: Any
) -> Any:
    torch.manual_seed(seed)
    model = build_model(config(300, **changes), DEVICE, dtype)
    randomise(model)
    return model


def packed(model: Any, *, fused: bool, longest: int = LONGEST) -> Decoder:
    return family(model.config.model_type)(copy.deepcopy(model), Measured(DEVICE), longest, fused=fused)


def _ids(length: int) -> torch.Tensor:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@torch.inference_mode()
def _states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen as 4B: two value heads a key head": {},
    "Qwen as 27B: three value heads a key head, six query heads a key head": {
        "linear_num_value_heads": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
    },
    "Qwen as 0.8B: one value head a key head": {"linear_num_value_heads": 2},
    "Qwen, delta rule last": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    "Muse": {"config": muse_config},
    "Muse, a window last": {
        "config": muse_config,
        "layer_types": ["full_attention", "sliding_attention"],
        "layer_rope_theta": [0, 500_000.0],
        "num_hidden_layers": 2,
    },
    "Muse, a group of four, a scale of queries": {
        "config": muse_config,
        "num_key_value_heads": 1,
        "qk_scale_factor": 2.5,
    },
    "Gemma": {"config": gemma_config},
    "Gemma, no keys shared": {"config": gemma_config, "num_kv_shared_layers": 0},
    "Gemma, other heads in full attention": {"config": gemma_config, "num_global_key_value_heads": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen": {},
    "Muse": {"config": muse_config},
    "Gemma": {"config": gemma_config},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fused", [False, True], ids=["twins", "fused"])
@torch.inference_mode()
def test_states_are_those_of_transformers(changes: dict[str, Any], fused: bool) -> None:
    model = small_model(**changes)
    ours = packed(model, fused=fused)
    # Windows are of 8 tokens.
    for length in (12,) if fused else (1, 5, 8, 9, 64, 131):
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


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
@torch.inference_mode()
def test_bfloat16_errs_no_more_than_transformers(changes: dict[str, Any]) -> None:
    # One model's error is chance; over a few, ours must not be the larger.
    ours, theirs = [], []
    for seed in range(6):
        half = small_model(torch.bfloat16, seed=seed, **changes)
        true = _states(copy.deepcopy(half).float(), _ids(100))
        reads = torch.arange(100, device=DEVICE)
        theirs.append((_states(half, _ids(100)).float() - true).norm() / true.norm())
        ours.append((packed(half, fused=False)(_ids(100), reads).float() - true).norm() / true.norm())
    assert sum(ours) < 1.1 * sum(theirs), (ours, theirs)


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
@torch.inference_mode()
def test_tokens_behind_the_row_change_no_bit(changes: dict[str, Any]) -> None:
    ours = packed(small_model(**changes), fused=False)
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


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_packing_leaves_no_second_copy(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    large = {name: p for name, p in model.named_parameters() if "gate_proj" in name or "q_proj" in name}
    sources = [weakref.ref(p) for p in large.values()]
    assert len(sources) >= 5
    # Where queries have a product of their own, it is in the memory they came in.
    alone = max(int(getattr(model.config, "num_kv_shared_layers", 0)) + 1, 1)
    del large
    ours = family(model.config.model_type)(model, Measured(DEVICE), LONGEST, fused=False)
    gc.collect()
    assert sum(source() is not None for source in sources) <= alone
    assert ours.embedding.data_ptr() == model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"config": muse_config, "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"config": gemma_config, "hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"config": gemma_config, "attention_k_eq_v": True}, "attention_k_eq_v True"),
        ({"config": gemma_config, "hidden_size_per_layer_input": 0}, "no per-layer embeddings"),
        ({"config": gemma_config, "use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed(small_model(**changes), fused=False)


def test_a_plan_for_a_sum_or_for_few_rows_is_not_given_to_another_reader() -> None:
    ours = packed(small_model(), fused=False)
    ours.plans.clear()
    for summed, of_reads in ((True, False), (False, False), (False, False), (True, True)):
        ours.product(torch.nn.Linear(8, 4, bias=False), summed=summed, of_reads=of_reads)
    assert list(ours.plans) == [(4, 8, True, LONGEST), (4, 8, False, LONGEST), (4, 8, True, 256)]


@pytest.mark.parametrize("keys_shared", [0, 3])
@torch.inference_mode()
def test_gemma_computes_only_rows_that_are_read_once_no_more_keys_are_made(keys_shared: int) -> None:
    ours = packed(small_model(config=gemma_config, num_kv_shared_layers=keys_shared), fused=False)
    rows: list[int] = []
    run_mlp = ours.run_mlp

    def counted(mlp: Any, normed: torch.Tensor, activation: str) -> torch.Tensor:
        rows.append(len(normed))
        return run_mlp(mlp, normed, activation)

    ours.run_mlp = counted  # type: ignore[method-assign]
    ours(_ids(40), torch.tensor([39, 7], device=DEVICE))
    assert rows == [40] * (5 - keys_shared) + [2] * (1 + keys_shared)
