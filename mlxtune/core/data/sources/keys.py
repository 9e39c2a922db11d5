"""The meaning of keys in rows, messages and tool calls, as many trainers and tools write them.

Whatever stands under another key is noted by name, so that no key is left unread in silence.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from typing import Any

from mlxtune.core.data.problems import (
    MARK_REASONS,
    UNREAD_METADATA,
    BadRowError,
    json_text,
    parse_row_json,
    unread_key,
)
from mlxtune.errors import shorten


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whether a turn is learned: OpenAI's and Mistral's `weight`, axolotl's `train` and `training`,
# ms-swift's and xtuner's `loss`, verl's `loss_mask` and `response_mask`, transformers'
# `assistant_masks`, tinker's `trainable`, torchtune's `masked`.
_LEARNED = _words(
    "weight loss train training trained trainable istrainable lossmask lossweight lossscale "
    "lossmultiplier useloss hasloss computeloss calculateloss learn learnable supervise supervised "
    "trainonturn sampleweight exampleweight rowweight responsemask assistantmask assistantmasks "
    "trainmask trainingmask"
)
_MASKED = _words("masked ismasked maskloss noloss ignoreloss skiploss")
# True hides a turn in some files, and shows it in others.
_AMBIGUOUS = frozenset(["mask"])
# Marks of other tools that are not followed, as what they hide or show depends on the tool.
_OTHER_MARKS = _words(
    "ignore ignored skip exclude excluded include included includeinloss excludefromloss "
    "traindetail trainon trainonturns trainonassistant trainonlast trainonprompt trainoninput "
    "trainoninputs labels lossweights tokenweights masks"
)
# Marks of all turns, in a row: one for each message, or one for each answer.
_ROW_MARKS = _words(
    "weights steplossmask steplossmasks lossmasks turnmask turnweights messageweights"
)
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "off", "0", "0.0"), False),
}
# Values of facts that say that a row is not for training, in lower case and without punctuation.
_OTHER_SPLITS = _words("test testing val valid validation dev eval evaluation holdout heldout")
_SET_ASIDE = re.compile(
    r"(?:do not|dont|not for|never|no|skip|excluded? from) ?train(?:ing)?|excluded?|ignored?"
)
# Facts about a row or a message that no model is shown.
_METADATA = _words(
    "id idx index rowid rownumber uid uuid guid promptid questionid conversationid messageid "
    "conversationhash sampleid exampleid dataid originalid parentid threadid sessionid userid "
    "username user name datasetname dataset source sources sourceurl datasource origin subset "
    "split config language lang languages locale category categories subcategory topic topics "
    "subtopic domain task tasks taskname tasktype type kind tag tags label labels labelname title "
    "url urls link links author authors license licence date datetime created createdat updated "
    "updatedat createtime updatetime timestamp time version model models modelname modelid "
    "teacher generator generatedby score scores scorechosen scorerejected rating ratings "
    "quality reward rewards difficulty level turn turns numturns numtokens ntokens tokens "
    "tokencount length numchars hash sha256 md5 metadata meta extra extrainfo info comment "
    "comments note notes status toxic redacted moderation moderationresults openaimoderation "
    "detoxifymoderation country state hashedip header headers annotator annotators annotations "
    "finishreason stopreason usage logprobs object systemfingerprint createdby toolcallid "
    "conversationtemplateid voice owner moderationstate generationconfig n indexlevel0"
)
# The fields that hold thinking in data files and in templates.
THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# System prompts beside the messages.
SYSTEMS = _words(
    "system systemprompt systemmessage systeminstruction systeminstructions instructions persona "
    "developer developermessage"
)
# Thinking under other names than those that templates use.
_THINKING = _words(
    "thought thoughts think thinkingcontent reasoningtext reasoningtrace thinkingtrace "
    "thoughtprocess thinkingprocess chainofthought cot"
)
# Thinking under names that other texts have too, so that it is not read.
_MAYBE_THINKING = _words(
    "reasoningcontent thinking reasoning reasonings rationale rationales analysis scratchpad "
    "reasoningsteps chainofthoughts thoughtchain"
)
_IMAGES = frozenset(["inlinedata", "filedata"]) | frozenset(
    f"{kind}{form}"
    for kind in ("image", "audio", "video")
    for form in ("", "s", "url", "urls", "path", "paths", "file", "files")
)
MEDIA = "images, audio and video are out of scope"
# Values that say nothing.
EMPTY: tuple[Any, ...] = (None, "", [], {})
# Options of a template in a row: a variable of this name, or all variables in one object.
TEMPLATE_OPTIONS = (
    *("enable_thinking", "thinking_budget", "reasoning_effort", "preserve_thinking"),
    *("clear_thinking", "documents", "date_string", "builtin_tools", "tools_in_user_message"),
)
_SWITCHES = frozenset(
    ["enable_thinking", "preserve_thinking", "clear_thinking", "tools_in_user_message"]
)
OPTIONS_OBJECTS = ("chat_template_kwargs", "chat_template_args", "template_kwargs")
_RESERVED = re.compile(
    r"messages|conversations?|tools|chat_template|add_generation_prompt|continue_final_message"
    r"|\w+_token|return_\w+|strftime_now|raise_exception"
)
# The keys of messages and calls that every template may expect.
_MESSAGE = frozenset(["role", "content"])
_READ = {
    "assistant": _MESSAGE | {"tool_calls", *THINKING_FIELDS},
    "tool": _MESSAGE | {"tool_call_id", "name"},
}
_CALL, _FUNCTION = frozenset(["id", "type", "function"]), frozenset(["name", "arguments"])
# `{% for message in messages[1:] %}` or `{% set last = messages[-1] %}`.
_BINDING = re.compile(
    r"\b(?:for|set)\s+(\w+)\s*(?:\bin\b|=)\s*(\w+)(?:\[[^'\"\]]*\])*\s*(?:\||\bif\b|-?%\})"
)
# A template that writes a whole call as JSON, with all of its keys.
_WHOLE_CALL = re.compile(r"\b(?:tool_calls?|call|function)\s*\|\s*tojson")

Note = tuple[str, str]


def normalized_key(key: str) -> str:
    """Return a key in lower case, without spaces or punctuation."""
    return "".join(filter(str.isalnum, key[:200])).casefold()


def as_bool(value: Any) -> bool | None:
    """Return what the value of a mark or label means; None if it is neither true nor false."""
    if isinstance(value, str):
        return _BOOLEANS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


@lru_cache(4096)
def is_mark(key: str) -> bool:
    """Return whether a key of a message says whether its turn is learned."""
    return normalized_key(key) in _LEARNED | _MASKED | _AMBIGUOUS


def is_learned(marks: Mapping[str, Any], where: str) -> bool:
    """Return whether the marks of a message allow to learn it.

    Raises BadRowError for unclear marks.
    """
    learned: dict[str, bool] = {}
    for key, value in marks.items():
        name, is_true = normalized_key(key), as_bool(value)
        if name in _AMBIGUOUS:
            raise BadRowError(f"{shorten(key)} of a turn is ambiguous", f"{where}: write 'weight'")
        if is_true is None:
            raise BadRowError(f"{shorten(key)} is neither 0 nor 1", where)
        learned[key] = is_true is not (name in _MASKED)
    if len({*learned.values()}) > 1:
        names = " and ".join(map(shorten, learned))
        raise BadRowError("contradictory marks on a turn", f"{where}: {names}")
    return all(learned.values())


def check_row_is_learned(marks: Mapping[str, Any]) -> None:
    """Raise BadRowError for a row that is marked not to be learned.

    Numbers such as a row's measured loss are not marks.
    """
    for key, value in marks.items():
        name, is_true = normalized_key(key), as_bool(value)
        if name in _AMBIGUOUS and is_true is not None:
            raise BadRowError(f"{shorten(key)} of a row is ambiguous", "write 'weight'")
        if is_true is (name in _MASKED) and name in _LEARNED | _MASKED:
            raise BadRowError(MARK_REASONS["row"], f"{shorten(key)}: {json_text(value)}")


@lru_cache(4096)
def lists_marks(key: str) -> bool:
    """Return whether a key of a row may list whether each turn is learned."""
    return is_mark(key) or normalized_key(key) in _ROW_MARKS


def are_learned(listed: Mapping[str, Any]) -> dict[str, list[bool]]:
    """Return whether each turn is learned, by the keys of a row that list this as 0 and 1.

    Raises BadRowError for marks with two meanings.
    """
    learned = {}
    for key, value in listed.items():
        name, flags = normalized_key(key), [as_bool(each) for each in value]
        if None in flags:
            continue
        if name in _AMBIGUOUS:
            raise BadRowError(f"{shorten(key)} of a row is ambiguous", "write 'loss_mask'")
        learned[key] = [is_true is not (name in _MASKED) for is_true in flags]
    return learned


@lru_cache(4096)
def is_media(key: str) -> bool:
    """Return whether a key holds images, audio or video."""
    return normalized_key(key) in _IMAGES


def is_thinking(key: str) -> bool:
    """Return whether a key is an uncommon name for thinking."""
    return key not in _MESSAGE and normalized_key(key) in _THINKING


def template_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that keys of a row set for its template."""
    options = {name: content[name] for name in TEMPLATE_OPTIONS if content.get(name) is not None}
    for key in OPTIONS_OBJECTS:
        options |= _options_in(content.get(key), key)
    return {
        name: _switch(name, value) if name in _SWITCHES else value
        for name, value in options.items()
        if name.isidentifier() and not _RESERVED.fullmatch(name)
    }


