"""An assistant's next tool: which one a request needs, by what the tools are said to do."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from jevany_tiny.decisions.example import Example, choice, noul, option_set
from jevany_tiny.decisions.phrases import Phrases, Split, coined_name, distinct, fill, phrases, pick, roughened
from jevany_tiny.decisions.scene import among, distractor_count


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its possible names, what it does, and requests that need it."""

    names: tuple[str, ...]
    descriptions: Phrases
    texts: Phrases


TOOLS: dict[str, Tool] = {
    "send_email": Tool(
        ("send_email", "mail.send", "compose_mail", "email"),
        phrases(
            "Sends an e-mail",
            "writes and sends a mail",
            "send a mail to somebody",
            held_out=("sends a mail to a person",),
        ),
        phrases(
            "Write to {person} that we are late.",
            "Mail the report to {person}.",
            "Let {person} know by e-mail that the meeting moved.",
            "Send {person} a short mail about {company}.",
            held_out=("Send a mail to {person} about the report.", "Write {person} an e-mail that we are late."),
        ),
    ),
    "calendar": Tool(
        ("create_event", "calendar.add", "schedule_meeting", "calendar"),
        phrases(
            "Adds an event to the calendar",
            "books a meeting",
            "plans a meeting",
            held_out=("adds a meeting to the calendar",),
        ),
        phrases(
            "Put a meeting with {person} on {day} in my calendar.",
            "Schedule a call with {company} on {date}.",
            "Block {day} afternoon for me.",
            "Set up a meeting with {person} next {day}.",
            held_out=(
                "Set up a call with {person} on {day} in the calendar.",
                "Schedule a meeting with {company} next {day}.",
            ),
        ),
    ),
    "weather": Tool(
        ("get_weather", "weather.forecast", "weather"),
        phrases(
            "Looks up the weather forecast",
            "forecast for a town",
            "rain and temperature",
            held_out=("weather for a town",),
        ),
        phrases(
            "Will it rain in {place} on {day}?",
            "How warm is it in {place}?",
            "Do I need an umbrella in {place}?",
            "What is the forecast for {place}?",
            held_out=("How warm will {place} be, and will it rain?", "What is the forecast for {day} in {place}?"),
        ),
    ),
    "search_web": Tool(
        ("search_web", "web.search", "browse", "search"),
        phrases(
            "Searches the internet",
            "finds pages on the web",
            "looks something up online",
            held_out=("searches the web",),
        ),
        phrases(
            "Find news about {company} on the internet.",
            "Look up online who runs {company}.",
            "Search the web for reviews of the {item}.",
            "Google the opening hours of {company}.",
            held_out=("Search online for news about {company}.", "Look up reviews of the {item} on the web."),
        ),
    ),
    "translate": Tool(
        ("translate_text", "translator", "translate"),
        phrases(
            "Translates a text", "turns a text into another language", held_out=("translates into another language",)
        ),
        phrases(
            "Say this in French.",
            "What does this letter mean in English?",
            "Translate the note from {person} into German.",
            "I need the contract in Spanish.",
            held_out=("Translate this letter into French.", "I need the note in German."),
        ),
    ),
    "calculator": Tool(
        ("calculate", "calculator", "math.eval"),
        phrases("Does arithmetic", "works out numbers", "evaluates a formula", held_out=("works out a formula",)),
        phrases(
            "How much is {n} times {n}?",
            "Add {n} and {n}.",
            "What is {n} percent of {n}?",
            "Divide {amount} by {n}.",
            held_out=("What is {n} times {n}? Then divide by {n}.", "Add {n} percent to {n}."),
        ),
    ),
    "flights": Tool(
        ("search_flights", "flights.find", "book_flight"),
        phrases("Finds flights", "looks for plane tickets", held_out=("finds plane tickets",)),
        phrases(
            "I want to fly from {place} to {place}.",
            "Find a plane to {place} on {date}.",
            "Which flights go to {place} on {day}?",
            "I need a plane ticket to {place}.",
            held_out=("Find a flight from {place} on {day}.", "I want a plane ticket to fly to {place}."),
        ),
    ),
    "hotel": Tool(
        ("book_hotel", "hotels.reserve", "find_room"),
        phrases("Reserves a hotel room", "finds a place to sleep", held_out=("finds and reserves a hotel",)),
        phrases(
            "I need a room in {place} for {n} nights.",
            "Book a hotel near the station in {place}.",
            "Where can I sleep in {place} on {date}?",
            "Reserve a double room in {place}.",
            held_out=("Reserve a hotel in {place} for {n} nights.", "I need a double room near the station."),
        ),
    ),
    "reminder": Tool(
        ("set_reminder", "remind_me", "alarm.set"),
        phrases("Sets a reminder or an alarm", "reminds the user later", held_out=("sets an alarm for later",)),
        phrases(
            "Remind me to call {person} on {day}.",
            "Wake me at seven.",
            "Do not let me forget the {item}.",
            "Set an alarm for {day} morning.",
            held_out=("Remind me of the {item} on {day}.", "Set an alarm so that I do not forget to call {person}."),
        ),
    ),
    "database": Tool(
        ("query_database", "sql.run", "lookup_record"),
        phrases(
            "Reads a record of the company database",
            "looks up orders and customers",
            held_out=("looks up a customer record",),
        ),
        phrases(
            "Which orders did customer {code} place?",
            "Look up the record of customer {person}.",
            "What is the status of order {order}?",
            "How many customers do we have in {place}?",
            held_out=("Look up order {order} of customer {person}.", "What is in the record of customer {code}?"),
        ),
    ),
    "payment": Tool(
        ("make_payment", "transfer_money", "pay"),
        phrases("Transfers money", "pays a bill", held_out=("pays or transfers money",)),
        phrases(
            "Pay {amount} to {company}.",
            "Transfer {amount} to {person}.",
            "Settle the bill of {company}.",
            "Wire the rent to {person}.",
            held_out=("Transfer the rent to {company}.", "Pay the bill of {amount} from {person}."),
        ),
    ),
    "music": Tool(
        ("play_music", "music.play", "player"),
        phrases("Plays songs", "starts music", held_out=("plays music or songs",)),
        phrases(
            "Play something quiet.",
            "Put on the new album by {person}.",
            "I want to hear some jazz.",
            "Start my favourite playlist.",
            held_out=("Play the album by {person}.", "Put on some quiet jazz."),
        ),
    ),
    "map": Tool(
        ("get_directions", "maps.route", "navigate"),
        phrases("Finds the way between two places", "gives directions", held_out=("gives the way to a place",)),
        phrases(
            "How do I get from {place} to {place} by car?",
            "Show me the way to the office of {company}.",
            "Which road leads to {place}?",
            "How far is it from {place} to {place}?",
            held_out=("Show me the road from {place} to {place}.", "How do I get to the office of {company} by car?"),
        ),
    ),
    "smart_home": Tool(
        ("control_device", "home.set", "lights"),
        phrases("Switches lights and heating", "controls devices at home", held_out=("switches devices at home",)),
        phrases(
            "Turn off the lights in the kitchen.",
            "Make the bedroom warmer.",
            "Switch on the heating.",
            "Dim the lamp in the living room.",
            held_out=("Switch off the lamp in the bedroom.", "Turn on the heating in the kitchen."),
        ),
    ),
    "file": Tool(
        ("read_file", "files.open", "open_document"),
        phrases("Opens a file from disk", "reads a document", held_out=("opens and reads a document",)),
        phrases(
            "Open the file {code} and tell me what it says.",
            "What is in the document from {person}?",
            "Summarise the file called {product}.",
            "Read me the first page of the {product} document.",
            held_out=("Open the document called {product}.", "Read me what the file {code} says."),
        ),
    ),
}

