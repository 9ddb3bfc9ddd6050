"""From shards to the device: exact values, bounded memory, and what is left when a read fails."""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import os
import re
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from jevany_backend.checkpoint import (
    CheckpointError,
    load,
    load_readout,
    load_text_model,
    open_checkpoint,
    plan,
    stream,
)
from jevany_backend.checkpoint.adapter import LoraPair, read_adapter
from jevany_backend.checkpoint.shards import read_header
from jevany_backend.checkpoint.stream import WeightStream, read_rows
from jevany_backend.checkpoint.weights import BlockScales, Weight
from tests.checkpoint_factory import MadeCheckpoint, make_checkpoint

CPU = torch.device("cpu")
F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several blocks a tensor, of 64 rows where the tensor is 64 float32 wide.
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64 * 64 * 4)


def _open(made: MadeCheckpoint) -> Any:
    return open_checkpoint(str(made.adapter), str(made.base))


def _shard(made: MadeCheckpoint, parts: int) -> None:
    """Split a base's one file into shards."""
    path = made.base / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    index: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, made.base / file)
        index |= dict.fromkeys(names, file)
    (made.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=BF16), "c": torch.tensor(7.0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    content = (tmp_path / "x.safetensors").read_bytes()
    header = read_header(tmp_path / "x.safetensors")
    assert set(header) == {"a", "b", "c"}
    for name, stored in header.items():
        assert (stored.dtype, stored.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        raw = bytearray(content[stored.offset : stored.offset + stored.nbytes])
        assert torch.equal(torch.frombuffer(raw, dtype=stored.dtype).view(stored.shape), tensors[name])


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize(
    ("stored", "served"), [(F32, F32), (BF16, BF16), (F32, BF16), (BF16, F32), (torch.float16, F32)]
)
@pytest.mark.parametrize("adapted", [False, True])
def test_every_value_arrives(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype, adapted: bool, readers: int
) -> None:
    weight = torch.randn(301, 61).to(stored)
    wide = torch.randn(2, 10_000).to(stored)  # One row is larger than a block.
    save_file({"w": weight, "wide": wide, "one": torch.tensor(3.0), "none": torch.ones(0, 4)}, tmp_path / "x")
    header = read_header(tmp_path / "x")
    pair = LoraPair(torch.randn(4, 61), torch.randn(301, 4), 0.5) if adapted else None
    places = {name: torch.full(header[name].shape, torch.nan, dtype=served) for name in header}
    weights = [Weight(header[name], places[name], pair if name == "w" else None) for name in header]
    with WeightStream(CPU, readers) as reader:
        assert reader.read(weights) == weight.nbytes + wide.nbytes + 4
    expected = weight.to(served)
    if pair is not None:
        # Merged as a whole, in float32, rounded once: no bit may differ.
        expected = weight.float().add_(pair.up @ pair.down, alpha=pair.scale).to(served)
    assert torch.equal(places["w"], expected)
    assert torch.equal(places["wide"], wide.to(served))
    assert places["one"] == 3


@pytest.mark.parametrize("family", ["qwen3_5", "muse_glimmer"])
@pytest.mark.parametrize("mode", ["pointer", "lm_token"])
def test_only_what_text_serving_needs_is_read(
    tmp_path: Path, family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint(tmp_path, family=family, decision_mode=mode, config_changes={"tie_word_embeddings": False})
    header = read_header(made.base / "model.safetensors")
    towers = {name for name in header if "language_model" not in name and "lm_head" not in name}
    assert towers
    assert "lm_head.weight" in header
    inode, reads = os.stat(made.base / "model.safetensors").st_ino, []
    preadv = os.preadv

    def recorded(file: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(file, buffers, offset)
        if os.fstat(file).st_ino == inode:
            reads.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", recorded)
    files = _open(made)
    load_text_model(files, CPU, F32)
    load_readout(files, CPU, F32)

    def read_bytes(name: str) -> int:
        begin, end = header[name].offset, header[name].offset + header[name].nbytes
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in reads)

    read = {name: read_bytes(name) for name in header if read_bytes(name)}
    assert not towers & set(read)
    # Of the head direct token reads the rows of its labels, and a pointer readout nothing.
    rows = len(files.labels or ())
    head = header["lm_head.weight"]
    assert read.pop("lm_head.weight", 0) == rows * head.nbytes // head.rows
    assert set(read) == {name for name in header if "language_model" in name}
    assert all(count == header[name].nbytes for name, count in read.items())


class _Map(mmap.mmap):
    """Memory that is asked for as the loader does; all of it that is still there, and its sizes."""

    alive: ClassVar[weakref.WeakSet[_Map]] = weakref.WeakSet()
    sizes: ClassVar[list[int]] = []

    def __new__(cls, file: int, nbytes: int, **options: Any) -> Self:
        made = super().__new__(cls, file, nbytes, **options)
        cls.alive.add(made)
        cls.sizes.append(nbytes)
        return made


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> type[_Map]:
    monkeypatch.setattr(mmap, "mmap", _Map)
    monkeypatch.setattr(_Map, "sizes", [])
    return _Map


def _readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.mark.parametrize("readers", [1, 3])
def test_host_memory_is_bounded_however_large_a_file_is(tmp_path: Path, host_memory: type[_Map], readers: int) -> None:
    save_file({"w": torch.randn(9000, 20)}, tmp_path / "x")
    target = torch.zeros(9000, 20)
    with WeightStream(CPU, readers) as stream_of_weights:
        stream_of_weights.read([Weight(read_header(tmp_path / "x")["w"], target)])
        stream_of_weights.read([Weight(read_header(tmp_path / "x")["w"], target)])
        assert len(_readers()) == readers
    # The tensor has 44 blocks; beside the weight itself there were two for each reader, and they are gone.
    assert host_memory.sizes == [stream.BLOCK_BYTES] * 2 * readers
    assert not host_memory.alive
    assert not _readers()
    assert torch.equal(target, load_file(tmp_path / "x")["w"])


@pytest.mark.parametrize("block_rows", [64, 128, 192, 1000])
def test_the_merge_does_not_depend_on_the_size_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    width, rank = 256, 16
    base = torch.randn(1000, width).bfloat16()
    pair = LoraPair(torch.randn(rank, width).bfloat16(), torch.randn(1000, rank).bfloat16(), 2.0)
    save_file({"w": base}, tmp_path / "x")
    monkeypatch.setattr(stream, "BLOCK_BYTES", block_rows * width * 2)
    merged = torch.zeros(1000, width, dtype=BF16)
    with WeightStream(CPU) as reader:
        reader.read([Weight(read_header(tmp_path / "x")["w"], merged, pair)])
    whole = base.float().add_(pair.up.float() @ pair.down.float(), alpha=2.0).bfloat16()
    assert torch.equal(merged.view(torch.int16), whole.view(torch.int16))


def test_no_more_than_a_block_is_merged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.randn(1000, 64).bfloat16()}, tmp_path / "x")
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            nonlocal largest
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.dtype == F32:
                largest = max(largest, result.numel())
            return result

    pair = LoraPair(torch.randn(4, 64), torch.randn(1000, 4), 1.0)
    target = torch.zeros(1000, 64, dtype=BF16)
    with WeightStream(CPU, 1) as reader, Sizes():
        reader.read([Weight(read_header(tmp_path / "x")["w"], target, pair)])
    assert largest == 2 * 64 * 64  # In bfloat16, a block has twice the rows.


@pytest.mark.parametrize(
    ("rows", "at_once", "blocks"),
    [
        (200, 64, [64, 64, 72]),
        (192, 64, [64, 64, 64]),
        (63, 64, [63]),
        (257, 130, [128, 64, 65]),
        (400, 1000, [400]),
        (7, 3, [3, 3, 1]),
        (130, 65, [64, 66]),
    ],
)
def test_no_block_is_short(rows: int, at_once: int, blocks: list[int]) -> None:
    assert list(stream._block_rows(rows, at_once)) == blocks


def test_rows_are_read_alone(tmp_path: Path) -> None:
    weight = torch.randn(50, 8).bfloat16()
    save_file({"before": torch.ones(3), "w": weight}, tmp_path / "x")
    stored = read_header(tmp_path / "x")["w"]
    assert torch.equal(read_rows(stored, [7, 0, 49]), weight[[7, 0, 49]])
    os.truncate(tmp_path / "x", stored.offset + 10)
    with pytest.raises(CheckpointError, match=r"x: w: the file ends at byte \d+"):
        read_rows(stored, [0])


def test_shards_are_loaded_with_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_checkpoint(tmp_path)
    whole = load_text_model(_open(made), CPU, F32).state_dict()
    _shard(made, 3)
    caplog.clear()
    with caplog.at_level(logging.INFO, "jevany_backend"):
        sharded = load_text_model(_open(made), CPU, F32).state_dict()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
    *lines, last = [record.getMessage() for record in caplog.records]
    for number, line in enumerate(lines, 1):
        shard = rf"shard {number} of 3, model-0000{number}-of-00003\.safetensors"
        assert re.fullmatch(rf"{shard}: 0\.00 GB in \d+\.\d\d s, \d+\.\d GB/s", line)
    assert re.fullmatch(r"all 3 shards: 0\.00 GB in .* GB/s", last)


def _as_fp8(made: MadeCheckpoint, block: int = 16) -> dict[str, torch.Tensor]:
    """Store a base's matrices as e4m3 with a scale for each block; return the values that they stand for."""
    path = made.base / "model.safetensors"
    values, stored = {}, {}
    for name, tensor in load_file(path).items():
        if tensor.ndim != 2 or "_proj" not in name:
            values[name] = stored[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        scales = torch.rand(rows, columns) * 0.01 + 0.001
        spread = scales.repeat_interleave(block, 0)[: tensor.shape[0]].repeat_interleave(block, 1)[:, : tensor.shape[1]]
        stored[name] = (tensor / spread).clamp(-448, 448).to(FP8)
        stored[f"{name}_scale_inv"] = scales
        values[name] = stored[name].float() * spread
    save_file(stored, path)
    config = json.loads((made.base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    (made.base / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("served", [F32, BF16])
def test_fp8_weights_are_dequantised_and_merged_with_one_rounding(tmp_path: Path, served: torch.dtype) -> None:
    made = make_checkpoint(tmp_path)
    values = _as_fp8(made)
    ours = load_text_model(_open(made), CPU, served).state_dict()
    pairs = read_adapter(made.adapter).pairs
    for name, weight in ours.items():
        expected = values[f"model.{name}"].float()
        if pair := pairs.get(name.removesuffix(".weight")):
            expected = expected.clone().add_(pair.up @ pair.down, alpha=pair.scale)
        assert torch.equal(weight, expected.to(served)), name


def test_a_block_of_scales_starts_at_its_own_row() -> None:
    scales = BlockScales(torch.arange(1.0, 7).view(3, 2), rows=4, columns=3)
    whole = scales.dequantise(torch.ones(10, 5).to(FP8), 0)
    assert whole[0].tolist() == [1, 1, 1, 2, 2]
    assert whole[9].tolist() == [5, 5, 5, 6, 6]
    assert torch.equal(scales.dequantise(torch.ones(4, 5).to(FP8), 3), whole[3:7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "gptq"},
            r"config\.json: quantization_config is 'gptq' with weight_block_size \[16, 16\]; only",
        ),
        ({"weight_block_size": None}, r"quantization_config is 'fp8' with weight_block_size None; only bases"),
        ({"weight_block_size": [8, 8]}, r"_scale_inv has shape \(\d+, \d+\); needs \(\d+, \d+\)"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    made = make_checkpoint(tmp_path)
    _as_fp8(made)
    config = json.loads((made.base / "config.json").read_text())
    config["quantization_config"] |= changes
    (made.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_text_model(_open(made), CPU, F32)


def test_fp8_without_scales_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    path = made.base / "model.safetensors"
    tensors = load_file(path)
    up = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {up: tensors[up].to(FP8)}, path)
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight is stored as fp8, but has no .*up_proj\.weight_scale_inv"
    ):
        plan(_open(made), F32)
    save_file(tensors | {up: tensors[up].to(torch.int8)}, path)
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight is stored as I8; needs one of F64, F32, F16, BF16, F8_"
    ):
        plan(_open(made), F32)


def test_a_failed_read_names_file_and_tensor_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint(tmp_path)
    _shard(made, 2)
    files = _open(made)
    models: list[weakref.ref[Any]] = []
    build = load.build_model

    def remember(*arguments: Any) -> Any:
        model = build(*arguments)
        models.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    monkeypatch.setattr(load, "build_model", remember)
    path = made.base / "model-00002-of-00002.safetensors"
    last = max(read_header(path).values(), key=lambda stored: stored.offset)
    os.truncate(path, last.offset + 1)  # After the headers were read: as when a disk fails.
    with pytest.raises(CheckpointError) as raised:
        load_text_model(files, CPU, F32)
    assert re.fullmatch(rf"{path}: {re.escape(last.name)}: the file ends at byte {last.offset + 1}", str(raised.value))
    gc.collect()
    assert models
    assert not any(reference() is not None for reference in models)  # Though the error is still held here.


@pytest.mark.parametrize("where", ["open", "read", "take in"])
def test_whatever_fails_no_thread_and_no_buffer_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_memory: type[_Map], where: str
) -> None:
    for number in range(2):
        save_file({f"w{number}": torch.randn(2000, 64), f"v{number}": torch.randn(2000, 64)}, tmp_path / f"{number}.st")
    stored = read_header(tmp_path / "0.st") | read_header(tmp_path / "1.st")
    if where == "open":
        (tmp_path / "1.st").unlink()
        message = r"1\.st: No such file or directory"
    elif where == "read":
        fault = stored["v1"].offset + stored["v1"].nbytes // 2
        preadv = os.preadv

        def failing_disk(file: int, buffers: Any, offset: int) -> int:
            if Path(os.readlink(f"/proc/self/fd/{file}")).name == "1.st" and offset >= fault:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(file, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing_disk)
        message = r"1\.st: v1: Input/output error"
    else:
        message = r"1\.st: v1: .*size"
    targets = {name: torch.zeros(2000, 64 if where != "take in" or name != "v1" else 63) for name in stored}
    opened = set(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(CheckpointError, match=message),
        WeightStream(CPU, 3) as reader,
    ):
        reader.read([Weight(stored[name], targets[name]) for name in stored])
    gc.collect()
    assert not _readers()
    assert not host_memory.alive
    assert set(os.listdir("/proc/self/fd")) <= opened


def test_an_interrupt_ends_the_readers(tmp_path: Path, host_memory: type[_Map]) -> None:
    save_file({"w": torch.randn(9000, 64)}, tmp_path / "x")

    class Interrupted(Weight):
        def write(self, raw: torch.Tensor, first_row: int, rows: int) -> None:
            if first_row:
                raise KeyboardInterrupt

    weight = Interrupted(read_header(tmp_path / "x")["w"], torch.zeros(9000, 64))
    with pytest.raises(KeyboardInterrupt), WeightStream(CPU, 3) as reader:
        reader.read([weight])
    gc.collect()
    assert not _readers()
    assert not host_memory.alive


def test_a_full_device_says_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_checkpoint(tmp_path)

    def fail(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Weight, "write", fail)
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"model\.safetensors: model\.\S+: CUDA out of memory\. Tried to allocate"
    ):
        load_text_model(_open(made), CPU, F32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header is cut off"),
        ((999).to_bytes(8, "little") + b"{}", "its header is cut off"),
        ((2).to_bytes(8, "little") + b"[]", "its header is a list"),
        ((2).to_bytes(8, "little") + b"{,", "Expecting property name"),
        (
            (63).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(63) + b"1234",
            "it is cut off: w should end at byte 79, but the file has 75",
        ),
        (
            (63).to_bytes(8, "little")
            + b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'.ljust(63)
            + b"12345678",
            "w has offsets that do not fit its shape",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: not a safetensors file: {re.escape(message)}"):
        read_header(tmp_path / "x.safetensors")


def test_an_index_that_does_not_fit_its_shards_is_named(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path)
    _shard(made, 2)
    path = made.base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: model\.extra is not in it, but"):
        _open(made)
