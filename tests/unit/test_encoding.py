"""Rows of token ids, written by hand from the format, and the limits on their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

from jevany_backend.encoding import Delimiters, Limits, Row, RowEncoder, find_delimiters
from jevany_backend.protocol import Choice, InvalidRequest, Noul, Question, Score, TooLong
from tests.unit.toy_tokenizers import QWEN, UNKNOWN, characters, utf8_bytes, words

# The ids of QWEN's tokens after the 257 of `characters`; b"ab" spells the ids of a and b.
OPTION, END_OPTION, STATE, QUESTION, DECIDE = 257, 258, 259, 260, 261


def encoder(labels: list[str] | None = None, limits: Limits | None = None, **init_kwargs: Any) -> RowEncoder:
    tokenizer = characters(QWEN, **init_kwargs)
    return RowEncoder(tokenizer, find_delimiters(tokenizer), labels, limits)


def test_a_pointer_row() -> None:
    question = Choice("Which team?", {"billing": "about money", "technical": None})

    row = encoder().encode({"plan": "pro", "seats": 2}, question)

    assert row.ids == [
        *[STATE, *b"plan: pro\nseats: 2"],  # 0 to 18
        *[QUESTION, *b"Which team?"],  # 19 to 30
        *[OPTION, *b"billing: about money", END_OPTION],  # 31 to 52
        *[OPTION, *b"technical", END_OPTION],  # 53 to 63
        DECIDE,  # 64
    ]
    assert row.option_ends == [52, 63]
    assert row.decide == 64


def test_a_direct_token_row() -> None:
    question = Choice("Which team?", {"billing": "about money", "technical": None})

    row = encoder(labels=["A", "B", "C"]).encode("Hi", question)

    assert row.ids == [
        *[STATE, *b"Hi"],  # 0 to 2
        *[QUESTION, *b"Which team?"],  # 3 to 14
        *[OPTION, *b"A: billing: about money", END_OPTION],  # 15 to 39
        *[OPTION, *b"B: technical", END_OPTION],  # 40 to 53
        DECIDE,  # 54
    ]
    assert row.option_ends == [39, 53]
    assert row.decide == 54


def test_the_shortest_row() -> None:
    row = encoder().encode(None, Noul())

    assert row == Row(
        ids=[STATE, QUESTION, OPTION, *b"no", END_OPTION, OPTION, *b"yes", END_OPTION, DECIDE],
        decide=11,
        option_ends=[5, 10],
    )


def test_a_row_of_noul_criteria() -> None:
    row = encoder().encode("", Noul(["Is it?", None], {"true": {"a": [1]}}))

    assert row.ids == [
        *[STATE, QUESTION, *b"- Is it?\n- "],
        *[OPTION, *b"no", END_OPTION, OPTION, *b"yes: a:\n  - 1", END_OPTION, DECIDE],
    ]
    assert [row.ids[end] for end in row.option_ends] == [END_OPTION] * 2


def test_a_row_of_levels() -> None:
    row = encoder().encode(True, Score(None, [None, "", 1.0, "x"]))

    assert row.ids == [
        *[STATE, *b"True", QUESTION],
        *[OPTION, END_OPTION, OPTION, END_OPTION, OPTION, *b"1.0", END_OPTION, OPTION, *b"x", END_OPTION, DECIDE],
    ]
    assert row.option_ends == [7, 9, 14, 17]
    assert row.decide == 18


def test_a_row_of_words() -> None:
    vocabulary = ["??", "the", "cat", "sat", "is", "it", "fed?", "no", "yes", "no:", "hungry"]
    tokenizer = words(vocabulary, ["<unused4>", "<unused3>", "<unused2>", "<unused1>", "<unused0>"])

    row = RowEncoder(tokenizer, find_delimiters(tokenizer)).encode(
        "the cat sat on the cat", Noul("is it fed?", {"false": "hungry"})
    )

    assert row == Row(
        ids=[15, 1, 2, 3, 0, 1, 2, 14, 4, 5, 6, 13, 9, 10, 12, 13, 8, 12, 11],
        decide=18,
        option_ends=[14, 17],
    )


def test_a_row_of_bytes() -> None:
    tokenizer = utf8_bytes(QWEN)  # 256 to 260

    row = RowEncoder(tokenizer, find_delimiters(tokenizer)).encode("é\x00😀", Noul("¿"))

    assert row.ids == [
        *[258, 0xC3, 0xA9, 0x00, 0xF0, 0x9F, 0x98, 0x80],
        *[259, 0xC2, 0xBF],
        *[256, *b"no", 257, 256, *b"yes", 257, 260],
    ]


def test_each_piece_is_tokenised_on_its_own() -> None:
    # As SentencePiece does, this tokenizer marks the beginning of a text, but not what follows a special token in it.
    tokenizer = characters(QWEN)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace("_", prepend_scheme="first", split=False), backend.pre_tokenizer]
    )
    assert tokenizer("a<|box_end|>b", add_special_tokens=False)["input_ids"] == [*b"_a", END_OPTION, *b"b"]

    row = RowEncoder(tokenizer, find_delimiters(tokenizer)).encode("a", Choice("b c", {"d": None}))

    assert row.ids == [STATE, *b"_a", QUESTION, *b"_b_c", OPTION, *b"_d", END_OPTION, DECIDE]


def test_a_tokenizer_s_own_special_tokens_and_truncation_stay_out() -> None:
    tokenizer = characters([*QWEN, "<s>", "</s>"], model_max_length=8, truncation_side="left")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 262), ("</s>", 263)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    assert tokenizer("ab")["input_ids"] == [262, *b"ab", 263]

    row = RowEncoder(tokenizer, find_delimiters(tokenizer)).encode("a long state", Noul("a long question"))

    assert row.ids[:29] == [STATE, *b"a long state", QUESTION, *b"a long question"]
    assert len(row.ids) == 29 + 10


def test_an_encoder_keeps_nothing_from_the_row_before() -> None:
    rows = encoder(labels=["A", "B"])
    first = rows.encode("one", Noul("two"))

    assert rows.encode("other", Score("", ["x", "y"])) == encoder(labels=["A", "B"]).encode(
        "other", Score("", ["x", "y"])
    )
    assert rows.encode("one", Noul("two")) == first


def test_unknown_characters_are_the_tokenizer_s_matter() -> None:
    assert encoder().tokens("aЖb", "state", 100) == [ord("a"), UNKNOWN, ord("b")]


TINY = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "model_repository" / "jevany-tiny" / "1" / "base")
SPLIT = characters([*QWEN, "<s>"], split_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [TINY, SPLIT, utf8_bytes(QWEN)], ids=["tiny", "split", "bytes"])
@given(parts=st.lists(st.text(st.characters(codec="utf-8")) | st.sampled_from(["<|endoftext|>", "<s>", "\r\n", "  "])))
def test_a_text_is_split_as_transformers_splits_it(tokenizer: Any, parts: list[str]) -> None:
    text = "".join(parts)
    rows = RowEncoder(tokenizer, find_delimiters(tokenizer))
    assert rows.tokens(text, "state", 1000) == tokenizer(rows.escape(text), add_special_tokens=False)["input_ids"]
    assert rows.count_tokens(text) == len(tokenizer(text, add_special_tokens=False)["input_ids"])


# Limits.


@pytest.mark.parametrize(("length", "fits"), [(8, True), (9, True), (10, False), (19, False)])
def test_a_state_is_counted_with_its_delimiter(length: int, fits: bool) -> None:
    rows = encoder(limits=Limits(state_tokens=10, row_tokens=1_000_000))

    if fits:
        assert rows.encode("s" * length, Noul()).ids[: length + 2] == [STATE, *b"s" * length, QUESTION]
        return
    with pytest.raises(TooLong) as caught:
        rows.encode("s" * length, Noul(), "questions.spam")
    assert caught.value.wire_text() == f"context_length_exceeded: state: {length + 1} tokens; the limit is 10"


@pytest.mark.parametrize(
    "question",
    [
        Noul("q" * 17),
        Noul("q" * 10, {"true": "o" * 5}),
        Choice("q" * 19, {"a": None, "b": "c"}),
        Choice("", {"a" * 26: 0}),
    ],
)
def test_a_row_fits_its_limit_exactly_or_not_at_all(question: Question) -> None:
    # 1 + 2 of the state, and 29 or 30 of the rest.
    length = len(encoder().encode("st", question).ids)

    for limit in (length, length + 1):
        assert len(encoder(limits=Limits(state_tokens=3, row_tokens=limit)).encode("st", question).ids) == length
    with pytest.raises(TooLong) as caught:
        encoder(limits=Limits(state_tokens=3, row_tokens=length - 1)).encode("st", question, "questions.spam")
    assert caught.value.message == (f"questions.spam: {length} tokens with its state; the limit is {length - 1}")


def test_a_row_over_its_limit_names_both_numbers() -> None:
    # [state] s [question] q [option] no [end] [option] yes [end] [decide] = 14
    for limit, fits in ((15, True), (14, True), (13, False)):
        rows = encoder(limits=Limits(row_tokens=limit))
        if fits:
            assert len(rows.encode("s", Noul("q")).ids) == 14
            continue
        with pytest.raises(TooLong) as caught:
            rows.encode("s", Noul("q"))
        assert caught.value.message == "question: 14 tokens with its state; the limit is 13"


def test_a_state_over_its_limit_is_named_before_the_row() -> None:
    with pytest.raises(TooLong, match=r"^state: 11 tokens; the limit is 8$"):
        encoder(limits=Limits(state_tokens=8, row_tokens=8)).encode("s" * 10, Noul())


@pytest.mark.parametrize("place", ["state", "instructions", "one option", "many options"])
def test_a_request_far_over_its_limit_is_not_split_to_its_end(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[int] = []
    rows = encoder(limits=Limits(state_tokens=100, row_tokens=200))
    whole = rows._split

    def counted(text: str) -> list[int]:
        split.append(len(text))
        return whole(text)

    monkeypatch.setattr(rows, "_split", counted)
    long = "x" * 1_000_000
    requests: dict[str, tuple[str, Question, str, int]] = {
        "state": (long, Noul(), "state", 100),
        "instructions": ("", Noul(long), "question.instructions", 200),
        "one option": ("", Choice("", {"a": None, long: None}), "question.criteria", 200),
        "many options": ("", Choice("", {f"{number:4}{'x' * 96}": None for number in range(4096)}), "question", 200),
    }
    state, question, path, most = requests[place]
    with pytest.raises(TooLong) as caught:
        rows.encode(state, question)
    assert caught.value.message == f"{path}: more than {2 * most} tokens; the limit is {most}"
    assert sum(split) < 1000


@pytest.mark.parametrize("tokenizer", [TINY, utf8_bytes(QWEN)], ids=["tiny", "bytes"])
@given(
    st.text(st.sampled_from("ab1 .\n<>|é😀") | st.characters(codec="utf-8")), st.integers(1, 200), st.integers(1, 30)
)
def test_no_text_within_twice_its_limit_is_refused_uncounted(tokenizer: Any, text: str, times: int, most: int) -> None:
    rows = RowEncoder(tokenizer, find_delimiters(tokenizer))
    exact = rows.tokens(text * times, "state", 10**9)
    try:
        assert rows.tokens(text * times, "state", most) == exact
    except TooLong:
        assert len(exact) > 2 * most - 8  # What a cut changes at its end.


def test_the_limits_by_default() -> None:
    assert Limits() == Limits(state_tokens=8192, row_tokens=8192)
    rows = encoder()

    assert len(rows.encode("s" * 8179, Noul()).ids) == 8191
    assert len(rows.encode("s" * 8180, Noul()).ids) == 8192
    with pytest.raises(TooLong, match=r"^question: 8193 tokens with its state; the limit is 8192$"):
        rows.encode("s" * 8181, Noul())
    with pytest.raises(TooLong, match=r"^state: 8193 tokens; the limit is 8192$"):
        rows.encode("s" * 8192, Noul())


def test_the_labels_count_in_the_limit() -> None:
    for labels, length in ((None, 12), (["A", "B"], 18)):
        with pytest.raises(TooLong, match=f": {length} tokens"):
            encoder(labels, limits=Limits(row_tokens=11)).encode("", Noul())


def test_a_message_about_a_long_id_is_short() -> None:
    with pytest.raises(TooLong) as caught:
        encoder(limits=Limits(row_tokens=5)).encode("", Noul(), f"questions.{'x' * 100_000}")

    assert len(caught.value.message) <= 500
    assert caught.value.message.endswith("x: 12 tokens with its state; the limit is 5")


# The number of labels.


def test_more_options_than_labels_are_refused() -> None:
    rows = encoder(labels=["A", "B"])
    assert rows.encode("", Choice("", {"x": 1, "y": 2})).ids.count(END_OPTION) == 2

    for question, count in ((Choice("", dict.fromkeys("xyz")), "3 options"), (Score("", [0] * 4096), "4096 options")):
        with pytest.raises(InvalidRequest) as caught:
            rows.encode("", question, "questions.team")
        assert caught.value.message == f"questions.team.criteria: {count}; this direct-token model has 2 labels"


def test_a_pointer_row_takes_every_option() -> None:
    row = encoder(limits=Limits(row_tokens=10_000)).encode("", Score("", [""] * 4096))

    assert row.ids == [STATE, QUESTION, *[OPTION, END_OPTION] * 4096, DECIDE]
    assert row.option_ends == list(range(3, 8195, 2))


def test_usage_counts_tokens_without_special_ones() -> None:
    assert encoder().count_tokens('{"a": 1}') == 8
    assert encoder().count_tokens("") == 0


def test_a_row_takes_the_ids_it_is_given() -> None:
    delimiters = Delimiters(("<1>", "<2>", "<3>", "<4>", "<5>"), (301, 302, 303, 304, 305))

    row = RowEncoder(characters(), delimiters).encode("s", Choice("q", {"o": None}))

    assert row.ids == [301, *b"s", 302, *b"q", 303, *b"o", 304, 305]
