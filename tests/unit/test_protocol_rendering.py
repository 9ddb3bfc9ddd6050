"""The text a model reads for a JSON value. The expected texts are written by hand from the format."""

from __future__ import annotations

from typing import Any

import pytest

from jevany_backend.protocol import render

RENDERINGS: list[tuple[Any, str]] = [
    (None, ""),
    ("", ""),
    ("plain text", "plain text"),
    ("  blanks of a lone text stay ", "  blanks of a lone text stay "),
    ("two\n  lines", "two\n  lines"),
    (True, "True"),
    (False, "False"),
    (0, "0"),
    (-7, "-7"),
    (123456789012345678901234567890, "123456789012345678901234567890"),
    (1.0, "1.0"),
    (-0.0, "-0.0"),
    (0.1, "0.1"),
    (1e16, "1e+16"),
    (1e22, "1e+22"),
    (1e-7, "1e-07"),
    (123456.789, "123456.789"),
    # Lists.
    ([], ""),
    (["a"], "- a"),
    (["a", 2, 2.5, True, None, "b"], "- a\n- 2\n- 2.5\n- True\n- \n- b"),
    ([None], "- "),
    ([""], "- "),
    ([[]], "- "),
    ([{}], "- "),
    ([[], [], {}], "- \n- \n- "),
    (["  leading blanks go, trailing stay  "], "- leading blanks go, trailing stay  "),
    (["\n\t two\n  lines"], "- two\n  lines"),
    (["first\nsecond", "third"], "- first\nsecond\n- third"),
    ([["a", "b"], ["c"]], "- - a\n  - b\n- - c"),
    ([[["a", "b"], "c"], "d"], "- - - a\n    - b\n  - c\n- d"),
    ([[None, "a"]], "- - \n  - a"),
    ([[[]]], "- - "),
    # Objects.
    ({}, ""),
    ({"plan": "pro"}, "plan: pro"),
    ({"a": None, "b": True, "c": 1.0}, "a: \nb: True\nc: 1.0"),
    ({"": "no name"}, ": no name"),
    ({"a: b": "c: d"}, "a: b: c: d"),
    ({"two\nlines": "x"}, "two\nlines: x"),
    ({"text": "  blanks stay"}, "text:   blanks stay"),
    ({"text": "one\ntwo"}, "text: one\ntwo"),
    ({"list": []}, "list:\n"),
    ({"object": {}}, "object:\n"),
    ({"list": [], "next": 1}, "list:\n\nnext: 1"),
    ({"list": ["a", "b"]}, "list:\n  - a\n  - b"),
    ({"object": {"a": 1, "b": 2}}, "object:\n  a: 1\n  b: 2"),
    ({"b": 1, "a": 2}, "b: 1\na: 2"),
    ({"outer": {"text": "one\ntwo"}}, "outer:\n  text: one\ntwo"),
    # One in the other.
    ([{"a": 1, "b": 2}, {"c": 3}], "- a: 1\n  b: 2\n- c: 3"),
    ([{"a": [1, 2], "b": {"c": None}}], "- a:\n    - 1\n    - 2\n  b:\n    c: "),
    ({"a": [[1, 2], {"b": 3}]}, "a:\n  - - 1\n    - 2\n  - b: 3"),
    ({"a": {"b": {"c": [True]}}}, "a:\n  b:\n    c:\n      - True"),
    ([{" a": 1, " b": 2}], "- a: 1\n   b: 2"),
    ([{"list": []}, "x"], "- list:\n\n- x"),
]


@pytest.mark.parametrize(("value", "text"), RENDERINGS, ids=[repr(value) for value, _ in RENDERINGS])
def test_a_value_renders_to_the_text_of_the_format(value: Any, text: str) -> None:
    assert render(value) == text


def test_a_record_renders_as_written_by_hand() -> None:
    ticket: dict[str, Any] = {
        "id": 4711,
        "from": {"name": "Zoë", "vip": False, "tags": ["new", "eu"]},
        "messages": [
            {"at": 1.5, "text": "It broke.\n  Again.", "files": [{"name": "log.txt", "lines": [1, [2, 3]]}]},
            "  (no reply)",
            None,
        ],
        "note": None,
    }

    assert render(ticket) == (
        "id: 4711\n"
        "from:\n"
        "  name: Zoë\n"
        "  vip: False\n"
        "  tags:\n"
        "    - new\n"
        "    - eu\n"
        "messages:\n"
        "  - at: 1.5\n"
        "    text: It broke.\n"
        "  Again.\n"
        "    files:\n"
        "      - name: log.txt\n"
        "        lines:\n"
        "          - 1\n"
        "          - - 2\n"
        "            - 3\n"
        "  - (no reply)\n"
        "  - \n"
        "note: "
    )


def test_rendering_leaves_the_value_as_it_was() -> None:
    value: dict[str, Any] = {"a": ["  x", {"b": None}]}

    render(value)

    assert value == {"a": ["  x", {"b": None}]}
