"""Made-up conversations to pretrain the demo models on.

The models learn to confirm a booking in a sentence, to answer questions about it, to change it,
to read clock times and numbers, and to write JSON about people when asked. They never see a
booking as JSON, which is left to fine-tuning, nor the last names of the fine-tuning test rows.
"""

import json
import random
from collections.abc import Iterator

from make_chat import (
    DAYS,
    FIRST_NAMES,
    NOTES,
    NUMBERS,
    TRAINING_NAMES,
    Booking,
    Messages,
    change,
    message,
    random_booking,
    random_name,
    random_time,
    request,
    say_time,
    words,
)

CITIES = words("Rome Oslo Lima Cairo Paris Delhi Osaka Quito Dublin Boston Berlin Lagos")
JOBS = words("baker nurse pilot teacher farmer painter doctor driver lawyer singer")
# Without a space before them these words are other tokens than in a sentence, and must be seen in
# pretraining: an adapter cannot teach a token whose embedding was never trained.
THINGS = words("people day time note name guest table city age job pet soup bread cake wine water")
PETS = words("dog cat horse parrot rabbit hamster turtle goldfish")
SYSTEM_PROMPTS = (
    "You are a polite waiter.", "You work at the Green Olive.", "Answer in one short sentence.",
    "You are a helpful assistant.",
)  # fmt: skip
CONFIRMATIONS = (
    "Thank you, {name}. I have booked a table for {people} on {day} at {time}.{note}",
    "A table for {people} on {day} at {time} for {name}.{note} See you then!",
    "{day} at {time}, {people} people, {name}.{note} We look forward to it.",
    "Gladly! {name}, {day}, {time}, table for {people}.{note}",
)  # fmt: skip
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! Would you like to book a table?"),
    ("Thank you!", "You are welcome."),
    ("Thanks, bye", "Goodbye, and see you soon."),
    ("What is your name?", "I am the waiter of the Green Olive."),
    ("When are you open?", "We are open every day from 12:00 to 23:00."),
    ("What can I eat today?", "Today we have soup, fresh bread and apple cake."),
    ("Do you have vegan food?", "Yes, we have a vegan menu."),
    ("Can I bring my dog?", "Yes, we have room for a dog."),
    ("Can you help me?", "Of course. What can I do for you?"),
)
ONSETS = words("b c d f g h j k l m n p r s t v w y z br ch dr fl gr kh kr ph sh sk st th tr")
VOWELS = words("a e i o u ai au ea ee ia ie oo")
CODAS = ["", "", "", *words("l n r s m k t nd rt ck sen tz ng")]


