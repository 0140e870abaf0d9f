"""Numbers within bounds, as expressions over their digits."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from worker.engines.llama.grammar.gbnf import EMPTY, either, literal, repeat
from worker.engines.llama.grammar.refused import GrammarRefused

# What 64-bit integers and doubles hold exactly: no settings.
INTEGER_DIGITS_MAX: Final = 18
"""Digits of an integer's bound: all integers of 18 digits are read back exactly as 64-bit numbers."""
INTEGER_DIGITS: Final = 16
"""Digits of an integer where nothing bounds it."""
NUMBER_DIGITS_MAX: Final = 12
"""Digits before the point of a number's bound, and of a number that is bounded on one side alone."""
_EXACT_DIGITS: Final = 15  # decimal numbers of up to so many digits differ also as doubles (IEEE 754 binary64)
_FRACTION_DIGITS: Final = 6


def integers(low: int | None, high: int | None) -> str:
    """Integers from `low` to `high`, without leading zeros. Raises `GrammarRefused` where there are none."""
    limit = 10**INTEGER_DIGITS_MAX
    if any(bound is not None and abs(bound) >= limit for bound in (low, high)):
        raise GrammarRefused(f"a bound has more than {INTEGER_DIGITS_MAX} digits")
    usual = 10**INTEGER_DIGITS - 1
    if low is None:
        low = -usual if high is None or high >= -usual else 1 - limit
    if high is None:
        high = usual if low <= usual else limit - 1
    if low > high:
        raise GrammarRefused("no integer lies between its bounds")
    alternatives = []
    if low < 0:
        alternatives.append(f'"-" {either(_naturals(max(1, -high), -low))}')
    if high >= 0:
        alternatives += _naturals(max(low, 0), high)
    return either(alternatives)


def numbers(low: Decimal | None, high: Decimal | None, *, low_open: bool, high_open: bool) -> str:
    """Decimal numbers from `low` to `high`; an open bound is not itself among them.

    So few digits are written that no number is rounded onto an open bound when it is read as a double. Raises
    `GrammarRefused` where there are no numbers, or none that can be told apart.
    """
    limit = Decimal(10) ** NUMBER_DIGITS_MAX
    if any(bound is not None and abs(bound) >= limit for bound in (low, high)):
        raise GrammarRefused(f"a bound has more than {NUMBER_DIGITS_MAX} digits before its point")
    whole = max(len(str(int(abs(bound)))) for bound in (low, high) if bound is not None)
    digits = min(_FRACTION_DIGITS, _EXACT_DIGITS - whole)
    if any(bound is not None and len(_split(abs(bound))[1]) > digits for bound in (low, high)):
        raise GrammarRefused(f"a bound has more than {digits} digits after its point")
    low = -limit + 1 if low is None else low
    high = limit - 1 if high is None else high

    alternatives = []
    if low < 0:
        nearest, nearest_open = (-high, high_open) if high <= 0 else (Decimal(0), False)
        magnitudes = _magnitudes(nearest, -low, nearest_open, low_open, digits) if nearest <= -low else []
        if magnitudes:
            alternatives.append(f'"-" {either(magnitudes)}')
    if high >= 0:
        nearest, nearest_open = (low, low_open) if low >= 0 else (Decimal(0), False)
        alternatives += _magnitudes(nearest, high, nearest_open, high_open, digits) if nearest <= high else []
    if not alternatives:
        raise GrammarRefused("no number lies between its bounds")
    return either(alternatives)


# --- digits before the point ------------------------------------------------------------------------------------------


def _naturals(low: int, high: int) -> list[str]:
    """Alternatives for the numbers `low` to `high`, both 0 or more."""
    alternatives, whole_lengths = [], []
    for length in range(len(str(low)), len(str(high)) + 1):
        smallest, largest = (10 ** (length - 1) if length > 1 else 0), 10**length - 1
        if length > 1 and low <= smallest and largest <= high:
            whole_lengths.append(length)
        else:
            alternatives.append(_between(str(max(low, smallest)), str(min(high, largest))))
    if whole_lengths:
        alternatives.append(f"[1-9] {repeat('[0-9]', whole_lengths[0] - 1, whole_lengths[-1] - 1)}")
    return alternatives


def _between(low: str, high: str) -> str:
    """Digits from `low` to `high`, of equal length."""
    if low == high:
        return literal(low) if low else EMPTY
    if low[0] == high[0]:
        return f"{literal(low[0])} {_between(low[1:], high[1:])}"
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    whole_first, whole_last = low[1:] == "0" * rest, high[1:] == "9" * rest
    alternatives = []
    if not whole_first:
        alternatives.append(f"{literal(low[0])} {_between(low[1:], '9' * rest)}")
    inner_first, inner_last = first + (not whole_first), last - (not whole_last)
    if inner_first <= inner_last:
        alternatives.append(f"{_digit(inner_first, inner_last)} {_any_digits(rest, rest)}".removesuffix(f" {EMPTY}"))
    if not whole_last:
        alternatives.append(f"{literal(high[0])} {_between('0' * rest, high[1:])}")
    return either(alternatives)