_KEYS = tuple(TOOLS)
_NEXT = phrases(
    "Which tool should the assistant call for {focus}?",
    "Pick the tool for {focus}.",
    "What tool does {focus} need?",
    "Which function answers {focus}?",
    "Choose the next tool call for {focus}.",
    held_out=("Choose the tool that {focus} needs.", "Which tool should be called for {focus}?"),
)
_PLAIN_NEXT = phrases(
    "Which tool should be called next?",
    "Pick a tool.",
    "What should the agent call?",
    "Next tool?",
    held_out=("Which tool should the agent call?", "Pick the next tool."),
)
_NEEDS = phrases(
    "Does {focus} need {tool}?",
    "Should the assistant call {tool} for {focus}?",
    "Is {tool} the right tool for {focus}?",
    "Would {tool} help with {focus}?",
    held_out=("Is {tool} what {focus} needs?", "Should {tool} be called for {focus}?"),
)
_DONE_ALREADY = phrases(
    "{past} You already did that. {now}",
    "Done: {past} Next: {now}",
    "{past} That is finished, thanks. {now}",
    "{now} (You have already done this one: {past})",
    "First: {past} - ok, that worked. Then: {now}",
    "Do not do this: {past} Do this: {now}",
    "Instead of this: {past} I would rather have this: {now}",
    held_out=(
        "{past} Thanks, that worked and is finished. Next: {now}",
        "Do this: {now} Do not do this: {past}",
        "You already did this: {past} Then: {now}",
    ),
)
_WHICH_LISTED = phrases(
    "Which of the listed tools does the request need?",
    "Pick the tool by what the list says.",
    "Following the tool list, what should be called?",
    held_out=("Following the list, which tool does the request need?", "Pick the listed tool for the request."),
)