def _switch(name: str, value: Any) -> bool:
    """Return an option that templates compare with true or false. Raises BadRowError."""
    if (is_true := as_bool(value)) is None:
        raise BadRowError(f"'{name}' is neither true nor false", json_text(value))
    return is_true


def _options_in(value: Any, key: str) -> Mapping[str, Any]:
    """Return an object of options, which may be JSON text. Raises BadRowError for other text."""
    if isinstance(value, str) and value.strip():
        value = parse_row_json(value, f"'{key}' is text that is not JSON")
    return value if isinstance(value, Mapping) else {}


def unread_in_row(
    unread: Mapping[str, Any], repeated: Collection[str], advise: Callable[[str], str]
) -> Iterator[Note]:
    """Yield a note for each key of a row that its format does not read, with the key's value.

    The detail of metadata is its key. `repeated` has the keys whose text the conversation repeats,
    which count as metadata. `advise` returns the advice on a key that holds a system prompt.
    """
    options = template_options(unread)
    for key, value in unread.items():
        if key in OPTIONS_OBJECTS and (several := _options_in(value, key)):
            left_out = sorted(several.keys() - options.keys())
            yield from ((unread_key("the template's options", each), "") for each in left_out)
        elif key in TEMPLATE_OPTIONS or (is_mark(key) and as_bool(value) is not None):
            continue
        elif holds := kind_of_text(key, value):
            yield unread_key("a row", key, holds), ""
        elif is_metadata(key) or key in repeated or _is_number(value):
            yield UNREAD_METADATA, key
        else:
            yield unread_key("a row", key), advise(key) if normalized_key(key) in SYSTEMS else ""


