"""Support messages: which department handles them, and what the customer asks for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jevany_tiny.decisions.example import Example, choice, noul, option_set
from jevany_tiny.decisions.phrases import Phrases, Split, coined_name, distinct, fill, phrases, pick, roughened
from jevany_tiny.decisions.scene import among, distractor_count


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing customers write about: what they are doing, as a question names it, and how they say it."""

    doing: tuple[str, ...]
    texts: Phrases


@dataclass(frozen=True, slots=True)
class Department:
    """A department: what it may be called, how it may be described, and what it handles."""

    names: tuple[str, ...]
    descriptions: Phrases
    issues: tuple[Issue, ...]


DEPARTMENTS: dict[str, Department] = {
    "billing": Department(
        ("billing", "payments", "finance", "invoices"),
        phrases(
            "charges, invoices and refunds",
            "payments and money back",
            "anything about a charge, a bill or an invoice",
            "Charges, payments and invoices",
            held_out=("bills, charges and money back", "payments, refunds and invoices"),
        ),
        (
            Issue(
                ("asking for a refund", "asking for money back", "requesting a refund"),
                phrases(
                    "I want my money back for the {item}.",
                    "Please refund {amount} for order {order}.",
                    "Can I get a refund for the {item}?",
                    "I would like a refund of {amount}.",
                    "Please give me back the {amount} I paid.",
                    "I am asking for a full refund of my last payment.",
                    "When will you refund the {item} I paid for?",
                    held_out=(
                        "I would like my money back, {amount} in all.",
                        "Please refund my last payment of {amount}.",
                    ),
                ),
            ),
            Issue(
                ("reporting a double charge", "complaining about being charged twice"),
                phrases(
                    "I was charged twice for the {item}.",
                    "My card was charged {amount} two times.",
                    "You took the same payment twice on {date}.",
                    "There is a double charge of {amount} on my card.",
                    "I see two identical charges for order {order}.",
                    "Order {order} was billed twice.",
                    "The same {amount} was taken from my account two times.",
                    held_out=("There are two charges of {amount} on my card.", "You billed order {order} two times."),
                ),
            ),
            Issue(
                ("asking for an invoice", "requesting a copy of an invoice"),
                phrases(
                    "Could you send me the invoice for order {order}?",
                    "I need an invoice for {amount} for our books.",
                    "The invoice from {date} has the wrong company name on it.",
                    "We never got the bill for {month}.",
                    "Please correct the amount on invoice {code}.",
                    "Where can I find my invoices for {month}?",
                    held_out=("Please send the bill for order {order}.", "I need the {month} invoice for our books."),
                ),
            ),
        ),
    ),
    "shipping": Department(
        ("shipping", "delivery", "logistics", "parcels"),
        phrases(
            "delivery and tracking of parcels",
            "late, lost or missing parcels",
            "Delivery, tracking and addresses",
            "where a parcel is and when it arrives",
            held_out=("parcels, delivery dates and tracking", "tracking of late or lost parcels"),
        ),
        (
            Issue(
                ("reporting a late parcel", "asking where a parcel is"),
                phrases(
                    "My parcel has not arrived yet.",
                    "Where is order {order}? It should have been here on {day}.",
                    "The {item} was due on {date} and is still not here.",
                    "The tracking page has not changed for {n} days.",
                    "The delivery to {place} is {n} days late.",
                    "I am still waiting for the {item} I ordered.",
                    "The driver never came on {day}.",
                    held_out=(
                        "The parcel with the {item} is late and has not arrived.",
                        "I am still waiting for the delivery of order {order}.",
                    ),
                ),
            ),
            Issue(
                ("asking to change the delivery address", "giving a new delivery address"),
                phrases(
                    "Please deliver the {item} to {place} instead.",
                    "I have moved, so send order {order} to my new address in {place}.",
                    "The address on my order is wrong.",
                    "Can you change the delivery address of order {order}?",
                    "I typed the wrong street for the delivery.",
                    held_out=(
                        "Please change the address of order {order} to {place}.",
                        "Send the {item} to my new address.",
                    ),
                ),
            ),
            Issue(
                ("saying that a parcel is lost", "reporting a missing parcel"),
                phrases(
                    "The tracking says delivered but I never got the parcel.",
                    "My parcel seems to be lost.",
                    "The carrier lost the {item}.",
                    "The parcel was marked as delivered but nothing was there.",
                    "Nobody knows where the parcel with order {order} went.",
                    held_out=(
                        "The carrier says delivered, but the parcel was never here.",
                        "I think order {order} is lost.",
                    ),
                ),
            ),
        ),
    ),
    "returns": Department(
        ("returns", "exchanges", "warranty", "quality"),
        phrases(
            "damaged, wrong or unwanted goods",
            "sending goods back and exchanges",
            "Items that are broken, wrong or do not fit",
            "broken or wrong items",
            held_out=("goods that are broken, damaged or wrong", "exchange of wrong or unwanted items"),
        ),
        (
            Issue(
                ("reporting a damaged item", "saying that something arrived broken"),
                phrases(
                    "The {item} arrived broken.",
                    "The {item} has a crack in it.",
                    "The box was crushed and the {item} is damaged.",
                    "When I opened the box the {item} was in pieces.",
                    "One part of the {item} is broken.",
                    "The {item} came with a scratch on it.",
                    held_out=("The {item} was damaged when I opened the box.", "There is a crack in the new {item}."),
                ),
            ),
            Issue(
                ("saying that the wrong item came", "reporting a wrong item"),
                phrases(
                    "I ordered one thing and got a {item} instead.",
                    "You sent me the wrong {item}.",
                    "This is not the {item} I ordered.",
                    "The {item} has the wrong colour.",
                    "I got a different {item} from the one I ordered.",
                    held_out=("The {item} you sent is the wrong one.", "I got a {item}, which is not what I ordered."),
                ),
            ),
            Issue(
                ("asking for an exchange", "asking to swap an item"),
                phrases(
                    "The {item} is too big, can I swap it for a smaller one?",
                    "I would like to exchange the {item} for another size.",
                    "How do I send the {item} back?",
                    "I do not like the {item} and want to return it.",
                    "The {item} does not fit, please exchange it.",
                    held_out=(
                        "Can I exchange the {item}? It is too small.",
                        "I want to send back the {item} for another size.",
                    ),
                ),
            ),
        ),
    ),
    "technical": Department(
        ("technical", "engineering", "tech support", "technical support"),
        phrases(
            "errors, crashes and broken features",
            "bugs in the app or the website",
            "Something in the product does not work",
            "crashes and error messages",
            held_out=("errors and bugs in the product", "features of the app that do not work"),
        ),
        (
            Issue(
                ("reporting a crash", "saying that the app crashes"),
                phrases(
                    "The {app} crashes every time I open it.",
                    "The {app} closes by itself after a few seconds.",
                    "Since the update the {app} crashes.",
                    "The {app} freezes when I press save.",
                    "The {app} stops responding and then closes.",
                    held_out=(
                        "When I open the {app} it freezes and crashes.",
                        "Since {day} the {app} closes by itself.",
                    ),
                ),
            ),
            Issue(
                ("reporting an error message", "reporting an error"),
                phrases(
                    "I get error {n} on the {app}.",
                    "The {app} shows an error message.",
                    "The {app} only says that something went wrong.",
                    "Error code {code} comes up when I upload a file.",
                    "Every upload on the {app} fails with an error.",
                    held_out=("The {app} gives me error code {code}.", "When I press save an error message comes up."),
                ),
            ),
            Issue(
                ("saying that the service is slow", "reporting a slow page"),
                phrases(
                    "The {app} is very slow since {day}.",
                    "It takes {n} minutes to load the {app}.",
                    "Pages load far too slowly.",
                    "The {app} takes ages to open.",
                    held_out=("Since the update the {app} is far too slow.", "The {app} takes {n} minutes to open."),
                ),
            ),
        ),
    ),
    "account": Department(
        ("account", "login", "identity", "profile"),
        phrases(
            "login, password and profile",
            "users who cannot sign in",
            "Passwords, sign-in and personal details",
            "access to an account",
            held_out=("sign-in, passwords and profile details", "users who cannot get into an account"),
        ),
        (
            Issue(
                ("asking for a password reset", "unable to sign in"),
                phrases(
                    "I forgot my password.",
                    "I cannot sign in to my account.",
                    "The password reset link does not come.",
                    "My account is locked after {n} wrong passwords.",
                    "The login code never comes to my phone.",
                    "I am locked out of my profile.",
                    held_out=(
                        "My password is not accepted and I am locked out.",
                        "I cannot sign in, please reset my password.",
                    ),
                ),
            ),
            Issue(
                ("asking to change profile details", "asking to change an e-mail address"),
                phrases(
                    "Please change the e-mail address of my account.",
                    "I have a new phone number for my profile.",
                    "My name is spelled wrong in my profile.",
                    "I got married and need to change my last name in the profile.",
                    held_out=(
                        "Please change the phone number of my account.",
                        "The e-mail address in my profile is wrong.",
                    ),
                ),
            ),
        ),
    ),
    "sales": Department(
        ("sales", "quotes", "new business", "presales"),
        phrases(
            "prices, quotes and new orders",
            "questions before buying",
            "Offers, discounts and upgrades",
            "customers who want to buy more",
            held_out=("quotes, discounts and prices", "questions about offers before an order"),
        ),
        (
            Issue(
                ("asking for a quote", "asking about prices"),
                phrases(
                    "How much would {n} licences cost?",
                    "Please send us an offer for {n} of the {item}.",
                    "What is the price of the {plan} plan?",
                    "Can we get a quote for {n} seats?",
                    "We are thinking of buying {n} licences.",
                    held_out=("What would {n} seats of the {plan} plan cost?", "Please send a quote for {n} licences."),
                ),
            ),
            Issue(
                ("asking for a discount", "asking about a discount"),
                phrases(
                    "Do you give a discount for schools?",
                    "Is there a discount if we buy {n}?",
                    "Can we get a better price for a long contract?",
                    "Do you have a student discount?",
                    held_out=("Is there a better price for schools?", "Do you have a discount for {n} licences?"),
                ),
            ),
            Issue(
                ("asking for a demo", "asking for a product demo"),
                phrases(
                    "We would like to see a demo before we buy.",
                    "Could someone show us the product on {day}?",
                    "Can I try the {plan} plan before buying?",
                    "Please book a demo for our team in {place}.",
                    held_out=(
                        "Could we see a demo of the product on {day}?",
                        "We would like to try the product before we buy.",
                    ),
                ),
            ),
        ),
    ),
    "cancellation": Department(
        ("cancellation", "retention", "subscriptions", "contracts"),
        phrases(
            "ending or pausing a subscription",
            "customers who want to leave",
            "Cancelling, pausing or renewing a plan",
            held_out=("ending, pausing or renewing a subscription", "customers who want to cancel a plan"),
        ),
        (
            Issue(
                ("asking to cancel a subscription", "cancelling a plan"),
                phrases(
                    "Please cancel my {plan} plan.",
                    "I want to end my subscription in {month}.",
                    "We no longer need the service, so close our contract.",
                    "How do I stop my subscription?",
                    "I do not want to renew my {plan} plan.",
                    held_out=("Please end my {plan} subscription.", "We want to cancel our contract in {month}."),
                ),
            ),
            Issue(
                ("asking to pause a subscription", "asking for a pause"),
                phrases(
                    "Can I pause my subscription until {month}?",
                    "Please put my {plan} plan on hold for {n} weeks.",
                    "I would like to pause the service for a while.",
                    held_out=("Please pause my {plan} plan until {month}.", "Can I put the subscription on hold?"),
                ),
            ),
        ),
    ),
    "security": Department(
        ("security", "trust and safety", "abuse", "fraud"),
        phrases(
            "hacked accounts and stolen data",
            "fraud, abuse and suspicious logins",
            "Anything that looks like an attack",
            held_out=("fraud, attacks and hacked accounts", "suspicious logins and stolen data"),
        ),
        (
            Issue(
                ("reporting a hacked account", "reporting a suspicious login"),
                phrases(
                    "Somebody hacked my account.",
                    "There was a suspicious login from {place}.",
                    "A stranger used my account on {day}.",
                    "I think someone stole my password and got in.",
                    "I see a login from {place} that was not me.",
                    held_out=(
                        "A stranger hacked my account on {day}.",
                        "There was a login from {place}, and it was not me.",
                    ),
                ),
            ),
            Issue(
                ("reporting fraud", "reporting a fake message"),
                phrases(
                    "I got a fake e-mail in your name.",
                    "Someone pretends to work for you and asks for card numbers.",
                    "A fake shop uses your logo.",
                    "This looks like fraud: a caller wanted my card number in your name.",
                    held_out=(
                        "Someone sends fake e-mails with your logo.",
                        "A caller pretends to work for you; it looks like fraud.",
                    ),
                ),
            ),
        ),
    ),
    "privacy": Department(
        ("privacy", "legal", "data protection", "compliance"),
        phrases(
            "contracts, laws and personal data",
            "requests to delete or export personal data",
            "Legal questions and data protection",
            held_out=("personal data and legal questions", "laws, contracts and data protection"),
        ),
        (
            Issue(
                ("asking for deletion of personal data", "asking to delete personal data"),
                phrases(
                    "Please delete all personal data you hold about me.",
                    "Erase everything you know about me.",
                    "I want my personal data removed from your files.",
                    held_out=("Please erase my personal data from your files.", "Delete everything you hold about me."),
                ),
            ),
            Issue(
                ("asking about a legal contract", "asking a legal question"),
                phrases(
                    "Our lawyer has a question about the contract.",
                    "Which law applies to the agreement with {company}?",
                    "We need a signed data protection agreement.",
                    "Please send the terms of the contract to our lawyer.",
                    held_out=("Our lawyer needs the signed agreement.", "Which law applies to the contract?"),
                ),
            ),
        ),
    ),
    "hiring": Department(
        ("hiring", "human resources", "careers", "recruiting"),
        phrases(
            "jobs and applications",
            "people who want to work for us",
            "Job applications and interviews",
            held_out=("applications, interviews and jobs", "people who apply for a job"),
        ),
        (
            Issue(
                ("applying for a job", "asking about a job"),
                phrases(
                    "I would like to apply for the job in {place}.",
                    "Do you have an open position for a designer?",
                    "I sent my CV on {date} and wonder about the interview.",
                    "Are you hiring in {place}?",
                    "My CV is attached for the open position.",
                    held_out=(
                        "I apply for the open position in {place}; my CV is attached.",
                        "Do you have a job for a designer in {place}?",
                    ),
                ),
            ),
        ),
    ),
    "appointments": Department(
        ("appointments", "scheduling", "front desk", "bookings"),
        phrases(
            "booking and moving appointments",
            "visits and meeting times",
            "Dates, visits and bookings",
            held_out=("meeting times and bookings", "moving or booking a visit"),
        ),
        (
            Issue(
                ("asking to move an appointment", "asking for a new appointment"),
                phrases(
                    "Can we move my appointment to {day}?",
                    "I cannot come on {day}, please give me another time.",
                    "I would like to book a visit on {date}.",
                    "Is there a free appointment in {month}?",
                    "Please move our meeting from {day} to another day.",
                    held_out=(
                        "Please book an appointment for me on {day}.",
                        "Can I move the visit to another day in {month}?",
                    ),
                ),
            ),
        ),
    ),
    "feedback": Department(
        ("feedback", "product", "ideas", "research"),
        phrases(
            "ideas, wishes and praise",
            "suggestions for new features",
            "Feature requests and compliments",
            held_out=("wishes and suggestions for the product", "praise, ideas and feature requests"),
        ),
        (
            Issue(
                ("suggesting a new feature", "making a suggestion"),
                phrases(
                    "It would be great if the {app} had a dark mode.",
                    "I have an idea: let us sort the list by date.",
                    "I wish the {app} could print labels.",
                    "Please add a way to export the list.",
                    held_out=(
                        "I wish the {app} had a way to sort the list.",
                        "It would be great if you could add a dark mode.",
                    ),
                ),
            ),
            Issue(
                ("praising the service", "giving praise"),
                phrases(
                    "I just want to say that I love the {item}.",
                    "{person} on your team did a great job, thank you!",
                    "What a lovely service, keep it up.",
                    held_out=(
                        "I love the service, you did a great job!",
                        "I just want to say thank you for the lovely {item}.",
                    ),
                ),
            ),
        ),
    ),
}

