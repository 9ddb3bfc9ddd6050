"""The data, the tokenizer and the files of the tiny models."""

from __future__ import annotations

import datetime
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jevany_backend.encoding import MAX_LABELS, build_labels, find_delimiters, label_ids
from jevany_backend.protocol import question_from_json, render, request_from_json
from jevany_tiny.batches import NO_DECISION, Batch, Course, Encoders, batches_of, training_batches
from jevany_tiny.decisions import (
    DOMAINS,
    MAKERS,
    decisions,
    facts,
    lessons,
    phrases,
    recitals,
    routing,
    scene,
    screening,
    take,
    thresholds,
    tools,
    urgency,
)
from jevany_tiny.decisions.phrases import Split
from jevany_tiny.decisions.stream import RECITERS, Maker
from jevany_tiny.tokenizer import SplitText, save_tokenizer, texts, train_tokenizer

MODULES = (facts, routing, scene, screening, thresholds, tools, urgency)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(seed=0, examples=2_000), folder)
    return folder


def of(maker: Maker, split: Split = "train", count: int = 300) -> Any:
    return itertools.islice(decisions(split, "tests", ((maker, 1),)), count)


# Decisions. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_same_seed_gives_the_same_decisions(split: Split) -> None:
    assert take(split, 3, 500) == take(split, 3, 500)
    assert take(split, 3, 50) != take(split, 4, 50)


def test_every_domain_and_type_is_well_represented() -> None:
    examples = take("heldout", 0, 6000)
    domains = Counter(example.domain for example in examples)
    kinds = Counter(example.question["type"] for example in examples)
    assert set(domains) == set(DOMAINS)
    assert min(domains.values()) > 0.08 * len(examples)
    assert set(kinds) == {"noul", "choice", "score"}
    assert min(kinds.values()) > 0.18 * len(examples)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_decision_is_a_valid_request(split: Split) -> None:
    for example in take(split, 1, 3000):
        request = request_from_json(json.loads(json.dumps(example.request())))
        options = request.questions[example.question_id].option_texts
        assert len(options) == len(set(options)) == example.option_count
        assert 0 <= example.label < len(options)
        assert "{" not in render(example.state) + render(example.question["instructions"])


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_labels_are_balanced_by_place(split: Split) -> None:
    counts: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for example in take(split, 2, 30_000):
        counts[example.question["type"], example.option_count][example.label] += 1
    for (kind, options), labels in counts.items():
        total = labels.total()
        if total < 400:
            continue
        margin = 4.5 * (total / options) ** 0.5
        assert all(abs(labels[place] - total / options) < margin for place in range(options)), (kind, options, labels)


def test_labels_are_balanced_by_option_name() -> None:
    shown: Counter[tuple[str, int]] = Counter()
    right: Counter[tuple[str, int]] = Counter()
    for example in take("train", 5, 30_000):
        for place, text in enumerate(question_from_json(example.question, "question").option_texts):
            key = (text, example.option_count)
            shown[key] += 1
            right[key] += place == example.label
    for (text, options), count in shown.items():
        if count >= 100:
            expected = count / options
            assert abs(right[text, options] - expected) < 5 * expected**0.5, text


def test_labels_are_balanced_by_question() -> None:
    """Without the state, the words of a question say nothing about its answer."""
    shown: Counter[str] = Counter()
    yes: Counter[str] = Counter()
    for example in take("train", 6, 30_000):
        if example.question["type"] == "noul":
            for word in set(re.findall(r"[a-z]+", example.question["instructions"].lower())):
                shown[word] += 1
                yes[word] += example.label
    for word, count in shown.items():
        if count >= 200:
            assert abs(yes[word] / count - 0.5) < 0.16, word


# The held-out split. ---------------------------------------------------------------------------------------------


def pools() -> Any:
    def inside(value: Any) -> Any:
        if isinstance(value, phrases.Phrases):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from inside(item)
        elif isinstance(value, dict):
            yield from inside(tuple(value.values()))
        elif hasattr(value, "__dataclass_fields__"):
            yield from inside(tuple(getattr(value, name) for name in value.__dataclass_fields__))

    for module in MODULES:
        yield from inside([value for name, value in vars(module).items() if not name.startswith("__")])


def test_held_out_frames_are_not_training_frames() -> None:
    count = 0
    for pool in pools():
        assert pool.train
        assert pool.held_out
        assert not set(pool.train) & set(pool.held_out)
        count += 1
    assert count > 150


