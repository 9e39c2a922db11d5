"""Write the demo chat data: messages to a restaurant, answered by the booking as JSON.

    python data/make_chat.py            # data/bookings.jsonl and data/bookings_test.jsonl

Everything is made up from the word lists here, so a seed always gives the same files. The last
names in the test rows occur neither in training rows nor in the data that the demo models learned.
"""

import argparse
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

Messages = list[dict[str, str]]


def words(text: str) -> list[str]:
    return text.split()


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# The index of a word is its value.
NUMBERS = words("zero one two three four five six seven eight nine ten eleven twelve")
NOTES = (
    "window table", "high chair", "quiet corner", "birthday cake", "vegan menu", "no nuts",
    "garden table", "wheelchair access", "no gluten", "room for a dog",
)  # fmt: skip
FIRST_NAMES = words("""
    Ann Ben Cleo Dan Ella Finn Grace Hugo Iris Jack Kate Leo Maya Nora Owen Paula Quinn Rosa Sam
    Tess Uma Vera Will Xena Yara Zoe Adam Bella Carl Dora Emil Flora Gus Helen Ivan Julia Karl Lena
    Mark Nina Otto Pia Ralf Sara Tom Ursula Victor Wanda Xavier Yusuf Zara Amir Bruno Chloe David
    Elsa Felix Gina Henry Ingrid Jonas Kira Lucas Marta Noah Olga Peter Rita Stella Tim Vito Amina
    Boris Carmen Diego Esther Farid Greta Hassan Irene Jorge Kenji Lucia Mehmet Naomi Oscar Priya
    Ravi Sofia Theo Usha Viktor Wei Yuki Zeno Alma Basil Clara Dmitri Edith Fatima Gavin Hana
    Ibrahim Joan Kofi Linh Miguel Nadia Omar Petra Rania Simon Tara Vikram Willow Yan José Zoë Abby
    Alan Alice Amy Andre Anita Arthur Asha Astrid Aziz Barry Beth Bianca Bob Brian Cara Cecil Cora
    Cyrus Daisy Daria Dean Derek Diana Donna Doris Duncan Edgar Eileen Elias Emma Enzo Erik Eva Fay
    Frank Fred Gemma George Gloria Gordon Gwen Harold Harriet Hazel Hilda Holly Ian Ida Igor Imran
    Isla Jade James Jane Jasper Jim Joel Judy Kai Karen Keith Ken Kim Kurt Lana Lars Laura Liam Lily
    Lisa Lorna Luke Mabel Malik Maria Max Mia Mina Mohan Molly Mona Neil Nick Nils Noor Nuria Olive
    Orla Pablo Pam Pavel Phil Rachel Ralph Rex Robin Roman Rory Ruby Ruth Sally Sean Selma Sergio
    Sid Sonia Stan Sven Tanya Ted Tilda Tobias Tony Umar Valerie Vince Walter Wendy Yasmin Yves
""")
LAST_NAMES = words("""
    Abbott Baker Carter Dixon Ellis Foster Grant Hughes Irving Jensen Keller Lambert Moreno Novak
    Olsen Porter Quigley Rossi Silva Turner Upton Vargas Weber Young Ziegler Adams Brandt Costa
    Duval Engel Fischer Garcia Hansen Ivanov Jones Kaplan Larsen Meyer Nolan Ortega Perez Rivera
    Santos Tanaka Urban Vogel Walsh Yamada Zhang Arnold Becker Cohen Evans Fleming Gordon
    Holmes Iqbal Joshi Khan Martin Nguyen Okafor Patel Ramos Schmidt Thomas Vance Wagner
    Yilmaz Zimmer Ahmed Bianchi Castro Dubois Eriksen Ferrari Gomez Haddad Ito Jansen Kovacs Lopez
    Mensah Nowak Osman Petrov Reyes Sato Torres Virtanen Wolf Abe Bauer Cruz Drake Esposito Frost
    Greene Hill Jung Kumar Lund Marino Nakamura Oliveira Park Romano Stone Tran Underwood Vidal West
    Yates Müller Núñez
""") + [
    stem + end
    for stem in words("""
        Ash Black Bram Brook Clay Cran Dal Dun Eld Fair Fen Gar Green Hal Hart Hol Kel Kings Lang
        Lind Long Mar Mead Mill New Nor Oak Pem Rad Red Rock Rose Sand Sel Shel Stan Sum Thorn Wake
        Wal Ward Whit Win Wood Wyn
    """)
    for end in words("""
        berg bridge burn by croft dale den field ford gate ham hurst land ley man more shaw son
        stead ton well wick wood worth
    """)
]
SYSTEM_PROMPTS = (
    "You turn booking requests into JSON.",
    "Reply with the booking as JSON and nothing else.",
    "Extract name, day, time, people and note.",
)

MESSAGES = (
    "Hello, my name is {name}. I would like {table} on {day} at {time}.{note}",
    "Hi, this is {name}. Do you have {table} on {day} at {time}?{note}",
    "Good morning! Can I book {table} for {day}, {time}? The name is {name}.{note}",
    "Please reserve {table} for {name} on {day} at {time}.{note}",
    "We would like to come on {day} at {time}. {party} {note_first}My name is {name}.",
    "On {day} at {time} I need {table}.{note} Thanks, {name}",
    "{name} here. {day}, {time}, {party_short}.{note}",
    "Is {day} at {time} still free? {party}{note} Best wishes, {name}",
    "Dear team, please keep {table} on {day}. We arrive at {time}.{note} Yours, {name}",
    "Hey, {table} for {day} please, at {time}, under {name}.{note}",
    "Could you fit us in at {time} on {day}? {party}{note} It is for {name}.",
    "I am calling for {name}: {party_short} on {day}, {time}.{note}",
)  # fmt: skip
NOTE_PHRASES = (" We need: {note}.", " {Note}, please.", " If possible, {note}.", " Also: {note}.")


