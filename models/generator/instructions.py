"""Small instructions with one right answer: sort, count, rewrite, extract, reverse, pick out, repeat."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.generator.base import Chat, Turn, exact, number
from models.generator.words import CITIES, DAYS, NAMES, THINGS

DOMAIN = "instructions"

# present and past of verbs, and he/she forms, for rewriting
PAST = {
    "buys": "bought",
    "finds": "found",
    "sells": "sold",
    "sees": "saw",
    "takes": "took",
    "brings": "brought",
    "loses": "lost",
    "paints": "painted",
    "cleans": "cleaned",
    "wants": "wanted",
    "needs": "needed",
    "makes": "made",
}


def _ask(rng: random.Random, asks: tuple[str, ...], text: str) -> str:
    return rng.choice(asks).format(text)


def _words(rng: random.Random, least: int, most: int) -> list[str]:
    return rng.sample(THINGS, rng.randint(least, most))


def _sort_numbers(rng: random.Random) -> Turn:
    numbers = rng.sample(range(1, 100 if rng.random() < 0.5 else 30), rng.randint(3, 5))
    down = rng.random() < 0.25
    asks = (
        ("Sort from large to small: {}", "Sort these numbers in falling order: {}")
        if down
        else ("Sort these numbers: {}", "Sort: {}", "Put these numbers in order: {}", "Sort from small to large: {}")
    )
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return Turn(_ask(rng, asks, ", ".join(map(str, numbers))), answer, exact(answer))


def _sort_words(rng: random.Random) -> Turn:
    words = _words(rng, 3, 4)
    asks = ("Sort these words: {}", "Sort alphabetically: {}", "Put these words in alphabetical order: {}")
    answer = ", ".join(sorted(words))
    return Turn(_ask(rng, asks, ", ".join(words)), answer, exact(answer))


def _largest(rng: random.Random) -> Turn:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    word, value = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
    asks = (f"Which number is the {word}: {{}}", f"Find the {word} number: {{}}", f"What is the {word} of these: {{}}")
    return Turn(_ask(rng, asks, ", ".join(map(str, numbers))), str(value), exact(str(value)))


def _reverse(rng: random.Random) -> Turn:
    words = _words(rng, 3, 4)
    asks = ("Reverse this list: {}", "Write these words in reverse order: {}", "Reverse: {}")
    answer = ", ".join(words[::-1])
    return Turn(_ask(rng, asks, ", ".join(words)), answer, exact(answer))


def _count(rng: random.Random) -> Turn:
    words = _words(rng, 2, 7)
    asks = ("Count these words: {}", "How many words are in this list: {}", "How many words: {}")
    return Turn(_ask(rng, asks, ", ".join(words)), f"There are {len(words)} words.", number(len(words)))


def _count_one(rng: random.Random) -> Turn:
    word, *others = _words(rng, 3, 4)
    n = rng.randint(1, 4)
    listing = [word] * n + others
    rng.shuffle(listing)
    text = ", ".join(listing)
    ask = rng.choice((f'How often does "{word}" occur in: {text}', f'Count the word "{word}" in: {text}'))
    times = "time" if n == 1 else "times"
    return Turn(ask, f'"{word}" occurs {n} {times}.', number(n))


def _pick(rng: random.Random) -> Turn:
    words = _words(rng, 3, 5)
    which, word = rng.choice((("first", words[0]), ("last", words[-1]), ("second", words[1]), ("third", words[2])))
    asks = (f"What is the {which} word: {{}}", f"Give me the {which} word of this list: {{}}")
    return Turn(_ask(rng, asks, ", ".join(words)), word, exact(word))


def _repeat(rng: random.Random) -> Turn:
    text = " ".join(_words(rng, 1, 4))
    asks = ("Say: {}", "Repeat after me: {}", "Repeat: {}", "Say this: {}")
    return Turn(_ask(rng, asks, text), text, exact(text))


def _repeat_long(rng: random.Random) -> Turn:
    """Long enough that each word must be found by the word before it, as every kind of lookup requires."""
    pool = (*THINGS, *NAMES, *CITIES, *map(str, range(100)))
    text = rng.choice((" ", ", ")).join(rng.choice(pool) for _ in range(rng.randint(8, 32)))
    asks = ("Say: {}", "Repeat after me: {}", "Repeat: {}", "Copy this text: {}", "Copy: {}", "Write again: {}")
    return Turn(_ask(rng, asks, text), text, exact(text))


def _find(rng: random.Random) -> Turn:
    """A table in a line, and the word next to one of its words."""
    words = rng.sample((*THINGS, *NAMES), rng.randint(3, 8))
    values = [str(rng.randint(1, 99)) if rng.random() < 0.5 else rng.choice(THINGS) for _ in words]
    i = rng.randrange(len(words))
    text = ", ".join(f"{word} {value}" for word, value in zip(words, values, strict=True))
    asks = (f"What comes after {words[i]} in this list? {{}}", f"Look up {words[i]}: {{}}", f"Find {words[i]} in: {{}}")
    answer = f"{words[i]} {values[i]}"
    return Turn(_ask(rng, asks, text), answer, exact(answer))


def _find_all(rng: random.Random) -> Turn:
    """The same table read in another order, one look-up after the other."""
    words = rng.sample((*THINGS, *NAMES), rng.randint(4, 10))
    marks = rng.sample("ABCDEFGHIJKLMNOP", len(words))
    values = marks if rng.random() < 0.5 else [rng.choice((*THINGS, *NAMES)) for _ in words]
    pairs = [f"{word} {value}" for word, value in zip(words, values, strict=True)]
    order = rng.sample(range(len(words)), len(words))
    asked = ", ".join(words[i] for i in order)
    ask = rng.choice(("List: {t}. Put it into this order: {a}", "Table: {t}. Look up: {a}", "Given {t}, find: {a}"))
    answer = ", ".join(pairs[i] for i in order)
    return Turn(ask.format(t=", ".join(pairs), a=asked), answer, exact(answer))


def _without(rng: random.Random) -> Turn:
    words = _words(rng, 3, 5)
    gone = rng.choice(words)
    answer = ", ".join(word for word in words if word != gone)
    ask = rng.choice((f'Remove "{gone}" from this list: {{}}', f"Leave out {gone}: {{}}", f"Delete {gone} from: {{}}"))
    return Turn(ask.format(", ".join(words)), answer, exact(answer))


def _sentence(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A sentence with named parts."""
    parts = {
        "name": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "city": rng.choice(CITIES),
        "day": rng.choice(DAYS),
    }
    parts["number"] = str(rng.randint(2, 99))
    forms = (
        "On {day}, {name} bought a {thing} in {city} for {number} dollars.",
        "{name} sold {number} copies of the {thing} in {city} on {day}.",
        "The {thing} of {name} came to {city} on {day} at {number} minutes past nine.",
        "Room {number} in {city} has a {thing}, says {name}. It opens on {day}.",
    )
    return rng.choice(forms).format(**parts), parts


