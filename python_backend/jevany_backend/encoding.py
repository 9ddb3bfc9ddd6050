"""From a question to a row of token ids.

One question is one causal row:
``[state] state-tokens [question] instruction-tokens ([option] option-tokens [end-option])* [decide]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jevany_backend.protocol import InvalidRequest, Question, TooLong, render

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from jevany_backend.protocol import JSON

# In order of preference: the first alphabet that the tokenizer knows as five single, distinct tokens.
DELIMITER_ALPHABETS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"),
    ("<|jev_state|>", "<|jev_question|>", "<|jev_option|>", "<|jev_end_option|>", "<|jev_decide|>"),
    tuple(f"<unused{index}>" for index in range(5)),
    tuple(f"<|reserved_special_token_{index}|>" for index in range(2, 7)),
)
ADDED_ALPHABET = DELIMITER_ALPHABETS[1]

LABEL_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
MAX_LABELS = 255

_CONTROL_TOKEN = re.compile(r"<\|([A-Za-z0-9_]+)\|>", re.ASCII)


@dataclass(frozen=True)
class Delimiters:
    """The five tokens that give a row its structure.

    Attributes:
        strings: state, question, option, end-option, decide, as the tokenizer writes them.
        ids: Their token ids, in the same order.
        added: Whether the tokenizer lacked them, so that the embedding grows and the adapter brings their values.
    """

    strings: tuple[str, ...]
    ids: tuple[int, ...]
    added: bool = False


def find_delimiters(tokenizer: PreTrainedTokenizerBase) -> Delimiters:
    """Choose the delimiter tokens of a tokenizer; where it has none, add them to it.

    The choice is, in this order: the list a checkpoint saved with its tokenizer; the schema it saved; the first of
    `DELIMITER_ALPHABETS` that the tokenizer knows; else `ADDED_ALPHABET`, added as special tokens and noted in the
    tokenizer, so that it, and what is saved of it, makes the same choice again.

    Args:
        tokenizer: The tokenizer of the checkpoint or of its base. It changes only where tokens are added.

    Raises:
        ValueError: What the checkpoint saved does not fit its tokenizer.
    """
    saved = tokenizer.init_kwargs.get("jevany_decision_tokens")
    if saved is not None:
        texts = isinstance(saved, list) and all(isinstance(text, str) for text in saved)
        if not texts or len(saved) != 5 or len(set(saved)) != 5:
            raise ValueError(f"tokenizer: jevany_decision_tokens needs five distinct strings, not {saved!r}")
        return _known_delimiters(tokenizer, tuple(saved), added=bool(tokenizer.init_kwargs.get("jevany_added_tokens")))
    schema = tokenizer.init_kwargs.get("jevany_token_schema")
    if schema is not None:
        if schema not in ("legacy", "v1"):
            raise ValueError(f"tokenizer: unknown jevany_token_schema {schema!r}")
        strings = ADDED_ALPHABET if schema == "v1" else DELIMITER_ALPHABETS[0]
        return _known_delimiters(tokenizer, strings, added=bool(tokenizer.init_kwargs.get("jevany_added_tokens")))
    for strings in DELIMITER_ALPHABETS:
        ids = _token_ids(tokenizer, strings)
        if ids is not None:
            return Delimiters(strings, ids)
    tokenizer.add_special_tokens({"extra_special_tokens": list(ADDED_ALPHABET)}, replace_extra_special_tokens=False)
    tokenizer.init_kwargs.update(jevany_token_schema="v1", jevany_added_tokens=list(ADDED_ALPHABET))
    return _known_delimiters(tokenizer, ADDED_ALPHABET, added=True)


def _known_delimiters(tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...], *, added: bool) -> Delimiters:
    ids = _token_ids(tokenizer, strings)
    if ids is None:
        raise ValueError(f"tokenizer: the delimiters {', '.join(strings)} are not five single, distinct tokens")
    return Delimiters(strings, ids, added)


def _token_ids(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> tuple[int, ...] | None:
    vocabulary = tokenizer.get_vocab()
    ids = tuple(vocabulary[text] for text in strings if text in vocabulary)
    return ids if len(set(ids)) == len(strings) else None


def build_labels(tokenizer: PreTrainedTokenizerBase, count: int = MAX_LABELS) -> list[str]:
    r"""Build the verbalizer table: the labels that name the options of a direct-token row.

    A-Z, a-z and 0-9 come first, then the printable code points from U+00A1 to U+9FFF, without spaces, ``"`` and
    ``\``; each must be one token that decodes back to itself, and no token may serve twice.

    Args:
        tokenizer: The tokenizer of the checkpoint.
        count: How many labels are wanted.

    Returns:
        ``count`` labels.

    Raises:
        ValueError: The tokenizer has fewer such tokens.
    """
    labels: list[str] = []
    taken: set[int] = set()
    further = (chr(point) for point in range(0x00A1, 0xA000))
    for label in (*LABEL_CHARACTERS, *(c for c in further if c.isprintable() and not c.isspace() and c not in '"\\')):
        if len(labels) == count:
            break
        token = _single_token(tokenizer, label)
        if token is not None and token not in taken:
            labels.append(label)
            taken.add(token)
    if len(labels) < count:
        raise ValueError(f"tokenizer: only {len(labels)} single-token labels; {count} are wanted")
    return labels


def label_ids(tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]) -> list[int]:
    """Return the token id of each label of a saved verbalizer table.

    Raises:
        ValueError: A label is not one token that decodes back to itself, or two share a token.
    """
    ids: list[int] = []
    for label in labels:
        token = _single_token(tokenizer, label)
        if token is None:
            raise ValueError(f"verbalizers: {label!r} is not one round-tripping token of this tokenizer")
        ids.append(token)
    if len(set(ids)) != len(ids):
        raise ValueError("verbalizers: two labels share a token")
    return ids


def _single_token(tokenizer: PreTrainedTokenizerBase, label: str) -> int | None:
    ids = tokenizer(label, add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids) == label else None


# From this multiple of a limit on, how far a request is over it is not worth counting.
_FAR_OVER = 2
_SHORT_TOKEN = 4  # Characters of an ordinary text's token.


@dataclass(frozen=True)
class Limits:
    """The most tokens a request may have. What is over is refused, never cut.

    Attributes:
        state_tokens: Of the state, its delimiter included.
        row_tokens: Of the whole row; the base's context window bounds it too.
    """

    state_tokens: int = 8192
    row_tokens: int = 8192


@dataclass(frozen=True)
class Row:
    """One question as the model reads it.

    Attributes:
        ids: The n token ids; position i holds token i.
        decide: Position of the decide token, n - 1.
        option_ends: Position of each option's end-option token, K of them.
    """

    ids: list[int]
    decide: int
    option_ends: list[int]


def _splitter(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return what splits a text into token ids, without special tokens around it, as calling the tokenizer does.

    For tokenizers of the Rust library it is the library itself. What transformers adds to it, masks and checks that a
    row has no use for, takes several times longer than the splitting; and of the library's ways, the one that does
    not note where in the text each token stood takes a quarter less time than the others.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    # As every call of transformers sets them anew. What a checkpoint's file says here is about training rows.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _far_too_long(path: str, most: int) -> TooLong:
    return TooLong(f"{path}: more than {_FAR_OVER * most} tokens; the limit is {most}")


class RowEncoder:
    """Turns a state and a question into a row of token ids.

    Args:
        tokenizer: The checkpoint's tokenizer. Calls are not thread-safe where the tokenizer's are not.
        delimiters: Its five structure tokens.
        labels: The verbalizer table of a direct-token model; None for a pointer model.
        limits: The most tokens a request may have.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        delimiters: Delimiters,
        labels: Sequence[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.delimiters = delimiters
        self.labels = None if labels is None else list(labels)
        self.limits = limits or Limits()
        self._delimiter_ids = frozenset(delimiters.ids)
        self._split = _splitter(tokenizer)

    def encode(self, state: JSON, question: Question, path: str = "question") -> Row:
        """Encode one question about a state.

        Args:
            state: JSON content.
            question: The question, K options.
            path: The question's place in the request, for error messages.

        Returns:
            The row; never truncated.

        Raises:
            TooLong: The state or the row has more tokens than the limits allow.
            InvalidRequest: More options than the verbalizer table has labels, or text that would be a delimiter.
        """
        state_id, question_id, option_id, end_option_id, decide_id = self.delimiters.ids
        options = self._option_texts(question, path)
        most = self.limits.row_tokens
        ids = [state_id, *self.tokens(render(state), "state", self.limits.state_tokens)]
        if len(ids) > self.limits.state_tokens:
            raise TooLong(f"state: {len(ids)} tokens; the limit is {self.limits.state_tokens}")
        ids.append(question_id)
        ids.extend(self.tokens(render(question.instructions), f"{path}.instructions", most))
        option_ends = []
        for option in options:
            if len(ids) > _FAR_OVER * most:
                raise _far_too_long(path, most)
            ids.append(option_id)
            ids.extend(self.tokens(option, f"{path}.criteria", most))
            option_ends.append(len(ids))
            ids.append(end_option_id)
        decide = len(ids)
        ids.append(decide_id)
        if len(ids) > most:
            raise TooLong(f"{path}: {len(ids)} tokens with its state; the limit is {most}")
        return Row(ids, decide, option_ends)

    def _option_texts(self, question: Question, path: str) -> list[str]:
        texts = question.option_texts
        if self.labels is None:
            return texts
        if len(texts) > len(self.labels):
            raise InvalidRequest(
                f"{path}.criteria", f"{len(texts)} options; this direct-token model has {len(self.labels)} labels"
            )
        return [f"{label}: {text}" for label, text in zip(self.labels, texts, strict=False)]

    def tokens(self, text: str, path: str, most: int) -> list[int]:
        """Return the token ids of a caller's text, in which no delimiter can occur.

        A text that is far too long is not split to its end, which for some megabytes takes seconds in which nobody else
        is answered.

        Args:
            text: The text.
            path: Its place in the request, for error messages.
            most: How many tokens the request may have.

        Raises:
            TooLong: There are more than twice as many tokens. A text with fewer is left to the caller to judge.
            InvalidRequest: The tokenizer reads a delimiter even in the escaped text, as one that folds case or
                Unicode forms may.
        """
        text = self.escape(text)
        # Where a text is cut, a few tokens come out otherwise than in the whole, but not every other one of them.
        begin = most * _SHORT_TOKEN
        while begin < len(text):
            if len(self._split(text[:begin])) > _FAR_OVER * most:
                raise _far_too_long(path, most)
            begin *= 4
        ids = self._split(text)
        if not self._delimiter_ids.isdisjoint(ids):
            raise InvalidRequest(path, "this model's tokenizer reads a delimiter in the text")
        return ids

    def escape(self, text: str) -> str:
        """Rewrite whatever a tokenizer could read as a control token or as one of the delimiters.

        Every ``<|word|>`` becomes ``<¦word¦>``; after that, in every delimiter that still stands, the first ``<``
        becomes ``<¦`` and the first ``>`` becomes ``¦>``.
        """
        text = _CONTROL_TOKEN.sub(r"<¦\1¦>", text)
        for delimiter in self.delimiters.strings:
            if delimiter in text:
                text = text.replace(delimiter, delimiter.replace("<", "<¦", 1).replace(">", "¦>", 1))
        return text

    def count_tokens(self, value: Any) -> int:
        """Return the number of tokens of a serialised answer, for usage accounting."""
        return len(self._split(value))
