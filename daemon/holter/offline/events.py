"""Reads binary logs: TensorBoard's event files and wandb's offline folder, and the formats that they are made of.

    TensorBoard   length, its checksum, an Event, its checksum; again and again
    wandb         blocks of 32 KiB with records in them, as LevelDB writes its log, each a Record

Both hold protocol buffers; the few fields with numbers are found by their field numbers, so that neither library is needed.
Reading ends at a record with a wrong checksum: what came before is used.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from holter.offline.found import Config, Found
from holter.offline.recorder import RowRecorder, add_values

MAX_RECORD = 64 * 2**20
MAX_CHECKED = 2**16
"""Bytes of a record above which it holds images: its length is checked, its content is skipped."""
_WANDB_HEADER = b":W&B"
_BLOCK = 32_768
_MASK = 0xA282EAD8


def _crc_table() -> list[int]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of TensorFlow's records: CRC-32C, rotated and masked."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF


def is_tensorboard(head: bytes) -> bool:
    """Whether a file begins with a TensorFlow record."""
    if len(head) < 16:  # noqa: PLR2004 - a record's frame
        return False
    length, check = struct.unpack("<QI", head[:12])
    return bool(0 < length < MAX_RECORD and check == masked_crc32c(head[:8]))


def is_wandb(head: bytes) -> bool:
    """Whether a file is a run that wandb stored offline."""
    return head.startswith(_WANDB_HEADER)


Field = tuple[int, int, int | bytes]


def fields(data: bytes) -> Iterator[Field]:
    """Yield (number, kind, value) of a protocol buffer's fields; raise ValueError if the data are no protocol buffer."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, kind, value
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            yield number, kind, data[at : at + size]
            at += size
        elif kind == 2:  # noqa: PLR2004 - the wire's own numbers
            size, at = _varint(data, at)
            yield number, kind, data[at : at + size]
            at += size
        else:
            raise ValueError("no protocol buffer")
        if at > end:
            raise ValueError("a field is longer than its record")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:  # noqa: PLR2004 - ten bytes at most
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
    raise ValueError("a number that does not end")


def read_tensorboard(file: str, stream: BinaryIO, found: Found) -> int:
    """Read the scalars of an event file; return how many there were."""
    rows: dict[int, dict[str, object]] = {}
    order: list[tuple[int, dict[str, object]]] = []
    num = number = 0
    for data in _records(file, stream, found):
        number += 1
        try:
            step, values = _event(data)
        except (ValueError, struct.error):
            continue
        for tag, value in values:
            num += 1
            row = rows.get(step)
            if row is None or tag in row:
                row = rows[step] = {}
                order.append((step, row))
            row[tag] = value
    recorder = RowRecorder(file)
    for place, (step, row) in enumerate(order, start=1):
        row.pop("hp_metric", None)
        epochs = [name for name in row if name == "epoch"]
        add_values(recorder, {name: value for name, value in row.items() if name not in epochs}, place, step=step)
    found.runs.extend(run for run in recorder.runs() if run.names())
    return num


def _records(file: str, stream: BinaryIO, found: Found) -> Iterator[bytes]:
    while len(frame := stream.read(12)) == 12:  # noqa: PLR2004 - length and its checksum
        length, check = struct.unpack("<QI", frame)
        if check != masked_crc32c(frame[:8]) or length > MAX_RECORD:
            found.failures.append(f"{file} is damaged after {stream.tell() - 12:,} bytes: what comes before is used")
            return
        data, tail = stream.read(length), stream.read(4)
        if len(data) < length or len(tail) < 4:  # noqa: PLR2004 - its checksum
            found.remarks.append(f"{file} ends in the middle of a record, as while a run still writes it")
            return
        if length <= MAX_CHECKED:
            if struct.unpack("<I", tail)[0] != masked_crc32c(data):
                found.failures.append(
                    f"{file} holds a record whose checksum is wrong at {stream.tell():,} bytes: what comes before is used"
                )
                return
            yield data


def _event(data: bytes) -> tuple[int, list[tuple[str, float]]]:
    step, values = 0, []
    for number, kind, value in fields(data):
        if number == 2 and kind == 0 and isinstance(value, int):  # noqa: PLR2004 - Event.step
            step = value - 2**64 if value >= 2**63 else value
        elif number == 5 and isinstance(value, bytes):  # noqa: PLR2004 - Event.summary
            values = [
                known
                for n, k, v in fields(value)
                if n == 1 and isinstance(v, bytes) and (known := _value(v)) is not None
            ]
    return step, values


