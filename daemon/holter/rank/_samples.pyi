def sign(
    address: int, rows: int, stride: int, num_bytes: int, size: int, is_trimmed: bool, first: int, step: int, /
) -> bytes: ...
def visit(
    prints: bytes,
    own: bytearray,
    other: bytearray,
    is_evaluation: bool,
    step: int,
    round_number: int,
    loader: int,
    training: int,
    /,
) -> tuple[int, int, int, bytes]: ...
def count(address: int, rows: int, size: int, counts: bytearray, /) -> int: ...
def survey(address: int, count: int, kind: int, /) -> tuple[float, float, float, float] | None: ...
def kept(address: int, num_bytes: int, last: bytes, /) -> bytes: ...