@pytest.mark.parametrize("draw", [phrases.person, phrases.place, phrases.company, phrases.coined_name])
def test_held_out_names_are_not_training_names(draw: Any) -> None:
    rng = random.Random(0)
    seen = {split: {draw(rng, split) for _ in range(3000)} for split in ("train", "heldout")}
    assert not seen["train"] & seen["heldout"]
    assert len(seen["heldout"]) > 100


@pytest.mark.parametrize("maker", [routing.desk_choice, tools.tool_choice])
def test_held_out_option_sets_are_not_training_sets(maker: Maker) -> None:
    by_split = {}
    for split in ("train", "heldout"):
        names = {name: key for key, tool in tools.TOOLS.items() for name in tool.names}
        if maker is tools.tool_choice:
            by_split[split] = {
                frozenset(names[name] for name in example.question["criteria"]) for example in of(maker, split, 3000)
            }
        else:
            by_split[split] = {frozenset(example.question["criteria"]) for example in of(maker, split, 3000)}
    assert not by_split["train"] & by_split["heldout"]


# Labels follow from the state. -----------------------------------------------------------------------------------


def record(state: Any) -> Any:
    """Reads the records of a state that is an object or a list, or returns None."""
    while isinstance(state, dict) and not all(isinstance(value, dict) for value in state.values()):
        inner = [value for value in state.values() if isinstance(value, (dict, list))]
        if len(inner) != 1:
            return None
        state = inner[0]
    while isinstance(state, dict) and len(state) == 1 and next(iter(state)).endswith("s") and nested(state):
        state = next(iter(state.values()))
    if isinstance(state, list):
        rows = {}
        for item in state:
            if not isinstance(item, dict):
                return None
            name, *_ = item.values()
            fields = item.get("details", item)
            rows[str(name)] = fields
        return rows
    return state if isinstance(state, dict) else None


def nested(state: Any) -> Any:
    inner = next(iter(state.values()))
    return isinstance(inner, list) or all(isinstance(value, dict) for value in inner.values())


def number(value: Any) -> Any:
    return int(re.findall(r"\d+", str(value))[0])


def named(rows: Any, instructions: Any) -> Any:
    return max((name for name in rows if name in instructions), key=len, default=None)


def test_value_choices_follow_from_the_records() -> None:
    checked = 0
    for example in of(facts.value_choice, count=1500):
        rows = record(example.state)
        if rows is None:
            continue
        who = named(rows, example.question["instructions"])
        key = max((key for key in rows[who] if key in example.question["instructions"]), key=len)
        assert rows[who][key] == list(example.question["criteria"])[example.label]
        checked += 1
    assert checked > 300


def test_limits_follow_from_the_records() -> None:
    checked = 0
    for example in of(thresholds.limit_noul, count=1500):
        rows = record(example.state)
        asked = example.question["instructions"]
        if rows is None:
            continue
        who = named(rows, asked)
        keys = [key for key in rows[who] if key in asked and key not in ("name", "id")]
        if who is None or len(keys) != 1:
            continue
        value = number(rows[who][keys[0]])
        limit = number(asked.replace(who, ""))
        above = re.search(r"above|more than|greater|exceed|over ", asked) is not None
        assert example.label == (value > limit if above else value < limit), example
        checked += 1
    assert checked > 300


def test_bands_follow_from_the_records() -> None:
    checked = 0
    for example in of(thresholds.band_score, count=1500):
        rows = record(example.state)
        asked = example.question["instructions"]
        if rows is None:
            continue
        who = named(rows, asked)
        keys = [key for key in rows[who] if key in asked and key not in ("name", "id")]
        if len(keys) != 1:
            continue
        value = number(rows[who][keys[0]])
        starts = [number(text) for text in example.question["criteria"][1:]]
        assert example.label == sum(value >= start for start in starts), example
        checked += 1
    assert checked > 300


def test_dates_follow_from_the_state() -> None:
    pattern = re.compile(r"\d{4}-\d\d-\d\d")
    checked = 0
    for example in of(thresholds.date_noul, count=1500):
        asked, state = example.question["instructions"], render(example.state)
        dates = pattern.findall(state)
        limits = pattern.findall(asked)
        if len(dates) != 1 or len(limits) != 1:
            continue
        day, limit = (datetime.date.fromisoformat(text) for text in (dates[0], limits[0]))
        assert example.label == (day > limit if "after" in asked or "later" in asked else day < limit)
        checked += 1
    assert checked > 50