_KEYS = tuple(DEPARTMENTS)
_ISSUES = tuple((key, issue) for key, department in DEPARTMENTS.items() for issue in department.issues)

_WHICH_TEAM = phrases(
    "Which team should handle {focus}?",
    "Who is responsible for {focus}?",
    "Where should {focus} go?",
    "Route {focus} to a department.",
    "Pick the department for {focus}.",
    "Which queue does {focus} belong in?",
    "Choose the best team to answer {focus}.",
    "{focus}: which department?",
    "Which department should own {focus}?",
    held_out=(
        "Choose the department that should handle {focus}.",
        "Which team is responsible for {focus}?",
        "Pick the queue for {focus}.",
    ),
)
_PLAIN_TEAM = phrases(
    "Which department should handle this?",
    "Where should this e-mail go?",
    "Which team is this for?",
    "Department?",
    "Route the ticket.",
    "Who should answer?",
    held_out=("Which department is this for?", "Which team should answer this e-mail?"),
)
_IS_DOING = phrases(
    "Is the customer {doing}?",
    "Is the sender {doing}?",
    "Is the writer {doing}?",
    "Would you say the customer is {doing}?",
    "Is someone {doing} here?",
    held_out=("Is the person who writes {doing}?", "Would you say the sender is {doing}?"),
)
_IS_DOING_IN = phrases(
    "In {focus}, is the writer {doing}?",
    "Is the customer {doing} in {focus}?",
    "Looking only at {focus}: is someone {doing}?",
    "Is the writer of {focus} {doing}?",
    "Does {focus} come from someone who is {doing}?",
    held_out=("Looking at {focus}, is the customer {doing}?", "Is someone {doing} in {focus}?"),
)
_BELONGS = phrases(
    "Does {focus} belong to {name}?",
    "Should {name} handle {focus}?",
    "Is {focus} a case for {name}?",
    "Is {name} the right team for {focus}?",
    held_out=("Is {name} the team that should handle {focus}?", "Does {name} own {focus}?"),
)
_DESK_NOTE = phrases(
    "Routing rules",
    "Who does what",
    "Team list",
    "Desks",
    held_out=("Routing list", "Who handles what"),
)

