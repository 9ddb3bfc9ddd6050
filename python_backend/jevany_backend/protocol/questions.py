"""The request: a state and typed questions about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from jevany_backend.protocol.errors import InvalidRequest, Unsupported
from jevany_backend.protocol.json_content import (
    JSON,
    check_content,
    check_keys,
    counted,
    kind_of,
    parse_json,
    render,
    shown,
)

MAX_QUESTIONS = 64
MAX_OPTIONS = 4096

REQUEST_FIELDS = ("state", "question", "questions", "model", "media")
QUESTION_FIELDS = ("type", "instructions", "criteria")


@dataclass(frozen=True)
class Noul:
    """A yes/no question. The options the model sees are ``no`` and ``yes``, in this order.

    Args:
        instructions: What is asked, as JSON content.
        criteria: What ``false`` and ``true`` mean; either may be left out.

    Raises:
        InvalidRequest: A criterion other than ``false`` and ``true``, or content that is not JSON.
    """

    type: ClassVar[str] = "noul"
    instructions: JSON = None
    criteria: Mapping[str, JSON] | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_content(self.instructions, "instructions")
        if self.criteria is None:
            return
        _check_object(self.criteria, "criteria")
        unknown = [key for key in self.criteria if key not in ("false", "true")]
        if unknown:
            raise InvalidRequest(
                _field(unknown[0], "criteria"), f"unknown key {shown(unknown[0])}; a noul has only 'false' and 'true'"
            )

    @property
    def keys(self) -> list[str]:
        """The options' names in the answer, in option order."""
        return ["false", "true"]

    @property
    def option_texts(self) -> list[str]:
        """The options as the model reads them."""
        criteria = self.criteria or {}
        return [_named_option("no", criteria.get("false")), _named_option("yes", criteria.get("true"))]


@dataclass(frozen=True)
class Choice:
    """A choice among named options.

    Args:
        instructions: What is asked, as JSON content.
        criteria: Each option's name and description, in the order the model sees; a description may be None.

    Raises:
        InvalidRequest: No option, more than `MAX_OPTIONS`, or content that is not JSON.
    """

    type: ClassVar[str] = "choice"
    instructions: JSON = None
    criteria: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        check_content(self.instructions, "instructions")
        _check_object(self.criteria, "criteria")
        _check_count(len(self.criteria), "option", 1)

    @property
    def keys(self) -> list[str]:
        """The options' names in the answer, in option order."""
        return list(self.criteria)

    @property
    def option_texts(self) -> list[str]:
        """The options as the model reads them."""
        return [_named_option(name, description) for name, description in self.criteria.items()]


@dataclass(frozen=True)
class Score:
    """A rating on an ordered scale.

    Args:
        instructions: What is asked, as JSON content.
        criteria: The description of each level, lowest first.

    Raises:
        InvalidRequest: Fewer than 2 levels, more than `MAX_OPTIONS`, or content that is not JSON.
    """

    type: ClassVar[str] = "score"
    instructions: JSON = None
    criteria: list[JSON] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check every field."""
        check_content(self.instructions, "instructions")
        if not isinstance(self.criteria, list):
            raise InvalidRequest("criteria", f"needs a list of levels, not {kind_of(self.criteria)}")
        _check_count(len(self.criteria), "level", 2)
        check_content(self.criteria, "criteria")

    @property
    def keys(self) -> list[str]:
        """The levels' names in the answer, ``"0"`` first."""
        return [str(level) for level in range(len(self.criteria))]

    @property
    def option_texts(self) -> list[str]:
        """The levels as the model reads them."""
        return [render(level) for level in self.criteria]


Question: TypeAlias = "Noul | Choice | Score"
QUESTION_TYPES: dict[str, type[Noul] | type[Choice] | type[Score]] = {kind.type: kind for kind in (Noul, Choice, Score)}


@dataclass(frozen=True)
class DecisionRequest:
    """A state and the questions about it.

    Attributes:
        state: Any JSON value: text, or a record that is rendered to text.
        questions: The questions by id, 1 to `MAX_QUESTIONS`.
        model: The model the caller means to ask, or None for whichever receives the request.
        single: Whether the request came with one ``question`` and no id, so that the reply has one ``answer``.
    """

    state: JSON
    questions: Mapping[str, Question]
    model: str | None = None
    single: bool = False


def parse_request(body: bytes) -> DecisionRequest:
    """Read a request from its JSON.

    Args:
        body: UTF-8 JSON: ``state``, and ``question`` or ``questions``, optionally ``model``.

    Returns:
        The request, every value of it checked.

    Raises:
        InvalidRequest: Names the path of the first bad value.
        TooLong: The body exceeds `json_content.MAX_REQUEST_BYTES`.
        Unsupported: The request carries media; this server reads text.
    """
    return request_from_json(parse_json(body))


