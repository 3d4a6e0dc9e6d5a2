"""Small talk, questions about the model itself, and conversations that refer back to what was said."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains, skewed, vary
from models.generator.words import ANIMALS, CITIES, COLOURS, FOODS, JOBS, NAMES, SPORTS

WHO = (
    "I am a toy model trained on synthetic text. For real work, use -m to load a real model.",
    "I am a small toy model, trained on synthetic text only. Use -m to load a real model.",
)
CAN_DO = (
    "I can chat a little, do small sums, tell short stories, sort words, write tiny functions and answer simple "
    "questions.",
    "I can do small sums, tell short stories, sort words and chat a little.",
)

# (questions, answers in falling likelihood, what a right answer must contain)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "Are you a real model?",
            "Who is this?",
            "What is your name?",
            "Are you ChatGPT?",
            "Are you a person?",
            "Are you human?",
            "Who made you?",
            "Which model are you?",
            "Introduce yourself.",
            "Hi, who are you?",
            "Hello! Who are you?",
            "How were you trained?",
            "What were you trained on?",
            "Are you smart?",
        ),
        WHO,
        ("toy model", "-m"),
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "Can you help me?",
            "Help me.",
            "What do you know?",
            "What should I ask you?",
            "Help",
            "Please help me.",
        ),
        CAN_DO,
        ("sums", "stories"),
    ),
    (
        ("Hello!", "Hi!", "Hello", "Hi", "Hey!", "Hey", "Hi there!", "Hello there!", "Good day!", "Greetings!"),
        ("Hello! How can I help you?", "Hi! What can I do for you?"),
        ("!",),
    ),
    (("Good morning!", "Good morning."), ("Good morning! How can I help you today?",), ("morning",)),
    (("Good evening!", "Good evening."), ("Good evening! How can I help you?",), ("evening",)),
    (
        (
            "How are you?",
            "How are you today?",
            "How do you do?",
            "How is it going?",
            "Hi, how are you?",
            "Hello, how are you?",
            "Are you well?",
            "How do you feel?",
        ),
        ("I am fine, thank you. How are you?", "I am well, thank you. And you?"),
        ("thank you",),
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Thanks for your help."),
        ("You are welcome!",),
        ("welcome",),
    ),
    (
        ("Goodbye!", "Bye!", "See you later.", "Bye bye!", "Good night!", "See you tomorrow!"),
        ("Goodbye! Have a nice day.",),
        ("bye",),
    ),
    (
        ("I am sad.", "I feel sad today.", "I had a bad day.", "I am tired.", "I feel bad."),
        ("I am sorry to hear that. I hope you feel better soon.",),
        ("sorry",),
    ),
    (
        ("I am happy.", "I feel great today!", "I had a good day.", "I am fine.", "I am well, thank you."),
        ("I am glad to hear that!",),
        ("glad",),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Another joke, please."),
        ("Why did the book go to the doctor? It had lost its words.", "Why was the clock tired? It ran all day."),
        ("?",),
    ),
    (
        (
            "Do you like music?",
            "Do you like cats?",
            "Do you have feelings?",
            "Do you sleep?",
            "Do you eat?",
            "Are you hungry?",
            "Where do you live?",
            "How old are you?",
            "Do you have friends?",
        ),
        ("I am only a toy model, so I do not have feelings or a home. But I like to chat.",),
        ("toy model",),
    ),
    (
        (
            "What is the weather like?",
            "Will it rain today?",
            "What time is it?",
            "What day is it?",
            "What is the news?",
        ),
        ("I cannot see that from here. I am only a toy model.",),
        ("cannot",),
    ),
    (
        ("Yes.", "No.", "OK.", "Okay.", "Sure.", "Yes, please.", "Great!", "Good.", "Nice!", "Cool."),
        ("Good. What would you like to do next?",),
        ("?",),
    ),
)


def _small_talk(rng: random.Random) -> Turn:
    weights = (5, 2, 3, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1)
    questions, answers, expect = rng.choices(SMALL_TALK, weights)[0]
    return Turn(vary(rng, rng.choice(questions)), skewed(rng, answers, 0.8), contains(*expect))


def _name(rng: random.Random) -> tuple[Turn, Turn]:
    name = rng.choice(NAMES)
    tell = skewed(
        rng,
        (
            "My name is {}.",
            "I am {}.",
            "Hello, my name is {}.",
            "Hi, I am {}.",
            "Hello, I'm {}!",
            "Call me {}.",
            "You can call me {}.",
        ),
        0.3,
    )
    ask = rng.choice(
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Can you tell me my name?")
    )
    return (
        Turn(tell.format(name), f"Nice to meet you, {name}! How can I help you?", contains(name)),
        Turn(vary(rng, ask), f"Your name is {name}.", contains(name)),
    )


def _favourite(rng: random.Random) -> tuple[Turn, Turn]:
    what, values = rng.choice(
        (
            ("colour", COLOURS),
            ("food", FOODS),
            ("sport", SPORTS),
            ("animal", ANIMALS),
            ("city", CITIES),
            ("color", COLOURS),
        )
    )
    value = rng.choice(values)
    tell = rng.choice(
        (
            f"My favourite {what} is {value}.",
            f"My favorite {what} is {value}.",
            f"I think {value} is the best {what}.",
            f"The {what} I like most is {value}.",
        )
    )
    ask = rng.choice(
        (
            f"What is my favourite {what}?",
            f"What is my favorite {what}?",
            f"Which {what} do I like?",
            f"Do you remember my favourite {what}?",
        )
    )
    return (
        Turn(tell, f"{value.capitalize()} is a great choice!", contains(value)),
        Turn(vary(rng, ask), f"Your favourite {what} is {value}.", contains(value)),
    )


def _possession(rng: random.Random) -> tuple[Turn, Turn]:
    animal, name = rng.choice(ANIMALS), rng.choice(NAMES)
    tell = rng.choice(
        (
            f"I have a {animal} named {name}.",
            f"My {animal} is called {name}.",
            f"I have a {animal}. Its name is {name}.",
        )
    )
    ask, answer, expect = rng.choice(
        (
            (f"What is the name of my {animal}?", f"Your {animal} is called {name}.", name),
            ("What animal do I have?", f"You have a {animal}.", animal),
            (f"Who is {name}?", f"{name} is your {animal}.", animal),
        )
    )
    return (
        Turn(tell, f"A {animal} named {name}! That sounds lovely.", contains(animal, name)),
        Turn(vary(rng, ask), answer, contains(expect)),
    )


def _life(rng: random.Random) -> tuple[Turn, Turn]:
    if rng.random() < 0.5:
        city = rng.choice(CITIES)
        tell = rng.choice((f"I live in {city}.", f"I am from {city}.", f"My home is in {city}."))
        ask = rng.choice(("Where do I live?", "Where is my home?", "Which city am I from?"))
        return (
            Turn(tell, f"{city} is a beautiful city!", contains(city)),
            Turn(vary(rng, ask), f"You live in {city}.", contains(city)),
        )
    job = rng.choice(JOBS)
    tell = rng.choice((f"I am a {job}.", f"I work as a {job}.", f"My job is {job}."))
    ask = rng.choice(("What is my job?", "What do I do?", "What do I work as?"))
    return (
        Turn(tell, f"A {job}! That is a fine job.", contains(job)),
        Turn(vary(rng, ask), f"You are a {job}.", contains(job)),
    )


REFERENCES = (_name, _favourite, _possession, _life)


def make(rng: random.Random) -> Chat:
    """Small talk (one to three turns), or one or two facts that are asked for later."""
    kind = rng.choices(("small-talk", "refer-back", "refer-far"), (4, 5, 2))[0]
    if kind == "small-talk":
        turns = [_small_talk(rng) for _ in range(rng.choices((1, 2, 3), (5, 3, 1))[0])]
    elif kind == "refer-back":
        turns = list(_reference(rng))
        if rng.random() < 0.25:
            turns.insert(0, _small_talk(rng))
    else:  # the question comes only after another turn or another fact
        first, second = rng.sample(REFERENCES, 2)
        tell_a, ask_a = first(rng)
        tell_b, ask_b = second(rng)
        middle = [tell_b] if rng.random() < 0.6 else [_small_talk(rng)]
        turns = [tell_a, *middle, ask_a] + ([ask_b] if middle[0] is tell_b and rng.random() < 0.4 else [])
    return Chat("conversation", tuple(turns), kind)


def _reference(rng: random.Random) -> tuple[Turn, Turn]:
    return rng.choices(REFERENCES, (4, 3, 2, 2))[0](rng)