_WHICH_DESK = phrases(
    "Which desk should get the message?",
    "Following the list, who should handle the message?",
    "Pick the desk for the message.",
    "By the rules, where does the message go?",
    held_out=("Which desk on the list should handle the message?", "Following the rules, pick the desk."),
)

_TONE = phrases(
    "Please answer today.",
    "There is no hurry.",
    "This is urgent!",
    "I am very angry!",
    "I am not happy about this.",
    "Thank you so much for your help.",
    "Please help me.",
    "Can you help?",
    "What should I do?",
    "I hope you can fix this soon.",
    held_out=("Please help me with this today.", "This is urgent, can you help?", "I hope for your help soon."),
)


def _text(rng: random.Random, split: Split, issue: Issue) -> str:
    frames = [issue.texts.draw(rng, split)]
    if rng.random() < 0.2:
        second = issue.texts.draw(rng, split)
        frames += [second] if second not in frames else []
    if rng.random() < 0.2:
        frames.insert(rng.randint(0, len(frames)), _TONE.draw(rng, split))
    return fill(rng, split, " ".join(roughened(rng, split, frame) for frame in frames))


def any_issue(rng: random.Random, split: Split) -> str:
    """Returns what a customer writes about one thing or another."""
    return fill(rng, split, roughened(rng, split, pick(rng, _ISSUES)[1].texts.draw(rng, split)))