def test_departments_follow_from_a_lone_message() -> None:
    by_name = {name: department for department in routing.DEPARTMENTS.values() for name in department.names}

    def pattern(frame: str) -> str:
        parts = re.split(r"(<[^<>]*>|\{\w+\})", frame)
        return "".join(
            "(?:" + "|".join(pattern(part) for part in piece[1:-1].split("|")) + ")"
            if piece.startswith("<")
            else (".+" if piece.startswith("{") else re.escape(piece))
            for piece in parts
        )

    checked = 0
    for example in of(routing.department_choice, "heldout", count=1000):
        name = list(example.question["criteria"])[example.label]
        frames = [text for issue in by_name[name].issues for text in issue.texts.held_out]
        assert any(re.search(pattern(frame), render(example.state)) for frame in frames), example
        checked += 1
    assert checked == 1000


def test_held_out_sentences_use_words_that_training_knows() -> None:
    known = set()
    for text in texts(take("train", 8, 40_000)):
        known.update(re.findall(r"[a-z]+", text.lower()))
    for pool in pools():
        for frame in pool.held_out:
            unknown = set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", "", frame).lower())) - known
            assert not unknown, (frame, unknown)


# Recitals. -------------------------------------------------------------------------------------------------------


def recited(reciter: Any, count: int = 1000) -> Any:
    rng = random.Random(f"tests/{reciter.__name__}")
    return [reciter(rng, "train") for _ in range(count)]


def test_the_same_seed_gives_the_same_recitals() -> None:
    first, second, third = (list(itertools.islice(recitals(seed), 100)) for seed in ("a", "a", "b"))
    assert first == second != third


@pytest.mark.parametrize("reciter", [reciter for reciter, _ in RECITERS])
def test_told_answers_occur_in_the_state(reciter: Any) -> None:
    answers: Counter[str] = Counter()
    for recital in recited(reciter):
        assert recital.told
        for asked, answer in recital.told:
            assert asked
            assert "{" not in asked
            answers[answer] += 1
            assert answer in ("yes", "no") or answer in render(recital.state), recital
    if reciter in (routing.told_messages, facts.told_pairs):
        assert not answers["yes"] + answers["no"]
    else:
        assert min(answers["yes"], answers["no"]) > 0.3 * (answers["yes"] + answers["no"])


def test_told_messages_are_those_of_the_people_asked_about() -> None:
    checked = 0
    for recital in recited(routing.told_messages):
        if isinstance(recital.state, dict) and len(recital.state) > 1 and len(recital.told) == len(recital.state):
            for asked, answer in recital.told:
                assert recital.state[named(recital.state, asked)] == answer
                checked += 1
    assert checked > 100


def test_told_values_follow_from_the_records() -> None:
    checked = 0
    for recital in recited(facts.told_values):
        rows = record(recital.state)
        if rows is None:
            continue
        for asked, answer in recital.told:
            who = answer if answer in rows else named(rows, asked)
            values = [value for key, value in rows[who].items() if key in asked and key not in ("name", "id")]
            if len(values) != 1:
                continue
            [value] = values
            if answer in rows:
                assert value in asked, recital
            elif answer in ("yes", "no"):
                assert (value in asked.replace(who, "")) == (answer == "yes"), recital
            else:
                assert value == answer, recital
            checked += 1
    assert checked > 1000


def test_told_pairs_stand_beside_each_other() -> None:
    for recital in recited(facts.told_pairs):
        text = render(recital.state)
        for asked, answer in recital.told:
            first, second = (asked, answer) if text.index(asked) < text.index(answer) else (answer, asked)
            assert re.search(rf"{re.escape(first)}\W{{1,4}}{re.escape(second)}", text), recital


def test_told_numbers_follow_from_the_records() -> None:
    checked = 0
    for recital in recited(thresholds.told_numbers):
        rows = record(recital.state)
        if rows is None:
            continue
        for asked, answer in recital.told:
            who = answer if answer in rows else named(rows, asked)
            keys = [key for key in rows[who] if key in asked and key not in ("name", "id")]
            if len(keys) != 1:
                continue
            values = {name: number(fields[keys[0]]) for name, fields in rows.items()}
            if answer in rows:
                most = re.search(r"most|highest|largest|biggest|greatest|maxim", asked) is not None
                assert values[who] == (max if most else min)(values.values()), recital
            elif answer in ("yes", "no"):
                limit = number(asked.replace(who, ""))
                above = re.search(r"above|more than|greater|exceed|over ", asked) is not None
                assert (values[who] > limit if above else values[who] < limit) == (answer == "yes"), recital
            else:
                assert values[who] == int(answer), recital
            checked += 1
    assert checked > 1000


