"""Whether llama.cpp can work with a grammar: no dead ends, no endless loops, bounded memory and time.

At a dead end no token is left to choose from, and llama.cpp ends its process when a token that does not fit is taken.
Its own check for left recursion misses some (it looks for empty rules one level deep) and takes exponential time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.grammar.growth import GrowthSearch
from worker.engines.llama.grammar.parse import Alternatives, Group, Item, Ref, Repeat, Text, parse_gbnf
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama_limits import GrammarLimits

ROOT: Final = "root"


class TooManyWays(GrammarRefused):
    """There are too many ways to go on at some point."""


class NeverEnds(GrammarRefused):
    """A text that begins some rule cannot be completed."""


def check_gbnf(text: str, limits: GrammarLimits) -> None:
    """Raise `GrammarRefused` unless llama.cpp can load `text` and every answer begun in it can be completed."""
    size = len(text.encode(errors="surrogatepass"))
    if size > limits.gbnf_bytes_max:
        reason = f"it has {size} bytes; {limits.gbnf_bytes_max} are allowed"
        raise GrammarRefused(f"{reason} (engine.limits.grammar.gbnf_bytes_max)")
    rules = parse_gbnf(text, limits)
    if ROOT not in rules:
        raise GrammarRefused(f"it has no rule '{ROOT}'")
    if sum(map(_elements, rules.values())) > limits.elements_max:
        reason = f"with its repetitions written out, it has more than {limits.elements_max} elements"
        raise GrammarRefused(f"{reason} (engine.limits.grammar.elements_max)")
    named = {name: list(_names(body)) for name, body in rules.items()}
    for name, others in named.items():
        for other in others:
            if other not in rules:
                raise GrammarRefused(f"the rule '{other}' is not defined", rule=name)
    order = _bottom_up(named, refuse_circles=False)
    _check_complete(rules, order, limits)
    _check_beginnings(rules, _closure(rules, order, limits, text_holds=False), limits)
    GrowthSearch(rules, limits).check(ROOT)


def _elements(alternatives: Alternatives) -> int:
    return sum(1 + sum(map(_item_elements, sequence)) for sequence in alternatives)


def _item_elements(item: Item) -> int:
    match item:
        case Text(length=length):
            return length
        case Ref():
            return 1
        case Group(alternatives=alternatives):
            return 1 + _elements(alternatives)
        case Repeat(item=inner, low=low, high=high):
            copies = (high if high is not None else low + 1) or 1
            return copies * (_item_elements(inner) + 3)


def _names(alternatives: Alternatives) -> Iterator[str]:
    for sequence in alternatives:
        for item in sequence:
            while isinstance(item, Repeat):
                item = item.item
            if isinstance(item, Ref):
                yield item.name
            elif isinstance(item, Group):
                yield from _names(item.alternatives)


# --- what can be empty, and what can be completed ---------------------------------------------------------------------


def _closure(rules: dict[str, Alternatives], order: list[str], limits: GrammarLimits, *, text_holds: bool) -> set[str]:
    """Rules with an alternative all of whose items hold. A text does if `text_holds`; what may be left out always does.

    In an order in which rules follow those that they name, few passes are needed, and each takes linear time.
    """
    holding: set[str] = set()

    def holds(item: Item) -> bool:
        match item:
            case Text():
                return text_holds
            case Ref(name=name):
                return name in holding
            case Group(alternatives=alternatives):
                return any(all(map(holds, sequence)) for sequence in alternatives)
            case Repeat(item=inner, low=low):
                return low == 0 or holds(inner)

    for _ in range(limits.passes_max):
        found = [name for name in order if name not in holding and _add_if(holding, name, rules[name], holds)]
        if not found:
            return holding
    reason = f"its rules refer to each other in so intricate a way that {limits.passes_max} passes do not see through"
    raise GrammarRefused(f"{reason} (engine.limits.grammar.passes_max)")


def _add_if(holding: set[str], name: str, body: Alternatives, holds: Callable[[Item], bool]) -> bool:
    if any(all(map(holds, sequence)) for sequence in body):
        holding.add(name)
        return True
    return False


def _check_complete(rules: dict[str, Alternatives], order: list[str], limits: GrammarLimits) -> None:
    complete = _closure(rules, order, limits, text_holds=True)
    for name in order:
        if name not in complete:
            raise NeverEnds(f"a text that begins the rule '{name}' can never end", rule=name)


# --- how a text may begin ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How texts of a rule begin. `ways`: places to begin at. `visits`: rules that llama.cpp walks through to find them.
    `depth`: the longest way down."""

    ways: int
    visits: int
    depth: int