def _of_department(rng: random.Random, split: Split, key: str) -> str:
    return _text(rng, split, pick(rng, DEPARTMENTS[key].issues))


def _options(rng: random.Random, split: Split, keys: list[str]) -> list[tuple[str, str | None]]:
    described = rng.random()
    options = []
    for key in keys:
        department = DEPARTMENTS[key]
        name = department.names[0] if rng.random() < 0.6 else pick(rng, department.names)
        keep = described < 0.55 or (described < 0.65 and rng.random() < 0.5)
        options.append((name, department.descriptions.draw(rng, split) if keep else None))
    return options


def department_choice(rng: random.Random, split: Split) -> Example:
    """A message and the department that should handle it."""
    keys = option_set(rng, split, _KEYS, 2, 7)
    target = pick(rng, range(len(keys)))
    others = [key for key in keys if key != keys[target]]
    count = min(distractor_count(rng), len(others))
    distractors = [_of_department(rng, split, key) for key in rng.sample(others, count)]
    scene = among(rng, split, _of_department(rng, split, keys[target]), distractors)
    plain = not distractors and rng.random() < 0.5
    frame = (_PLAIN_TEAM if plain else _WHICH_TEAM).draw(rng, split)
    instructions = fill(rng, split, frame, focus=scene.focus)
    return choice(rng, split, "routing", scene.state, instructions, _options(rng, split, keys), target)