def request_from_json(value: Any) -> DecisionRequest:
    """Read a request from a parsed JSON object; see `parse_request`."""
    _check_object_shape(value, "request")
    for key in value:
        if key not in REQUEST_FIELDS:
            raise InvalidRequest(str(key) if key.isidentifier() else shown(key), "unknown field of a request")
    if "state" not in value:
        raise InvalidRequest("state", "missing")
    check_content(value["state"], "state")
    model = value.get("model")
    if model is not None:
        if not isinstance(model, str) or not model:
            raise InvalidRequest("model", f"needs a model's name, not {shown(model)}")
        check_content(model, "model")
    media = value.get("media")
    if media is not None:
        if not isinstance(media, list):
            raise InvalidRequest("media", f"needs a list, not {kind_of(media)}")
        if media:
            raise Unsupported("media: this server reads text only, no images or video")
    questions, single = _read_questions(value)
    return DecisionRequest(state=value["state"], questions=questions, model=model, single=single)


def _read_questions(value: dict[str, Any]) -> tuple[dict[str, Question], bool]:
    if "question" in value and "questions" in value:
        raise InvalidRequest("question", "stands beside 'questions'; a request has one of them")
    if "question" in value:
        return {"question": question_from_json(value["question"], "question")}, True
    if "questions" not in value:
        raise InvalidRequest("question", "missing; a request has 'question', or 'questions' by id")
    questions = value["questions"]
    if not isinstance(questions, dict):
        raise InvalidRequest("questions", f"needs an object of questions by id, not {kind_of(questions)}")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise InvalidRequest("questions", f"{counted(len(questions), 'question')}; needs 1 to {MAX_QUESTIONS}")
    check_keys(questions, "questions")
    return {
        identifier: question_from_json(question, f"questions.{identifier}")
        for identifier, question in questions.items()
    }, False


def question_from_json(value: Any, path: str) -> Question:
    """Read one question from a parsed JSON object.

    Args:
        value: ``type``, ``instructions`` and ``criteria`` of the question.
        path: Where the question stands, for the error message.

    Raises:
        InvalidRequest: Names the path of the first bad value.
    """
    _check_object_shape(value, path)
    if "type" not in value:
        raise InvalidRequest(f"{path}.type", f"missing; needs one of {', '.join(QUESTION_TYPES)}")
    if not isinstance(value["type"], str):
        raise InvalidRequest(f"{path}.type", f"needs one of {', '.join(QUESTION_TYPES)}, not {kind_of(value['type'])}")
    kind = QUESTION_TYPES.get(value["type"])
    if kind is None:
        raise InvalidRequest(
            f"{path}.type", f"unknown type {shown(value['type'])}; needs one of {', '.join(QUESTION_TYPES)}"
        )
    for key in value:
        if key not in QUESTION_FIELDS:
            raise InvalidRequest(_field(key, path), f"unknown field {shown(key)}")
    if kind is not Noul and value.get("criteria") is None:
        raise InvalidRequest(
            f"{path}.criteria", f"missing; a {kind.type} needs its {'levels' if kind is Score else 'options'}"
        )
    fields = {key: value[key] for key in ("instructions", "criteria") if key in value}
    try:
        return kind(**fields)
    except InvalidRequest as error:
        raise error.within(path) from None


def question_to_json(question: Question) -> dict[str, Any]:
    """Return the question as it goes over the wire."""
    result: dict[str, Any] = {"type": question.type}
    if question.instructions is not None:
        result["instructions"] = question.instructions
    if question.criteria is not None:
        result["criteria"] = dict(question.criteria) if isinstance(question.criteria, Mapping) else question.criteria
    return result


def _named_option(name: str, description: JSON) -> str:
    return name if description is None or description == "" else f"{name}: {render(description)}"


def _field(key: str, path: str) -> str:
    """Return the path of an unknown field, or of its object where the name would make the path unreadable."""
    return f"{path}.{key}" if key.isidentifier() else path


def _check_object_shape(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(path, f"needs an object, not {kind_of(value)}")
    check_keys(value, path)


def _check_object(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"needs an object, not {kind_of(value)}")
    check_content(value if isinstance(value, dict) else dict(value), path)


def _check_count(count: int, what: str, least: int) -> None:
    if not least <= count <= MAX_OPTIONS:
        raise InvalidRequest("criteria", f"{counted(count, what)}; needs {least} to {MAX_OPTIONS}")
