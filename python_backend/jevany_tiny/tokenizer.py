"""The tokenizer of the tiny models: a byte-level BPE over their own training text.

Capitalised words, digits and signs stand apart from the space before them, so that a name is the same tokens wherever
it occurs: inside a sentence, after a quotation mark, or as an option. Small-letter words take their space along.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jevany_backend.encoding import DELIMITER_ALPHABETS, LABEL_CHARACTERS, MAX_LABELS
from jevany_backend.protocol import question_from_json, render
from jevany_tiny.decisions import Example, decisions

PAD = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, *DELIMITER_ALPHABETS[0])
VOCABULARY = 2560

_WORDS = (
    r"'(?:[sdmt]|ll|ve|re)(?!\p{L})"
    r"| ?[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[\p{Lu}\p{Lt}][\p{Ll}\p{M}]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def further_labels() -> list[str]:
    """Returns the labels after A-Z, a-z and 0-9: printable code points, each two bytes that become one token."""
    points = (chr(point) for point in range(0xA1, 0x800))
    printable = (character for character in points if character.isprintable() and not character.isspace())
    return list(itertools.islice(printable, MAX_LABELS - len(LABEL_CHARACTERS)))


def texts(examples: Iterable[Example]) -> Iterator[str]:
    """Yields what the tokenizer will be asked to split: states, instructions and options."""
    for example in examples:
        question = question_from_json(example.question, "question")
        yield render(example.state)
        yield render(question.instructions)
        yield from question.option_texts


def train_tokenizer(seed: int, examples: int = 60_000) -> Tokenizer:
    """Trains the tokenizer on decisions of the training split.

    Args:
        seed: Seed of the decisions it reads.
        examples: How many of them.

    Returns:
        A tokenizer of `VOCABULARY` tokens: special tokens, bytes, the labels, and merges by frequency.
    """
    labels = further_labels()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - len(labels),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    stream = itertools.islice(decisions("train", f"tokenizer/{seed}"), examples)
    tokenizer.train_from_iterator(texts(stream), trainer)
    return _with_labels(tokenizer, labels)


def _with_labels(tokenizer: Tokenizer, labels: list[str]) -> Tokenizer:
    """Makes each label one ordinary token by merging its two bytes before anything else, and adds special tokens."""
    spec = json.loads(tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pairs = [list(byte_level.pre_tokenize_str(label)[0][0]) for label in labels]
    merges = [merge for merge in spec["model"]["merges"] if merge not in pairs]
    known = list(spec["model"]["vocab"])
    tokens = [*known, *("".join(pair) for pair in pairs if "".join(pair) not in spec["model"]["vocab"])]
    spec["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    spec["model"]["merges"] = pairs + merges
    result = Tokenizer.from_str(json.dumps(spec))
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return result


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json`, on one line, and the small files that make transformers load it."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


class SplitText:
    """The part of transformers' tokenizer interface that encoding a row needs, several times faster.

    Instructions and options repeat, so short texts are remembered.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.init_kwargs: dict[str, object] = {}
        self._known: dict[str, list[int]] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> SplitText:
        """Reads `tokenizer.json`."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def __call__(self, text: str, add_special_tokens: bool = False, verbose: bool = True) -> dict[str, list[int]]:
        """Splits one text."""
        del add_special_tokens, verbose
        ids = self._known.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(text) < 64 and len(self._known) < 200_000:
                self._known[text] = ids
        return {"input_ids": ids}

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of every token."""
        return self.tokenizer.get_vocab()

    def decode(self, ids: list[int]) -> str:
        """Returns the text of some tokens, special ones included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)
