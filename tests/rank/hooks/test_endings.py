"""What an exception at the top waits for before it is shown as always."""

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

from holter.records import LEFT, Farewell


class Halts:
    """Notes who lingers."""

    def __init__(self) -> None:
        self.lingered: list[str] = []

    def linger(self, why: str) -> None:
        self.lingered.append(why)
        raise RuntimeError("whatever goes wrong here is not the script's")


@pytest.fixture
def shown(monkeypatch):
    seen: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: seen.append(kind))
    return seen


@pytest.mark.parametrize(("error", "lingers"), [(ValueError("boom"), True), (KeyboardInterrupt(), False)])
def test_an_exception_may_be_asked_to_save_first_and_ctrl_c_never(shown, wear, error, lingers):
    context = wear().monitor.context
    context.hold.agent = Halts()
    sys.excepthook(type(error), error, None)
    assert context.hold.agent.lingered == (["ValueError: boom"] if lingers else [])
    assert shown == [type(error)]


def test_an_exception_that_somebody_has_caught_is_shown_and_is_no_farewell(shown, wear):
    worn = wear()
    worn.monitor.context.hold.agent = Halts()
    try:
        int("x")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    assert [ValueError] == shown
    assert [] == worn.monitor.context.hold.agent.lingered
    assert not worn.said(Farewell)


def test_an_exception_before_a_prompt_is_shown_and_is_no_farewell(shown, wear, monkeypatch):
    worn = wear()
    worn.monitor.context.hold.agent = Halts()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert [ValueError] == shown
    assert [] == worn.monitor.context.hold.agent.lingered
    assert not worn.said(Farewell)


ENDS = """
    import sys
    from types import SimpleNamespace

    from holter.rank.hooks.endings import EndingProbe
    from holter.rank.guard import Guard

    agent = SimpleNamespace(linger=lambda why: print("lingers:", why))
    writer = SimpleNamespace(say=lambda _step, word: print("says:", word.kind))
    context = SimpleNamespace(
        guard=Guard(), hold=SimpleNamespace(agent=agent), writer=writer, log=SimpleNamespace(step=3)
    )
    EndingProbe(context).install()
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("boom") from error
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [([], ["says: exception", "lingers: RuntimeError: boom"]), (["-i"], ["says: end"])],
    ids=["at the top", "python -i"],
)
def test_what_the_interpreter_ends_with_is_a_farewell(options, expected):
    command = [sys.executable, *options, "-c", textwrap.dedent(ENDS)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)
    assert "RuntimeError: boom" in ended.stderr
    assert expected == ended.stdout.splitlines()


def test_who_leaves_the_process_group_says_so_and_may_say_more(wear, tmp_path):
    worn = wear()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    part = dist.new_group([0])
    dist.destroy_process_group(part)
    assert not worn.said(Farewell)
    dist.destroy_process_group()
    assert [LEFT] == [said.body.text for said in worn.said(Farewell)]
    worn.monitor._ending.leave(Farewell(kind="exit", text="os._exit(3)", where=""))
    assert "os._exit(3)" in [said.body.text for said in worn.said(Farewell)]