@dataclass(frozen=True)
class Booking:
    name: str
    day: str
    time: str  # 24 hours, "19:30"
    people: int
    note: str | None

    def to_json(self) -> str:
        return json.dumps(vars(self), ensure_ascii=False)


# A fifth of the last names is reserved for the test rows.
TEST_NAMES = sorted(random.Random(0).sample(LAST_NAMES, len(LAST_NAMES) // 5))
TRAINING_NAMES = sorted(set(LAST_NAMES) - set(TEST_NAMES))


def random_name(rng: random.Random, last_names: list[str]) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(last_names)}"


def random_time(rng: random.Random) -> str:
    return f"{rng.randint(12, 21)}:{rng.choice(('00', '30'))}"


def random_booking(rng: random.Random, name: str) -> Booking:
    note = rng.choice(NOTES) if rng.random() < 0.5 else None
    return Booking(name, rng.choice(DAYS), random_time(rng), rng.randint(1, 12), note)


def say_time(rng: random.Random, time: str) -> str:
    """Write "19:30" as people do, one way at random; all times are noon or later."""
    hour, minute = (int(part) for part in time.split(":"))
    on_clock = (hour - 1) % 12 + 1
    spoken = {
        0: f"{NUMBERS[on_clock]} o'clock",
        30: f"half past {NUMBERS[on_clock]}",
    }[minute]
    short = f"{on_clock} pm" if minute == 0 else f"{on_clock}:{minute} pm"
    return rng.choice((time, short, short, spoken))


def say_number(rng: random.Random, number: int) -> str:
    return rng.choice((str(number), NUMBERS[number]))


def say_party(rng: random.Random, people: int) -> dict[str, str]:
    """Write the number of guests as three phrases for the message templates."""
    if people == 1:
        return {"table": "a table just for me", "party": "It is just me.", "party_short": "just me"}
    count = say_number(rng, people)
    table = rng.choice(("a table for {}", "a table for {} people", "{} seats")).format(count)
    party = rng.choice(("We are {}.", "There are {} of us.", "We will be {} people."))
    short = rng.choice(("{} people", "{} guests", "party of {}"))
    return {"table": table, "party": party.format(count), "party_short": short.format(count)}


def say_note(rng: random.Random, note: str | None) -> str:
    if note is None:
        return ""
    return rng.choice(NOTE_PHRASES).format(note=note, Note=note.capitalize())


def request(rng: random.Random, booking: Booking) -> str:
    """The message of a guest who wants this booking."""
    note = say_note(rng, booking.note)
    text = rng.choice(MESSAGES).format(
        name=booking.name,
        day=booking.day,
        time=say_time(rng, booking.time),
        note=note,
        note_first=note.lstrip() + " " if note else "",
        **say_party(rng, booking.people),
    )
    return text[0].upper() + text[1:]


def change(rng: random.Random, booking: Booking) -> tuple[str, Booking]:
    """A second message that changes one thing, and the booking after it."""
    kind = rng.choice(("day", "time", "people"))
    if kind == "day":
        day = rng.choice([day for day in DAYS if day != booking.day])
        texts = ("Sorry, make it {}.", "Could we come on {} instead?", "I meant {}.")
        return rng.choice(texts).format(day), replace(booking, day=day)
    if kind == "time":
        time = random_time(rng)
        texts = ("Can we come at {} instead?", "Sorry, {} is better.", "I meant {}.")
        text = rng.choice(texts).format(say_time(rng, time))
        return text, replace(booking, time=time)
    people = rng.choice([n for n in range(2, 13) if n != booking.people])
    texts = ("Now we are {}.", "Sorry, there will be {} of us.", "It is {} people now.")
    return rng.choice(texts).format(say_number(rng, people)), replace(booking, people=people)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat_row(rng: random.Random, last_names: list[str]) -> Messages:
    """A booking request and its JSON; some rows have a system message, some a second turn."""
    booking = random_booking(rng, random_name(rng, last_names))
    system = rng.random() < 0.1
    messages = [message("system", rng.choice(SYSTEM_PROMPTS))] if system else []
    messages.append(message("user", request(rng, booking)))
    messages.append(message("assistant", booking.to_json()))
    if rng.random() < 0.1:
        text, booking = change(rng, booking)
        messages += [message("user", text), message("assistant", booking.to_json())]
    return messages


def prompt_key(messages: Messages) -> str:
    return json.dumps(messages[:-1])


def make_rows(seed: int, train: int, test: int) -> tuple[list[Messages], list[Messages]]:
    """Training and test rows, each prompt once."""
    rng = random.Random(seed)
    seen: set[str] = set()

    def fresh_rows(count: int, last_names: list[str]) -> list[Messages]:
        rows: list[Messages] = []
        while len(rows) < count:
            row = chat_row(rng, last_names)
            if prompt_key(row) not in seen:
                seen.add(prompt_key(row))
                rows.append(row)
        return rows

    return fresh_rows(train, TRAINING_NAMES), fresh_rows(test, TEST_NAMES)


def write_jsonl(path: Path, rows: list[Messages]) -> None:
    lines = (json.dumps({"messages": row}, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--test", type=int, default=150)
    args = parser.parse_args()
    train, test = make_rows(args.seed, args.train, args.test)
    write_jsonl(args.out / "bookings.jsonl", train)
    write_jsonl(args.out / "bookings_test.jsonl", test)


if __name__ == "__main__":
    main()
