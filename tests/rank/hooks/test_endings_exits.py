"""`os._exit` ends the process whoever calls it."""

import _thread
import os
import threading

from holter.records import Farewell


def test_it_is_said_from_which_line_and_the_original_is_called(monkeypatch, wear):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    worn = wear()
    os._exit(3)
    assert [3] == codes
    (said,) = (observation.body for observation in worn.said(Farewell))
    assert ("exit", "os._exit(3)") == (said.kind, said.text)
    assert "test_endings_exits.py:" in said.where


def test_called_by_the_interpreter_itself_it_ends_the_process_too(monkeypatch, wear):
    codes, is_called = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), is_called.set()))
    worn = wear()
    # As from `atexit`: there is no frame above ours.
    _thread.start_new_thread(os._exit, (3,))
    assert is_called.wait(10)
    assert [3] == codes
    assert [("os._exit(3)", "")] == [(said.body.text, said.body.where) for said in worn.said(Farewell)]