def kind_of_text(key: str, value: Any) -> str:
    """Return "a mark" or "thinking" if a key that is not read holds one; else empty text."""
    name = normalized_key(key)
    if name == "labels":  # which may also be classes of the whole row
        numbers = isinstance(value, list) and all(map(_is_number, value))
        return "a mark" if numbers else ""
    if name == "loss" and _is_number(value):  # as measured
        return ""
    if name in _LEARNED | _MASKED | _AMBIGUOUS | _ROW_MARKS | _OTHER_MARKS:
        return "a mark"
    if is_metadata(key) and _sets_aside(name, value):
        return "a mark"
    names = _THINKING | _MAYBE_THINKING
    return "thinking" if name in names and not _is_number(value) else ""


def _sets_aside(name: str, fact: Any) -> bool:
    """Return whether a fact about a row, under a key of these letters, excludes it from training.

    It may also be an object with a mark.
    """
    if isinstance(fact, Mapping):
        marks = {
            normalized_key(key): as_bool(value)
            for key, value in fact.items()
            if not _is_number(value)
        }
        return any(marks.get(each) is (each in _MASKED) for each in _LEARNED | _MASKED)
    text = fact[:60].lower().replace("'", "") if isinstance(fact, str) else ""
    words = re.sub(r"[\W_]+", " ", text).strip()
    in_other = name in ("split", "subset") and words.replace(" ", "") in _OTHER_SPLITS
    return in_other or _SET_ASIDE.fullmatch(words) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@lru_cache(4096)