# --- digits after the point -------------------------------------------------------------------------------------------


def _magnitudes(low: Decimal, high: Decimal, low_open: bool, high_open: bool, room: int) -> list[str]:
    """Alternatives for the numbers `low` to `high`, both 0 or more, with at most `room` digits after the point."""
    (low_whole, low_digits), (high_whole, high_digits) = _split(low), _split(high)
    if low_whole == high_whole:
        fraction = _fraction_between(low_digits, high_digits, low_open, high_open, room)
        return [] if fraction is None else [f"{literal(str(low_whole))} {fraction}"]
    alternatives = []
    fraction = _at_least(low_digits, low_open, room)
    if fraction is not None:
        pointed = f'("." {_any_digits(1, room)})?' if not low_digits and not low_open else f'"." {fraction}'
        alternatives.append(f"{literal(str(low_whole))} {pointed}")
    if low_whole + 1 <= high_whole - 1:
        alternatives.append(f'{either(_naturals(low_whole + 1, high_whole - 1))} ("." {_any_digits(1, room)})?')
    if high_digits:
        alternatives.append(f'{literal(str(high_whole))} ("." {either(_at_most(high_digits, high_open, room))})?')
    elif not high_open:
        alternatives.append(f"{literal(str(high_whole))} {_zeros(room)}")
    return alternatives


def _fraction_between(low: str, high: str, low_open: bool, high_open: bool, room: int) -> str | None:
    """The fractions from 0.`low` to 0.`high` with their point, where both have the same whole part; None: no such."""
    if low == high:
        exact = literal(f".{low}") if low else _zeros(room)
        return None if low_open or high_open else exact
    digits = _digits_between(low, high, low_open, high_open, room)
    if low or low_open:
        return None if digits is None else f'"." {digits}'
    return EMPTY if digits is None else f'("." {digits})?'


def _digits_between(low: str, high: str, low_open: bool, high_open: bool, room: int) -> str | None:
    """One digit or more, so that 0.`low` <= 0.digits <= 0.`high`, where `low` is less than `high`."""
    first, last = int(low[:1] or "0"), int(high[0])
    if first == last:
        rest = _digits_between(low[1:], high[1:], low_open, high_open, room - 1)
        alternatives = [] if rest is None else [f"{_digit(first, first)} {rest}"]
        if not low[1:] and not low_open:
            alternatives.append(_digit(first, first))
        return either(alternatives) if alternatives else None
    alternatives = []
    at_least = _at_least(low[1:], low_open, room - 1)
    if at_least is not None:
        alternatives.append(f"{_digit(first, first)} {at_least}")
    if first + 1 <= last - 1:
        alternatives.append(f"{_digit(first + 1, last - 1)} {_any_digits(0, room - 1)}")
    if high[1:]:
        alternatives.append(f"{_digit(last, last)} {_optional(_at_most(high[1:], high_open, room - 1))}")
    elif not high_open:
        alternatives.append(_digit(last, last))
    return either(alternatives) if alternatives else None


def _at_least(bound: str, open_: bool, room: int) -> str | None:
    """Digits, none where that suffices, so that 0.digits is at least (open: more than) 0.`bound`; None: impossible."""
    if not bound and not open_:
        return _any_digits(0, room)
    if room == 0:
        return None
    digit = int(bound[:1] or "0")
    alternatives = [f"{_digit(digit + 1, 9)} {_any_digits(0, room - 1)}"] if digit < 9 else []
    rest = _at_least(bound[1:], open_, room - 1)
    if rest is not None:
        alternatives.append(f"{_digit(digit, digit)} {rest}")
    return either(alternatives) if alternatives else None


def _at_most(bound: str, open_: bool, room: int) -> list[str]:
    """Alternatives for one digit or more, so that 0.digits is at most (open: less than) 0.`bound`, which is not 0."""
    digit = int(bound[0])
    alternatives = [f"{_digit(0, digit - 1)} {_any_digits(0, room - 1)}"] if digit else []
    if bound[1:]:
        alternatives.append(f"{_digit(digit, digit)} {_optional(_at_most(bound[1:], open_, room - 1))}")
    elif not open_:
        alternatives.append(_digit(digit, digit))
    return alternatives


def _split(bound: Decimal) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at their end."""
    whole, _, digits = f"{bound:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _zeros(room: int) -> str:
    zeros = repeat('"0"', 1, room)
    return f'("." {zeros})?'


def _optional(alternatives: list[str]) -> str:
    return f"({' | '.join(alternatives)})?"


def _digit(low: int, high: int) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _any_digits(low: int, high: int) -> str:
    return repeat("[0-9]", low, high)
