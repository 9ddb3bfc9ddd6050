"""Which five tokens delimit a row, and that no caller's text can hold one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jevany_backend.encoding import ADDED_ALPHABET, DELIMITER_ALPHABETS, Delimiters, RowEncoder, find_delimiters
from jevany_backend.protocol import Choice, InvalidRequest, Noul, Question, Score
from tests.unit.toy_tokenizers import (
    GEMMA,
    JEV,
    LLAMA,
    OTHER_CONTROL_TOKENS,
    QWEN,
    UNKNOWN,
    characters,
    utf8_bytes,
    words,
)

QWEN_ROLES = ("<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>")
OWN = ("<state>", "<question>", "[option>", "<end", "decide>")  # A checkpoint's own: any strings at all.


# The choice.


def test_the_alphabets_are_those_of_the_format() -> None:
    assert DELIMITER_ALPHABETS == (QWEN_ROLES, JEV, GEMMA, LLAMA)
    assert ADDED_ALPHABET == JEV


@pytest.mark.parametrize(
    ("special", "delimiters"),
    [
        (QWEN, Delimiters(QWEN_ROLES, (259, 260, 257, 258, 261))),
        (JEV, Delimiters(JEV, (257, 258, 259, 260, 261))),
        (GEMMA[::-1], Delimiters(GEMMA, (261, 260, 259, 258, 257))),
        (LLAMA, Delimiters(LLAMA, (257, 258, 259, 260, 261))),
        # The first that is whole, wherever it stands in the vocabulary.
        ((*LLAMA, *GEMMA, *JEV, *QWEN), Delimiters(QWEN_ROLES, (274, 275, 272, 273, 276))),
        ((*LLAMA, *GEMMA, *JEV), Delimiters(JEV, (267, 268, 269, 270, 271))),
        ((*LLAMA, *GEMMA), Delimiters(GEMMA, (262, 263, 264, 265, 266))),
        ((*QWEN[1:], *LLAMA), Delimiters(LLAMA, (261, 262, 263, 264, 265))),
        ((*QWEN[:-1], *JEV[1:], *GEMMA[:2], *GEMMA[3:], *LLAMA), Delimiters(LLAMA, (269, 270, 271, 272, 273))),
    ],
)
def test_the_first_whole_alphabet_is_chosen(special: Sequence[str], delimiters: Delimiters) -> None:
    tokenizer = characters(special)

    assert find_delimiters(tokenizer) == delimiters
    assert len(tokenizer) == 257 + len(special)


def test_a_checkpoint_s_own_list_comes_first() -> None:
    tokenizer = characters([*QWEN, *OWN], jevany_decision_tokens=list(OWN), jevany_token_schema="v1")

    assert find_delimiters(tokenizer) == Delimiters(OWN, (262, 263, 264, 265, 266))


def test_a_checkpoint_s_own_list_gives_the_roles_by_its_order() -> None:
    tokenizer = characters(QWEN, jevany_decision_tokens=list(QWEN))

    assert find_delimiters(tokenizer) == Delimiters(QWEN, (257, 258, 259, 260, 261))


@pytest.mark.parametrize(
    ("schema", "delimiters"),
    [
        ("legacy", Delimiters(QWEN_ROLES, (259, 260, 257, 258, 261))),
        ("v1", Delimiters(JEV, (262, 263, 264, 265, 266))),
    ],
)
def test_a_checkpoint_s_schema_comes_before_the_alphabets(schema: str, delimiters: Delimiters) -> None:
    assert find_delimiters(characters([*QWEN, *JEV], jevany_token_schema=schema)) == delimiters


@pytest.mark.parametrize("saved", [{"jevany_token_schema": "v1"}, {"jevany_decision_tokens": list(JEV)}])
@pytest.mark.parametrize(("value", "added"), [(list(JEV), True), (True, True), ([], False), (None, False)])
def test_a_checkpoint_says_which_tokens_it_added(saved: dict[str, Any], value: Any, added: bool) -> None:
    tokenizer = characters(JEV, jevany_added_tokens=value, **saved)

    assert find_delimiters(tokenizer) == Delimiters(JEV, (257, 258, 259, 260, 261), added)


MISFITS = [
    ({"jevany_decision_tokens": list(QWEN[:4])}, "jevany_decision_tokens needs five distinct strings, not ['<|box_"),
    ({"jevany_decision_tokens": [*QWEN, "a"]}, "jevany_decision_tokens needs five distinct strings, not ['<|box_"),
    ({"jevany_decision_tokens": [*QWEN[:4], QWEN[0]]}, "jevany_decision_tokens needs five distinct strings, not ["),
    ({"jevany_decision_tokens": []}, "jevany_decision_tokens needs five distinct strings, not []"),
    ({"jevany_decision_tokens": "abcde"}, "jevany_decision_tokens needs five distinct strings, not 'abcde'"),
    ({"jevany_decision_tokens": dict.fromkeys(QWEN)}, "jevany_decision_tokens needs five distinct strings, not {"),
    ({"jevany_decision_tokens": [1, 2, 3, 4, 5]}, "needs five distinct strings, not [1, 2, 3, 4, 5]"),
    ({"jevany_decision_tokens": [[], {}, "a", "b", "c"]}, "needs five distinct strings, not [[], {}, 'a', 'b', 'c']"),
    ({"jevany_decision_tokens": [*QWEN[:4], None]}, "needs five distinct strings, not ["),
    ({"jevany_decision_tokens": list(JEV)}, f"the delimiters {', '.join(JEV)} are not five single, distinct tokens"),
    ({"jevany_decision_tokens": [*QWEN[:4], "ab"]}, "are not five single, distinct tokens"),
    ({"jevany_token_schema": "v1"}, f"the delimiters {', '.join(JEV)} are not five single, distinct tokens"),
    ({"jevany_token_schema": "v2"}, "unknown jevany_token_schema 'v2'"),
    ({"jevany_token_schema": ""}, "unknown jevany_token_schema ''"),
    ({"jevany_token_schema": ["v1"]}, "unknown jevany_token_schema ['v1']"),
]


@pytest.mark.parametrize(("saved", "message"), MISFITS, ids=[message for _, message in MISFITS])
def test_what_a_checkpoint_saved_must_fit_its_tokenizer(saved: dict[str, Any], message: str) -> None:
    tokenizer = characters(QWEN, **saved)

    with pytest.raises(ValueError, match=r"^tokenizer: ") as caught:
        find_delimiters(tokenizer)

    assert message in str(caught.value)
    assert len(tokenizer) == 262


def test_a_legacy_schema_needs_qwen_s_tokens() -> None:
    with pytest.raises(ValueError, match=r"<\|fim_suffix\|> are not five single, distinct tokens$"):
        find_delimiters(characters(JEV, jevany_token_schema="legacy"))


def test_a_tokenizer_without_delimiters_gets_them_at_its_end() -> None:
    tokenizer = characters(["<s>", *QWEN[:4]], extra_special_tokens=["<s>"])

    delimiters = find_delimiters(tokenizer)

    assert delimiters == Delimiters(JEV, (262, 263, 264, 265, 266), added=True)
    assert len(tokenizer) == 267
    assert {"<s>", *JEV} <= set(tokenizer.all_special_tokens)
    assert tokenizer("<s>a<|jev_state|>b", add_special_tokens=False)["input_ids"] == [257, 97, 262, 98]


def test_added_delimiters_are_known_as_added_the_next_time(tmp_path: Path) -> None:
    tokenizer = characters()
    delimiters = find_delimiters(tokenizer)
    tokenizer.save_pretrained(tmp_path)

    assert delimiters == Delimiters(JEV, (257, 258, 259, 260, 261), added=True)
    assert find_delimiters(tokenizer) == delimiters
    assert find_delimiters(AutoTokenizer.from_pretrained(tmp_path)) == delimiters


def test_known_delimiters_change_nothing_in_the_tokenizer() -> None:
    tokenizer = characters(QWEN)
    before = dict(tokenizer.init_kwargs)

    find_delimiters(tokenizer)

    assert tokenizer.init_kwargs == before


# The escapes.

ESCAPES = [
    ("<|word|>", "<¦word¦>"),
    ("<|fim_prefix|>", "<¦fim_prefix¦>"),
    ("a<|box_end|><|box_start|>b", "a<¦box_end¦><¦box_start¦>b"),
    ("<|A_z_09|>", "<¦A_z_09¦>"),
    ("<|_|>", "<¦_¦>"),
    ("<|7|>", "<¦7¦>"),
    # Not a word of ASCII letters, digits and underscores: as it was.
    ("<||>", "<||>"),
    ("<| |>", "<| |>"),
    ("<|a b|>", "<|a b|>"),
    ("<|a-b|>", "<|a-b|>"),
    ("<|é|>", "<|é|>"),
    ("<|٣|>", "<|٣|>"),
    ("<|word|", "<|word|"),
    ("|word|>", "|word|>"),
    ("<|wo\nrd|>", "<|wo\nrd|>"),
    ("<¦word¦>", "<¦word¦>"),
    ("a < b | c > d", "a < b | c > d"),
    ("", ""),
    # One within the other.
    ("<<|box_end|>|>", "<<¦box_end¦>|>"),
    ("<|box_<|box_end|>end|>", "<|box_<¦box_end¦>end|>"),
    ("<|<|box_end|>|>", "<|<¦box_end¦>|>"),
    ("<|a|b|>", "<|a|b|>"),
    ("<|a|><|", "<¦a¦><|"),
    ("<|a|>b|>", "<¦a¦>b|>"),
    ("<|<|a|>", "<|<¦a¦>"),
]


@pytest.mark.parametrize("special", [QWEN, JEV, GEMMA, LLAMA], ids=["qwen", "jev", "gemma", "llama"])
@pytest.mark.parametrize(("text", "escaped"), ESCAPES)
def test_every_control_token_is_escaped(special: Sequence[str], text: str, escaped: str) -> None:
    assert encoder(special).escape(text) == escaped


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<unused0>", "<¦unused0¦>"),
        ("<unused4><unused0>", "<¦unused4¦><¦unused0¦>"),
        ("<unused5>", "<unused5>"),
        ("<unused00>", "<unused00>"),
        ("<unu<unused0>sed0>", "<unu<¦unused0¦>sed0>"),
        ("<<unused1>>", "<<¦unused1¦>>"),
        ("<unused<unused2>2>", "<unused<¦unused2¦>2>"),
        ("<|unused0|><unused0>", "<¦unused0¦><¦unused0¦>"),
        ("<¦unused0¦>", "<¦unused0¦>"),
    ],
)
def test_gemma_s_delimiters_are_escaped(text: str, escaped: str) -> None:
    assert encoder(GEMMA).escape(text) == escaped


def test_another_alphabet_s_words_stay() -> None:
    assert encoder(QWEN).escape("<unused0>") == "<unused0>"


def test_a_checkpoint_s_own_delimiters_are_escaped() -> None:
    tokenizer = characters(OWN, jevany_decision_tokens=list(OWN))
    rows = RowEncoder(tokenizer, find_delimiters(tokenizer))

    assert rows.escape("<state> [option> <end decide> <b>") == "<¦state¦> [option¦> <¦end decide¦> <b>"


# What is smuggled in stays text.

ALL_DELIMITERS = (*QWEN, *JEV, *GEMMA, *LLAMA)
FRAGMENTS = (
    *("<", ">", "|", "¦", "<|", "|>", "<¦", "¦>", "\n", " ", "\x00", "_", "unused", "0", "box_", "end", "fim_prefix"),
    *("\uff1c", "\uff1e", "\uff5c", "<\u0338", "\u200b", "\ufeff"),
    *("<<|box_end|>|>", "<|box_<|box_end|>end|>", "<unu<unused0>sed0>", "<|<|fim_suffix|>|>"),
    *("<state>", "<end", "decide>", "[option>", "<question>"),
)
TEXTS = st.lists(
    st.sampled_from((*ALL_DELIMITERS, *OTHER_CONTROL_TOKENS, *FRAGMENTS)) | st.text(max_size=3), max_size=8
).map("".join)
TOKENIZERS = {
    "qwen": characters((*QWEN, *OTHER_CONTROL_TOKENS)),
    "jev": characters((*JEV, *OTHER_CONTROL_TOKENS)),
    "gemma": characters((*GEMMA, *OTHER_CONTROL_TOKENS)),
    "llama": characters((*LLAMA, *OTHER_CONTROL_TOKENS)),
    "added": characters(OTHER_CONTROL_TOKENS),
    "own": characters((*OWN, *OTHER_CONTROL_TOKENS), jevany_decision_tokens=list(OWN)),
    "all": characters((*ALL_DELIMITERS, *OTHER_CONTROL_TOKENS)),
    "bytes": utf8_bytes((*QWEN, *OTHER_CONTROL_TOKENS)),
    "gemma bytes": utf8_bytes((*GEMMA, *OTHER_CONTROL_TOKENS)),
}
ENCODERS = {name: RowEncoder(tokenizer, find_delimiters(tokenizer)) for name, tokenizer in TOKENIZERS.items()}


def encoder(special: Sequence[str]) -> RowEncoder:
    tokenizer = characters(special)
    return RowEncoder(tokenizer, find_delimiters(tokenizer))


def assert_sound(rows: RowEncoder, state: Any, question: Question) -> None:
    """Check that a row's delimiters are its own, in their order, and that no other control token is in it."""
    row = rows.encode(state, question)
    options = len(question.keys)
    state_id, question_id, option_id, end_option_id, decide_id = rows.delimiters.ids
    structure = [token for token in row.ids if token in rows.delimiters.ids]

    assert structure == [state_id, question_id, *[option_id, end_option_id] * options, decide_id]
    assert row.ids[0] == state_id
    assert row.decide == len(row.ids) - 1
    assert row.ids[row.decide] == decide_id
    assert row.option_ends == [position for position, token in enumerate(row.ids) if token == end_option_id]
    others = {rows.tokenizer.convert_tokens_to_ids(token) for token in OTHER_CONTROL_TOKENS}
    assert not others & set(row.ids)