def _check_beginnings(rules: dict[str, Alternatives], nullable: set[str], limits: GrammarLimits) -> None:
    """No rule begins with itself, and no text can begin in too many ways."""
    first = {name: list(_first_names(body, nullable)) for name, body in rules.items()}
    known: dict[str, _Beginning] = {}
    for name in _bottom_up(first, refuse_circles=True):
        ways = _ways(rules[name], nullable, known)
        below = [known[other] for other in first[name]]
        visits = 1 + sum(each.visits for each in below)
        depth = 1 + max((each.depth for each in below), default=0)
        if ways > limits.ways_max:
            reason = f"its rule '{name}' can begin in more than {limits.ways_max} ways"
            raise TooManyWays(f"{reason} (engine.limits.grammar.ways_max)", rule=name)
        if depth > limits.chain_max:
            reason = f"more than {limits.chain_max} rules begin with each other"
            raise GrammarRefused(f"{reason} (engine.limits.grammar.chain_max)", rule=name)
        known[name] = _Beginning(ways, visits, depth)
    if sum(each.visits for each in known.values()) > limits.visits_max:
        reason = f"its rules lead to each other's beginnings in more than {limits.visits_max} ways"
        raise GrammarRefused(f"{reason} (engine.limits.grammar.visits_max)")


def _first_names(alternatives: Alternatives, nullable: set[str]) -> Iterator[str]:
    """Names of the rules that may come first."""
    for sequence in alternatives:
        for item in sequence:
            yield from _item_first_names(item, nullable)
            if not _may_be_empty(item, nullable):
                break


def _item_first_names(item: Item, nullable: set[str]) -> Iterator[str]:
    match item:
        case Ref(name=name):
            yield name
        case Group(alternatives=alternatives):
            yield from _first_names(alternatives, nullable)
        case Repeat(item=inner, high=high):
            if high is None and _may_be_empty(inner, nullable):
                raise GrammarRefused("something that may be empty is repeated without limit")
            yield from _item_first_names(inner, nullable)


def _may_be_empty(item: Item, nullable: set[str]) -> bool:
    match item:
        case Text():
            return False
        case Ref(name=name):
            return name in nullable
        case Group(alternatives=alternatives):
            return any(all(_may_be_empty(each, nullable) for each in sequence) for sequence in alternatives)
        case Repeat(item=inner, low=low):
            return low == 0 or _may_be_empty(inner, nullable)


def _ways(alternatives: Alternatives, nullable: set[str], known: dict[str, _Beginning]) -> int:
    total = 0
    for sequence in alternatives:
        for item in sequence:
            total += _item_ways(item, nullable, known)
            if not _may_be_empty(item, nullable):
                break
    return total


def _item_ways(item: Item, nullable: set[str], known: dict[str, _Beginning]) -> int:
    match item:
        case Text():
            return 1
        case Ref(name=name):
            return known[name].ways
        case Group(alternatives=alternatives):
            return _ways(alternatives, nullable, known)
        case Repeat(item=inner, low=low, high=high):
            again = (high if high is not None else low + 1) if _may_be_empty(inner, nullable) else 1
            return again * _item_ways(inner, nullable, known)


def _bottom_up(names_of: dict[str, list[str]], *, refuse_circles: bool) -> list[str]:
    """All names, each after those that it leads to, as far as there are no circles."""
    done: list[str] = []
    state: dict[str, bool] = {}  # False while what a name leads to is being walked
    for start in names_of:
        if start in state:
            continue
        state[start] = False
        path = [(start, iter(names_of[start]))]
        while path:
            name, others = path[-1]
            following = next((other for other in others if refuse_circles or other not in state), None)
            if following is None:
                path.pop()
                state[name] = True
                done.append(name)
            elif following not in state:
                state[following] = False
                path.append((following, iter(names_of[following])))
            elif not state[following]:
                raise GrammarRefused(f"the rule '{following}' begins with itself", rule=following)
    return done