def _text(rng: random.Random, split: Split, key: str) -> str:
    return fill(rng, split, roughened(rng, split, TOOLS[key].texts.draw(rng, split)))


def _state(rng: random.Random, split: Split, key: str, others: list[str]) -> tuple[Any, str]:
    text = _text(rng, split, key)
    texts = [_text(rng, split, other) for other in others]
    if texts and rng.random() < 0.6:
        body = _DONE_ALREADY.draw(rng, split).format(past=" ".join(texts), now=text)
        kind = rng.random()
        if kind < 0.5:
            return body, "this request"
        return ({"user": body} if kind < 0.75 else [{"role": "user", "content": body}]), "this request"
    scene = among(rng, split, text, texts)
    return scene.state, scene.focus


def tool_choice(rng: random.Random, split: Split) -> Example:
    """A request and the tool that it needs."""
    keys = option_set(rng, split, _KEYS, 2, 8)
    target = pick(rng, range(len(keys)))
    others = [key for key in keys if key != keys[target]]
    count = min(distractor_count(rng), len(others), 2)
    state, focus = _state(rng, split, keys[target], rng.sample(others, count))
    plain = focus == "this request" or not count
    frame = (_PLAIN_NEXT if plain and rng.random() < 0.5 else _NEXT).draw(rng, split)
    described = rng.random() < 0.6
    options = [
        (pick(rng, TOOLS[key].names), TOOLS[key].descriptions.draw(rng, split) if described else None) for key in keys
    ]
    return choice(rng, split, "tools", state, fill(rng, split, frame, focus=focus), options, target)


def listed_tool_choice(rng: random.Random, split: Split) -> Example:
    """A request and tools with made-up names, whose descriptions stand in the state or with the options."""
    keys = option_set(rng, split, _KEYS, 2, 5)
    target = pick(rng, range(len(keys)))
    names = [name.lower() for name in distinct(rng, split, len(keys), coined_name)]
    descriptions = [TOOLS[key].descriptions.draw(rng, split) for key in keys]
    request = _text(rng, split, keys[target])
    if rng.random() < 0.4:
        scene = among(rng, split, request, [])
        instructions = fill(rng, split, _NEXT.draw(rng, split), focus=scene.focus)
        options: list[tuple[str, str | None]] = list(zip(names, descriptions, strict=True))
        return choice(rng, split, "tools", scene.state, instructions, options, target)
    rows = list(zip(names, descriptions, strict=True))
    rng.shuffle(rows)
    if rng.random() < 0.6:
        state: Any = {"tools": dict(rows), "request": request}
    else:
        state = "Tools:\n" + "\n".join(f"{name} - {text}" for name, text in rows) + f"\nRequest: {request}"
    return choice(rng, split, "tools", state, _WHICH_LISTED.draw(rng, split), [(name, None) for name in names], target)


def tool_noul(rng: random.Random, split: Split) -> Example:
    """Whether a request needs one certain tool."""
    asked, *pool = rng.sample(_KEYS, 4)
    answer = rng.random() < 0.5
    count = min(distractor_count(rng), 2)
    key, others = (asked, pool[:count]) if answer else (pool[0], [asked, *pool[1:]][:count])
    state, focus = _state(rng, split, key, others)
    tool = TOOLS[asked]
    instructions = fill(rng, split, _NEEDS.draw(rng, split), focus=focus, tool=pick(rng, tool.names))
    descriptions = (tool.descriptions.draw(rng, split), "another tool or none")
    return noul(rng, split, "tools", state, instructions, answer, descriptions)
