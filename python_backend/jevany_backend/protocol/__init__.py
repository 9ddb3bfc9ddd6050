"""The wire format, defined once and used by the server and the client alike. It needs no torch."""

from jevany_backend.protocol.answers import answer
from jevany_backend.protocol.errors import (
    ERRORS_BY_CODE,
    DecisionError,
    InternalError,
    InvalidRequest,
    NotReady,
    OutOfMemory,
    TooLong,
    Unsupported,
)
from jevany_backend.protocol.json_content import JSON, MAX_DEPTH, MAX_REQUEST_BYTES, render
from jevany_backend.protocol.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    REQUEST_FIELDS,
    Choice,
    DecisionRequest,
    Noul,
    Question,
    Score,
    parse_request,
    question_from_json,
    question_to_json,
    request_from_json,
)

__all__ = [
    "ERRORS_BY_CODE",
    "JSON",
    "MAX_DEPTH",
    "MAX_OPTIONS",
    "MAX_QUESTIONS",
    "MAX_REQUEST_BYTES",
    "REQUEST_FIELDS",
    "Choice",
    "DecisionError",
    "DecisionRequest",
    "InternalError",
    "InvalidRequest",
    "NotReady",
    "Noul",
    "OutOfMemory",
    "Question",
    "Score",
    "TooLong",
    "Unsupported",
    "answer",
    "parse_request",
    "question_from_json",
    "question_to_json",
    "render",
    "request_from_json",
]
