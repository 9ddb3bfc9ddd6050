"""The verbalizer table: the labels that name the options of a direct-token row."""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from jevany_backend.encoding import LABEL_CHARACTERS, MAX_LABELS, build_labels, label_ids
from tests.unit.toy_tokenizers import QWEN, characters, utf8_bytes

ALPHANUMERIC = list("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
# U+00A1 to U+00FF without U+00AD, the soft hyphen, which is not printable.
LATIN = [chr(point) for point in range(0xA1, 0x100) if point != 0xAD]


def test_letters_and_digits_come_first() -> None:
    assert build_labels(characters(), 62) == ALPHANUMERIC == list(LABEL_CHARACTERS)
    assert build_labels(characters(), 2) == ["A", "B"]
    assert build_labels(characters(), 0) == []


def test_printable_characters_follow_in_the_order_of_their_code_points() -> None:
    # The tokenizer's own order is another.
    tokenizer = characters(QWEN, further="\u9fffЖ\u4e00Ā")

    assert build_labels(tokenizer, 160) == [*ALPHANUMERIC, *LATIN, "Ā", "Ж", "\u4e00", "\u9fff"]


def test_blanks_quotes_and_the_unprintable_are_no_labels() -> None:
    blanks = "\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000"
    unprintable = "\u200b\u202e\u2060\u0378\u0600"  # formats, and a code point without a character

    labels = build_labels(characters(further=blanks + unprintable + "Ā"), 157)

    assert labels == [*ALPHANUMERIC, *LATIN, "Ā"]
    assert not {'"', "\\", " ", "\xa0", "\xad"} & set(labels)


def test_a_table_has_255_labels() -> None:
    tokenizer = characters(further="".join(chr(point) for point in range(0x100, 0x200)))

    labels = build_labels(tokenizer)

    assert MAX_LABELS == len(labels) == len(set(labels)) == 255
    assert labels == [*ALPHANUMERIC, *LATIN, *(chr(point) for point in range(0x100, 0x163))]
    assert label_ids(tokenizer, labels) == [
        *(ord(label) for label in (*ALPHANUMERIC, *LATIN)),
        *range(257, 257 + 99),
    ]


def test_a_tokenizer_with_too_few_labels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: only 156 single-token labels; 255 are wanted$"):
        build_labels(characters(further="\ua000\U0001f600"))  # Both are beyond the range.


def test_characters_of_several_tokens_are_skipped() -> None:
    tokenizer = utf8_bytes(joined="éß")

    assert build_labels(tokenizer, 64) == [*ALPHANUMERIC, "ß", "é"]
    assert label_ids(tokenizer, ["A", "é", "ß"]) == [65, 256, 257]


def test_of_characters_that_share_a_token_one_is_a_label() -> None:
    tokenizer = characters(normalizer=normalizers.Lowercase())

    assert build_labels(tokenizer, 3) == ["a", "b", "c"]
    assert build_labels(tokenizer, 36) == list("abcdefghijklmnopqrstuvwxyz0123456789")


def test_a_saved_table_gives_ids_in_its_own_order() -> None:
    assert label_ids(characters(), ["b", "A", "é", "0"]) == [98, 65, 233, 48]
    assert label_ids(characters(), []) == []


@pytest.mark.parametrize("label", ["AB", "", "Ж", "A ", "<|box_end"])
def test_a_saved_label_that_is_not_one_token_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"is not one round-tripping token of this tokenizer$") as caught:
        label_ids(characters(QWEN), ["A", label, "B"])

    assert str(caught.value).startswith(f"verbalizers: {label!r} is not")


def test_a_saved_label_that_reads_back_as_another_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^verbalizers: 'A' is not one round-tripping token of this tokenizer$"):
        label_ids(characters(normalizer=normalizers.Lowercase()), ["b", "A"])


def test_a_saved_table_that_names_two_options_alike_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^verbalizers: two labels share a token$"):
        label_ids(characters(), ["A", "B", "A"])
