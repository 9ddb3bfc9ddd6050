"""Small real tokenizers whose ids can be read, so that a row can be written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# In the order in which Qwen's own vocabulary holds them, which is not the order of their roles.
QWEN = ("<|box_start|>", "<|box_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
JEV = ("<|jev_state|>", "<|jev_question|>", "<|jev_option|>", "<|jev_end_option|>", "<|jev_decide|>")
GEMMA = ("<unused0>", "<unused1>", "<unused2>", "<unused3>", "<unused4>")
LLAMA = tuple(f"<|reserved_special_token_{index}|>" for index in (2, 3, 4, 5, 6))
OTHER_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")

UNKNOWN = 256


def characters(
    special: Sequence[str | AddedToken] = (),
    further: str = "",
    normalizer: normalizers.Normalizer | None = None,
    **init_kwargs: Any,
) -> PreTrainedTokenizerFast:
    """One token a character.

    The id of a character up to U+00FF is its code point; `UNKNOWN` is any other character, but for those of
    ``further``, which have 257 and so on; the special tokens come last, in the order given.
    """
    vocabulary = {chr(point): point for point in range(256)} | {"??": UNKNOWN}
    vocabulary |= {character: 257 + index for index, character in enumerate(further)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="??"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **init_kwargs)


def utf8_bytes(special: Sequence[str] = (), joined: Sequence[str] = (), **init_kwargs: Any) -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, the id of which is the byte, as Qwen's tokenizer would be without its merges.

    The two-byte characters in ``joined`` are one token each, 256 and so on; the special tokens come last.
    """
    as_text = _bytes_as_text()
    vocabulary = {as_text[byte]: byte for byte in range(256)}
    merges = []
    for character in joined:
        first, second = (as_text[byte] for byte in character.encode())
        merges.append((first, second))
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **init_kwargs)


def _bytes_as_text() -> list[str]:
    # GPT-2's table: a printable byte stands for itself, the others for U+0100 and on, in order.
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def words(vocabulary: Sequence[str], special: Sequence[str], **init_kwargs: Any) -> PreTrainedTokenizerFast:
    """One token a word between blanks; ids count from 0 through ``vocabulary``, then through ``special``."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="??"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **init_kwargs)
