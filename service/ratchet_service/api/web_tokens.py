"""Tokens of JavaScript, as far as is needed to leave out comments and white space without a change of what a script does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

Kind = Literal["space", "comment", "word", "string", "template", "regex", "sign"]

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//.*|/\*(?s:.*?)\*/)
  | (?P<word>[\w$]+)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<sign>=>|\+\+|--|.)
    """,
    re.VERBOSE,
)
_TEMPLATE: Final = re.compile(r"(?s:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)")
"""The text of a template up to its end, or to a value in it."""
_REGEX: Final = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/\w*")
_OPERAND_FOLLOWS: Final = frozenset(
    [
        "return",
        "typeof",
        "case",
        "in",
        "of",
        "delete",
        "void",
        "throw",
        "new",
        "else",
        "do",
        "instanceof",
        "await",
        "yield",
    ]
)
"""Words after which a slash begins a regular expression."""
_MARGIN: Final = re.compile(r"[ \t]*\n\s*")
_BETWEEN_TAGS: Final = re.compile(r"(?<=>)\s*\n\s*|\s*\n\s*(?=<)")


class Token(NamedTuple):
    kind: Kind
    text: str
    markup: bool = False
    """Whether it is text of an ``html`` template."""


def tokens(script: str) -> Iterator[Token]:
    """Yield the tokens of a script; together they are its text. A template is one token for each text between its values. A slash
    after ``)`` is a division. Raises ``ValueError`` for a template without an end."""
    at = 0
    before = Token("sign", ";")
    braces: list[bool | None] = []
    """Those that are open. None: of a block or object. Of a template's value: whether it is a template of ``html``."""

    def template(start: int, markup: bool) -> Token:
        found = _TEMPLATE.match(script, start + 1)
        if found is None:
            raise ValueError(f"a template has no end: {script[start : start + 60]}")
        if found[0].endswith("${"):
            braces.append(markup)
        return Token("template", script[start] + found[0], markup)

    while at < len(script):
        found = _TOKEN.match(script, at)
        assert found is not None
        kind: Kind = found.lastgroup  # type: ignore[assignment]
        token = Token(kind, found[0])
        if kind == "sign":
            if token.text == "`":
                token = template(at, before == ("word", "html", False))
            elif token.text == "{":
                braces.append(None)
            elif token.text == "}":
                markup = braces.pop() if braces else None
                if markup is not None:
                    token = template(at, markup)
            elif token.text == "/" and _begins_regex(before) and (regex := _REGEX.match(script, at)):
                token = Token("regex", regex[0])
        at += len(token.text)
        if token.kind not in ("space", "comment"):
            before = token
        yield token


def without_comments(script: str) -> str:
    """Return the script with an empty line for each line of a comment, so that lines keep their numbers."""
    return "".join(
        re.sub(r"[^\n]+", "", token.text) or " " if token.kind == "comment" else token.text for token in tokens(script)
    )


def compact(script: str) -> str:
    """Return the script without comments, and without white space that changes nothing. A line ends where JavaScript may put a
    semicolon. Margins in templates of ``html`` do not show."""
    parts: list[str] = []
    before = Token("sign", ";")
    space = ""
    for token in tokens(script):
        if token.kind == "space" or token.kind == "comment":
            space += token.text if token.kind == "space" else "\n" if "\n" in token.text else " "
            continue
        text = token.text
        if token.markup:
            text = _MARGIN.sub("\n", _BETWEEN_TAGS.sub("", text))
        if space and parts:
            parts.append(_needed(before, space, token))
        parts.append(text)
        before, space = token, ""
    return "".join(parts)


def _begins_regex(before: Token) -> bool:
    if before.kind == "word":
        return before.text in _OPERAND_FOLLOWS
    return before.kind == "sign" and before.text not in (")", "]", "++", "--")


def _needed(before: Token, space: str, after: Token) -> str:
    """Return what is left of the white space between two tokens."""
    if "\n" in space and not (
        (before.kind == "sign" and before.text in (*"([{,;=?:&|", "=>"))
        or (after.kind == "sign" and after.text in ")]}.,;:")
    ):
        return "\n"
    left, right = before.text[-1], after.text[0]
    words = before.kind in ("word", "regex") and after.kind == "word"
    joined = left + right in ("++", "--", "//", "/*", "<!") or (before.text.isdigit() and right == ".")
    return " " if words or joined else ""
