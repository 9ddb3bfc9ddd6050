"""Support messages: which department handles them, and what the customer asks for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jevany_tiny.decisions.example import Example, Recital, choice, noul, option_set
from jevany_tiny.decisions.phrases import (
    Phrases,
    Split,
    belongs_to,
    capitalised,
    coined_name,
    distinct,
    fill,
    phrases,
    pick,
    roughened,
)
from jevany_tiny.decisions.scene import among, distractor_count, recite


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing customers write about: what they are doing, as a question names it, and how they say it."""

    doing: tuple[str, ...]
    texts: Phrases


@dataclass(frozen=True, slots=True)
class Department:
    """A department: what it may be called, the duties that describe it, and what it handles."""

    names: tuple[str, ...]
    duties: tuple[str, ...]
    issues: tuple[Issue, ...]


DEPARTMENTS: dict[str, Department] = {
    "billing": Department(
        ("billing", "payments", "finance", "invoices"),
        ("charges", "invoices", "refunds", "payments", "money back", "bills", "double charges"),
        (
            Issue(
                ("asking for a refund", "asking for money back", "requesting a refund"),
                phrases(
                    "I <want|would like|need> my money back for <the|this> {item}.",
                    "<Please|Could you please|Kindly> refund <{amount} for order {order}|order {order}|my last "
                    "payment|the full price of the {item}>.",
                    "<Can|Could|May> I <get|have> a <full |>refund <for|of> <the {item}|order {order}|{amount}|my "
                    "payment>?",
                    "I <would like|want|expect|am asking for> a <full |>refund of <{amount}|my last payment|what I "
                    "paid>.",
                    "<Please|You should> give me back the {amount} <I paid|I sent you|that I spent on the {item}>.",
                    "When will you <refund|pay back> the {item} I <paid for|bought>?",
                    "<Return|Pay back> my money, {amount} <in all|in total>, <please|at once>.",
                    held_out=(
                        "I would like my money back, {amount} in all.",
                        "Please refund my last payment of {amount}.",
                    ),
                ),
            ),
            Issue(
                ("reporting a double charge", "complaining about being charged twice"),
                phrases(
                    "<I was|We were|My wife was> <charged|billed> <twice|two times|double> for <the {item}|order "
                    "{order}>.",
                    "<My card|My account|Our card> was charged {amount} <two times|twice>.",
                    "You <took|charged|billed> the same <payment|amount|{amount}> <twice|two times> on {date}.",
                    "There <is a double charge|are two charges> of {amount} on my <card|account|bill>.",
                    "I see two <identical|equal> <charges|payments> <for order {order}|of {amount}|on my card>.",
                    "Order {order} was <billed|charged|paid> <twice|two times>.",
                    "The same {amount} <was taken|went> from my <account|card> <two times|twice>.",
                    held_out=("There are two charges of {amount} on my card.", "You billed order {order} two times."),
                ),
            ),
            Issue(
                ("asking for an invoice", "requesting a copy of an invoice"),
                phrases(
                    "<Could you|Can you|Please> send me the <invoice|bill> for <order {order}|{month}|the {item}>?",
                    "<I|We> need <an invoice|the bill|a copy of the invoice> for <{amount}|{month}|order {order}> "
                    "for <our books|the tax office>.",
                    "The <invoice|bill> from {date} has the wrong <company name|amount|date> on it.",
                    "We never <got|received> the <bill|invoice> for <{month}|order {order}>.",
                    "Please correct the <amount|name|date> on <invoice {code}|the last bill>.",
                    "Where can I find my <invoices|bills> for {month}?",
                    held_out=("Please send the bill for order {order}.", "I need the {month} invoice for our books."),
                ),
            ),
        ),
    ),
    "shipping": Department(
        ("shipping", "delivery", "logistics", "parcels"),
        ("delivery", "tracking", "late parcels", "lost parcels", "parcels", "delivery dates", "delivery addresses"),
        (
            Issue(
                ("reporting a late parcel", "asking where a parcel is"),
                phrases(
                    "My <parcel|package|order> <has not arrived|is not here> yet.",
                    "Where is <order {order}|my parcel|the {item}>? It should have been here on {day}.",
                    "The {item} was due on {date} and <is still not here|has not arrived>.",
                    "The tracking <page|number> has not <changed|moved> for {n} days.",
                    "The <delivery|parcel> to {place} is <{n} days|very> late.",
                    "<I am|We are> still waiting for <the {item}|order {order}|the delivery|my parcel>.",
                    "The driver <never came|did not come> <on {day}|with the {item}>.",
                    held_out=(
                        "The parcel with the {item} is late and has not arrived.",
                        "I am still waiting for the delivery of order {order}.",
                    ),
                ),
            ),
            Issue(
                ("asking to change the delivery address", "giving a new delivery address"),
                phrases(
                    "Please <deliver|send|ship> <the {item}|order {order}|my parcel> to {place} instead.",
                    "I have moved, so <send|ship> <order {order}|the {item}> to my new address in {place}.",
                    "The address on <my order|order {order}|the parcel> is wrong.",
                    "<Can you|Please|I want to> change the <delivery |>address of <order {order}|my parcel>.",
                    "I <typed|gave> the wrong street for the <delivery|parcel>.",
                    held_out=(
                        "Please change the address of order {order} to {place}.",
                        "Send the {item} to my new address.",
                    ),
                ),
            ),
            Issue(
                ("saying that a parcel is lost", "reporting a missing parcel"),
                phrases(
                    "The tracking says delivered but <I never got the parcel|nothing was there>.",
                    "<My parcel|Order {order}|The {item}> seems to be lost.",
                    "The <carrier|driver|courier> lost <the {item}|my parcel|order {order}>.",
                    "<The parcel|Order {order}> was marked as delivered but <nothing was there|it was never here>.",
                    "<Nobody knows|I do not know> where the parcel with <order {order}|the {item}> went.",
                    "I think <the carrier lost my parcel|my parcel is lost>.",
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
        ("damaged goods", "wrong items", "broken items", "exchanges", "unwanted goods", "sending things back"),
        (
            Issue(
                ("reporting a damaged item", "saying that something arrived broken"),
                phrases(
                    "The {item} <arrived|came> <broken|damaged>.",
                    "<The {item} has|There is> a <crack|hole|scratch> in it.",
                    "The box was <crushed|open> and the {item} is <damaged|broken>.",
                    "When I opened the box the {item} was <in pieces|broken|cracked>.",
                    "One <part|side|corner> of the {item} is <broken|cracked|damaged>.",
                    "The <new |>{item} came with a <scratch|crack> on it.",
                    held_out=("The {item} was damaged when I opened the box.", "There is a crack in the new {item}."),
                ),
            ),
            Issue(
                ("saying that the wrong item came", "reporting a wrong item"),
                phrases(
                    "I ordered <one thing|something else> and <got|received> a {item} instead.",
                    "You sent <me|us> the wrong <{item}|thing|model>.",
                    "This is not <the {item}|what> I ordered.",
                    "The {item} <you sent |>has the wrong <colour|size>.",
                    "I <got|received> a different {item} from the one I ordered.",
                    "The {item} is <the wrong one|not the one I ordered>.",
                    held_out=("The {item} you sent is the wrong one.", "I got a {item}, which is not what I ordered."),
                ),
            ),
            Issue(
                ("asking for an exchange", "asking to swap an item"),
                phrases(
                    "The {item} is too <big|small|long|short>, can I <swap|exchange> it for a <smaller|larger> one?",
                    "I <would like|want> to <exchange|swap> the {item} for another <size|colour>.",
                    "How <do I|can I> send <the {item}|it> back?",
                    "I do not like the {item} and want to <return it|send it back>.",
                    "The {item} does not fit, <please exchange it|I need another size>.",
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
        ("errors", "crashes", "bugs in the app", "broken features", "error messages", "slow pages"),
        (
            Issue(
                ("reporting a crash", "saying that the app crashes"),
                phrases(
                    "The {app} <crashes|closes|freezes> <every time|whenever> I open it.",
                    "The {app} closes by itself <after a few seconds|all the time>.",
                    "Since <the update|{day}|yesterday> the {app} <crashes|freezes>.",
                    "The {app} <freezes|crashes|hangs> when I <press save|log out|open it>.",
                    "The {app} stops responding and then <closes|crashes>.",
                    held_out=(
                        "When I open the {app} it freezes and crashes.",
                        "Since {day} the {app} closes by itself.",
                    ),
                ),
            ),
            Issue(
                ("reporting an error message", "reporting an error"),
                phrases(
                    "<I get|We get|It gives me> error <{n}|code {code}> on the {app}.",
                    "The {app} <shows|gives> <me |>an error <message|code>.",
                    "The {app} only says that something went wrong.",
                    "<Error code {code}|An error message> comes up when I <upload a file|press save>.",
                    "Every <upload|download|search> on the {app} <fails|ends> with an error.",
                    held_out=("The {app} gives me error code {code}.", "When I press save an error message comes up."),
                ),
            ),
            Issue(
                ("saying that the service is slow", "reporting a slow page"),
                phrases(
                    "The {app} is <very|far too|so> slow since <{day}|the update>.",
                    "It takes {n} minutes to <load|open> the {app}.",
                    "<Pages load|The {app} loads> far too slowly.",
                    "The {app} takes <ages|{n} minutes|far too long> to <open|load>.",
                    held_out=("Since the update the {app} is far too slow.", "The {app} takes {n} minutes to open."),
                ),
            ),
        ),
    ),
    "account": Department(
        ("account", "login", "identity", "profile"),
        ("login", "passwords", "sign-in", "profile details", "users who cannot get in", "locked accounts"),
        (
            Issue(
                ("asking for a password reset", "unable to sign in"),
                phrases(
                    "I <forgot|lost> my password.",
                    "I cannot <sign in|log in|get> <to|into> my account.",
                    "The password reset <link|mail> does not come.",
                    "My account is locked after {n} wrong passwords.",
                    "The login code never <comes|came> to my phone.",
                    "I am locked out of my <profile|account>.",
                    "<Please reset|My login does not accept> my password.",
                    "My password is <not accepted|wrong>.",
                    held_out=(
                        "My password is not accepted and I am locked out.",
                        "I cannot sign in, please reset my password.",
                    ),
                ),
            ),
            Issue(
                ("asking to change profile details", "asking to change an e-mail address"),
                phrases(
                    "Please change the <e-mail address|phone number|name> <of my account|in my profile>.",
                    "I have a new <phone number|e-mail address> for my <profile|account>.",
                    "My name is <spelled wrong|wrong> in my <profile|account>.",
                    "I got married and need to change my last name in the profile.",
                    "The <phone number|e-mail address|birthday> in my profile is <wrong|old>.",
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
        ("prices", "quotes", "discounts", "offers", "demos", "questions before buying"),
        (
            Issue(
                ("asking for a quote", "asking about prices"),
                phrases(
                    "<How much|What> would {n} <licences|seats> <of the {plan} plan |>cost?",
                    "Please send <us|me> <an offer|a quote> for {n} <of the {item}|licences|seats>.",
                    "What is the price of <the {plan} plan|{n} seats>?",
                    "<Can we|Could I> get <a quote|an offer> for {n} <seats|licences>?",
                    "We are thinking of buying {n} <licences|seats>.",
                    held_out=("What would {n} seats of the {plan} plan cost?", "Please send a quote for {n} licences."),
                ),
            ),
            Issue(
                ("asking for a discount", "asking about a discount"),
                phrases(
                    "<Do you give|Do you have|Is there> a discount for <schools|students|{n} licences>?",
                    "Is there a <discount|better price> if we buy {n} <licences|of them>?",
                    "Can we get a better price for <a long contract|schools|{n} seats>?",
                    "Do you have a student discount?",
                    held_out=("Is there a better price for schools?", "Do you have a discount for {n} licences?"),
                ),
            ),
            Issue(
                ("asking for a demo", "asking for a product demo"),
                phrases(
                    "We <would like|want> to see <a demo|the product> before we buy.",
                    "<Could|Can> someone show us <the product|a demo> on {day}?",
                    "<Can I|Could we|We would like to> try the <{plan} plan|product> before <buying|we buy>.",
                    "Please book a demo for our team <in {place}|on {day}>.",
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
        ("ending a subscription", "pausing a plan", "cancelling", "customers who want to leave", "renewals"),
        (
            Issue(
                ("asking to cancel a subscription", "cancelling a plan"),
                phrases(
                    "Please <cancel|end|stop> my {plan} <plan|subscription>.",
                    "<I|We> want to <end|cancel|stop> <my|our> <subscription|contract> in {month}.",
                    "We no longer need the service, so <close|cancel|end> our contract.",
                    "How do I <stop|cancel> my <subscription|plan>?",
                    "I do not want to renew my {plan} <plan|subscription>.",
                    held_out=("Please end my {plan} subscription.", "We want to cancel our contract in {month}."),
                ),
            ),
            Issue(
                ("asking to pause a subscription", "asking for a pause"),
                phrases(
                    "<Can I|I want to|Please> pause my <subscription|{plan} plan> until {month}.",
                    "<Please|Can you> put <my {plan} plan|the subscription> on hold <for {n} weeks|until {month}>?",
                    "I would like to pause the <service|plan|subscription> for a while.",
                    held_out=("Please pause my {plan} plan until {month}.", "Can I put the subscription on hold?"),
                ),
            ),
        ),
    ),
    "security": Department(
        ("security", "trust and safety", "abuse", "fraud"),
        ("hacked accounts", "fraud", "suspicious logins", "stolen data", "attacks", "fake messages"),
        (
            Issue(
                ("reporting a hacked account", "reporting a suspicious login"),
                phrases(
                    "<Somebody|Someone|A stranger> hacked my account<| on {day}>.",
                    "There was a suspicious login from {place}.",
                    "A stranger <used|got into> my account on {day}.",
                    "I think <someone|somebody> stole my password and got in.",
                    "<I see|There was> a login from {place} <that|and it> was not me.",
                    held_out=(
                        "A stranger hacked my account on {day}.",
                        "There was a login from {place}, and it was not me.",
                    ),
                ),
            ),
            Issue(
                ("reporting fraud", "reporting a fake message"),
                phrases(
                    "I got a fake <e-mail|letter|call> in your name.",
                    "<Someone|A caller> pretends to work for you and asks for card numbers.",
                    "A fake <shop|page|e-mail> uses your logo.",
                    "This looks like fraud: <a caller|someone> wanted my card number in your name.",
                    "Someone sends <fake e-mails|fraud mails> <with your logo|in your name>.",
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
        ("personal data", "legal questions", "contracts", "laws", "data protection", "deletion of data"),
        (
            Issue(
                ("asking for deletion of personal data", "asking to delete personal data"),
                phrases(
                    "Please <delete|erase> all <personal |>data you <hold|have> about me.",
                    "<Erase|Delete|Remove> everything you <know|hold> about me.",
                    "I want my personal data <removed|erased|deleted> from your files.",
                    held_out=("Please erase my personal data from your files.", "Delete everything you hold about me."),
                ),
            ),
            Issue(
                ("asking about a legal contract", "asking a legal question"),
                phrases(
                    "Our lawyer has a question about the <contract|agreement>.",
                    "Which law applies to the <agreement with {company}|contract>?",
                    "<We need|Our lawyer needs> a signed <data protection |>agreement.",
                    "Please send the <terms of the contract|signed agreement> to our lawyer.",
                    held_out=("Our lawyer needs the signed agreement.", "Which law applies to the contract?"),
                ),
            ),
        ),
    ),
    "hiring": Department(
        ("hiring", "human resources", "careers", "recruiting"),
        ("jobs", "applications", "interviews", "people who want to work for us", "open positions"),
        (
            Issue(
                ("applying for a job", "asking about a job"),
                phrases(
                    "I <would like to|want to> apply for the <job|open position> in {place}.",
                    "Do you have <an open position|a job> for a <designer|driver|teacher><| in {place}>?",
                    "I sent my CV on {date} and wonder about the interview.",
                    "Are you hiring in {place}?",
                    "My CV is attached for the <open position|job in {place}>.",
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
        ("bookings", "visits", "meeting times", "moving an appointment", "free appointments"),
        (
            Issue(
                ("asking to move an appointment", "asking for a new appointment"),
                phrases(
                    "<Can we|Can I|I want to> move <my appointment|the visit|our meeting> to <{day}|another day>?",
                    "I cannot come on {day}, please give me another <time|day>.",
                    "<I would like to|Please|Can you> book <a visit|an appointment> <for me |>on <{date}|{day}>.",
                    "Is there a free <appointment|time> in {month}?",
                    "Please move our <meeting|visit> from {day} to another day<| in {month}>.",
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
        ("ideas", "wishes", "praise", "suggestions", "feature requests", "compliments"),
        (
            Issue(
                ("suggesting a new feature", "making a suggestion"),
                phrases(
                    "<It would be great if|I wish> <the {app} had|you could add> <a dark mode|a way to sort the list>.",
                    "I have an idea: let us <sort|print|export> the list<| by date>.",
                    "I wish the {app} could <print labels|sort the list|speak>.",
                    "Please add a way to <export|sort|print> the list.",
                    held_out=(
                        "I wish the {app} had a way to sort the list.",
                        "It would be great if you could add a dark mode.",
                    ),
                ),
            ),
            Issue(
                ("praising the service", "giving praise"),
                phrases(
                    "I just want to say <that I love the {item}|thank you for the lovely service>.",
                    "{person} on your team did a great job, thank you!",
                    "What a <lovely|great> service, keep it up.",
                    "I love the <{item}|service|{app}>, <you did a great job|keep it up>!",
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

_ONE_DUTY = phrases(
    "{one}",
    "for {one}",
    "<Handles|takes care of> {one}",
    "anything about {one}",
    "{one} and the like",
    held_out=("everything about {one}", "cares for {one}"),
)
_SOME_DUTIES = phrases(
    "{some} and {last}",
    "{some} or {last}",
    "{some}, {last}",
    "anything about {some} or {last}",
    "<for|handles|takes care of> {some} and {last}",
    "everything that has to do with {some} and {last}",
    "cares about {some} and {last}",
    "{some} as well as {last}",
    held_out=(
        "anything that has to do with {some} and {last}",
        "takes care of {some} as well as {last}",
        "{some} and also {last}",
    ),
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


def told_messages(rng: random.Random, split: Split) -> Recital:
    """Messages of several people, and what each of them wrote."""
    return recite(rng, split, [any_issue(rng, split) for _ in range(rng.randint(2, 3))])


def _of_department(rng: random.Random, split: Split, key: str) -> str:
    return _text(rng, split, pick(rng, DEPARTMENTS[key].issues))


def _description(rng: random.Random, split: Split, department: Department) -> str:
    """Lists some duties, in an order that belongs to the split."""
    while True:
        duties = rng.sample(department.duties, rng.randint(1, 3))
        if belongs_to(split, "|".join(duties)):
            break
    if len(duties) == 1:
        return fill(rng, split, _ONE_DUTY.draw(rng, split), one=duties[0])
    frame = _SOME_DUTIES.draw(rng, split)
    text = fill(rng, split, frame, some=", ".join(duties[:-1]), last=duties[-1])
    return capitalised(text) if rng.random() < 0.3 else text


def _options(rng: random.Random, split: Split, keys: list[str]) -> list[tuple[str, str | None]]:
    described = rng.random()
    options = []
    for key in keys:
        department = DEPARTMENTS[key]
        name = department.names[0] if rng.random() < 0.6 else pick(rng, department.names)
        keep = described < 0.55 or (described < 0.65 and rng.random() < 0.5)
        options.append((name, _description(rng, split, department) if keep else None))
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
    duties = [_description(rng, split, DEPARTMENTS[key]) for key in keys]
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
    descriptions = (_description(rng, split, department), "another department")
    return noul(rng, split, "routing", scene.state, instructions, answer, descriptions)