def test_told_mentions_follow_from_the_list() -> None:
    for recital in recited(facts.told_mentions):
        for asked, answer in recital.told:
            if isinstance(recital.state, list):
                frame = r"^Does the text mention |^Is |^Does | in the list\?$| occur in the record\?$|\?$"
                assert (re.sub(frame, "", asked) in recital.state) == (answer == "yes"), recital


def test_a_recital_tells_its_answers(tokenizer_folder: Path) -> None:
    encoders = Encoders(tokenizer_folder)
    decode = encoders.tokenizer.decode
    end_option = find_delimiters(encoders.tokenizer).ids[3]  # type: ignore[arg-type]
    whole = 0
    for recital in itertools.islice(recitals("told"), 500):
        told = encoders.recite(recital)
        assert told.label == NO_DECISION
        assert told.row.option_ends == []
        assert told.told == sorted(set(told.told))
        assert told.told[-1] + 1 < len(told.row.ids)
        runs: list[list[int]] = [[]]
        for before, position in itertools.pairwise([told.told[0] - 1, *told.told]):
            if position != before + 1:
                runs.append([])
            runs[-1].append(told.row.ids[position + 1])
        # Of long answers the first tokens are learnt, and of many answers the first ones.
        for place, (run, (_, answer)) in enumerate(zip(runs, recital.told, strict=False)):
            if run[-1] == end_option:
                assert decode(run[:-1]) == answer
                whole += 1
            else:
                assert end_option not in run
                assert answer.startswith(decode(run).rstrip("\ufffd"))
                assert len(run) == 3 or (place == len(runs) - 1 and len(told.told) == 48)
        assert len(runs) == len(recital.told) or len(told.told) == 48
    assert whole > 1000


# Tokenizer. ------------------------------------------------------------------------------------------------------


