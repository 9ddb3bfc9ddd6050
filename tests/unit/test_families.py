"""Every family of bases: our decoder against transformers' own multimodal model, in float32, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from jevany_backend.checkpoint import load_readout, load_text_model, open_checkpoint
from jevany_backend.checkpoint.plan import build_model
from jevany_backend.encoding import Row
from jevany_backend.engine.reference import ReferenceEngine, live_kernels
from tests.checkpoint_factory import MadeCheckpoint, gemma_config, make_checkpoint, qwen_config, text_decoder

CPU = torch.device("cpu")
FAMILIES = ("qwen3_5", "muse_glimmer", "gemma4")


def _row(made: MadeCheckpoint, length: int = 45) -> Row:
    # Longer than the window of every sliding layer. Token 0 to 255 are bytes.
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return Row(ids, decide=length - 1, option_ends=[20, 30, length - 3])


def _transformers_states(made: MadeCheckpoint, row: Row, tokens: int) -> torch.Tensor:
    """The hidden states of the multimodal model as transformers loads it, with the adapter merged by PEFT."""
    model = AutoModelForImageTextToText.from_pretrained(made.base, dtype=torch.float32).model.eval()
    model.language_model.resize_token_embeddings(tokens, mean_resizing=False)
    if tokens > 0 and hasattr(model.language_model, "embed_tokens_per_layer"):
        for table in ("embed_tokens", "embed_tokens_per_layer"):
            ours = getattr(model.language_model, table).weight.data
            old = getattr(text_decoder(made.base, torch.float32), table).weight.data
            ours[len(old) :] = old.mean(dim=0)
    model.language_model = PeftModel.from_pretrained(model.language_model, str(made.adapter)).merge_and_unload()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state[0]
    return states[[row.decide, *row.option_ends]]


@pytest.mark.parametrize("added_tokens", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str, added_tokens: bool) -> None:
    made = make_checkpoint(tmp_path, family=family, added_tokens=added_tokens)
    files = open_checkpoint(str(made.adapter), str(made.base))
    model = load_text_model(files, CPU, torch.float32)
    row = _row(made)
    if added_tokens:
        for index, identifier in enumerate(files.delimiters.ids):
            row.ids[5 * index] = identifier
    theirs = _transformers_states(made, row, len(files.tokenizer))
    ours = ReferenceEngine(model, load_readout(files, CPU, torch.float32)).hidden_states(row)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert theirs.std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_token_reads_the_rows_of_the_head(tmp_path: Path, family: str) -> None:
    made = make_checkpoint(tmp_path, family=family, decision_mode="lm_token")
    files = open_checkpoint(str(made.adapter), str(made.base))
    readout = load_readout(files, CPU, torch.float32)
    ids = [files.tokenizer(label)["input_ids"][0] for label in files.labels or ()]
    head = AutoModelForImageTextToText.from_pretrained(made.base, dtype=torch.float32).lm_head.weight
    assert torch.equal(readout.label_rows, head[ids])  # type: ignore[union-attr]
    embedding = load_text_model(files, CPU, torch.float32).get_parameter("embed_tokens.weight")
    # Muse has a head of its own; the others' is the embedding matrix.
    assert torch.equal(embedding[ids], head[ids]) == (family != "muse_glimmer")


def test_a_window_is_kept(tmp_path: Path) -> None:
    # A token that no window reaches changes nothing once the full layers do not see it either.
    made = make_checkpoint(
        tmp_path,
        family="muse_glimmer",
        config_changes={
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention"] * 2,
            "layer_rope_theta": [500_000.0] * 2,
        },
    )
    files = open_checkpoint(str(made.adapter), str(made.base))
    model, readout = load_text_model(files, CPU, torch.float32), load_readout(files, CPU, torch.float32)
    engine = ReferenceEngine(model, readout)
    row = _row(made)
    before = engine.hidden_states(row)
    reach = 2 * (8 - 1)  # Two layers, each of which sees a token and the 7 before it.
    row.ids[row.decide - reach - 1] ^= 1
    torch.testing.assert_close(engine.hidden_states(row)[0], before[0], rtol=0, atol=0)
    row.ids[row.decide - reach] ^= 1
    assert not torch.equal(engine.hidden_states(row)[0], before[0])


def test_gemma_loads_its_layer_scalars_and_not_the_unused_keys(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, family="gemma4")
    stored = load_file(made.base / "model.safetensors")
    files = open_checkpoint(str(made.adapter), str(made.base))
    state = load_text_model(files, CPU, torch.float32).state_dict()
    for layer in range(6):
        scalar = stored[f"model.language_model.layers.{layer}.layer_scalar"]
        assert scalar != 1
        assert torch.equal(state[f"layers.{layer}.layer_scalar"], scalar)
        assert (f"layers.{layer}.self_attn.k_proj.weight" in state) == (layer < 3)
        assert f"model.language_model.layers.{layer}.self_attn.k_proj.weight" in stored
    assert not any(tensor.isnan().any() for tensor in state.values())


def test_kernels_are_named() -> None:
    qwen = build_model(qwen_config(300), torch.device("meta"), torch.float32)
    assert set(live_kernels(qwen)) == {"chunk_gated_delta_rule", "causal_conv1d_fn"}
    assert all(module.startswith(("transformers.", "fla.", "causal_conv1d.")) for module in live_kernels(qwen).values())
    assert live_kernels(build_model(gemma_config(300), torch.device("meta"), torch.float32)) == {}
