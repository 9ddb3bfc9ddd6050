"""Reads docker/Dockerfile and docker/compose.yaml as far as the tests need them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


@dataclass
class Stage:
    """One stage of the Dockerfile.

    Attributes:
        name: What comes after AS.
        base: What comes after FROM.
        outer_arguments: The ARGs before the first FROM, with their defaults.
        arguments: Its own ARGs.
        environment: Its own ENVs.
        steps: Its instructions, each with its text, in order.
    """

    name: str
    base: str
    outer_arguments: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)

    def runs(self) -> list[str]:
        """Return its commands."""
        return [text for instruction, text in self.steps if instruction == "RUN"]

    def copied(self) -> list[tuple[str, str]]:
        """Return source and destination of all that it copies from the repository."""
        pairs = []
        for instruction, text in self.steps:
            if instruction == "COPY":
                *sources, destination = text.split()
                pairs += [(source, destination) for source in sources]
        return pairs

    def last(self, instruction: str) -> str:
        """Return the text of its last instruction of a kind."""
        return [text for kind, text in self.steps if kind == instruction][-1]

    def words(self, instruction: str) -> list[str]:
        """Return the words of its last instruction of a kind that is written as a list."""
        return json.loads(self.last(instruction))


def read_dockerfile() -> dict[str, Stage]:
    """Return the stages of docker/Dockerfile by name, in order."""
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", "")
    outer: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(str.strip, text.splitlines()):
        instruction, rest = re.sub(r" +", " ", line).split(" ", 1)
        if instruction == "FROM":
            base, name = rest.split(" AS ")
            stage = stages[name] = Stage(name, base, outer)
        elif instruction == "ARG":
            name, _, default = rest.partition("=")
            (outer if stage is None else stage.arguments)[name] = default.strip('"')
        elif stage is not None:
            if instruction == "ENV":
                stage.environment |= dict(word.split("=", 1) for word in shlex.split(rest))
            stage.steps.append((instruction, rest))
    return stages


def read_compose(**settings: str) -> dict[str, Any]:
    """Return docker/compose.yaml with its variables replaced by ``settings`` or their defaults, as compose does."""
    return _replaced(yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()), settings)


def _replaced(part: Any, settings: Mapping[str, str]) -> Any:
    if isinstance(part, dict):
        return {key: _replaced(value, settings) for key, value in part.items()}
    if isinstance(part, list):
        return [_replaced(value, settings) for value in part]
    if isinstance(part, str):
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: settings.get(match[1]) or match[2], part)
    return part
