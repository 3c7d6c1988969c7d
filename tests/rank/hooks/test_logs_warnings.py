"""Warnings that matter are heard; the script's own filters work as without us."""

import _thread
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holter.records import ScriptWarning

pytestmark = pytest.mark.filterwarnings("default")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values) / values.std(0)


def test_a_variance_over_one_sample_names_its_module(worn):
    model = nn.Sequential(nn.Linear(4, 4), Normed())
    worn.monitor.add_model(model)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(1, 4))
    (heard,) = (observation.body for observation in worn.said(ScriptWarning))
    assert "degrees of freedom is <= 0" in heard.text
    assert "1" == heard.module
    assert "test_logs_warnings.py:" in heard.where
    assert 3 == len(shown)


def test_a_checkpoint_that_cuts_the_graph_is_heard(worn):
    layer = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        checkpoint(layer, torch.ones(2, 4), use_reentrant=True)
    assert "None of the inputs have requires_grad=True" in worn.said(ScriptWarning)[0].body.text


def test_other_warnings_are_shown_and_not_told(worn):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.warn("something else", stacklevel=1)
    assert ["something else"] == [str(entry.message) for entry in shown]
    assert not worn.said(ScriptWarning)


def test_the_scripts_own_filters_and_its_own_showing_keep_working(worn, monkeypatch):
    seen = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: seen.append(str(message)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ones(1).std()
    assert [] == seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="degrees of freedom"):
            torch.ones(1).std()
    assert not worn.said(ScriptWarning)


def test_a_warning_that_no_python_code_shows_is_shown(monkeypatch, wear):
    seen, is_shown = [], threading.Event()
    monkeypatch.setattr(warnings, "_showwarnmsg", lambda message: (seen.append(message), is_shown.set()))
    wear()
    _thread.start_new_thread(warnings._showwarnmsg, ("from C",))
    assert is_shown.wait(10)
    assert ["from C"] == seen
