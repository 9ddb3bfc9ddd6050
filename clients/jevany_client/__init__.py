"""Clients for a JevAny decision model in Triton Inference Server: sync and asyncio, over gRPC and HTTP.

Example:
    >>> from jevany_client import Choice, Client
    >>> with Client("localhost:8001", "jevany-tiny") as client:  # doctest: +SKIP
    ...     decision = client.decide("I was charged twice.", Choice("Which team?", {"billing": None, "shipping": None}))
    ...     print(decision.answer["choice"], decision.probabilities)
"""

from jevany_backend.protocol import (
    Choice,
    DecisionError,
    InternalError,
    InvalidRequest,
    NotReady,
    Noul,
    OutOfMemory,
    Question,
    Score,
    TooLong,
    Unsupported,
)
from jevany_client.async_client import AsyncClient
from jevany_client.client import Client
from jevany_client.errors import DeadlineExceeded, Overloaded, Unavailable, UnknownModel
from jevany_client.messages import Decision, ServedModel

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Decision",
    "DecisionError",
    "InternalError",
    "InvalidRequest",
    "NotReady",
    "Noul",
    "OutOfMemory",
    "Overloaded",
    "Question",
    "Score",
    "ServedModel",
    "TooLong",
    "Unavailable",
    "UnknownModel",
    "Unsupported",
]
