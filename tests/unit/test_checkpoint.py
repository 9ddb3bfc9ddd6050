"""Reading a checkpoint: the merge against PEFT, and every way in which the files can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from jevany_backend.checkpoint import CheckpointError, load_readout, load_text_model, open_checkpoint
from jevany_backend.checkpoint.adapter import read_adapter
from jevany_backend.checkpoint.base import BaseFiles
from tests.checkpoint_factory import MadeCheckpoint, make_checkpoint

CPU = torch.device("cpu")


def _open(made: MadeCheckpoint) -> Any:
    return open_checkpoint(str(made.adapter), str(made.base))


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added_tokens", [False, True])
def test_merged_weights_are_those_of_peft(tmp_path: Path, base_dtype: torch.dtype, added_tokens: bool) -> None:
    made = make_checkpoint(tmp_path, base_dtype=base_dtype, added_tokens=added_tokens)
    ours = load_text_model(_open(made), CPU, base_dtype).state_dict()
    # PEFT merges in the dtype of the weight; in float32, and rounded once at the end, it is the oracle.
    theirs = made.peft_model.float().merge_and_unload().state_dict()
    assert set(ours) == set(theirs)
    for name, weight in ours.items():
        assert weight.dtype == base_dtype
        if base_dtype == torch.float32:
            torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
        else:
            # The two may fall on different sides of a rounding step, never further apart.
            torch.testing.assert_close(weight, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6, msg=name)
            assert (weight == theirs[name].bfloat16()).float().mean() > 0.999


def test_merge_changes_every_adapted_weight_and_no_other(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    merged = load_text_model(_open(made), CPU, torch.float32).state_dict()
    base = AutoModel.from_pretrained(made.base, dtype=torch.float32).state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {f"{module}.weight" for module in read_adapter(made.adapter).pairs}


def test_added_tokens_get_their_trained_rows_and_the_others_stay(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, added_tokens=True)
    files = _open(made)
    assert files.delimiters.added
    embedding = load_text_model(files, CPU, torch.float32).get_parameter("embed_tokens.weight")
    saved = load_file(made.adapter / "adapter_model.safetensors")
    rows = next(tensor for name, tensor in saved.items() if name.endswith("trainable_tokens_delta"))
    assert torch.equal(embedding[list(files.delimiters.ids)], rows)
    base = load_file(made.base / "model.safetensors")
    original = next(tensor for name, tensor in base.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(embedding[: len(original)], original)
    assert len(embedding) == len(original) + 5


def test_added_tokens_without_trained_rows_start_as_the_mean(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, added_tokens=True)
    path = made.adapter / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if "embed_tokens" not in name}, path)
    files = _open(made)
    embedding = load_text_model(files, CPU, torch.float32).get_parameter("embed_tokens.weight")
    mean = embedding[: files.base.config.vocab_size].mean(dim=0)
    torch.testing.assert_close(embedding[list(files.delimiters.ids)], mean.expand(5, -1))


@pytest.mark.parametrize(
    "change",
    [{"use_rslora": True}, {"alpha_pattern": {"layers.0.mlp.up_proj": 64}}, {"alpha_pattern": {"q_proj": 3}}],
)
def test_scales_are_those_of_peft(tmp_path: Path, change: dict[str, Any]) -> None:
    made = make_checkpoint(tmp_path)
    path = made.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    base = AutoModel.from_pretrained(made.base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(made.adapter)).merge_and_unload().state_dict()
    ours = load_text_model(_open(made), CPU, torch.float32).state_dict()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_decoder_is_found_inside_a_multimodal_base(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    plain = load_text_model(_open(made), CPU, torch.float32).state_dict()
    path = made.base / "model.safetensors"
    tensors = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in load_file(path).items()}
    tensors["model.visual.blocks.0.mlp.up_proj.weight"] = torch.ones(2, 2)
    first, second = tmp_path / "first", tmp_path / "second"
    half = len(tensors) // 2
    path.unlink()
    index: dict[str, str] = {}
    for shard, names in ((first, list(tensors)[:half]), (second, list(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, made.base / f"{shard.name}.safetensors")
        index |= dict.fromkeys(names, f"{shard.name}.safetensors")
    (made.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    wrapped = load_text_model(_open(made), CPU, torch.float32).state_dict()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)
    (made.base / "second.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"second\.safetensors: missing, but model\.safetensors\.index\.json"):
        _open(made)


def test_direct_token_reads_the_tied_or_the_own_head(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", decision_mode="lm_token")
    files = _open(tied)
    readout = load_readout(files, CPU, torch.float32)
    embedding = load_text_model(files, CPU, torch.float32).get_parameter("embed_tokens.weight")
    ids = [files.tokenizer(label)["input_ids"][0] for label in files.labels]
    assert torch.equal(readout.label_rows, embedding[ids])  # type: ignore[union-attr]
    own = make_checkpoint(tmp_path / "own", decision_mode="lm_token", config_changes={"tie_word_embeddings": False})
    head = load_file(own.base / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_readout(_open(own), CPU, torch.float32).label_rows, head[ids])  # type: ignore[union-attr]


def _with_config(**changes: Any) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = made.adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _with_base_config(**changes: Any) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = made.base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _with_head(**changes: Any) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = made.adapter / "head.pt"
        torch.save(torch.load(path, weights_only=True) | changes, path)

    return change


def _with_head_tensor(name: str, tensor: torch.Tensor) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = made.adapter / "head.pt"
        content = torch.load(path, weights_only=True)
        content["head"][name] = tensor
        torch.save(content, path)

    return change


def _cut_off(folder: str, file: str, share: float) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = getattr(made, folder) / file
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return change


def _with_tensor(name: str, tensor: torch.Tensor | None, file: str = "adapter") -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        path = made.adapter / "adapter_model.safetensors" if file == "adapter" else made.base / "model.safetensors"
        tensors = load_file(path)
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
        save_file(tensors, path)

    return change


def _without(part: str, name: str) -> Callable[[MadeCheckpoint], None]:
    return lambda made: (getattr(made, part) / name).unlink()


def _overwritten(part: str, name: str, content: bytes) -> Callable[[MadeCheckpoint], None]:
    def change(made: MadeCheckpoint) -> None:
        (getattr(made, part) / name).write_bytes(content)

    return change


def _load_all(made: MadeCheckpoint) -> None:
    files = _open(made)
    load_text_model(files, CPU, torch.float32)
    load_readout(files, CPU, torch.float32)


UP_A = "base_model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("adapter", "head.pt"), r"head\.pt: missing; a JevAny checkpoint holds head\.pt"),
        (_without("adapter", "adapter_config.json"), r"adapter_config\.json: missing"),
        (_without("adapter", "adapter_model.safetensors"), r"adapter_model\.safetensors: missing"),
        (_without("adapter", "tokenizer.json"), r"adapter/tokenizer\.json: missing"),
        (_without("base", "config.json"), r"config\.json: missing; .* is not a base model"),
        (_without("base", "model.safetensors"), r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        (_overwritten("adapter", "head.pt", b"PK\x03\x04"), r"head\.pt: not a torch\.save file"),
        (_overwritten("adapter", "head.pt", b""), r"head\.pt: not a torch\.save file"),
        (_cut_off("adapter", "head.pt", 0.1), r"head\.pt: not a torch\.save file, or cut off or damaged"),
        (_cut_off("adapter", "head.pt", 0.5), r"head\.pt: not a torch\.save file, or cut off or damaged"),
        (_cut_off("adapter", "head.pt", 0.99), r"head\.pt: not a torch\.save file, or cut off or damaged"),
        (_cut_off("adapter", "tokenizer.json", 0.5), r"adapter/tokenizer\.json: not JSON, or cut off: "),
        (_overwritten("adapter", "tokenizer.json", b"{}"), r"adapter/tokenizer\.json: no tokenizer can be made of it"),
        (_overwritten("adapter", "tokenizer.json", b"[]"), r"adapter/tokenizer\.json: not a JSON object"),
        (_overwritten("adapter", "tokenizer.json", b"\xff"), r"adapter/tokenizer\.json: not JSON, or cut off: "),
        (
            _overwritten("adapter", "tokenizer_config.json", b"{"),
            r"adapter/tokenizer_config\.json: not JSON, or cut off",
        ),
        (_overwritten("adapter", "tokenizer_config.json", b"[]"), r"adapter/tokenizer_config\.json: not a JSON object"),
        (_overwritten("adapter", "adapter_config.json", b"{"), r"adapter_config\.json: not JSON"),
        (_overwritten("adapter", "adapter_model.safetensors", b"\x00" * 9), r"adapter_model\.safetensors: not a safet"),
        (_overwritten("base", "config.json", b"{}"), r"config\.json: "),
        (
            _with_base_config(num_hidden_layers=5),
            r"config\.json: .*`num_hidden_layers` \(5\) must be equal to the numb",
        ),
        (_with_base_config(hidden_act="wish"), r"config\.json: .*wish"),
        (_overwritten("base", "model.safetensors", b"\xff" * 9), r"model\.safetensors: not a safetensors file"),
        (_with_config(peft_type="IA3"), r"peft_type is 'IA3'; only LORA adapters are served"),
        (_with_config(use_dora=True), r"use_dora = True is not supported"),
        (_with_config(modules_to_save=["embed_tokens"]), r"modules_to_save = \['embed_tokens'\] is not supported"),
        (_with_head(base=""), r"base: needs the name of a base model, not ''"),
        (_with_head(decision_mode="letters"), r"decision_mode: 'letters' is neither 'pointer' nor 'lm_token'"),
        (_with_head(option_isolation=True), r"option_isolation: such checkpoints need packed rows"),
        (_with_head(temperature=0.0), r"temperature: 0\.0 is not a number from 0\.001 to 1000"),
        (_with_head(temperature=1e-300), r"temperature: 1e-300 is not a number from 0\.001 to 1000"),
        (_with_head(temperature=float("nan")), r"temperature: nan is not a number from 0\.001 to 1000"),
        (_with_head(temperature="1"), r"temperature: needs a number, not '1'"),
        (_with_head(weights_dtype="int8"), r"weights_dtype: 'int8' is neither 'fp32' nor 'bf16'"),
        (_with_head(head_dim=17), r"head: q\.weight has shape \(16, 64\); needs \(17, 64\)"),
        (_with_head(head=None), r"head: missing; a pointer checkpoint holds its head's tensors"),
        (_with_head(head={"q.weight": torch.ones(16, 64)}), r"head: holds \['q\.weight'\]; needs \["),
        (_with_head(head_type="mlp"), r"head_type: 'mlp' is not supported"),
        (
            _with_head(lora=8),
            r"head\.pt: made with an adapter of rank 8, but adapter_config\.json has r = 4; the two are",
        ),
        (_with_head_tensor("k.bias", torch.full((16,), torch.nan)), r"head\.pt: head: k\.bias holds NaN or infinite"),
        (_with_head_tensor("k.bias", torch.ones(16, dtype=torch.int32)), r"k\.bias holds int32, not floating-point"),
        (_with_head_tensor("k.bias", torch.ones(16, dtype=torch.complex64)), r"k\.bias holds complex64, not floating"),
        (_with_head_tensor("k.bias", torch.ones(16, device="meta")), r"k\.bias holds a shape without numbers"),
        (_with_head_tensor("k.bias", torch.ones(16).to_sparse()), r"k\.bias holds a sparse tensor"),
        (_with_tensor(UP_A, torch.ones(4, 64, dtype=torch.int8)), r"up_proj.* holds int8, not floating-point numbers"),
        (_with_config(lora_alpha=None), r"adapter_config\.json: lora_alpha of .* is None, not a number"),
        (
            _with_tensor(UP_A, torch.full((4, 64), torch.nan)),
            r"adapter_model\.safetensors: .*up_proj.* holds NaN or inf",
        ),
        (
            _with_tensor("model.norm.weight", torch.ones(64, dtype=torch.int8), "base"),
            r"base/model\.safetensors: model\.norm\.weight is stored as I8; needs one of F64",
        ),
        (
            _with_tensor("model.norm.weight", torch.full((64,), torch.nan), "base"),
            r"base/model\.safetensors: model\.norm\.weight holds NaN or infinite values",
        ),
        (
            _with_tensor("model.layers.1.mlp.up_proj.weight", torch.full((96, 64), torch.inf), "base"),
            r"base/model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values",
        ),
        (_with_head(decision_mode="lm_token", verbalizers=["A", "AB"]), r"'AB' is not one round-tripping token"),
        (
            _with_tensor("base_model.model.extra", torch.ones(1)),
            r"the tensor base_model\.model\.extra belongs to no",
        ),
        (_with_tensor(UP_A, None), r"layers\.0\.mlp\.up_proj has only half of its LoRA pair"),
        (_with_tensor(UP_A, torch.ones(4, 60)), r"up_proj is trained for a weight of \(96, 60\), but the base's is"),
        (_with_tensor(UP_A, torch.ones(3, 64)), r"up_proj has ranks 3 and 4"),
        (_with_tensor("model.norm.weight", None, "base"), r"1 tensors are missing, as norm\.weight"),
        (
            _with_tensor("model.norm.weight", torch.ones(63), "base"),
            r"norm\.weight has shape \(63,\), but config",
        ),
        (_with_tensor("model.embed_tokens.weight", None, "base"), r"no text decoder: there is no embed_tokens"),
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path: Path, change: Callable[[MadeCheckpoint], None], message: str) -> None:
    made = make_checkpoint(tmp_path)
    change(made)
    with pytest.raises(CheckpointError, match=message) as raised:
        _load_all(made)
    assert "\n" not in str(raised.value)


def test_an_adapter_of_another_depth_is_refused(tmp_path: Path) -> None:
    deep = make_checkpoint(
        tmp_path / "deep",
        config_changes={"num_hidden_layers": 5, "layer_types": ["linear_attention"] * 4 + ["full_attention"]},
    )
    shallow = make_checkpoint(tmp_path / "shallow")
    files = open_checkpoint(str(deep.adapter), str(shallow.base))
    with pytest.raises(CheckpointError, match=r"adapted modules do not exist in the base.*belongs to another base"):
        load_text_model(files, CPU, torch.float32)


def test_a_tokenizer_larger_than_the_base_is_refused(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    files = _open(made)
    files.tokenizer.add_tokens(["<new>"])
    with pytest.raises(CheckpointError, match="tokenizer and base do not belong together"):
        load_text_model(files, CPU, torch.float32)


def test_base_comes_from_the_head_file_unless_another_is_named(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    _with_head(base=str(made.base))(made)
    assert open_checkpoint(str(made.adapter)).base.directory == made.base
    moved = tmp_path / "moved"
    shutil.copytree(made.base, moved)
    assert open_checkpoint("adapter", "moved", relative_to=tmp_path).base.directory == moved


def test_remote_code_of_a_base_is_not_run(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    path = made.base / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "custom", "auto_map": {"AutoConfig": "evil.Config"}}
    path.write_text(json.dumps(config))
    (made.base / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        BaseFiles(made.base)
    assert not (tmp_path / "ran").exists()
