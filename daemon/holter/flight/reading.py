"""A dump of PyTorch's Flight Recorder, whatever wrote it, as a `Flight`.

    gloo   JSON; every state is `scheduled`, times are 0 or null, counts are strings, the default group has no name in `pg_config` and
           the other groups are not there at all: their members are who calls in them
    NCCL   JSON of the same shape, or a pickle (what torch writes by itself after a timeout), members of groups as a string "[0, 1]"

Operations are named as `torch.distributed` names them, without the backend: `gloo:all_reduce` and `nccl:all_reduce` are `all_reduce`,
`nccl:_all_gather_base` is `all_gather`, `nccl:ALLTOALL_coalesced` is `alltoall_coalesced`. Messages keep whom they go to, by rank in
their group: `send 0->1`, `recv 1<-0`. Dtypes are torch's: `Float` is `float32`.

A pickle is a program. Torch's dumps need only the instructions that make strings, numbers, lists, tuples and dicts, so the reader knows no
others, and `find_class` refuses too: it never imports, never calls, never builds an object. It is Python's own slow reader: its memo is a
dict, while the fast one would reserve whatever memory a forged index asks for.
"""

import functools
import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar, Literal, Never, cast

import msgspec

from holter.errors import FlightError
from holter.records import Call, Flight, Group

MAX_BYTES = 64 * 1024 * 1024
"""Largest pickle that is read, in bytes; a recorder of ten thousand calls writes about ten megabytes."""
ENTRY_BYTES = 48
"""Smallest number of bytes that an entry with its fields takes in a dump."""
ROOM = 100_000
"""Number of items that any dump may hold, in addition to one for each of its bytes."""

_ALLOWED = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT",
    "SETITEM", "SETITEMS", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE",
)  # fmt: skip
DEFAULT_GROUP = "0"
DEFAULT_DESCRIPTION = "default_pg"
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "Bool": "bool",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<|/holter/(rank|frameworks)/|/holter/__main__\.py$"
)
MAX_LINES = 3
MAX_LINE = 200
_State = Literal["scheduled", "started", "completed"]
_Sizes = tuple[tuple[int, ...], ...]
_RANKS = msgspec.json.Decoder(tuple[int, ...])


class _Reader(pickle._Unpickler):  # noqa: SLF001  # the C one's table of instructions cannot be cut
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code]  # noqa: SLF001
        for code in (getattr(pickle, name)[0] for name in _ALLOWED)
    }

    def find_class(self, module: str, name: str) -> Never:
        raise FlightError(f"this pickle wants {module}.{name}; a Flight Recorder dump holds plain data only")


def _unpickled(data: bytes) -> Any:
    """Unpickle plain data, refusing anything that would be too large to walk through."""
    if len(data) > MAX_BYTES:
        raise FlightError(f"this pickle has {len(data)} bytes; more than {MAX_BYTES} are not read")
    try:
        value = _Reader(io.BytesIO(data)).load()
    except FlightError:
        raise
    except KeyError as error:
        raise FlightError(f"this pickle does more than hold plain data (instruction {error}); it is not read") from None
    except Exception as error:  # noqa: BLE001  # a broken pickle can raise anything
        raise FlightError(f"this pickle is broken: {type(error).__name__}: {error}") from None
    _refuse_bombs(value, len(data) + ROOM)
    return value


def _refuse_bombs(value: Any, most: int) -> None:
    """Refuse a pickle that unfolds to far more items than it has bytes.

    A few bytes can refer to one list a million times from a million places.
    """
    entries = value.get("entries") if isinstance(value, dict) else None
    num = 0
    for entry in entries if isinstance(entries, list) else []:
        num += ENTRY_BYTES
        for item in entry.values() if isinstance(entry, dict) else ():
            if isinstance(item, list | tuple):
                num += len(item) + sum(len(part) for part in item if isinstance(part, list | tuple))
        if num > most:
            raise FlightError("this pickle unfolds to far more than it holds; it is not read")