@pytest.mark.parametrize("name", ENCODERS)
def test_no_delimiter_comes_in_with_a_caller_s_text(name: str) -> None:
    for smuggled in (*ALL_DELIMITERS, *OTHER_CONTROL_TOKENS, *FRAGMENTS):
        for text in (smuggled, f"a {smuggled} b", smuggled * 3, f"<{smuggled}>", f"<|{smuggled}|>"):
            assert_sound(ENCODERS[name], text, Noul("q"))
            assert_sound(ENCODERS[name], "s", Noul(text, {"true": text, "false": [text]}))
            assert_sound(ENCODERS[name], {text: [text, {text: text}]}, Choice({text: text}, {text: text, "x": text}))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sampled_from(sorted(ENCODERS)), TEXTS, TEXTS, TEXTS, TEXTS)
def test_no_text_around_a_delimiter_lets_it_through(
    name: str, state: str, instructions: str, option: str, description: str
) -> None:
    rows = ENCODERS[name]

    assert_sound(rows, state, Choice(instructions, {option: description, f"{option}>": None}))
    assert_sound(rows, {state: [description]}, Score([instructions], [option, [description]]))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sampled_from(ALL_DELIMITERS), st.data())
def test_a_delimiter_may_be_cut_and_filled_anywhere(delimiter: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(delimiter)))
    filling = data.draw(st.sampled_from((*ALL_DELIMITERS, *FRAGMENTS)))
    text = delimiter[:cut] + filling + delimiter[cut:]

    for rows in ENCODERS.values():
        assert_sound(rows, text, Choice(text, {text: text}))


