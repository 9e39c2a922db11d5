"""Rounds lengths up, so that a GPU runs fewer different shapes, which suit its kernels.

A sequence and its examples side by side, where each `.` is padding that no token sees:

    sequence             a b c d p q . .
    side by side     a b c d . .
                     p q . . . .
"""

from dataclasses import dataclass

# The maximum padding of a sequence, as a fraction of its tokens, and the smallest multiple to try.
_MAX_PADDING, _MIN_MULTIPLE = 0.03, 8


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds sequences to multiples of `length`, a power of two, and widths to multiples of
    `width`.
    """

    length: int = 1
    width: int = 1

    def padding(self, tokens: int, max_tokens: int) -> int:
        """Return the number of padding tokens at a sequence's end.

        They make the sequence's length a multiple of `length`, or of half of `length`, a quarter
        and so on: the first of these multiples that adds at most 3%, as every layer runs the
        padding. A sequence never grows beyond `max_tokens`.
        """
        multiple = self.length
        while multiple >= _MIN_MULTIPLE:
            added = -tokens % multiple
            if added <= _MAX_PADDING * tokens and (not added or tokens + added <= max_tokens):
                return added
            multiple //= 2
        return 0

    def rounded_width(self, width: int) -> int:
        """Return the padded width of examples side by side; only mixing layers run this padding."""
        return -(-width // self.width) * self.width


NOT_ROUNDED = Rounding()
