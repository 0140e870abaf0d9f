"""Chat templates as Hugging Face renders them, and what a broken or hostile one may not do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama.template import ChatTemplate, TemplateUnusable
from worker.engines.llama_limits import LlamaLimits

LIMITS = LlamaLimits()
CREATED = 1_700_000_000.0  # 2023-11-14T22:13:20Z
SECRET = "a secret of the user"
USER = ({"role": "user", "content": SECRET},)


FAILED = "the chat template failed on these messages ({})"
Messages = Sequence[Mapping[str, Any]]


def render(source: str, messages: Messages = USER, **options: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", **{"limits": LIMITS, **options})
    return template.render(messages, created=CREATED)


def refusal(source: str, messages: Messages = USER, **options: Any) -> str:
    with pytest.raises(MeshError) as caught:
        render(source, messages, **options)
    assert caught.value.code is ErrorCode.TEMPLATE_REFUSED
    assert SECRET not in caught.value.message
    return caught.value.message


def test_blocks_leave_no_blank_lines_as_in_hugging_face() -> None:
    source = """{{ bos_token }}
{% for m in messages %}
    {% if m.role == 'user' %}
U: {{ m['content'] }}
    {% endif %}
{% endfor %}"""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(source) == environment.from_string(source).render(messages=USER, bos_token="<s>")


@pytest.mark.parametrize(
    "source,expected",
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "' + SECRET + '"}'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x ~ m.role %}{% endfor %}{{ n.x }}",
            "user",
        ),
        ("{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say('a') + say('b') }}", "[a][b]"),
        ("{% generation %}{{ 'kept' }}{% endgeneration %}", "kept"),
        ("{{ '%s-%d' % ('a', 3) }}", "a-3"),
        ("{% if tools %}tools{% endif %}{% if add_generation_prompt %}go{% endif %}{{ eos_token }}", "go</s>"),
        ("{{ '-' * 3 }}{{ 2 * 3 }}{{ [1] + [2] }}{{ missing }}", "---6[1, 2]"),
        ("{{ messages[0].content.split(' ')[-1] | upper | trim }}", "USER"),
        ("{{ messages | map(attribute='role') | list }}{{ ['a', 'b'] | join('-') }}", "['user']a-b"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | first | length }}", "2"),
        ("{{ '{:02d} {} {{}}'.format(7, 'x') }}{{ {'a': 1}.items() | list }}", "07 x {}[('a', 1)]"),
        ("{{ 'a\\nb' | indent(2) }}{{ 'ab' | wordwrap(1) }}", "a\n  ba\nb"),
        ("{% set kept %}[{{ messages[0].role }}]{% endset %}{{ kept }}", "[user]"),
        ("{% set kept | upper %}{{ messages[0].role }}{% endset %}{{ kept }}", "USER"),
        ("{% for row in range(5) | batch(2, 0) %}{{ row }}{% endfor %}", "[0, 1][2, 3][4, 0]"),
        ("{{ -3 * 'a' }}{{ [] * 5 }}{{ 1.5 * 2 }}{{ true * 'b' }}", "[]3.0b"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_refuses_in_its_own_words() -> None:
    assert refusal("{{ raise_exception('Conversation roles must alternate') }}") == "Conversation roles must alternate"


@pytest.mark.parametrize(
    "source,reason",
    [
        ("{{ raise_exception('Cannot handle: ' + messages[0].content) }}", "Cannot handle: ..."),
        ("{{ raise_exception(messages[0].content) }}", "the chat template refuses these messages"),
        ("{{ messages[0].content + 1 }}", FAILED.format("TypeError")),
        ("{{ messages[0].content | int / 0 }}", FAILED.format("ZeroDivisionError")),
        ("{{ messages[0].missing.deeper }}", FAILED.format("UndefinedError")),
        ("{{ ''.__class__.__mro__ }}", FAILED.format("SecurityError")),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", FAILED.format("RecursionError")),
    ],
)
def test_a_refusal_never_quotes_a_message(source: str, reason: str) -> None:
    assert refusal(source) == reason


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped(source: str) -> None:
    ticks = itertools.count(step=LIMITS.template_render_s_max / 50)
    message = refusal(source, clock=lambda: next(ticks))
    assert message == "the chat template takes more than 2 seconds (engine.limits.template_render_s_max)"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * 'x' }}",
        "{{ 'x'.ljust(999999999) }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set big = 'x' * 9999999 %}{% for i in range(9) %}{{ big }}{% endfor %}",
        "{% set big = [1] * 9999999 %}{% set ns = namespace(x=big) %}{% for i in range(9) %}"
        "{% set ns.x = ns.x + big %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='\"') %}{% for i in range(60) %}{% set ns.x = ns.x | tojson %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
        "{{ [1] | batch(999999999, 0) | list }}",
        "{{ ('\\n' * 9999) | indent(9999, true, true) }}",
        "{{ ('\\n' * 9999) | indent('x' * 9999) }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_that_makes_a_huge_text_is_stopped(source: str) -> None:
    """By its size alone: no time passes."""
    reason = "the chat template makes a text of more than 16777216 characters"
    assert refusal(source, clock=lambda: 0.0) == f"{reason} (engine.limits.template_rendered_chars_max)"


@pytest.mark.parametrize(
    "source, bound",
    [
        (
            "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            "a number of more than 4096 bits (engine.limits.template_product_bits_max)",
        ),
        (
            "{{ [1] | slice(9999999) | list | length }}",
            "more than 1000000 items (engine.limits.template_items_max)",
        ),
    ],
)
def test_a_template_that_makes_huge_numbers_or_lists_is_stopped(source: str, bound: str) -> None:
    assert refusal(source, clock=lambda: 0.0).endswith(f"makes {bound}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 2 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999) }}",
        "{{ '{x:>{w}}'.format(x=1, w=999999999) }}",
    ],
)
def test_what_no_limit_could_stop_in_the_middle_is_refused(source: str) -> None:
    assert "a power or a wide format" in refusal(source, clock=lambda: 0.0)


@pytest.mark.parametrize("source", ["{{ lipsum(n=99999) }}", "{{ 'x' | center(99) }}", "{{ '%99d' | format(1) }}"])
def test_what_makes_much_of_little_is_not_there(source: str) -> None:
    with pytest.raises((MeshError, TemplateUnusable)):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 | nosuchfilter }}", "{% endif %}", "x" * 300_000])
def test_a_template_that_cannot_be_compiled_says_so(source: str) -> None:
    with pytest.raises(TemplateUnusable, match="chat template") as caught:
        ChatTemplate(source, bos_token="", eos_token="", limits=LIMITS)
    assert "\n" not in str(caught.value)