def reads_key(template: str, key: str) -> bool:
    """Return whether a template's source reads a key of a message, as `.key` or `['key']`."""
    if key in _CALL | _FUNCTION:  # which calls and tools have too
        of = r"\b(?:\w*message\w*|msg|m|turn)(?:\[[^\]]*\])?(?:\.get\(\s*|[.\[])['\"]?"
        return re.search(rf"{of}{re.escape(key)}\b", template) is not None
    return re.search(rf"[.'\"]{re.escape(key)}\b", template) is not None


@lru_cache(4096)
def _reads_of_message(template: str, key: str) -> bool:
    """Return whether a template reads a key of messages, not of calls or tools."""
    owner, key = rf"(?:{'|'.join(_message_variables(template))})", re.escape(key)
    element, quoted_key = r"(?:\[[^'\"\]]*\])*", rf"['\"]{key}['\"]"
    reads = (
        rf"\b{owner}{element}(?:\.{key}\b|\[\s*{quoted_key}|\.get\(\s*{quoted_key})",
        rf"{quoted_key}\s+(?:not\s+)?in\s+{owner}\b",
        rf"attr\w*\s*[(=]\s*{quoted_key}",
        rf"\b{owner}{element}\s*\|\s*(?:tojson|items)",
    )
    return re.search("|".join(reads), template) is not None


@lru_cache(16)
def _message_variables(template: str) -> tuple[str, ...]:
    """Return the names of a template's variables that hold messages or a message."""
    names = {"messages", "message"}
    # A variable may be bound to one that is bound further up.
    for name, value in _BINDING.findall(template):
        names |= {name} if value in names else set()
    return tuple(sorted(names))


def reads_variable(template: str, name: str) -> bool:
    """Return whether a template's source reads a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def unread_in_message(
    role: str, keys: Set[str], calls: Iterable[Mapping[str, Any]], template: str
) -> Iterator[tuple[str, str]]:
    """Yield the level and the name of each key of a message and its calls that nothing reads.

    `template` is the source of the model's own template, or empty.
    """
    for key in sorted(keys - _READ.get(role, _MESSAGE)):
        if not _reads_of_message(template, key):
            yield "a message", key
    for call in () if _WHOLE_CALL.search(template) else calls:
        function = call.get("function")
        outer = call.keys() if isinstance(function, Mapping) else set()
        inner = function.keys() if isinstance(function, Mapping) else call.keys()
        for key in sorted({*(outer - _CALL), *(inner - _FUNCTION - _CALL)}):
            if not reads_key(template, key):
                yield "a tool call", key


@lru_cache(4096)
def is_metadata(key: str) -> bool:
    """Return whether a key usually holds a fact that no model is shown."""
    return normalized_key(key) in _METADATA


def quoted(keys: Iterable[str]) -> str:
    """Return a list of keys for a message."""
    return ", ".join(map(shorten, sorted(keys)))


def field_option(name: str, key: str) -> str:
    """Return the option that reads a field from a key, or from KEY if shells cannot show it."""
    return f"--field {name}={shlex.quote(key) if key.isprintable() and len(key) <= 200 else 'KEY'}"