def _value(data: bytes) -> tuple[str, float] | None:
    tag, scalar = "", None
    for number, kind, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and kind == 5 and isinstance(value, bytes):  # noqa: PLR2004 - Value.simple_value
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):  # noqa: PLR2004 - Value.tensor
            scalar = _tensor(value)
    return (tag, float(scalar)) if tag and scalar is not None else None


def _tensor(data: bytes) -> float | None:
    """Return the value of a tensor of one number, as TensorFlow 2 writes scalars."""
    dtype, content, single = 0, b"", None
    for number, kind, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 4 and isinstance(value, bytes):  # noqa: PLR2004 - tensor_content
            content = value
        elif number == 5 and isinstance(value, bytes) and len(value) == 4:  # noqa: PLR2004 - float_val, of one number
            single = struct.unpack("<f", value)[0]
        elif number == 6 and isinstance(value, bytes) and len(value) == 8:  # noqa: PLR2004 - double_val
            single = struct.unpack("<d", value)[0]
        del kind
    if dtype == 1 and len(content) == 4:  # noqa: PLR2004 - float32
        single = struct.unpack("<f", content)[0]
    elif dtype == 2 and len(content) == 8:  # noqa: PLR2004 - float64
        single = struct.unpack("<d", content)[0]
    return single


def read_wandb(file: str, stream: BinaryIO, found: Found) -> int:
    """Read the history and settings of a run that wandb stored offline; return how many rows of numbers there were."""
    recorder, num = RowRecorder(file), 0
    config: dict[str, str] = {}
    try:
        for data in _blocks(stream):
            for number, _, value in fields(data):
                if number == 2 and isinstance(value, bytes):  # noqa: PLR2004 - Record.history
                    row, step = _history(value)
                    num += bool(row)
                    add_values(recorder, row, num, step=step)
                elif number == 17 and isinstance(value, bytes):  # noqa: PLR2004 - Record.run
                    config |= _settings(value)
    except (ValueError, struct.error):
        found.failures.append(f"{file} is damaged: its first {num} rows are used")
    found.runs.extend(run for run in recorder.runs() if run.names())
    if config:
        found.configs.append(Config(file, config))
    return num


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, joined from their parts; raise ValueError at a wrong checksum."""
    stream.read(7)
    parts, at = b"", 7
    while True:
        room = _BLOCK - at % _BLOCK
        if room < 7:  # noqa: PLR2004 - a header does not fit
            stream.read(room)
            at += room
            continue
        header = stream.read(7)
        if len(header) < 7:  # noqa: PLR2004 - the end
            return
        check, length, kind = struct.unpack("<IHB", header)
        data = stream.read(length)
        at += 7 + length
        if kind == 0 and length == 0:
            continue
        if len(data) < length or kind not in (1, 2, 3, 4):
            raise ValueError("cut off")
        if check not in (zlib.crc32(bytes([kind]) + data), zlib.crc32(data, zlib.crc32(bytes([kind])))):
            raise ValueError("checksum")
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4) and len(parts) <= MAX_RECORD:
            yield parts


def _history(data: bytes) -> tuple[dict[str, object], int | None]:
    row: dict[str, object] = {}
    step: int | None = None
    for number, _, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            name, text = _item(value)
            known = _number(text)
            if name == "_step" and known is not None:
                step = int(known)
            elif known is not None and not name.startswith("_"):
                row[name] = known
        elif number == 2 and isinstance(value, bytes):  # noqa: PLR2004 - HistoryRecord.step
            step = next((v for n, _, v in fields(value) if n == 1 and isinstance(v, int)), step)
    # A global step that the script logged is preferred to wandb's own.
    own = next(
        (row[name] for name in ("train/global_step", "trainer/global_step", "global_step", "step") if name in row), None
    )
    return row, int(own) if isinstance(own, float) and math.isfinite(own) else step


def _item(data: bytes) -> tuple[str, str]:
    name, nested, text = "", [], ""
    for number, _, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name = value.decode("utf-8", "replace")
        elif number == 2:  # noqa: PLR2004 - nested_key
            nested.append(value.decode("utf-8", "replace"))
        elif number == 16:  # noqa: PLR2004 - value_json
            text = value.decode("utf-8", "replace")
    return name or "/".join(nested), text


def _number(text: str) -> float | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, str) and re.fullmatch(r"-?(NaN|Infinity)", value):
        return float(value.replace("Infinity", "inf"))
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _settings(data: bytes) -> dict[str, str]:
    """Return the settings in RunRecord.config.update, by key."""
    made: dict[str, str] = {}
    for number, _, value in fields(data):
        if number == 5 and isinstance(value, bytes):  # noqa: PLR2004 - config
            for n, _, update in fields(value):
                if n == 1 and isinstance(update, bytes):
                    name, text = _item(update)
                    if name and not name.startswith("_"):
                        made[name] = text.strip('"')
    return made
