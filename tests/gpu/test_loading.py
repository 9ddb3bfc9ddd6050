"""Weights from files onto a real GPU: the same bits as merged whole, bounded memory, nothing left after a failure."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jevany_backend.checkpoint import CheckpointError, load_text_model, open_checkpoint
from jevany_backend.checkpoint.adapter import LoraPair
from jevany_backend.checkpoint.shards import read_header
from jevany_backend.checkpoint.stream import BLOCK_BYTES, STREAMS, WeightStream
from jevany_backend.checkpoint.weights import BlockScales, Weight
from tests.checkpoint_factory import make_checkpoint

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
ROWS, WIDTH, RANK = 9000, 4096, 16  # 74 MB each: five blocks.


def _adapted(number: int) -> LoraPair | None:
    """Return what is added to a weight: all but every third have something, and the dtypes change."""
    if number % 3 == 2:
        return None
    generator = torch.Generator().manual_seed(number)
    pair = LoraPair(
        torch.randn(RANK, WIDTH, generator=generator), torch.randn(ROWS, RANK, generator=generator), 0.5 + number
    )
    return LoraPair(pair.down.to(BF16), pair.up.to(BF16), pair.scale) if number % 3 == 1 else pair


def _write(directory: Path, weights: int) -> dict[str, torch.Tensor]:
    """Write weights in shards of four, each with a small one beside the large."""
    values: dict[str, torch.Tensor] = {}
    for begin in range(0, weights, 4):
        shard = {}
        for number in range(begin, min(begin + 4, weights)):
            shard[f"w{number}"] = torch.randn(ROWS, WIDTH, device=GPU).to(BF16).cpu()
            shard[f"small{number}"] = torch.randn(WIDTH).to(BF16)
        save_file(shard, directory / f"{begin:03}.safetensors")
        values |= shard
    return values


def test_every_bit_is_as_if_merged_whole_and_memory_is_bounded(tmp_path: Path) -> None:
    values = _write(tmp_path, 12)
    stored = {name: tensor for path in tmp_path.iterdir() for name, tensor in read_header(path).items()}
    pairs = {f"w{number}": pair.to(GPU) for number in range(12) if (pair := _adapted(number))}
    targets = {name: torch.full(tensor.shape, torch.nan, dtype=BF16, device=GPU) for name, tensor in stored.items()}
    for _ in range(3):  # The order in which streams run differs from time to time.
        before = torch.cuda.memory_allocated(GPU)
        torch.cuda.reset_peak_memory_stats(GPU)
        with WeightStream(GPU) as stream:
            read = stream.read([Weight(stored[name], targets[name], pairs.get(name)) for name in stored])
        assert read == sum(tensor.nbytes for tensor in stored.values())
        peak = torch.cuda.max_memory_allocated(GPU)
        for name, value in values.items():
            expected = value.to(GPU)
            if (pair := pairs.get(name)) is not None:
                product = pair.up.float() @ pair.down.float()
                expected = expected.float().add_(product, alpha=pair.scale).to(BF16)
            assert torch.equal(targets[name].view(torch.int16), expected.view(torch.int16)), name
            targets[name].fill_(torch.nan)
        # A block as stored, in float32 and as a product, for each stream; the pairs; and cuBLAS's 32 MiB a stream.
        assert peak - before < STREAMS * (5 * BLOCK_BYTES + (32 << 20)) + (100 << 20)


def test_fp8_is_dequantised_and_merged_as_on_the_cpu(tmp_path: Path) -> None:
    fp8 = torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn)
    save_file({"w": fp8}, tmp_path / "x.safetensors")
    scales = torch.rand(-(-ROWS // 128), WIDTH // 128) + 0.1
    target = torch.zeros(ROWS, WIDTH, dtype=BF16, device=GPU)
    with WeightStream(GPU) as stream:
        stored = read_header(tmp_path / "x.safetensors")["w"]
        stream.read([Weight(stored, target, None, BlockScales(scales.to(GPU), 128, 128))])
    assert torch.equal(target.cpu(), BlockScales(scales, 128, 128).dequantise(fp8, 0).to(BF16))


def test_a_failed_load_gives_everything_back(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 20_000}
    made = make_checkpoint(tmp_path, base_dtype=BF16, config_changes=changes)
    files = open_checkpoint(str(made.adapter), str(made.base))
    load_text_model(files, GPU, BF16)  # Now the libraries have what they keep.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU), torch.cuda.memory_reserved(GPU)
    path = made.base / "model.safetensors"
    last = max(read_header(path).values(), key=lambda stored: stored.offset)
    os.truncate(path, last.offset + 1)
    with pytest.raises(CheckpointError, match=rf"{re.escape(last.name)}: the file ends at byte {last.offset + 1}"):
        load_text_model(files, GPU, BF16)
    assert (torch.cuda.memory_allocated(GPU), torch.cuda.memory_reserved(GPU)) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