def desk_choice(rng: random.Random, split: Split) -> Example:
    """A message and a list in the state of which desk, with a made-up name, does what."""
    keys = option_set(rng, split, _KEYS, 2, 5)
    target = pick(rng, range(len(keys)))
    desks = distinct(rng, split, len(keys), coined_name)
    duties = [DEPARTMENTS[key].descriptions.draw(rng, split) for key in keys]
    message = _of_department(rng, split, keys[target])
    rows = list(zip(desks, duties, strict=True))
    rng.shuffle(rows)
    title = _DESK_NOTE.draw(rng, split)
    kind = rng.random()
    if kind < 0.4:
        state: object = {title.lower(): dict(rows), "message": message}
    elif kind < 0.7:
        state = title + ":\n" + "\n".join(f"{desk}: {duty}" for desk, duty in rows) + f"\n\nMessage: {message}"
    else:
        state = [{"desk": desk, "does": duty} for desk, duty in rows] + [{"message": message}]
    return choice(rng, split, "routing", state, _WHICH_DESK.draw(rng, split), [(desk, None) for desk in desks], target)


def issue_noul(rng: random.Random, split: Split) -> Example:
    """Whether the writer does one certain thing; another message in the state may be the one that does it."""
    asked = pick(rng, _ISSUES)[1]
    answer = rng.random() < 0.5
    pool = [issue for _, issue in rng.sample(_ISSUES, 4) if issue is not asked]
    count = distractor_count(rng)
    if answer:
        message, others = asked, pool[:count]
    else:
        message, others = pool[0], ([asked, *pool[1:]])[:count]
    scene = among(rng, split, _text(rng, split, message), [_text(rng, split, issue) for issue in others])
    frame = (_IS_DOING_IN if others or rng.random() < 0.3 else _IS_DOING).draw(rng, split)
    instructions = fill(rng, split, frame, doing=pick(rng, asked.doing), focus=scene.focus)
    doing = pick(rng, asked.doing)
    return noul(rng, split, "routing", scene.state, instructions, answer, (f"someone is {doing}", "something else"))


def department_noul(rng: random.Random, split: Split) -> Example:
    """Whether a message belongs to a department; another message may be the one that does."""
    asked, *pool = rng.sample(_KEYS, 4)
    answer = rng.random() < 0.5
    count = distractor_count(rng)
    message, others = (asked, pool[:count]) if answer else (pool[0], [asked, *pool[1:]][:count])
    scene = among(rng, split, _of_department(rng, split, message), [_of_department(rng, split, key) for key in others])
    department = DEPARTMENTS[asked]
    instructions = fill(rng, split, _BELONGS.draw(rng, split), name=pick(rng, department.names), focus=scene.focus)
    descriptions = (department.descriptions.draw(rng, split), "another department")
    return noul(rng, split, "routing", scene.state, instructions, answer, descriptions)
