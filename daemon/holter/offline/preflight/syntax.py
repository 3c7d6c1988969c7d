"""Helpers for names in a syntax tree."""

import ast
from collections.abc import Iterator

OPTIMIZERS = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adafactor",
        "Lion",
        "Muon",
        "NAdam",
        "RAdam",
        "LBFGS",
        "AdamW8bit",
        "FusedAdam",
    }
)


def all_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield every call below a node."""
    yield from (one for one in ast.walk(node) if isinstance(one, ast.Call))


def last(node: ast.AST) -> str:
    """Return the last name: `torch.distributed.barrier` -> `barrier`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def root_of(node: ast.AST) -> str:
    """Return the first name: `model.module.encoder` -> `model`; `self.model.encoder` -> `self.model`."""
    words: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        else:
            break
    if not isinstance(node, ast.Name):
        return ""
    return f"self.{words[-1]}" if node.id == "self" and words else node.id