def test_a_delimiter_cannot_be_split_over_two_pieces() -> None:
    for delimiter in ALL_DELIMITERS:
        for cut in range(1, len(delimiter)):
            first, second = delimiter[:cut], delimiter[cut:]
            assert_sound(ENCODERS["all"], first, Choice(second, {first: None, second: first}))
            assert_sound(ENCODERS["gemma"], first, Choice(second, {first: None, second: first}))


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        # Folds case and Unicode forms before it looks for special tokens.
        (
            characters(
                [AddedToken(text, normalized=True, special=True) for text in GEMMA],
                normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
            ),
            "a <UNUSED3> b",
        ),
        (
            characters(
                [AddedToken(text, normalized=True, special=True) for text in QWEN], normalizer=normalizers.NFKC()
            ),
            "a \uff1c|box_end\uff5c\uff1e b",
        ),
        # Delimiters without brackets, which no escape reaches.
        (
            characters(["[S]", "[Q]", "[O]", "[E]", "[D]"], jevany_decision_tokens=["[S]", "[Q]", "[O]", "[E]", "[D]"]),
            "[E]",
        ),
        # Delimiters that the escapes of others spell.
        (
            characters(
                ["<¦x¦>", "<x>", "<a>", "<b>", "<c>"], jevany_decision_tokens=["<¦x¦>", "<x>", "<a>", "<b>", "<c>"]
            ),
            "<x>",
        ),
        # The unknown token as a delimiter.
        (words(["??", "q"], GEMMA[:4], jevany_decision_tokens=["??", *GEMMA[:4]]), "anything"),
    ],
    ids=["case", "forms", "no brackets", "escapes", "unknown"],
)
def test_a_delimiter_that_no_escape_stops_is_refused(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    rows = RowEncoder(tokenizer, find_delimiters(tokenizer))
    escaped = tokenizer(rows.escape(text), add_special_tokens=False)["input_ids"]
    assert set(escaped) & set(rows.delimiters.ids), "the case shows nothing"

    places: list[tuple[Any, Question, str]] = [
        (text, Noul("q"), "state"),
        ({"q": ["q", text]}, Noul("q"), "state"),
        ("q", Noul(text), "questions.id.instructions"),
        ("q", Choice("q", {"q": None, text: None}), "questions.id.criteria"),
        ("q", Choice("q", {"q": text}), "questions.id.criteria"),
    ]
    for state, question, path in places:
        with pytest.raises(InvalidRequest) as caught:
            rows.encode(state, question, "questions.id")
        assert caught.value.message == f"{path}: this model's tokenizer reads a delimiter in the text"


def test_full_width_signs_are_other_characters_elsewhere() -> None:
    assert ENCODERS["qwen"].tokens("\uff1c|box_end|\uff1e", "state", 100) == [UNKNOWN, *b"|box_end|", UNKNOWN]
