"""What the script calls a model is found, and its variables are left as they are."""

import sys
import weakref

import pytest
import torch
from torch import nn

from holter.rank import search


def test_a_local_of_a_running_function_is_found():
    encoder = nn.Linear(2, 2)
    assert "encoder" == search.variable_of(encoder)


def test_a_batch_that_the_script_lets_go_of_is_gone():
    encoder, batch = nn.Linear(2, 2), torch.ones(2)
    kept = weakref.ref(batch)
    search.variable_of(encoder)
    del batch
    assert kept() is None


def test_a_batch_of_a_function_whose_names_do_not_fit_is_gone_too():
    class Holder:
        encoder = nn.Linear(2, 2)

    batch = torch.ones(2)
    kept = weakref.ref(batch)
    search.variable_of(Holder.encoder)
    del batch
    assert kept() is None


def test_what_a_function_holds_as_its_locals_stays():
    encoder, rate = nn.Linear(2, 2), 0.1
    held = locals()
    search.variable_of(encoder)
    assert (encoder, rate) == (held["encoder"], held["rate"])


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="exec in a function leaves nothing behind")
def test_what_exec_made_in_a_function_stays():
    encoder = nn.Linear(2, 2)
    exec("made = 1")  # noqa: S102
    search.variable_of(encoder)
    assert 1 == eval("made")  # noqa: S307
