"""Facts as a table for a terminal."""

from collections.abc import Iterator, Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def printable(text: str) -> str:
    """Names come from the training script: none of them may move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
