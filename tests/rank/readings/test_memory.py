"""Who keeps what grows is told by name, and looking keeps nothing alive and changes nothing."""

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from holter.rank.readings import memory
from holter.rank.readings.memory import BETWEEN, WARM_UP, MemoryProbe
from holter.records import Hoard


class Big:
    """Something that should be gone when nobody needs it."""


def probe(told: list[Hoard]) -> tuple[MemoryProbe, Any]:
    log = SimpleNamespace(step=0, now=SimpleNamespace(numbers={}))
    context = SimpleNamespace(log=log, writer=SimpleNamespace(say=lambda _step, hoard: told.append(hoard)))
    return MemoryProbe(context), log  # type: ignore[arg-type]


def train(monkeypatch: pytest.MonkeyPatch, told: list[Hoard]) -> list["weakref.ref[Big]"]:
    """A loop with a list that grows; returns what each step should have let go of."""
    looks, log = probe(told)
    kept: list[int] = []
    steady = [1, 2, 3]
    let_go: list[weakref.ref[Big]] = []
    monkeypatch.setattr(memory, "GROWN_BYTES", -1)
    for step in range(WARM_UP + 3 * BETWEEN):
        activations = Big()
        let_go.append(weakref.ref(activations))
        kept.append(step)
        log.step = step
        looks.look()
        assert step == kept[-1]
        assert [1, 2, 3] == steady
        del activations
    assert all(one() is None for one in let_go), "looking at the names of this function keeps none of its objects"
    return let_go


def test_the_list_that_grows_is_named_and_nothing_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Hoard] = []
    train(monkeypatch, told)
    assert {"kept"} <= {hoard.name for hoard in told} or {"let_go"} <= {hoard.name for hoard in told}


def test_a_class_body_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GROWN_BYTES", -1)
    looks, log = probe([])
    log.step = WARM_UP

    class Body:
        before = 1
        looks.look()
        log.step += 1
        looks.look()
        after = before + 1

    assert (1, 2) == (Body.before, Body.after)


def test_what_a_script_keeps_of_its_own_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GROWN_BYTES", -1)
    own: list[int] = []
    shown = locals()
    assert "own" in [name for name, where, _ in memory._containers() if "stays" in where]
    assert own is shown["own"]
    tracing = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        list(memory._containers())
    finally:
        sys.settrace(tracing)
    assert [] == own
