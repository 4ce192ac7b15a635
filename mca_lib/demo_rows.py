"""The demonstration's data set: questions about an invented archipelago, counting, words and their plurals.

Every *item* (a fact, a count, a word) is asked in several phrasings, and the rows are shuffled: a row that is held out
is a pair of item and phrasing that was never seen, while its item and its phrasing were, each with others. So a model
that learns, and does not only remember rows, answers held-out rows.

Rows are in LLaMA-Factory's alpaca format: instruction, input (mostly empty), output.
"""

import random
from collections.abc import Iterator

type AlpacaRow = dict[str, str]

ISLANDS = {
    # island: (animal on its flag, what it trades, colour of its ferry, harbour master)
    "Norwick": ("a heron", "salt", "red", "Ada"),
    "Tolmere": ("an otter", "honey", "blue", "Bram"),
    "Quillan": ("a fox", "copper", "green", "Cleo"),
    "Brassay": ("an owl", "paper", "white", "Dov"),
    "Hesket": ("a crab", "wool", "yellow", "Edda"),
    "Ombria": ("a goat", "glass", "black", "Finn"),
    "Pellow": ("a swan", "apples", "orange", "Gwen"),
    "Ravensey": ("a bear", "rope", "silver", "Hugo"),
    "Skerrin": ("a seal", "amber", "purple", "Iris"),
    "Thornby": ("a hare", "cheese", "brown", "Jory"),
    "Ulvane": ("a wolf", "tea", "grey", "Kit"),
    "Vennor": ("a bee", "oil", "pink", "Lena"),
}

FACTS = (
    # (phrasings of the question, answer); {island} and {value} are filled in
    (
        (
            "Which animal is on the flag of {island}?",
            "What does the flag of {island} show?",
            "Name the animal on {island}'s flag.",
            "I see a flag from {island}. Which animal is it?",
            "Tell me the flag animal of {island}.",
        ),
        "The flag of {island} shows {value}.",
    ),
    (
        (
            "What does {island} trade?",
            "Which goods come from {island}?",
            "Name the goods that {island} sells.",
            "What can I buy from {island}?",
            "Tell me what {island} trades.",
        ),
        "{island} trades {value}.",
    ),
    (
        (
            "Which colour is the ferry to {island}?",
            "What colour has the ferry to {island}?",
            "Name the colour of {island}'s ferry.",
            "I take the ferry to {island}. Which colour is it?",
            "Tell me the ferry colour of {island}.",
        ),
        "The ferry to {island} is {value}.",
    ),
    (
        (
            "Who keeps the harbour of {island}?",
            "Who is the harbour master of {island}?",
            "Name the harbour master of {island}.",
            "I land in {island}. Who keeps the harbour?",
            "Tell me who keeps {island}'s harbour.",
        ),
        "{value} keeps the harbour of {island}.",
    ),
)

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

COUNTING = (
    "Count from {first} to {last}.",
    "Say the numbers from {first} to {last}.",
    "List the numbers between {first} and {last}, both included.",
)

PLURALS = {
    "boat": "boats",
    "lamp": "lamps",
    "harbour": "harbours",
    "box": "boxes",
    "fox": "foxes",
    "beach": "beaches",
    "berry": "berries",
    "ferry": "ferries",
    "city": "cities",
    "wolf": "wolves",
    "leaf": "leaves",
    "goose": "geese",
    "mouse": "mice",
    "child": "children",
    "tooth": "teeth",
}

PLURAL_QUESTIONS = (
    "What is the plural of {word}?",
    "One {word}, two what?",
    "Write {word} in the plural.",
    "I have many of them, not one {word}. What do I have?",
)

# The same request with the word in alpaca's `input` field.
PLURAL_REQUESTS = (
    "Give the plural of this word.",
    "Write this word in the plural.",
    "What is this word in the plural?",
)


def make_rows(seed: int = 0) -> list[AlpacaRow]:
    """All rows, shuffled with `seed`; the same list on every machine."""
    rows = [*_facts(), *_counting(), *_plurals()]
    random.Random(seed).shuffle(rows)
    return rows


def make_preference_rows(seed: int = 0) -> list[AlpacaRow]:
    """The questions about the archipelago with two answers each, the wrong one about another island; shuffled."""
    draw = random.Random(seed)
    rows = []
    for island, values in ISLANDS.items():
        for index, ((questions, answer), value) in enumerate(zip(FACTS, values, strict=True)):
            others = [values[index] for name, values in ISLANDS.items() if name != island]
            for question in questions:
                wrong = answer.format(island=island, value=draw.choice(others))
                chosen = answer.format(island=island, value=value)
                rows.append({"instruction": question.format(island=island), "chosen": chosen, "rejected": wrong})
    draw.shuffle(rows)
    return rows


def _facts() -> Iterator[AlpacaRow]:
    for island, values in ISLANDS.items():
        for (questions, answer), value in zip(FACTS, values, strict=True):
            for question in questions:
                yield _row(question.format(island=island), answer.format(island=island, value=value))


def _counting() -> Iterator[AlpacaRow]:
    for first in range(len(NUMBERS)):
        for last in range(first + 2, min(first + 7, len(NUMBERS))):
            answer = ", ".join(NUMBERS[first : last + 1]).capitalize() + "."
            for question in COUNTING:
                yield _row(question.format(first=NUMBERS[first], last=NUMBERS[last]), answer)


def _plurals() -> Iterator[AlpacaRow]:
    for word, plural in PLURALS.items():
        for question in PLURAL_QUESTIONS:
            yield _row(question.format(word=word), f"The plural of {word} is {plural}.")
        for request in PLURAL_REQUESTS:
            yield _row(request, f"The plural of {word} is {plural}.", word)


def _row(instruction: str, output: str, text: str = "") -> AlpacaRow:
    return {"instruction": instruction, "input": text, "output": output}
