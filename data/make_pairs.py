"""Write the demo pairs: a booking that is right, and one with a plausible error.

    python data/make_pairs.py           # data/bookings_pairs.jsonl

The guests are new, and their last names are none of the test rows'. One error spoils each rejected
booking: a name that is misspelt, another day, time or number of people, a note that is invented or
left out. A seed always gives the same file.
"""

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

from make_chat import DAYS, NOTES, TRAINING_NAMES, Booking, random_booking, random_name, request

VOWELS = "aeiou"
ERRORS = ("name", "name", "day", "time", "people", "note")


def misspelt(rng: random.Random, name: str) -> str:
    """A last name with one letter changed, left out or doubled, as a model copies it wrongly."""
    first, last = name.rsplit(" ", 1)
    at = rng.randrange(1, len(last))
    letter = rng.choice(VOWELS if last[at] in VOWELS else "bcdfghklmnprstvw")
    changed = rng.choice((letter, "", last[at] * 2))
    wrong = last[:at] + changed + last[at + 1 :]
    return f"{first} {wrong}" if wrong != last else misspelt(rng, name)


def wrong_time(rng: random.Random, time: str) -> str:
    """Half an hour off, or an hour, or read as in the morning."""
    hour, minute = map(int, time.split(":"))
    other = "00" if minute else "30"
    times = (f"{hour}:{other}", f"{hour - 1}:{minute:02}", f"{hour + 1}:{minute:02}")
    return rng.choice((*times, f"{hour - 12:02}:{minute:02}"))


def spoilt(rng: random.Random, booking: Booking) -> Booking:
    """The booking with one error."""
    kind = rng.choice(ERRORS)
    if kind == "name":
        return replace(booking, name=misspelt(rng, booking.name))
    if kind == "day":
        return replace(booking, day=rng.choice([day for day in DAYS if day != booking.day]))
    if kind == "time":
        return replace(booking, time=wrong_time(rng, booking.time))
    if kind == "people":
        counts = [n for n in (booking.people - 1, booking.people + 1) if 1 <= n <= 12]
        return replace(booking, people=rng.choice(counts))
    return replace(booking, note=None if booking.note else rng.choice(NOTES))


def make_rows(seed: int, count: int) -> list[dict[str, str]]:
    rng = random.Random(f"pairs {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        booking = random_booking(rng, random_name(rng, TRAINING_NAMES))
        prompt, wrong = request(rng, booking), spoilt(rng, booking)
        rows[prompt] = {"prompt": prompt, "chosen": booking.to_json(), "rejected": wrong.to_json()}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=300)
    args = parser.parse_args()
    path = args.out / "bookings_pairs.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) for row in make_rows(args.seed, args.rows))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{path}: {args.rows} rows, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