def test_all_labels_are_single_tokens(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    labels = build_labels(tokenizer)
    assert len(labels) == MAX_LABELS
    assert labels[:3] == ["A", "B", "C"]
    assert labels[61] == "9"
    for label, token in zip(labels, label_ids(tokenizer, labels), strict=True):
        assert tokenizer(f"{label}: text", add_special_tokens=False)["input_ids"][0] == token
    assert find_delimiters(tokenizer).strings[0] == "<|fim_prefix|>"
    assert not find_delimiters(tokenizer).added


def test_text_survives_the_tokenizer(tokenizer_folder: Path) -> None:
    tokenizer = SplitText.from_folder(tokenizer_folder)
    strange = ["Größe: 12,50 € — naïve 日本 😀\n\tx", "it's O'Brien's  two  spaces ", "ABCdef_12-x/y"]
    for text in itertools.chain(strange, texts(take("heldout", 9, 200))):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_name_is_the_same_tokens_everywhere(tokenizer_folder: Path) -> None:
    tokenizer = SplitText.from_folder(tokenizer_folder)
    alone = tokenizer("Pregrund")["input_ids"]
    for text in ("ask Pregrund about it", 'said "Pregrund"', "(Pregrund)", "- Pregrund\n"):
        ids = tokenizer(text)["input_ids"]
        assert any(ids[start : start + len(alone)] == alone for start in range(len(ids)))


def test_digits_are_single_tokens(tokenizer_folder: Path) -> None:
    tokenizer = SplitText.from_folder(tokenizer_folder)
    assert len(tokenizer("90210")["input_ids"]) == 5


def test_the_tokenizer_is_deterministic() -> None:
    assert train_tokenizer(1, 500).to_str() == train_tokenizer(1, 500).to_str()


# Batches. --------------------------------------------------------------------------------------------------------


def test_batches_hold_the_rows_that_are_served(tokenizer_folder: Path) -> None:
    encoders = Encoders(tokenizer_folder)
    examples = take("heldout", 0, 20)
    for readout in ("pointer", "direct-token"):
        [batch] = batches_of(examples, encoders, readout, 20)
        assert batch.ids.shape[1] % 32 == 0
        for index, example in enumerate(examples):
            row = encoders.encode(example, readout)
            assert batch.ids[index, : len(row.ids)].tolist() == row.ids
            assert batch.decide[index] == row.decide
            ends = batch.option_ends[index]
            assert ends[ends >= 0].tolist() == row.option_ends
            assert batch.labels[index] == example.label


def test_training_batches_depend_on_the_seed_only(tokenizer_folder: Path) -> None:
    encoders = Encoders(tokenizer_folder)
    streams = [training_batches(encoders, ("pointer",), seed, 8, Course(0, 1000, 0.25)) for seed in ("a", "a", "b")]
    first, second, third = (list(itertools.islice(stream, 4)) for stream in streams)
    assert all(np.array_equal(one.ids, other.ids) for one, other in zip(first, second, strict=True))
    assert not all(np.array_equal(one.ids, other.ids) for one, other in zip(first, third, strict=True))


def reciting(batches: list[Batch]) -> float:
    return float(np.mean(np.concatenate([batch.labels for batch in batches]) == NO_DECISION))


def test_a_course_begins_with_recitals(tokenizer_folder: Path) -> None:
    # Eight batches of eight rows come at a time.
    course = Course(primer=128, ramp=1000, reciting=0.25)
    batches = list(itertools.islice(training_batches(Encoders(tokenizer_folder), ("pointer",), "c", 8, course), 32))
    assert reciting(batches[:16]) == 0.75
    assert reciting(batches[16:]) == 0.25
    for batch in batches:
        recites = batch.labels == NO_DECISION
        assert (batch.option_ends[recites] == -1).all()
        assert (batch.option_ends[~recites] >= 0).any(axis=1).all()
        assert ((batch.told >= 0).sum(axis=1) > 0).all()
        assert (batch.told < batch.decide[:, None]).all()


def test_a_plain_course_has_decisions_only(tokenizer_folder: Path) -> None:
    batches = list(itertools.islice(training_batches(Encoders(tokenizer_folder), ("pointer",), "c", 8, Course()), 8))
    assert reciting(batches) == 0


def test_a_ramp_shorter_than_the_primer_ends_with_it(tokenizer_folder: Path) -> None:
    encoders = Encoders(tokenizer_folder)
    one, other = (
        itertools.islice(training_batches(encoders, ("pointer",), "c", 8, Course(primer=64, ramp=ramp)), 24)
        for ramp in (0, 64)
    )
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


def test_workers_share_a_course() -> None:
    assert Course(120, 4000, 0.25).part(4) == Course(30, 1000, 0.25)


def test_lessons_go_from_easy_to_hard() -> None:
    first = list(itertools.islice(lessons("lessons", 100_000), 1500))
    full = list(itertools.islice(lessons("lessons", 0), 1500))
    # At first nearly everything asks to find and match; later every kind of decision is there, in longer states.
    assert sum(example.domain == "thresholds" for example in first) < 30
    assert sum(example.domain == "thresholds" for example in full) > 200
    assert np.mean([len(str(e.state)) for e in first]) < 0.75 * np.mean([len(str(e.state)) for e in full])


def test_every_maker_has_a_weight() -> None:
    assert all(weight > 0 for _, weight in MAKERS)


# Training. -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_short_training_leaves_checkpoints_that_can_be_served(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch

    from jevany_tiny.evaluate import Predictor
    from jevany_tiny.train import main

    main(["--out", str(tmp_path), "--smoke", "--threads", "1", "--workers", "0", "--steps", "2"])
    examples = take("heldout", 0, 12)
    for readout, mode in (("pointer", "pointer"), ("direct-token", "lm_token")):
        predictor = Predictor(str(tmp_path / readout), str(tmp_path / "base"), torch.device("cpu"), torch.float32)
        assert predictor.decision_mode == mode
        for example, probabilities in zip(examples, predictor.probabilities(examples), strict=True):
            assert probabilities.shape == (example.option_count,)
            assert probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_the_temperature_is_the_likeliest() -> None:
    import torch

    from jevany_tiny.train import fit_temperature

    torch.manual_seed(0)
    logits = torch.randn(20_000, 4) * 2
    labels = torch.multinomial(torch.softmax(logits, dim=-1), 1)[:, 0]
    assert fit_temperature(logits * 3, labels) == pytest.approx(3, rel=0.05)


def test_calibration_error_of_known_predictions() -> None:
    from jevany_tiny.evaluate import calibration_error

    confidence = np.array([0.9] * 10 + [0.6] * 10)
    right = np.array([True] * 9 + [False] + [True] * 3 + [False] * 7)
    assert calibration_error(confidence, right) == pytest.approx(0.15)
