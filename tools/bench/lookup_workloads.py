"""What `infermesh bench lookup` asks: from nothing to copy to a text that is copied with a small change. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STREAMS_MAX: Final = 4
"""Streams at once at most: each workload has so many prompts."""

_QUESTIONS: Final = (
    "Why is the sky blue during the day and red in the evening?",
    "What should I think about before I adopt a dog?",
    "How does a bicycle stay upright while it moves?",
    "Give me some ideas for a birthday party of a ten year old child.",
)

_TEXTS: Final = tuple(
    " ".join(text.split())
    for text in (
        """The town library of Marlow will close on Monday, 4 March, for eleven weeks. The heating, which dates
        from 1968, is replaced, and the reading room on the first floor gets new windows. During the work, books
        can be borrowed from the school in Mill Lane, on Tuesdays and Thursdays from 2 pm to 6 pm. Books that
        are due while the library is closed may be kept until 31 May. "We know that eleven weeks are long," says
        the head of the library, Anna Keller, "but the old heating failed five times last winter." The work
        costs 640,000 pounds, half of which comes from the county. The library opens again on Monday, 20 May,
        with a reading by the writer Tom Hale.""",
        """Dear Mr Osei, thank you for your order 58213 of 12 June. The two oak shelves left our store in Leeds on
        14 June. The desk lamp is not in stock at present; we expect it from the maker in Denmark in the last
        week of June and send it to you at once, without further charge. If you do not want to wait for the
        lamp, we pay its price of 79.90 pounds back to your card within three days. The shelves come with screws
        for brick walls. For walls of plaster you need other screws, which you find in our shop under number
        7714. If a part is missing or damaged, please write to service@oakandline.example or call 0113 496 0817
        from Monday to Friday. Yours sincerely, Julia Brandt, customer service.""",
        """The river gauge at Holm Bridge showed 3.42 metres at six this morning, 15 centimetres more than
        yesterday. Rain in the hills has stopped, and the river authority expects the highest water in the night
        to Friday, at about 3.80 metres. Cellars near the river may be flooded from 3.70 metres on. The road
        along the river is closed between Holm Bridge and the harbour; buses of line 12 go through Castle
        Street. The ferry does not run until further notice. The fire brigade has put 4,000 sandbags at the
        market hall, where they can be had free of charge. The river authority's next report comes at noon. The
        last flood of this size was in January 2011, when the gauge showed 3.91 metres.""",
        """Minutes of the meeting on 9 September. Present: Priya Nair, Jonas Weber, Lucy Adams, Omar Haddad. The
        new version of the app is to be in the stores on 1 October. Jonas reports that the login is done and
        that the search is too slow with more than 10,000 entries; he needs four more days for it. Lucy has
        tested the app on nine phones. On two old ones the start takes six seconds. It was decided not to
        support these any more. Omar writes to the 38 customers who use them. Priya asks the translators for the
        texts in Polish and Greek, which are still missing. The next meeting is on 16 September at 10 am in room
        214. Lucy brings the list of open faults.""",
    )
)

_RENAMED: Final = (("Marlow", "Ashford"), ("Osei", "Mensah"), ("Holm Bridge", "Stone Bridge"), ("Lucy", "Maria"))
"""In each text: what is to be replaced, and by what."""

_FIELDS: Final = (
    "place, closed_from, opens_on, cost, head_of_library",
    "customer, order_number, order_date, missing_item, price, email, phone",
    "gauge, level_now, level_expected, closed_road, bus_line, next_report",
    "date, present, release_date, next_meeting, room",
)

_CODES: Final = (
    """def mean_of_file(path):
    total = 0.0
    count = 0
    with open(path) as lines:
        for line in lines:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            total += float(line)
            count += 1
    if count == 0:
        raise ValueError("the file has no numbers: " + path)
    return total / count""",
    """class Stack:
    def __init__(self, limit):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        return self.items[-1] if self.items else None""",
    """def word_counts(text, smallest=3):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if len(word) < smallest:
            continue
        if word in counts:
            counts[word] += 1
        else:
            counts[word] = 1
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ordered[:10]""",
    """def find_path(graph, start, goal):
    queue = [(start, [start])]
    seen = {start}
    while queue:
        node, path = queue.pop(0)
        if node == goal:
            return path
        for neighbour in graph.get(node, []):
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append((neighbour, path + [neighbour]))
    return None""",
)

_NAMES: Final = (("total", "amount"), ("items", "elements"), ("counts", "numbers"), ("node", "vertex"))
"""In each program: a name, and its new one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What people ask for, with `STREAMS_MAX` different prompts."""

    name: str
    prompts: tuple[str, ...]


def workloads() -> tuple[Workload, ...]:
    """All of them, those with more to copy later."""
    return (
        Workload(name="chat", prompts=_QUESTIONS),
        Workload(
            name="summarise", prompts=tuple(f"Summarise this text in three sentences.\n\n{text}" for text in _TEXTS)
        ),
        Workload(
            name="extract",
            prompts=tuple(
                f"Extract these fields from the text as JSON: {fields}. Answer with the JSON only.\n\n{text}"
                for fields, text in zip(_FIELDS, _TEXTS, strict=True)
            ),
        ),
        Workload(
            name="rewrite text",
            prompts=tuple(
                f"Repeat this text word by word, but write {new} instead of {old}.\n\n{text}"
                for (old, new), text in zip(_RENAMED, _TEXTS, strict=True)
            ),
        ),
        Workload(
            name="rewrite code",
            prompts=tuple(
                f"Rename `{old}` to `{new}` in this program. Answer with the whole program only.\n\n"
                f"```python\n{code}\n```"
                for (old, new), code in zip(_NAMES, _CODES, strict=True)
            ),
        ),
    )