class _Frame(msgspec.Struct, gc=False):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct, gc=False):
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    pg_id: int | str = -1
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    record_id: int = 0
    input_sizes: _Sizes | None = None
    input_dtypes: tuple[str, ...] | None = None
    output_sizes: _Sizes | None = None
    output_dtypes: tuple[str, ...] | None = None
    state: str | None = None
    retired: bool | None = None
    time_created_ns: int | None = None
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    frames: tuple[_Frame, ...] | None = None
    lines: tuple[str, ...] = ()
    """Lines of the script, which a rank's own holter adds to its last dump."""


class _Config(msgspec.Struct):
    name: str | None = None
    desc: str | None = None
    ranks: str | tuple[int, ...] | None = None


class _Status(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _Dump(msgspec.Struct):
    entries: list[_Entry] | None = None
    pg_config: dict[str, _Config] | None = None
    pg_status: dict[str, _Status] | None = None


_DECODER = msgspec.json.Decoder(_Dump, strict=False)


def from_json(data: bytes, taken_ns: int) -> Flight:
    """Read what `_dump_fr_trace_json` and the worker server's `fr_trace_json` return."""
    try:
        dump = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FlightError(f"this is no Flight Recorder dump in JSON: {error}") from None
    return _flight(dump, taken_ns)


def from_pickle(data: bytes, taken_ns: int) -> Flight:
    """Read what torch writes for NCCL after a timeout, with an unpickler that knows only containers and scalars."""
    unpickled = _unpickled(data)
    try:
        dump = msgspec.convert(unpickled, _Dump, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FlightError(f"this is no Flight Recorder dump in pickle's format: {error}") from None
    return _flight(dump, taken_ns)


def from_bytes(data: bytes, taken_ns: int) -> Flight:
    """Read a dump in either format, recognised by its first byte."""
    if data[:1] == pickle.PROTO:
        return from_pickle(data, taken_ns)
    if data[:64].lstrip()[:1] == b"{":
        return from_json(data, taken_ns)
    raise FlightError("this is no Flight Recorder dump: it begins neither as JSON nor as a pickle")


def trimmed(flight: Flight, rank: int, limit: int = 256) -> Flight:
    """Shorten a recording for sending: keep the newest calls and all that are not over.

    Members of a group are kept only from its three lowest ranks, and never for the default group.
    """
    cut = max(len(flight.calls) - limit, 0)
    calls = [call for call in flight.calls[:cut] if not is_over(call)] + flight.calls[cut:]
    everyone = next((group.ranks for group in flight.groups if group.description == DEFAULT_DESCRIPTION), ())
    groups = [
        group
        if group.ranks != everyone and rank in sorted(group.ranks)[:3]
        else msgspec.structs.replace(group, ranks=())
        for group in flight.groups
    ]
    return Flight(groups=groups, calls=calls, taken_ns=flight.taken_ns)


def with_members(flight: Flight, told: Mapping[str, Group]) -> Flight:
    """Add what a rank reports of its groups: gloo's recorder knows no members, and no group before its first call."""
    known = [
        msgspec.structs.replace(group, ranks=told[group.name].ranks)
        if group.name in told and not group.ranks
        else group
        for group in flight.groups
    ]
    new = [group for name, group in told.items() if name not in {one.name for one in flight.groups}]
    return msgspec.structs.replace(flight, groups=known + new) if told else flight


def is_over(call: Call) -> bool:
    """Whether a call is over: gloo only marks it as retired, NCCL's recorder says `completed` a little earlier."""
    return call.is_retired or call.state == "completed"


def _flight(dump: _Dump, taken_ns: int) -> Flight:
    entries = dump.entries or []
    is_gloo = any(entry.profiling_name.startswith("gloo:") for entry in entries)
    calls = [_call(entry) for entry in entries]
    calls.sort(key=lambda call: call.record)
    return Flight(groups=_groups(dump, calls, is_gloo=is_gloo), calls=calls, taken_ns=taken_ns)


def _call(entry: _Entry) -> Call:
    name = entry.process_group[0] if entry.process_group else ""
    state = cast("_State", entry.state) if entry.state in {"started", "completed"} else "scheduled"
    return Call(
        name or DEFAULT_GROUP,
        entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        operation(entry.profiling_name),
        entry.input_sizes or (),
        _dtypes(entry.input_dtypes or ()),
        entry.time_created_ns or 0,
        bool(entry.retired),
        state,
        entry.is_p2p,
        entry.time_discovered_started_ns or 0,
        entry.time_discovered_completed_ns or 0,
        entry.output_sizes or (),
        _dtypes(entry.output_dtypes or ()),
        entry.record_id,
        tuple(entry.lines[:MAX_LINES])
        or script_lines((one.filename, one.line, one.name) for one in entry.frames or ()),
    )


def script_lines(frames: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    """Return the few innermost lines of a call's stack that belong to no library, innermost first.

    >>> script_lines([("/lib/site-packages/torch/distributed/distributed_c10d.py", 3245, "all_reduce"), ("/home/me/train.py", 41, "main")])
    ('/home/me/train.py:41 in main',)
    """
    own = (one for one in frames if one[0] and not _LIBRARY.search(one[0].replace("\\", "/")))
    return tuple(f"{file}:{line} in {name}"[:MAX_LINE] for file, line, name in islice(own, MAX_LINES))


def with_lines(flight: Flight, lines: Mapping[int, tuple[str, ...]]) -> Flight:
    """Add the script's lines to the calls for which they are known, by the call's number in its rank's recorder."""
    calls = [
        msgspec.structs.replace(call, lines=lines[call.record]) if call.record in lines and not call.lines else call
        for call in flight.calls
    ]
    return msgspec.structs.replace(flight, calls=calls) if lines else flight


@functools.lru_cache(maxsize=1024)
def operation(profiling_name: str) -> str:
    """Return the operation without its backend: `nccl:_all_gather_base` -> `all_gather`, `nccl:send 0->1` -> `send 0->1`."""
    return profiling_name.rpartition(":")[2].strip().lstrip("_").removesuffix("_base").lower()


@functools.lru_cache(maxsize=1024)
def _dtypes(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_DTYPES.get(name, name.lower()) for name in names)


def _groups(dump: _Dump, calls: list[Call], *, is_gloo: bool) -> list[Group]:
    """Return the groups of a dump, from its configuration or from the calls in them."""
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    for call in calls:
        if not call.is_p2p:
            entered[call.group] = max(call.sequence, entered.get(call.group, -1))
            if is_over(call):
                completed[call.group] = max(call.sequence, completed.get(call.group, -1))
    # gloo's own count also includes messages and barriers that it does not record.
    for number, status in {} if is_gloo else (_named_status(dump).items()):
        entered[number] = max(status.last_enqueued_collective, entered.get(number, -1))
        completed[number] = max(status.last_completed_collective, completed.get(number, -1))
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in dump.entries or []:
        if entry.process_group:
            known.setdefault(entry.process_group[0] or DEFAULT_GROUP, (entry.process_group[-1], ()))
    for key, config in (dump.pg_config or {}).items():
        name = config.name or key or DEFAULT_GROUP
        description = config.desc or (DEFAULT_DESCRIPTION if name == DEFAULT_GROUP else "")
        known[name] = (description, _members(config.ranks))
    return [
        Group(name, description, ranks, entered.get(name, -1), completed.get(name, -1))
        for name, (description, ranks) in known.items()
    ]


def _named_status(dump: _Dump) -> dict[str, _Status]:
    """Return `pg_status` by the group's name. It is kept by the process's own number of the group.

    Only calls connect that number with a name. Both count groups as they are made and so have the same order: if all
    names are numbers and no call contradicts, groups without calls can be named as well.
    """
    status = dump.pg_status or {}
    names = {str(e.pg_id): e.process_group[0] or DEFAULT_GROUP for e in dump.entries or [] if e.process_group}
    configured = [config.name or key or DEFAULT_GROUP for key, config in (dump.pg_config or {}).items()]
    if len(configured) == len(status) and all(map(str.isdecimal, [*configured, *status])):
        in_order = dict(zip(sorted(status, key=int), sorted(configured, key=int), strict=True))
        if all(in_order.get(number) == name for number, name in names.items()):
            names = in_order
    return {names[number]: value for number, value in status.items() if number in names}


def _members(ranks: Any) -> tuple[int, ...]:
    """Read the members of a group, given as `"[0, 1]"` or as a list."""
    if not isinstance(ranks, str):
        return tuple(ranks or ())
    try:
        return _RANKS.decode(ranks)
    except msgspec.MsgspecError:
        return ()
