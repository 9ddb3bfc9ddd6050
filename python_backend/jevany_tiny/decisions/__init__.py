"""Labelled decisions, made from a seed: support routing, urgency, facts, thresholds, tool choice and screening."""

from jevany_tiny.decisions.example import Example, Recital
from jevany_tiny.decisions.phrases import Split
from jevany_tiny.decisions.stream import DOMAINS, MAKERS, decisions, lessons, recitals, take

__all__ = ["DOMAINS", "MAKERS", "Example", "Recital", "Split", "decisions", "lessons", "recitals", "take"]