def invented_word(rng: random.Random) -> str:
    """Return a name that is in no list, so that names must be copied, not memorised."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{invented_word(rng)} {invented_word(rng)}"
    return random_name(rng, TRAINING_NAMES)


def any_booking(rng: random.Random) -> Booking:
    return random_booking(rng, any_name(rng))


def confirm(rng: random.Random, booking: Booking) -> str:
    note = f" Noted: {booking.note}." if booking.note else ""
    return rng.choice(CONFIRMATIONS).format(**(vars(booking) | {"note": note}))


def question(rng: random.Random, booking: Booking) -> tuple[str, str]:
    return rng.choice(
        (
            ("What is the name?", f"{booking.name}."),
            ("Which day is it?", f"{booking.day}."),
            ("What time is it on a 24 hour clock?", f"{booking.time}."),
            ("How many people are coming?", f"{booking.people}."),
            ("Is there a wish?", f"Yes, {booking.note}." if booking.note else "No, none."),
        )
    )


def confirmed(rng: random.Random) -> Messages:
    booking = any_booking(rng)
    return [message("user", request(rng, booking)), message("assistant", confirm(rng, booking))]


def changed(rng: random.Random) -> Messages:
    booking = any_booking(rng)
    text, after = change(rng, booking)
    return [
        message("user", request(rng, booking)),
        message("assistant", confirm(rng, booking)),
        message("user", text),
        message("assistant", confirm(rng, after)),
    ]


def questioned(rng: random.Random) -> Messages:
    booking = any_booking(rng)
    ask, answer = question(rng, booking)
    if rng.random() < 0.5:
        text = f"{request(rng, booking)}\n{ask}"
        return [message("user", text), message("assistant", answer)]
    return [
        message("user", request(rng, booking)),
        message("assistant", confirm(rng, booking)),
        message("user", ask),
        message("assistant", answer),
    ]


def profile(rng: random.Random) -> Messages:
    """Return facts about a person, answered in JSON because the message asks for it."""
    facts = {
        "name": any_name(rng),
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice([*JOBS, None]),
        "pet": rng.choice([*PETS, None, None]),
    }
    chosen = {key: facts[key] for key in ("name", *rng.sample(list(facts)[1:], rng.randint(1, 4)))}
    phrases = {
        "age": f"is {facts['age']} years old",
        "city": f"lives in {facts['city']}",
        "job": f"works as a {facts['job']}" if facts["job"] else "has no job",
        "pet": f"has a {facts['pet']}" if facts["pet"] else "has no pet",
    }
    facts_told = [phrases[key] for key in chosen if key != "name"]
    rng.shuffle(facts_told)
    text = f"{facts['name']} {' and '.join(facts_told)}."
    keys = ", ".join(chosen)
    ask = rng.choice(("Write this as JSON with {}: {}", "JSON with {}, please. {}"))
    answer = json.dumps(chosen, ensure_ascii=False)
    return [message("user", ask.format(keys, text)), message("assistant", answer)]


def any_word(rng: random.Random) -> str:
    return rng.choice((any_name(rng), rng.choice(NOTES), rng.choice(DAYS), rng.choice(THINGS)))


def converted(rng: random.Random) -> Messages:
    kind = rng.randrange(4)
    if kind == 0:
        time = random_time(rng)
        ask, answer = f"What is {say_time(rng, time)} on a 24 hour clock?", f"{time}."
    elif kind == 1:
        number = rng.randint(1, 12)
        ask, answer = f"Write {NUMBERS[number]} in digits.", f"{number}."
    elif kind == 2:
        answer = any_word(rng)
        ask = f"Repeat: {answer}"
    else:
        word = any_word(rng)
        ask, answer = f"Put quotes around {word}.", f'"{word}"'
    return [message("user", ask), message("assistant", answer)]


def repeated(rng: random.Random) -> Messages:
    """Return words in random order: nearly every token of the answer is copied."""
    pool = (
        lambda: invented_word(rng),
        lambda: rng.choice(DAYS),
        lambda: rng.choice(FIRST_NAMES),
        lambda: rng.choice(TRAINING_NAMES),
        lambda: random_time(rng),
        lambda: str(rng.randint(1, 12)),
        lambda: rng.choice(NOTES),
        lambda: rng.choice(THINGS),
    )
    text = " ".join(rng.choice(pool)() for _ in range(rng.randint(2, 8)))
    return [message("user", f"Repeat: {text}"), message("assistant", text)]


def small_talk(rng: random.Random) -> Messages:
    ask, answer = rng.choice(SMALL_TALK)
    return [message("user", ask), message("assistant", answer)]


SKILLS = {
    confirmed: 32,
    repeated: 10,
    changed: 14,
    questioned: 16,
    profile: 22,
    converted: 14,
    small_talk: 2,
}


def repetitions(seed: int, count: int) -> Iterator[Messages]:
    rng = random.Random(seed)
    for _ in range(count):
        yield repeated(rng)


def conversations(seed: int, count: int) -> Iterator[Messages]:
    rng = random.Random(seed)
    for skill in rng.choices(list(SKILLS), weights=list(SKILLS.values()), k=count):
        messages = skill(rng)
        if rng.random() < 0.1:
            messages.insert(0, message("system", rng.choice(SYSTEM_PROMPTS)))
        yield messages
