"""One row of a data file becomes a conversation, whatever its layout (`mca_lib/data/formats.py`).

The result is what LLaMA-Factory's converters give for a good row; a bad row, which they would drop or let through, is
refused with a reason here:

    not an object · missing column · column is null · column is not a string · not encodable as UTF-8 ·
    empty text · empty prompt · empty output · history is not a list of pairs ·
    column is not a list of turns · empty conversation · turn is not an object · bad role · bad role order ·
    odd number of turns · column is not a list of paths · image is not a path · images and marks differ in number

and of rows with two answers

    column is not a turn · empty chosen answer · empty rejected answer · even number of turns ·
    chosen and rejected are equal
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mca_lib.data.formats import RANKING_COLUMNS, RowFormat
from mca_lib.data.suggest import suggestion

IMAGE_MARK = "<image>"
"""Stands in the text of a row for the next of its images."""


class Message(NamedTuple):
    """One turn. Roles: user, assistant, observation (a tool's answer), function (a tool call)."""

    role: str
    content: str


class Sample(NamedTuple):
    """A row after alignment. A conversation ends with the answer to learn; plain text is one `user` message."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: str = ""
    split: str = "train"
    where: str = ""
    """Place in the data files, as `file:line`."""
    rejected: Message | None = None
    """A worse answer in place of the last message, in rows with two answers."""
    images: tuple[str, ...] = ()
    """Paths of the images, in the order of their marks in the messages."""


class UnusableRow(Exception):
    """Why a row cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


def parse_row(value: Any, row_format: RowFormat) -> Sample:
    """Align one row. Raises UnusableRow."""
    if not isinstance(value, dict):
        raise UnusableRow("not an object", f": {_kind(value)}")
    sample = _PARSERS[row_format.layout](value, row_format)
    if row_format.columns.get("images") is not None:
        sample = sample._replace(images=_images(value, sample, row_format.columns["images"]))
    messages = (*sample.messages, sample.rejected) if sample.rejected else sample.messages
    for text in (sample.system, sample.tools, *(message.content for message in messages)):
        _check_encodable(text)
    return sample


def _images(row: Mapping[str, Any], sample: Sample, column: str) -> tuple[str, ...]:
    """Paths of a row's images: a list of texts, or one; null or absent is none."""
    value = row.get(column)
    paths = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(paths, list):
        raise UnusableRow(f"column {column!r} is not a list of paths", f": {_kind(value)}")
    for path in paths:
        if not isinstance(path, str) or not path:
            raise UnusableRow("image is not a path", f": {_kind(path)}; write it to a file")
        if path.startswith(("data:", "http:", "https:")):
            raise UnusableRow("image is not a path", f": {path.partition(':')[0]} is no file; write it to one")
    marks = sum(message.content.count(IMAGE_MARK) for message in sample.messages)
    if marks != len(paths):
        raise UnusableRow("images and marks differ in number", f": {len(paths)} images and {marks} x {IMAGE_MARK}")
    return tuple(paths)


def _parse_text(row: Mapping[str, Any], fmt: RowFormat) -> Sample:
    text = _required(row, fmt.columns["prompt"])
    if not text.strip():
        raise UnusableRow("empty text")
    return Sample((Message("user", text),))


def _parse_alpaca(row: Mapping[str, Any], fmt: RowFormat) -> Sample:
    prompt = _required(row, fmt.columns["prompt"])
    query = _optional(row, fmt.columns["query"])
    question = "\n".join(part for part in (prompt, query) if part)
    if not question:
        raise UnusableRow("empty prompt")
    talk = [*_history(row, fmt.columns["history"]), Message("user", question)]
    if fmt.ranking:
        chosen, rejected = (Message("assistant", _required(row, fmt.columns[key])) for key in RANKING_COLUMNS)
        return _pair(talk, chosen, rejected, *_system_and_tools(row, fmt))
    response = _required(row, fmt.columns["response"])
    if not response:
        raise UnusableRow("empty output")
    return Sample((*talk, Message("assistant", response)), *_system_and_tools(row, fmt))


def _pair(talk: Sequence[Message], chosen: Message, rejected: Message, system: str, tools: str) -> Sample:
    """A conversation up to its last question, and two answers to it."""
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer.content:
            raise UnusableRow(f"empty {name} answer")
    if chosen == rejected:
        raise UnusableRow("chosen and rejected are equal")
    return Sample((*talk, chosen), system, tools, rejected=rejected)


def _history(row: Mapping[str, Any], column: str | None) -> Iterator[Message]:
    """Earlier turns: a list of [question, answer]; null or absent is none."""
    turns = row.get(column) if column else None
    if turns is None:
        return
    if not isinstance(turns, list):
        raise UnusableRow("history is not a list of pairs", f": {_kind(turns)}")
    for turn in turns:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise UnusableRow("history is not a list of pairs", f": turn {turns.index(turn) + 1}")
        yield Message("user", turn[0])
        yield Message("assistant", turn[1])


def _parse_sharegpt(row: Mapping[str, Any], fmt: RowFormat) -> Sample:
    column, tags = fmt.columns["messages"], fmt.tags
    turns = _column(row, column)
    if not isinstance(turns, list):
        raise UnusableRow(f"column {column!r} is not a list of turns", f": {_kind(turns)}")
    system, tools = _system_and_tools(row, fmt)
    roles = {tags["user_tag"]: "user", tags["observation_tag"]: "observation"}
    roles |= {tags["assistant_tag"]: "assistant", tags["function_tag"]: "function", tags["system_tag"]: "system"}
    messages = [_turn(turn, f"turn {number}", tags, roles) for number, turn in enumerate(turns, start=1)]
    if messages and messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    if not messages:
        raise UnusableRow("empty conversation")
    for index, message in enumerate(messages):
        # Questions (user, observation) and answers (assistant, function) take turns, a question first.
        if message.role not in (("assistant", "function") if index % 2 else ("user", "observation")):
            raise UnusableRow("bad role order", f": {message.role} as turn {index + 1}")
    if fmt.ranking:
        if len(messages) % 2 == 0:
            raise UnusableRow("even number of turns", ": the last one must be a question, answered by both answers")
        chosen, rejected = (_answer(row, fmt.columns[key], tags, roles) for key in RANKING_COLUMNS)
        return _pair(messages, chosen, rejected, system, tools)
    if len(messages) % 2:
        raise UnusableRow("odd number of turns", ": the last question has no answer")
    if not messages[-1].content:
        raise UnusableRow("empty output")
    return Sample(tuple(messages), system, tools)


def _answer(row: Mapping[str, Any], column: str | None, tags: Mapping[str, str], roles: Mapping[str, str]) -> Message:
    """One of two answers, a turn in a column of its own."""
    turn = _column(row, column)
    if not isinstance(turn, dict):
        raise UnusableRow(f"column {column!r} is not a turn", f": {_kind(turn)}")
    answer = _turn(turn, f"column {column!r}", tags, roles)
    if answer.role not in ("assistant", "function"):
        raise UnusableRow("bad role order", f": {answer.role} in column {column!r}")
    return answer


def _turn(turn: Any, place: str, tags: Mapping[str, str], roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise UnusableRow("turn is not an object", f": {place}")
    role, content = (_column(turn, tags[tag]) for tag in ("role_tag", "content_tag"))
    if not isinstance(role, str) or role not in roles:
        known = list(roles)
        hint = suggestion(role, known) if isinstance(role, str) else ""
        raise UnusableRow("bad role", f" {role!r:.40} in {place}{hint}")
    if not isinstance(content, str):
        raise _not_a_string(tags["content_tag"], content, f" in {place}")
    return Message(roles[role], content)


_PARSERS: dict[str, Callable[[Mapping[str, Any], RowFormat], Sample]] = {
    "alpaca": _parse_alpaca,
    "sharegpt": _parse_sharegpt,
    "text": _parse_text,
}


def _system_and_tools(row: Mapping[str, Any], fmt: RowFormat) -> tuple[str, str]:
    return _optional(row, fmt.columns["system"]), _optional(row, fmt.columns["tools"])


def _required(row: Mapping[str, Any], column: str | None) -> str:
    """Text of a column that must be there."""
    value = _column(row, column)
    if not isinstance(value, str):
        raise _not_a_string(column, value)
    return value


def _optional(row: Mapping[str, Any], column: str | None) -> str:
    """Text of a column that may be absent or null."""
    value = row.get(column) if column else None
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _not_a_string(column, value)
    return value


def _column(row: Mapping[str, Any], column: str | None) -> Any:
    if column not in row:
        raise UnusableRow(f"missing column {column!r}", suggestion(str(column), [str(key) for key in row]))
    return row[column]


def _not_a_string(column: str | None, value: Any, detail: str = "") -> UnusableRow:
    if value is None:
        return UnusableRow(f"column {column!r} is null", detail)
    return UnusableRow(f"column {column!r} is not a string", f"{detail}: {_kind(value)}")


def _check_encodable(text: str) -> None:
    """A lone surrogate, as `"\\ud800"` in JSON gives, has no UTF-8 and no tokens."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnusableRow("not encodable as UTF-8", ": a lone surrogate") from None


def _kind(value: Any) -> str:
    """What a value is, for messages: a JSON type, or what only parquet files hold, such as bytes."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    names |= {int: "number", float: "number"}
    return f"a JSON {names[type(value)]}" if type(value) in names else type(value).__name__