def _extract(rng: random.Random) -> Turn:
    sentence, parts = _sentence(rng)
    part = rng.choice(sorted(parts))
    asks = (
        f"Find the {part} in this sentence: {{}}",
        f"Extract the {part}: {{}}",
        f"Which {part} is in this text? {{}}",
    )
    return Turn(_ask(rng, asks, sentence), parts[part], exact(parts[part]))


def _rewrite_past(rng: random.Random) -> Turn:
    verb = rng.choice(sorted(PAST))
    name, thing, tail = rng.choice(NAMES), rng.choice(THINGS), rng.choice(("", f" in {rng.choice(CITIES)}"))
    asks = ("Rewrite in the past tense: {}", "Put this sentence in the past: {}")
    answer = f"{name} {PAST[verb]} a {thing}{tail}."
    return Turn(_ask(rng, asks, f"{name} {verb} a {thing}{tail}."), answer, exact(answer))


def _rewrite_word(rng: random.Random) -> Turn:
    sentence, parts = _sentence(rng)
    old = parts["thing"]
    new = rng.choice([word for word in THINGS if word != old])
    ask = rng.choice((f'Replace "{old}" by "{new}": {{}}', f'Rewrite with "{new}" instead of "{old}": {{}}'))
    answer = sentence.replace(f" {old}", f" {new}")
    return Turn(ask.format(sentence), answer, exact(answer))


def _rewrite_list(rng: random.Random) -> Turn:
    words = _words(rng, 2, 4)
    text = ", ".join(words)
    if rng.random() < 0.5:
        answer = "\n".join(f"- {word}" for word in words)
        return Turn(_ask(rng, ("Write as a list: {}", "Make bullet points: {}"), text), answer, exact(answer))
    answer = f"{', '.join(words[:-1])} and {words[-1]}"
    return Turn(_ask(rng, ('Join with "and": {}', 'Write with "and" at the end: {}'), text), answer, exact(answer))


TASKS: dict[str, Callable[[random.Random], Turn]] = {
    "sort-numbers": _sort_numbers,
    "sort-words": _sort_words,
    "largest": _largest,
    "reverse": _reverse,
    "count": _count,
    "count-one": _count_one,
    "pick": _pick,
    "repeat": _repeat,
    "repeat-long": _repeat_long,
    "find": _find,
    "find-all": _find_all,
    "without": _without,
    "extract": _extract,
    "rewrite-past": _rewrite_past,
    "rewrite-word": _rewrite_word,
    "rewrite-list": _rewrite_list,
}
WEIGHTS = {"sort-numbers": 3.0, "sort-words": 2.0, "repeat-long": 2.0, "find": 2.0, "find-all": 6.0}  # 1 for the others


def make(rng: random.Random) -> Chat:
    """One instruction; sometimes a second one of another kind."""
    names = list(TASKS)
    kind = rng.choices(names, [WEIGHTS.get(name, 1.0) for name in names])[0]
    turns = [TASKS[kind](rng)]
    if rng.random() < 0.2:
        turns.append(TASKS[rng.choice([name for name in names if name != kind])](rng))
    return Chat(DOMAIN, tuple(turns), kind)
